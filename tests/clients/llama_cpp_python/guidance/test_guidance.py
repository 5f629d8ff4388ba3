"""Guidance drives llama.cpp by itself: it gets the low-level context of a `cppbatch.Llama`."""

from __future__ import annotations

import warnings
from pathlib import Path

import cppbatch


def test_an_answer_is_generated_in_the_low_level_context(default_model: Path) -> None:
    with cppbatch.patch(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the chat template, which is not used here
        from guidance import gen, models

        lm = models.LlamaCpp(str(default_model), n_ctx=512, n_threads=1, echo=False)
        lm += "The capital of France is" + gen(name="answer", max_tokens=4, temperature=0)
        assert "Paris" in lm["answer"]
