"""A vector for every line of a text file: embeddings.py examples/data/questions.txt vectors.npy"""

import sys
from pathlib import Path

import numpy as np

from cppbatch import BatchInferenceEngine, pull_default

source, target = sys.argv[1:] or ["examples/data/questions.txt", "vectors.npy"]
texts = Path(source).read_text(encoding="utf-8").splitlines()
with BatchInferenceEngine(pull_default(), pooling="mean", n_batch=512) as engine:
    vectors = engine.embed(texts)
np.save(target, vectors)
print(f"{len(vectors)} vectors of {vectors.shape[1]} numbers")
