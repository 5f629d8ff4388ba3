"""Adds a label to every row of a CSV file. A JSON schema limits the answer to one of the labels.

.venv/bin/python examples/classify_csv.py examples/data/reviews.csv --column review
"""

from __future__ import annotations

import argparse
import csv
import json
import sys

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", default="examples/data/reviews.csv")
    parser.add_argument("--column", default="review", help="column with the text")
    parser.add_argument("--labels", nargs="+", default=["positive", "negative"])
    parser.add_argument("--model", help="GGUF file (the default model)")
    args = parser.parse_args()

    label = {"type": "string", "enum": args.labels}
    schema = {"type": "object", "properties": {"label": label}, "required": ["label"], "additionalProperties": False}
    params = SamplingParams(json_schema=schema, temperature=0)
    system = f"Label the text with one of: {', '.join(args.labels)}. Answer in JSON."
    with (
        open(args.file, encoding="utf-8", newline="") as file,
        BatchInferenceEngine(args.model or pull_default()) as engine,
    ):
        rows = list(csv.DictReader(file))
        answers = engine.chat([row[args.column] for row in rows], params, system=system)

    writer = csv.DictWriter(sys.stdout, [*rows[0], "label"])
    writer.writeheader()
    for row, answer in zip(rows, answers, strict=True):
        writer.writerow({**row, "label": json.loads(answer.text)["label"]})


if __name__ == "__main__":
    main()
