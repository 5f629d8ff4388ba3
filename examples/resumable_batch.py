"""Answers every line of a text file, and continues where it stopped when you run it again.

.venv/bin/python examples/resumable_batch.py examples/data/questions.txt answers.jsonl

Press Ctrl-C and run it again: no line is answered twice. `cppbatch batch` does the same with more file formats.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default


def answered(path: Path) -> set[int]:
    """The line numbers in the output. Cuts off a last line that was only partly written."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    complete = data.rfind(b"\n") + 1
    os.truncate(path, complete)
    return {json.loads(line)["line"] for line in data[:complete].splitlines()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path, help="one prompt per line")
    parser.add_argument("output", type=Path, help="JSON lines, in the order in which they finish")
    parser.add_argument("--model", help="GGUF file (the default model)")
    parser.add_argument("--max-tokens", type=int, default=48, help="new tokens for each prompt")
    args = parser.parse_args()

    done = answered(args.output)
    prompts = list(enumerate(args.input.read_text(encoding="utf-8").splitlines(), start=1))
    todo = [(number, prompt) for number, prompt in prompts if prompt.strip() and number not in done]
    print(f"{len(done)} lines are answered, {len(todo)} are left")
    params = SamplingParams(max_tokens=args.max_tokens)
    with (
        BatchInferenceEngine(args.model or pull_default()) as engine,
        args.output.open("a", encoding="utf-8") as output,
    ):
        for result in engine.map((prompt for _, prompt in todo), params):
            number, prompt = todo[result.index]
            answer = {
                "line": number,
                "prompt": prompt,
                "text": result.completion.text,
                "error": result.completion.error,
            }
            output.write(json.dumps(answer) + "\n")
            output.flush()


if __name__ == "__main__":
    main()
