"""A seeded request's text is its own: whatever else is in the batch, in whatever order, however often preempted.

On float weights with a float cache, where a batch changes logits by 0.00003; with an f16 cache it is 0.03, and of 16
texts one or two part at a near tie."""

from __future__ import annotations

from pathlib import Path

from cppbatch import BatchInferenceEngine, SamplingParams


def test_a_request_without_a_seed_reports_its_seed_and_another_one_differs(tiny_llama: Path) -> None:
    hot = SamplingParams(temperature=2.0, max_tokens=20, ignore_eos=True)
    with BatchInferenceEngine(tiny_llama, n_ctx=512, n_parallel=4, n_threads=1, flash_attn="off") as engine:
        first, second = engine.generate(["Hello"] * 2, hot)
        assert (first.seed, first.text) != (second.seed, second.text)
        again = SamplingParams(temperature=2.0, max_tokens=20, ignore_eos=True, seed=first.seed)
        assert engine.generate(["Hello"], again)[0].text == first.text


def test_n_completions_differ_and_are_reproducible_and_best_of_takes_the_most_likely(tiny_llama: Path) -> None:
    with BatchInferenceEngine(tiny_llama, n_ctx=512, n_parallel=4, n_threads=1, flash_attn="off") as engine:
        hot = SamplingParams(temperature=1.5, max_tokens=12, seed=7, logprobs=0)
        four = engine.generate(["Hello", "Bye"], hot, n=4)
        assert [result.seed for result in four] == [7, 8, 9, 10] * 2
        assert len({result.text for result in four[:4]}) == 4
        assert engine.generate(["Hello", "Bye"], hot, n=4) != four  # but for the times
        assert [result.text for result in engine.generate(["Hello", "Bye"], hot, n=4)] == [r.text for r in four]
        best = engine.generate(["Hello", "Bye"], hot, n=2, best_of=4)
        means = [sum(entry.logprob or 0 for entry in result.logprobs) / len(result.tokens) for result in four]
        for prompt in range(2):
            ranked = sorted(range(4 * prompt, 4 * prompt + 4), key=lambda i: -means[i])
            assert [result.text for result in best[2 * prompt : 2 * prompt + 2]] == [four[i].text for i in ranked[:2]]
