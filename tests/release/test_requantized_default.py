"""The default model with weights that batch well: nearly the same text, faster in batches."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from cppbatch.bench import compare_files, quality
from cppbatch.bench.quality import CONTEXT, compare_english, english_text
from cppbatch.config import EngineConfig
from cppbatch.engine.runtime import load_model, make_context
from cppbatch.models.kernels import has_gpu, kernel_times
from cppbatch.models.pull import choose_model, pull_default
from cppbatch.models.requantize import EXACT, plan_type, requantize, suited_types
from tests.conftest import once_a_run


@pytest.fixture(scope="module")
def suited_type(default_model: Path, default_source: Path) -> str:
    """The type that the default model has on this machine; Q8_0 where the downloaded file is used as it is."""
    return "Q8_0" if default_model == default_source else default_model.stem.rpartition("-")[2]


@pytest.fixture(scope="module")
def suited_copy(
    suited_type: str, default_model: Path, default_source: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The default model with other weights."""
    if default_model != default_source:
        return default_model
    plan = plan_type(default_source, suited_type)
    return once_a_run(tmp_path_factory, f"default-{suited_type}.gguf", lambda path: requantize(plan, path))


def test_text_is_predicted_nearly_as_well(
    suited_copy: Path, default_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = english_text()
    monkeypatch.setattr(quality, "english_text", lambda: text[: len(text) // 4])
    configs = [EngineConfig(str(path), n_ctx=CONTEXT, n_parallel=1) for path in (default_source, suited_copy)]
    with ExitStack() as stack:
        models = [stack.enter_context(load_model(config)) for config in configs]
        contexts = [stack.enter_context(make_context(*each)) for each in zip(configs, models, strict=True)]
        (found,), _ = compare_english(contexts, models[0].vocab)
    assert found.perplexity < 1.02 * found.source_perplexity
    assert found.figures()["same_top_percent"] >= 92  # Q8_0: 96 of the whole text, 93 of this quarter; Q4_0: 73
    assert found.kl_divergence < 0.02


def test_the_default_model_has_a_type_that_suits_this_cpu_and_is_chosen_again(
    default_model: Path, default_source: Path
) -> None:
    suited = ["Q4_1"] if has_gpu() else suited_types("Q4_1", kernel_times(["Q4_1", *EXACT]), is_small=True)
    files = [default_source if kind == "Q4_1" else plan_type(default_source, kind).output for kind in suited]
    assert default_model in files
    assert pull_default() == choose_model(None) == default_model


@pytest.mark.soak
def test_where_a_copy_is_chosen_batches_and_prompts_are_faster(
    suited_copy: Path, default_model: Path, default_source: Path
) -> None:
    source, copy = compare_files.compare_files(default_source, suited_copy).rows
    if default_model != default_source:
        assert copy["decode_16"].median > 1.2 * source["decode_16"].median
        assert copy["prefill"].median > 1.4 * source["prefill"].median
