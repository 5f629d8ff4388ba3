"""A request of a simulation, with what became of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cppbatch.engine.params import SamplingParams
from cppbatch.engine.request import GenerationRequest

Tokens = npt.NDArray[np.int32]

_PARAMS = SamplingParams(temperature=0)


class SimulatedRequest:
    """One turn of a conversation: its prompt is that of the turn before, its output, and what the user wrote then."""

    __slots__ = (
        "admitted_at", "arrived_at", "conversation", "finished_at", "first_token_at", "id", "n_cached", "n_generated",
        "n_output", "n_prompt", "n_system", "output", "prompt", "replica", "request", "system", "turn",
    )  # fmt: skip

    def __init__(self, conversation: int, turn: int, prompt: Tokens, output: Tokens, *, n_system: int = 0) -> None:
        """`prompt`, `output`: token ids; the output is what the engine will generate. `n_system`: tokens of the system
        prompt, with which the prompt starts."""
        self.conversation, self.turn, self.n_system = conversation, turn, n_system
        self.id = f"{conversation}.{turn}"
        self.prompt, self.output = prompt, output.tolist()
        self.n_prompt, self.n_output = len(prompt), len(output)
        self.system = hash(prompt[:n_system].tobytes())
        self.request = GenerationRequest(id=self.id, prompt=prompt.tolist(), params=_PARAMS)
        self.replica = -1
        self.n_generated = 0
        self.n_cached = 0
        """Prompt tokens taken from the prefix cache."""
        self.arrived_at = self.admitted_at = self.first_token_at = self.finished_at = -1.0

    def forget_tokens(self) -> None:
        """It has ended: only its counts and times are kept, because a simulation may have a million requests."""
        del self.prompt, self.output, self.request

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first_token_at - self.arrived_at
