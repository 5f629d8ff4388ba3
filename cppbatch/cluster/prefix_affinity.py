"""Guesses which worker has a prompt's prefix in its cache, from the prompts sent to each worker."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from cppbatch.engine.request import GenerationRequest, Pair

_MIN_LENGTH = 64  # characters
_CHARACTERS_PER_TOKEN = 4
_MAX_PREFIXES = 16384

Prefix = tuple[Hashable, int, int]


class PrefixAffinity:
    """Remembers the worker that last got each prompt prefix. Prefixes of 64, 128, 256 ... characters, as hashes."""

    def __init__(self) -> None:
        self._workers: OrderedDict[Prefix, int] = OrderedDict()

    def note(self, request: GenerationRequest, worker: int) -> None:
        """Remembers that this worker gets the request."""
        for _, prefix in _prefixes(request):
            self._workers[prefix] = worker
            self._workers.move_to_end(prefix)
        while len(self._workers) > _MAX_PREFIXES:
            self._workers.popitem(last=False)

    def find(self, request: GenerationRequest) -> tuple[int, int] | None:
        """The worker that had the prompt's longest known prefix, and the prefix's approximate length in tokens."""
        for length, prefix in reversed(list(_prefixes(request))):
            if (worker := self._workers.get(prefix)) is not None:
                return worker, length // _CHARACTERS_PER_TOKEN
        return None


def _prefixes(request: GenerationRequest) -> Iterator[tuple[int, Prefix]]:
    """Yields each prefix with its length in characters, the shortest first; none if the prompt must not be shared.

    Token ids count as 4 characters each. Prefixes are only equal with the same cache salt and LoRA adapters.
    """
    prompt = request.prompt
    if not request.cache_prompt or request.task == "embed" or isinstance(prompt, Pair):
        return
    characters = 1 if isinstance(prompt, str) else _CHARACTERS_PER_TOKEN
    lora = None if request.lora is None else frozenset(request.lora.items())
    length = _MIN_LENGTH
    while length <= len(prompt) * characters:
        part = prompt[: length // characters]
        yield length, ((request.cache_salt, lora), length, hash(part if isinstance(part, str) else tuple(part)))
        length *= 2
