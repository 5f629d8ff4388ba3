"""Several prompts that stream at once, each in its own panel.

.venv/bin/python examples/stream_side_by_side.py
"""

from __future__ import annotations

import argparse

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from cppbatch import BatchInferenceEngine, SamplingParams, pull_default

PROMPTS = ["Once upon a time", "The first computers were", "On Monday the baker", "Winter in the mountains"]


def panels(texts: dict[str, Text], width: int) -> Columns:
    return Columns([Panel(text, title=name, width=width) for name, text in texts.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file (the default model)")
    parser.add_argument("--max-tokens", type=int, default=64, help="new tokens for each prompt")
    args = parser.parse_args()

    console = Console()
    width = max(24, console.width // 2 - 2)
    steps = 0
    with BatchInferenceEngine(args.model or pull_default()) as engine:
        texts: dict[str, Text] = {}
        for seed, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=args.max_tokens, seed=seed, ignore_eos=True)
            texts[engine.add_request(prompt, params)] = Text(prompt, style="bold")
        with Live(panels(texts, width), console=console, refresh_per_second=12) as live:
            while engine.has_work:
                for event in engine.step():
                    texts[event.request_id].append(event.text, style="not bold")
                live.update(panels(texts, width))
                steps += 1
    console.print(f"\n{len(texts)} sequences of {args.max_tokens} tokens took {steps} steps.")


if __name__ == "__main__":
    main()
