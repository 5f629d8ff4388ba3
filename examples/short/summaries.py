"""A summary of every text file of a folder: summaries.py examples/data/notes"""

import sys
from pathlib import Path

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default

files = sorted(Path([*sys.argv, "examples/data/notes"][1]).glob("*.txt"))
texts = [file.read_text(encoding="utf-8") for file in files]
with BatchInferenceEngine(pull_default()) as engine:
    params = SamplingParams(max_tokens=60, temperature=0)
    answers = engine.chat(texts, params, system="Summarise the document in one sentence.")
for file, answer in zip(files, answers, strict=True):
    print(f"{file.name}: {answer.text}")
