"""One question at 16 temperatures: temperatures.py "Tell me about the sea." """

import sys

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default

settings = [SamplingParams(temperature=i / 10, seed=1, max_tokens=40) for i in range(16)]
with BatchInferenceEngine(pull_default(), n_parallel=16) as engine:
    answers = engine.chat([[*sys.argv, "Tell me about the sea."][1]] * 16, settings)
for params, answer in zip(settings, answers, strict=True):
    print(f"{params.temperature:.1f}  {' '.join(answer.text.split())}")
