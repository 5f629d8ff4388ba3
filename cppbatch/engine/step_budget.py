"""How many prompt tokens a step may compute while other sequences wait for their next token."""

from __future__ import annotations

_MIN_CHUNK = 4  # tokens: a prompt always goes on
_MIN_TARGET_S = 0.025  # shorter steps cost throughput, and clients do not notice them
_SLOWDOWN = 1.5  # time that prompts may add, in multiples of a step without prefill; promised: 2 in 95 of 100 steps
_REFRESH_EVERY = 16  # steps with prefill; then one without measures what decoding alone takes now
_PROMPT_WEIGHT = 8  # weight of each further prompt, in decoding sequences: many prompts mean many late first tokens
_GUESSED_TOKEN_S = 0.001
_BACKGROUND_S = 0.2  # time of background prompts in a step: a request that arrives waits for the end of the step
_BACKGROUND_PART = 16  # background pieces have at least ubatch / 16 tokens: smaller ones would cost throughput
_NEW = 0.3  # weight of a new measurement in the running means
_NEW_QUIET = 0.02  # the same for steps without prefill, while prompts are being computed


class StepBudget:
    """Keeps steps short while a sequence decodes, and large otherwise.

    A step takes the time of its decode rows plus a constant time for each prompt token: measured, mixing costs the sum
    of both, never more (docs/decisions/0002). Both are learnt from the steps. Example: 8 rows take 50 ms, a prompt
    token 1 ms; a step may take 125 ms, so it gets 75 prompt tokens.

    `target_s`: seconds a step may take. None: 2.5 times a step without prefill, at least 25 ms; longer when several
    prompts are computed, so that few decoding sequences do not delay many first tokens.
    """

    def __init__(self, max_tokens: int, target_s: float | None = None, max_alone: int | None = None) -> None:
        """`max_tokens`: tokens of a step. `max_alone`: prompt tokens of a step in which no sequence decodes; None: as
        many."""
        self._max_tokens = max_tokens
        self._max_alone = min(max_tokens, max_alone or max_tokens)
        self._target_s = target_s
        self._decode_s = _ByRows()
        """Running means of steps without prefill."""
        self._quiet_s = _ByRows()
        """The same, but they hardly change while prompts are computed. The cells of the prompts slow decoding down, and
        slower decoding must not be a reason to slow it down further."""
        self._token_s: float | None = None
        """Running mean of the time that a prompt token adds."""
        self._since_refresh = 0

    @property
    def knows_decoding(self) -> bool:
        """Whether a step without prefill has been measured."""
        return self._decode_s.knows_any

    @property
    def token_s(self) -> float:
        """Seconds that a prompt token adds to a step; a guess before the first measurement."""
        return self._token_s or _GUESSED_TOKEN_S

    def prefill_tokens(self, n_decode: int, n_prefill: int, n_others: int = 0, *, background: bool = False) -> int:
        """How many prompt tokens of `n_prefill` sequences the next step may compute beside `n_decode` decode rows.

        `n_others`: sequences that decode in other steps (of other LoRA adapters) and wait for the end of this one.
        `background`: all these prompts are background work, so the step stays short for requests that may arrive.
        """
        most = self._max_tokens - n_decode
        if background:
            piece = max(_MIN_CHUNK, self._max_alone // _BACKGROUND_PART, int(_BACKGROUND_S / self.token_s))
            most = min(most, piece)
        n_decoding = n_decode + n_others
        if n_decoding == 0 or self._token_s is None:
            return min(most, self._max_alone)
        if n_decode and (self._since_refresh >= _REFRESH_EVERY or not self._quiet_s.knows(n_decode)):
            return 0  # measure what this number of rows takes without prefill
        if not self.knows_decoding:
            return most
        slowdown = 1 + _SLOWDOWN * max(1, _PROMPT_WEIGHT * (n_prefill - 1) / n_decoding)
        target_s = self._target_s or max(_MIN_TARGET_S, slowdown * self._quiet_s.of(n_decoding))
        rows_s = self._decode_s.of(n_decode) if n_decode else 0.0
        wanted = int((target_s - rows_s) / self._token_s)
        return min(most, max(_MIN_CHUNK, wanted))

    def observe(self, n_decode: int, n_prefill: int, seconds: float) -> None:
        """Learns from the duration of a step."""
        if n_prefill == 0:
            reading = self._since_refresh > 0
            self._decode_s.learn(n_decode, seconds, _NEW)
            self._quiet_s.learn(n_decode, seconds, _NEW_QUIET if reading else _NEW)
            self._since_refresh = 0
            return
        self._since_refresh = self._since_refresh + 1 if n_decode else 0
        if n_prefill >= _MIN_CHUNK or self._token_s is None:  # fewer say little about the time of one
            rows_s = self._decode_s.of(n_decode) if n_decode and self.knows_decoding else 0.0
            # A noisy clock must not make it 0: at least 5% of the step is the prompt tokens' time.
            self._token_s = _mean(self._token_s, max(seconds - rows_s, 0.05 * seconds) / n_prefill)


class _ByRows:
    """Running means of step times for 1, 2-3, 4-7 ... decode rows: on a CPU each row adds time, on a GPU hardly any."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}

    @property
    def knows_any(self) -> bool:
        return bool(self._means)

    def knows(self, n: int) -> bool:
        return n.bit_length() in self._means

    def of(self, n: int) -> float:
        """The mean for `n` rows, or for the nearest number of rows that is known."""
        return self._means[min(self._means, key=lambda bits: abs(bits - n.bit_length()))]

    def learn(self, n: int, seconds: float, weight: float) -> None:
        self._means[n.bit_length()] = _mean(self._means.get(n.bit_length()), seconds, weight)


def _mean(old: float | None, new: float, weight: float = _NEW) -> float:
    return new if old is None else old + weight * (new - old)
