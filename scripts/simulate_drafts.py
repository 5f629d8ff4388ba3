"""What drafts gain for the texts of a model, without the noise of a machine: real texts, real drafts, given step times.

Usage: python scripts/simulate_drafts.py MODEL.gguf [-B 1,4,16] [--workloads quote,json,code,job,free] [--requests 16]
           [--disturbed 8]

The model writes the texts of each workload once. Then these texts are generated again in simulated steps: the engine's
`SuffixProposer` and `Speculator` draft, a draft token is accepted if it is the next one of the text, and a step takes
the time that decision 0033 gives for its rows. Prompts, grammars and sampling take no time, so this is the gain of
decode alone. `best copies`: the tokens of a step of one sequence if it always knew which earlier occurrence of its last
token matches longest: no choice among copies gives more.

With `--disturbed N` the engine does not know the step times but learns them, and another program disturbs it: 4% of the
steps seem to take 2 to 8 times as long, and half of the first steps of a number of rows 5 times. Medians of N runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from random import Random
from statistics import median

import numpy as np

from cppbatch import BatchInferenceEngine, GenerationRequest, SamplingParams
from cppbatch.bench.text_workloads import TEXT_WORKLOADS
from cppbatch.chat.template import ChatTemplate
from cppbatch.engine.sequence import Seq
from cppbatch.engine.speculation.speculator import DraftLimits, Speculator
from cppbatch.engine.speculation.suffix_proposer import SuffixProposer
from cppbatch.engine.step_cost import StepCost

STEP_MS = {1: 10.4, 4: 13.6, 8: 17.8, 16: 26.0, 32: 43.0, 64: 76.0, 128: 143.0, 256: 280.0}
"""Per number of rows: BF16, two AVX-512 cores, per-sequence layout, flash attention (0033; 256 is extrapolated)."""
PROMPT_TOKEN_S = 0.00105
DRAFT_MAX = 16

Text = tuple[list[int], list[int]]
"""The tokens of a prompt and of its completion."""


def texts(engine: BatchInferenceEngine, name: str, n: int) -> list[Text]:
    """What the model writes for the requests of a workload."""
    workload, info = TEXT_WORKLOADS[name], engine.info
    template = ChatTemplate(info.chat_template or "", bos=info.bos, eos=info.eos)
    messages = workload.prompts(workload.rounds * n, name)
    prompts = [template.render([{"role": "user", "content": message}]) for message in messages]
    params = [
        SamplingParams(
            max_tokens=workload.max_tokens, temperature=workload.temperature, json_schema=workload.schema, seed=i
        )
        for i in range(len(prompts))
    ]
    sequences = [engine.prepare(GenerationRequest(id=str(i), prompt=prompt)) for i, prompt in enumerate(prompts)]
    tokens = [sequence.tokens[: sequence.n_prompt].tolist() for sequence in sequences]
    return [(each, list(result.tokens)) for each, result in zip(tokens, engine.generate(prompts, params), strict=True)]


class Machine:
    """The times of steps, and the times that the engine measures."""

    def __init__(self, seed: int | None) -> None:
        """`seed`: of the disturbances; None: no disturbances, and the engine has the exact times."""
        known, times = list(STEP_MS), list(STEP_MS.values())
        self._true_s = {n: float(np.interp(n, known, times)) / 1000 for n in range(1, known[-1] + 1)}
        self._random = None if seed is None else Random(seed)
        self._seen = set[tuple[int, ...]]()
        self.cost = StepCost()
        if self._random is None:
            self.cost.seed(self._true_s.items())
        else:
            self.cost.observe_prompt(256, 256 * PROMPT_TOKEN_S)

    def step(self, groups: Sequence[int]) -> float:
        """Seconds of a step; the engine gets the time that it would measure."""
        seconds = sum(self._true_s[n] for n in groups)
        if self._random:
            factor = self._random.lognormvariate(0, 0.05)
            if self._random.random() < 0.04:
                factor *= self._random.uniform(2, 8)
            if tuple(groups) not in self._seen and self._random.random() < 0.5:
                factor *= 5
            self._seen.add(tuple(groups))
            self.cost.observe_rows(groups, factor * seconds)
        return seconds

    def plain_s(self, n: int) -> float:
        """Seconds of a step of this number of rows."""
        return self._true_s[n]


def simulate(cases: Sequence[Text], batch_size: int, seed: int | None = None) -> tuple[float, float, float]:
    """Returns the speedup of decode, and the draft tokens by 100 tokens and by 100 accepted ones of them."""
    machine = Machine(seed)
    speculator = Speculator([SuffixProposer()], DRAFT_MAX)
    waiting, running = list(cases), list[tuple[Seq, list[int]]]()
    seconds = plain_seconds = 0.0
    n_drafted = n_accepted = 0
    while waiting or running:
        while waiting and len(running) < batch_size:
            prompt, completion = waiting.pop(0)
            request = GenerationRequest(id=str(len(waiting)), prompt=prompt)
            sequence = Seq(request, np.array(prompt, np.int32), max_new=len(completion) + DRAFT_MAX, seed=0, now=0.0)
            extend(sequence, completion[:1])
            running.append((sequence, completion))
        rows = [sequence for sequence, _ in running]
        for seq_id, sequence in enumerate(rows):
            sequence.seq_id = seq_id
        limits = DraftLimits(256 - len(rows), [DRAFT_MAX] * len(rows), has_streams=True)
        plan = speculator.plan(rows, (len(rows),), machine.cost, limits)
        seconds += machine.step(plan.groups if plan else (len(rows),))
        accepted: dict[Seq, int] = {}
        for sequence, completion in running:
            coming = completion[sequence.n_tokens - sequence.n_prompt :]
            right = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(sequence.draft, coming, strict=False))
            )
            n_drafted += len(sequence.draft)
            accepted[sequence] = right
            extend(sequence, coming[: right + 1])
            plain_seconds += len(coming[: right + 1]) * machine.plain_s(len(rows)) / len(rows)
        n_accepted += sum(accepted.values())
        if plan:
            speculator.verified(accepted, 0.0)
        for sequence, completion in list(running):
            if sequence.n_tokens - sequence.n_prompt >= len(completion):
                speculator.finished(sequence)
                running.remove((sequence, completion))
    n_tokens = sum(len(completion) for _, completion in cases)
    return plain_seconds / seconds, 100 * n_drafted / n_tokens, 100 * n_accepted / max(1, n_drafted)


def extend(sequence: Seq, tokens: list[int]) -> None:
    sequence.draft = []
    sequence.tokens[sequence.n_tokens : sequence.n_tokens + len(tokens)] = tokens
    sequence.n_tokens += len(tokens)


def best_copies(cases: Sequence[Text]) -> float:
    """Tokens of a step if a draft is always the longest copy after an earlier occurrence of the last token."""
    n_steps = n_tokens = 0
    for prompt, completion in cases:
        text, at = prompt + completion, len(prompt)
        while at < len(text):
            starts = [start for start in range(1, at) if text[start - 1] == text[at - 1]]
            longest = max((n_equal(text, start, at) for start in starts), default=0)
            n_steps += 1
            n_tokens += longest + 1
            at += longest + 1
    return n_tokens / n_steps


def n_equal(text: list[int], start: int, at: int) -> int:
    n = 0
    while n < DRAFT_MAX and start + n < at and at + n < len(text) and text[start + n] == text[at + n]:
        n += 1
    return n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("-B", dest="batch_sizes", default="1,4,16")
    parser.add_argument("--workloads", default=",".join(TEXT_WORKLOADS))
    parser.add_argument("--requests", type=int, default=16, help="of a workload, three times as many of `job` (16)")
    parser.add_argument("--disturbed", type=int, default=0, metavar="N", help="runs with disturbed steps")
    args = parser.parse_args()
    with BatchInferenceEngine(args.model, n_ctx=16384, n_parallel=16, spec="off") as engine:
        for name in args.workloads.split(","):
            cases = texts(engine, name, args.requests)
            print(f"{name}: {best_copies(cases[:8]):.1f} tokens a step with the best copies", flush=True)
            for size in map(int, args.batch_sizes.split(",")):
                seeds = range(args.disturbed) if args.disturbed else (None,)
                runs = [simulate(cases, size, seed) for seed in seeds]
                speedup, drafted, accepted = (median(column) for column in zip(*runs, strict=True))
                print(f"  B = {size}: {speedup:.2f}x, drafted {drafted:.0f}%, accepted {accepted:.0f}%", flush=True)


if __name__ == "__main__":
    main()
