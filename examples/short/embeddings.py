"""A vector for every line of a text file: embeddings.py examples/data/questions.txt vectors.npy"""

import sys
from pathlib import Path

import numpy as np

from cppbatch import BatchInferenceEngine, pull_default

texts = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
with BatchInferenceEngine(pull_default(), pooling="mean", n_batch=512) as engine:
    vectors = engine.embed(texts, progress=True)
np.save(sys.argv[2], vectors)
print(f"{len(vectors)} vectors of {vectors.shape[1]} numbers")
