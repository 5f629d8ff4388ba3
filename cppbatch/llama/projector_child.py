"""The child process that tests a projector: loads it and encodes a minimal image and audio clip. It may crash."""

from __future__ import annotations

import sys

import numpy as np

from cppbatch.config import available_threads
from cppbatch.errors import CppBatchError
from cppbatch.llama import MediaEncoder, Model
from cppbatch.llama.media_encoder import MediaChunk


def main() -> None:
    """`projector_child MODEL PROJECTOR`: exit code 0 if it encodes. The model's weights are not loaded."""
    path, projector = sys.argv[1:]
    try:
        with Model(path, n_gpu_layers=0, no_alloc=True) as model:
            encoder = MediaEncoder(model, projector, n_threads=available_threads())
            chunks: list[MediaChunk] = []
            if "image" in encoder.modalities:
                chunks += encoder.split_image(np.full((64, 64, 3), 128, np.uint8))
            if "audio" in encoder.modalities:
                chunks += encoder.split_audio(np.zeros(encoder.sample_rate, np.float32))
            for chunk in chunks:
                if chunk.kind:
                    encoder.encode(chunk)
    except CppBatchError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
