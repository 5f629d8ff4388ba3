"""How many requests are being answered, in total and by client."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from cppbatch.server.api_errors import TooManyRequests
from cppbatch.server.limits import Limits


class Slots:
    """Counts the requests that are being answered, in total and by client."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._all = 0
        self._of: Counter[str] = Counter()
        self._lines_of: Counter[str] = Counter()

    @contextlib.contextmanager
    def one(self, client: str, most_of_key: int | None = None) -> Iterator[None]:
        """A slot for one request of this client. `most_of_key`: the limit of its key, if it has its own.

        Raises `TooManyRequests`.
        """
        most = self._limits.max_concurrent
        most_of_one = self._limits.max_concurrent_per_key if most_of_key is None else most_of_key
        if most and self._all >= most:
            raise TooManyRequests(
                f"too many requests: {most} are in progress, the limit (--max-concurrent); try again later"
            )
        if most_of_one and self._of[client] >= most_of_one:
            limit = "--max-concurrent-per-key" if most_of_key is None else "max_concurrent of your key"
            raise TooManyRequests(
                f"too many requests: {most_of_one} of your requests are in progress, the limit ({limit}); wait for one "
                "of them to finish"
            )
        self._all += 1
        self._of[client] += 1
        try:
            yield
        finally:
            self._all -= 1
            _decrease(self._of, client)

    def take_for_batch(self, client: str, most: int) -> bool:
        """Takes a slot for a line of a batch, if fewer than `most` of the client's slots are taken, and fewer than
        half of them by lines. `give_back` returns it."""
        if self._of[client] >= most or self._lines_of[client] >= max(1, most // 2):
            return False
        self._of[client] += 1
        self._lines_of[client] += 1
        return True

    def give_back(self, client: str) -> None:
        """Returns a slot of `take_for_batch`."""
        _decrease(self._of, client)
        _decrease(self._lines_of, client)


def _decrease(counts: Counter[str], client: str) -> None:
    counts[client] -= 1
    if not counts[client]:
        del counts[client]  # otherwise entries of old addresses would pile up
