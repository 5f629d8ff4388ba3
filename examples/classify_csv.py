"""Adds a label to every row of a CSV file. A JSON schema lets the model answer with one of the labels only.

.venv/bin/python examples/classify_csv.py examples/data/reviews.csv --column review
"""

from __future__ import annotations

import argparse
import csv
import json
import sys

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default

INSTRUCTIONS = """Label each text with one of: {labels}.

Text: {text}
JSON: """


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
    labels = ", ".join(args.labels)
    with (
        open(args.file, encoding="utf-8", newline="") as file,
        BatchInferenceEngine(args.model or pull_default()) as engine,
    ):
        rows = list(csv.DictReader(file))
        prompts = [INSTRUCTIONS.format(labels=labels, text=row[args.column]) for row in rows]
        results = engine.generate(prompts, params)

    writer = csv.DictWriter(sys.stdout, [*rows[0], "label"])
    writer.writeheader()
    for row, result in zip(rows, results, strict=True):
        writer.writerow({**row, "label": json.loads(result.text)["label"]})


if __name__ == "__main__":
    main()
