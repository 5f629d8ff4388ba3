"""Which worker has computed the beginning of a prompt: a guess from the texts that were sent there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from cppbatch.engine.request import GenerationRequest, Pair

_SHORTEST = 64  # letters; of token ids a quarter of that
_LETTERS_PER_TOKEN = 4
_MOST_KEPT = 16384  # beginnings

Beginning = tuple[Hashable, int, int]


class PrefixAffinity:
    """Remembers the beginnings of prompts, of 64 letters, 128, 256 ..., by their hashes, and who had them last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Beginning, int] = OrderedDict()

    def note(self, request: GenerationRequest, worker: int) -> None:
        """This worker gets it."""
        for _, beginning in _beginnings(request):
            self._known[beginning] = worker
            self._known.move_to_end(beginning)
        while len(self._known) > _MOST_KEPT:
            self._known.popitem(last=False)

    def find(self, request: GenerationRequest) -> tuple[int, int] | None:
        """Who had the longest beginning of its prompt, and about how many tokens that is."""
        for length, beginning in reversed(list(_beginnings(request))):
            if (worker := self._known.get(beginning)) is not None:
                return worker, length // _LETTERS_PER_TOKEN
        return None


def _beginnings(request: GenerationRequest) -> Iterator[tuple[int, Beginning]]:
    """Each with its length in letters, the shortest first; none when the prompt is not to be shared."""
    prompt = request.prompt
    if not request.cache_prompt or request.task == "embed" or isinstance(prompt, Pair):
        return
    letters = 1 if isinstance(prompt, str) else _LETTERS_PER_TOKEN
    lora = None if request.lora is None else frozenset(request.lora.items())
    length = _SHORTEST
    while length <= len(prompt) * letters:
        part = prompt[: length // letters]
        yield length, ((request.cache_salt, lora), length, hash(part if isinstance(part, str) else tuple(part)))
        length *= 2
