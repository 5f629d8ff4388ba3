"""Chooses the member of a fleet for a request: the one with its prefix, unless the queues are unbalanced.

A member is a worker process or a replica: it has a queue and a prefix cache. Members are not queried for their cache:
the router remembers which prompts were sent to which member.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from cppbatch.engine.request import GenerationRequest, Media, MediaPrompt, Pair, text_of_part

_CHARACTERS_PER_TOKEN = 4

Member = TypeVar("Member", bound=Hashable)


class Prefix(NamedTuple):
    """The start of a prompt."""

    n_tokens: int
    """The length of the prefix; 4 characters of a text count as a token."""
    hash: int
    """Hash of its text or token ids, with the cache salt and the LoRA adapters. Only valid in this process."""


class PrefixRouter(Generic[Member]):
    """The routing rule. Has no list of members: each choice gets the members and their numbers of requests.

    Chooses the member with the fewest requests. A member that was sent a prefix of the prompt may have one more request
    per 64 tokens of the prefix, up to n_parallel / 4 more.
    """

    def __init__(self, n_parallel: int, max_prefixes: int = 8192) -> None:
        """`max_prefixes`: remembered per member."""
        self._max_prefixes = max_prefixes
        self._max_extra_requests = max(1, n_parallel // 4)
        self._prefixes: dict[Member, OrderedDict[Prefix, None]] = {}  # by member, least recently used first
        self._holders: dict[Prefix, dict[Member, None]] = {}

    def choose(self, prefixes: Sequence[Prefix], loads: Mapping[Member, int]) -> Member:
        """The member for a request with these prefixes (`prompt_prefixes`).

        `loads`: the number of unfinished requests of each available member, at least one; ties go to the first. The
        choice is not recorded: call `note` when the request is sent.
        """
        chosen = min(loads, key=loads.__getitem__)
        least = loads[chosen]
        best = (least, 0)
        for prefix in reversed(prefixes):
            # 64 tokens of a known prefix outweigh one more request in the queue
            n_extra = min(self._max_extra_requests, prefix.n_tokens // 64)
            if best < (least - n_extra, -prefix.n_tokens):
                break  # no member with a shorter prefix can be better
            for member in self._holders.get(prefix, ()):
                if (load := loads.get(member)) is not None and (load - n_extra, -prefix.n_tokens) < best:
                    chosen, best = member, (load - n_extra, -prefix.n_tokens)
        return chosen

    def note(self, prefixes: Sequence[Prefix], member: Member) -> None:
        """Records that a request with these prefixes was sent to the member."""
        known = self._prefixes.setdefault(member, OrderedDict())
        for prefix in prefixes:
            known[prefix] = None
            known.move_to_end(prefix)
            self._holders.setdefault(prefix, {})[member] = None
        while len(known) > self._max_prefixes:
            self._remove_holder(known.popitem(last=False)[0], member)

    def forget(self, member: Member) -> None:
        """Called when the member is gone, or its cache is empty."""
        for prefix in self._prefixes.pop(member, ()):
            self._remove_holder(prefix, member)

    def _remove_holder(self, prefix: Prefix, member: Member) -> None:
        holders = self._holders[prefix]
        del holders[member]
        if not holders:
            del self._holders[prefix]


def prompt_prefixes(request: GenerationRequest) -> list[Prefix]:
    """The prefixes of 64, 128, 256 ... characters of a prompt, shortest first; empty if it must not be shared.

    A token id counts as 4 characters.
    """
    prompt = request.prompt
    if not request.cache_prompt or request.task == "embed" or isinstance(prompt, Pair):
        return []
    adapters = (each and frozenset(each.items()) for each in (request.lora, request.control_vectors))
    scope = (request.cache_salt, *adapters)
    return [
        Prefix(length // _CHARACTERS_PER_TOKEN, hash((scope, part if isinstance(part, str) else tuple(part))))
        for length, part in _parts(_text_with_digests(prompt) if isinstance(prompt, MediaPrompt) else prompt)
    ]


def _text_with_digests(prompt: MediaPrompt) -> str:
    """The text of a prompt, with digests in place of images and audio."""
    return "".join(
        f"\0{part.kind} {part.digest}\0" if isinstance(part, Media) else text_of_part(part) for part in prompt.parts
    )


def _parts(prompt: str | list[int]) -> Iterator[tuple[int, str | list[int]]]:
    characters = 1 if isinstance(prompt, str) else _CHARACTERS_PER_TOKEN
    length = 64  # characters of the shortest remembered prefix
    while length <= len(prompt) * characters:
        yield length, prompt[: length // characters]
        length *= 2
