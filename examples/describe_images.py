"""Describes every image in a folder, all in one batch. The model and its projector are two GGUF files.

.venv/bin/python examples/describe_images.py docs/images --model model.gguf --mmproj mmproj.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--question", default="Describe this image in one sentence.")
    parser.add_argument("--model", help="GGUF file of a vision model (the default model is not one)")
    parser.add_argument("--mmproj", required=True, help="GGUF file of its projector")
    parser.add_argument("--max-tokens", type=int, default=60, help="maximum tokens of a description")
    args = parser.parse_args()

    files = sorted(file for file in args.folder.iterdir() if file.suffix.lower() in ENDINGS)
    question = {"type": "text", "text": args.question}
    conversations = [[{"role": "user", "content": [{"type": "image", "path": file}, question]}] for file in files]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0)
    with BatchInferenceEngine(args.model or pull_default(), mmproj=args.mmproj) as engine:
        answers = engine.chat(conversations, params)

    for file, answer in zip(files, answers, strict=True):
        print(f"{file.name} ({answer.usage.n_media_tokens} tokens): {' '.join(answer.text.split())}")


if __name__ == "__main__":
    main()
