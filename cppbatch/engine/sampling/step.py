"""Sampling as the step loop sees it: before a decode, which rows are wanted; after it, a choice for each sequence."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from cppbatch.engine.sampling.device import sample_candidates
from cppbatch.engine.sampling.sampler import Sampler
from cppbatch.engine.sampling.sampler_output import SamplerOutput
from cppbatch.engine.sampling.token_logprobs import PromptScorer
from cppbatch.engine.scheduler import StepPlan
from cppbatch.engine.sequence import Seq
from cppbatch.engine.vocabulary import Vocabulary
from cppbatch.llama import BackendSampling


class Rows(Protocol):
    """The part of a context that gives rows (`cppbatch.llama.Context`)."""

    candidates: BackendSampling | None

    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]: ...


class StepSampler:
    """Sends each row to where it is sampled: the candidates that the device found, or the whole logits."""

    def __init__(self, vocab: Vocabulary, context: Rows) -> None:
        self._context = context
        self._scorer = PromptScorer(vocab)
        self._sampler = Sampler(vocab)

    def prepare(self, plan: StepPlan) -> None:
        """Tells the device, if it finds candidates, for which sequences of the next decode it need not."""
        if candidates := self._context.candidates:
            for sequence, n in plan.chunks:
                if sequence.n_logits(n):
                    enough = 0 < sequence.sampling.n_candidates <= candidates.n
                    candidates.use(sequence.seq_id, wanted=enough and not sequence.is_scored)

    def sample(self, plan: StepPlan, n_outputs: int) -> list[SamplerOutput]:
        """A choice for each of the plan's outputs, from the last decode, which had `n_outputs` rows."""
        sequences, scores = plan.outputs(), plan.scores
        if self._context.candidates is None and not scores:  # then each sequence has one row
            return self._sampler.sample(sequences, self._context.logits(n_outputs))
        rows = plan.rows()
        near = [i for i, sequence in enumerate(sequences) if self._is_near(sequence)]
        far = [i for i in range(len(sequences)) if i not in near] if near else list(range(len(sequences)))
        choices: dict[int, SamplerOutput] = {}
        if scores or far:
            logits = self._context.logits(n_outputs)
            if scores:
                self._scorer.take(plan.chunks, logits)
            theirs = logits if len(far) == n_outputs else logits[[rows[i] for i in far]]
            choices |= zip(far, self._sampler.sample([sequences[i] for i in far], theirs), strict=True)
        if near:
            assert self._context.candidates
            ids, values = self._context.candidates.of([rows[i] for i in near], n_outputs)
            choices |= zip(near, sample_candidates([sequences[i] for i in near], ids, values), strict=True)
        return [choices[i] for i in range(len(sequences))]

    def _is_near(self, sequence: Seq) -> bool:
        return self._context.candidates is not None and self._context.candidates.uses(sequence.seq_id)

    def close(self) -> None:
        """Ends the threads."""
        self._sampler.close()
