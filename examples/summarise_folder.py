"""Summarises every text file of a folder. All conversations share one system message, which is computed once.

.venv/bin/python examples/summarise_folder.py examples/data/notes
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default

SYSTEM = """You summarise documents for a busy reader. Write one plain sentence in the present tense. Name the subject
of the document and the most important fact in it. Use the words of the document, and leave out your own opinion.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="examples/data/notes", type=Path)
    parser.add_argument("--pattern", default="*.txt", help="glob pattern of the files")
    parser.add_argument("--characters", type=int, default=4000, help="maximum characters to read from each file")
    parser.add_argument("--model", help="GGUF file (the default model)")
    parser.add_argument("--max-tokens", type=int, default=60, help="maximum tokens of a summary")
    args = parser.parse_args()

    files = sorted(args.folder.glob(args.pattern))
    texts = [file.read_text(encoding="utf-8")[: args.characters] for file in files]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0)
    with BatchInferenceEngine(args.model or pull_default()) as engine:
        answers = engine.chat(texts, params, system=SYSTEM)

    for file, answer in zip(files, answers, strict=True):
        print(f"{file.name}: {' '.join(answer.text.split())}")
    prompt_tokens = sum(answer.usage.prompt_tokens for answer in answers)
    cached_tokens = sum(answer.usage.cached_tokens for answer in answers)
    print(f"{cached_tokens} of {prompt_tokens} prompt tokens came from the prefix cache.")


if __name__ == "__main__":
    main()
