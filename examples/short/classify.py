"""A label for every row of a CSV file: classify.py examples/data/reviews.csv > labelled.csv"""

import csv
import sys

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default

with open([*sys.argv, "examples/data/reviews.csv"][1], encoding="utf-8", newline="") as file:
    rows = list(csv.DictReader(file))
params = SamplingParams(guided_choice=["positive", "negative"], temperature=0)
with BatchInferenceEngine(pull_default()) as engine:
    questions = [f"{row['review']} What is the sentiment of this review, positive or negative?" for row in rows]
    answers = engine.chat(questions, params)
writer = csv.DictWriter(sys.stdout, [*rows[0], "label"])
writer.writeheader()
writer.writerows(row | {"label": answer.text} for row, answer in zip(rows, answers, strict=True))
