"""How many prompt tokens a step may take while others are waiting for their next token."""

from __future__ import annotations

_SMALLEST_CHUNK = 4  # tokens: a prompt always goes on
_LEAST_TARGET_S = 0.025  # shorter steps gain nobody anything and cost throughput
_SLOWDOWN = 1.5  # of a step without prefill: the time prompts may add to it; the promise is 2 for 95 of 100 steps
_REFRESH_EVERY = 16  # steps with prefill, before one without tells what decoding alone takes now
_PROMPTS_WEIGH = 8  # times as much as streams, from the second one on: the first tokens of many are late, not of one
_GUESSED_TOKEN_S = 0.001
_BACKGROUND_S = 0.2  # what background prompts may take of a step, while somebody may come who has to wait for its end
_BACKGROUND_PART = 16  # of what is computed at once: smaller pieces would cost throughput
_NEW = 0.3  # weight of a new measurement in the running means
_NEW_QUIET = 0.02  # the same for what a step took before the prompts came, while they are being read


class StepBudget:
    """Keeps steps short while anybody decodes, and large when nobody does.

    A step's time is taken as that of its decode rows plus so much for each prompt token: measured, mixing costs the sum
    of both and never more (docs/architecture.md). `target_s`: seconds a step may take; None: 2.5 times a step without
    prefill, at least 25 ms, and more when several prompts are read: then too many first tokens are late for the sake of
    few streams.
    """

    def __init__(self, most: int, target_s: float | None = None, alone: int | None = None) -> None:
        """`most`: tokens of a step. `alone`: prompt tokens of one in which nobody decodes; None: as many."""
        self._most = most
        self._alone = min(most, alone or most)
        self._target_s = target_s
        self._decode_s = _ByRows()
        """Running means of steps in which all decode."""
        self._quiet_s = _ByRows()
        """The same, but hardly moving while prompts are read: their cells slow decoding down, and slower streams must
        not be a reason to slow them further."""
        self._token_s: float | None = None
        """Running mean of what a prompt token adds."""
        self._since_refresh = 0

    @property
    def knows_decoding(self) -> bool:
        """Whether it has seen a step in which all decoded."""
        return self._decode_s.knows_any

    @property
    def token_s(self) -> float:
        """What a prompt token adds to a step, in seconds; a guess before anything is known."""
        return self._token_s or _GUESSED_TOKEN_S

    def prefill_tokens(self, n_decode: int, n_prefill: int, n_others: int = 0, *, background: bool = False) -> int:
        """Prompt tokens, of `n_prefill` sequences, for the next step beside `n_decode` decoding ones.

        `n_others` decode too, but in other steps: this one is not to take long for them either. `background`: nor for
        those who come while it computes, as these prompts are in no hurry.
        """
        most = self._most - n_decode
        if background:
            piece = max(_SMALLEST_CHUNK, self._alone // _BACKGROUND_PART, int(_BACKGROUND_S / self.token_s))
            most = min(most, piece)
        n_streams = n_decode + n_others
        if n_streams == 0 or self._token_s is None:
            return min(most, self._alone)
        if n_decode and (self._since_refresh >= _REFRESH_EVERY or not self._quiet_s.knows(n_decode)):
            return 0  # to learn what so many take alone
        if not self.knows_decoding:
            return most
        slowdown = 1 + _SLOWDOWN * max(1, _PROMPTS_WEIGH * (n_prefill - 1) / n_streams)
        target_s = self._target_s or max(_LEAST_TARGET_S, slowdown * self._quiet_s.of(n_streams))
        rows_s = self._decode_s.of(n_decode) if n_decode else 0.0
        wanted = int((target_s - rows_s) / self._token_s)
        return min(most, max(_SMALLEST_CHUNK, wanted))

    def observe(self, n_decode: int, n_prefill: int, seconds: float) -> None:
        """Learns from a step."""
        if n_prefill == 0:
            reading = self._since_refresh > 0
            self._decode_s.learn(n_decode, seconds, _NEW)
            self._quiet_s.learn(n_decode, seconds, _NEW_QUIET if reading else _NEW)
            self._since_refresh = 0
            return
        self._since_refresh = self._since_refresh + 1 if n_decode else 0
        if n_prefill >= _SMALLEST_CHUNK or self._token_s is None:  # shorter ones say little about a token
            rows_s = self._decode_s.of(n_decode) if n_decode and self.knows_decoding else 0.0
            # Never 0, however noisy the clock: at most as cheap as the rest of the step is fast.
            self._token_s = _mean(self._token_s, max(seconds - rows_s, 0.05 * seconds) / n_prefill)


class _ByRows:
    """Running means for 1, 2 to 3, 4 to 7 ... decoding sequences: on a CPU each adds its time, on a GPU hardly any."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}

    @property
    def knows_any(self) -> bool:
        return bool(self._means)

    def knows(self, n: int) -> bool:
        return n.bit_length() in self._means

    def of(self, n: int) -> float:
        """For so many, or the number nearest to it that is known."""
        return self._means[min(self._means, key=lambda bits: abs(bits - n.bit_length()))]

    def learn(self, n: int, seconds: float, weight: float) -> None:
        self._means[n.bit_length()] = _mean(self._means.get(n.bit_length()), seconds, weight)


def _mean(old: float | None, new: float, weight: float = _NEW) -> float:
    return new if old is None else old + weight * (new - old)
