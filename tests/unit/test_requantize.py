"""The types that a model's matrices get: the rule, the plan of a file, names, and refusals."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from cppbatch.cli.models_command import models
from cppbatch.errors import ModelError
from cppbatch.models import kernels
from cppbatch.models.find import copy_path, is_copy, shorter_names
from cppbatch.models.kernels import KernelTimes
from cppbatch.models.requantize import (
    TYPES,
    Times,
    bits,
    check_target,
    is_small_model,
    plan_auto,
    plan_type,
    suited_types,
    target_type,
)
from tests.support import tiny_models
from tests.support.lora_files import write_lora

ROW_BY_ROW = {"Q4_1": 0.26, "Q5_1": 0.27, "Q5_K": 0.3, "Q6_K": 0.33, "IQ4_XS": 0.28, "IQ2_XXS": 0.4, "BF16": 0.9}
BATCHED = {"Q4_0": 0.05, "IQ4_NL": 0.051, "Q4_K": 0.06, "Q5_0": 0.14, "Q8_0": 0.12, "F16": 0.2, "F32": 0.4}
"""Milliseconds of 16 rows, about as on a CPU with AVX-512 and without AMX."""

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]


def times(
    row_by_row: Mapping[str, float] = ROW_BY_ROW, batched: Mapping[str, float] = BATCHED
) -> dict[str, KernelTimes]:
    return {
        **{kind: KernelTimes({1: ms / 16, 4: ms / 4, 16: ms, 256: 16 * ms}) for kind, ms in row_by_row.items()},
        **{kind: KernelTimes({1: ms / 4, 4: ms / 3, 16: ms, 256: 16 * ms}) for kind, ms in batched.items()},
    }


def times_of(kinds: Iterable[str]) -> Times:
    return {kind: each for kind, each in times().items() if kind in kinds}


def gguf_file(path: Path, tensors: Shapes, file_type: gguf.LlamaFileType, **metadata: object) -> Path:
    """A model of which only metadata and the list of tensors are real: all weights are zeros."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(file_type)
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), value, gguf.GGUFValueType.get_type(value))
    for name, (kind, shape) in tensors.items():
        dtype = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[dtype]
        raw = np.zeros((*shape[:-1], shape[-1] // block * size), np.uint8)
        writer.add_tensor(name, raw, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Q4_K_M: Shapes = {
    "token_embd.weight": ("Q4_K", (512, 256)),
    "blk.0.attn_norm.weight": ("F32", (256,)),
    "blk.0.attn_q.weight": ("Q4_K", (256, 256)),
    "blk.0.attn_v.weight": ("Q6_K", (256, 256)),
    "blk.0.ffn_gate_inp.weight": ("F32", (8, 256)),
    "blk.0.ffn_up.weight": ("Q4_K", (512, 256)),
    "blk.0.ffn_down.weight": ("Q6_K", (256, 512)),
    "output.weight": ("Q6_K", (512, 256)),
}


@pytest.fixture
def q4_k_m(tmp_path: Path) -> Path:
    return gguf_file(tmp_path / "model.Q4_K_M.gguf", Q4_K_M, gguf.LlamaFileType.MOSTLY_Q4_K_M)


# --- the rule ---


@pytest.mark.parametrize("kind", ROW_BY_ROW)
def test_a_type_computed_row_by_row_becomes_the_smallest_nearly_lossless_type_of_no_fewer_bits(kind: str) -> None:
    assert target_type(kind, times()) == ("F16" if kind == "BF16" else "Q8_0")


@pytest.mark.parametrize("kind", BATCHED)
def test_in_a_large_model_a_type_with_a_batched_kernel_stays(kind: str) -> None:
    assert target_type(kind, times()) == kind


@pytest.mark.parametrize("kind", [*ROW_BY_ROW, *BATCHED])
def test_without_lossy_no_type_loses_bits(kind: str) -> None:
    assert bits(target_type(kind, times())) >= bits(kind)


def test_where_every_type_has_a_batched_kernel_nothing_changes() -> None:
    amx = times({}, ROW_BY_ROW | BATCHED)
    assert all(target_type(kind, amx) == kind for kind in amx)


def test_a_kernel_that_is_not_clearly_faster_is_not_chosen() -> None:
    slow = {**BATCHED, "Q8_0": 1.5 * ROW_BY_ROW["Q4_1"]}
    assert target_type("Q4_1", times(ROW_BY_ROW, slow)) == "Q4_1"
    assert target_type("Q4_1", times(ROW_BY_ROW, slow), is_small=True) == "F16"


TIMED = {  # milliseconds of 1, 4, 16 and 256 rows, AVX-512 with VNNI and BF16, no AMX
    "Q4_1": KernelTimes({1: 0.049, 4: 0.196, 16: 0.78, 256: 12.3}),
    "Q8_0": KernelTimes({1: 0.039, 4: 0.089, 16: 0.305, 256: 5.0}),
    "BF16": KernelTimes({1: 0.048, 4: 0.113, 16: 0.267, 256: 3.5}),
    "F16": KernelTimes({1: 0.063, 4: 0.134, 16: 0.465, 256: 6.7}),
    "F32": KernelTimes({1: 0.184, 4: 0.335, 16: 0.639, 256: 7.5}),
}


def scaled(part: float, of: KernelTimes = TIMED["Q8_0"]) -> KernelTimes:
    return KernelTimes({rows: part * ms for rows, ms in of.ms.items()})


@pytest.mark.parametrize("source", ["Q4_1", "Q8_0", "F16"])
def test_a_small_model_gets_bf16_where_16_rows_and_prompts_are_faster_though_one_row_is_slower(source: str) -> None:
    assert target_type(source, TIMED, is_small=True) == "BF16"


def test_a_type_that_is_faster_for_one_row_only_is_not_chosen() -> None:
    fast_alone = {**TIMED, "Q8_0": KernelTimes({**TIMED["Q8_0"].ms, 1: 0.001, 4: 0.004})}
    assert target_type("Q4_1", fast_alone, is_small=True) == "BF16"


@pytest.mark.parametrize("bf16", [TIMED["F16"], scaled(1.0), scaled(0.97)])
def test_where_bf16_is_not_clearly_faster_the_smaller_file_is_chosen(bf16: KernelTimes) -> None:
    assert target_type("Q4_1", {**TIMED, "BF16": bf16}, is_small=True) == "Q8_0"


@pytest.mark.parametrize("noise", [0.97, 1.0, 1.03])
def test_noise_of_3_percent_leads_to_the_same_file(noise: float) -> None:
    assert target_type("Q4_1", {**TIMED, "Q8_0": scaled(noise)}, is_small=True) == "BF16"
    nearly = scaled(noise, scaled(0.985))
    assert target_type("Q4_1", {**TIMED, "BF16": nearly}, is_small=True) == "Q8_0"


@pytest.mark.parametrize("bf16", [scaled(part) for part in (0.5, 0.78, 0.9, 0.96, 1.04, 2.0)])
@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("source", TIMED)
def test_every_suited_type_has_nothing_to_gain_by_the_same_rule(source: str, is_small: bool, bf16: KernelTimes) -> None:
    kernels = {**TIMED, "BF16": bf16}
    suited = suited_types(source, kernels, is_small=is_small)
    assert [target_type(kind, kernels, is_small=is_small) for kind in suited] == suited


def test_in_a_large_model_a_row_is_bound_by_reading_so_weights_grow_no_further_than_q8_0() -> None:
    assert target_type("Q4_1", TIMED) == "Q8_0"
    assert target_type("Q8_0", TIMED) == "Q8_0"
    assert target_type("Q4_1", {**TIMED, "Q8_0": TIMED["Q4_1"]}) == "Q4_1"


def test_a_model_is_small_if_its_weights_in_16_bits_take_512_mib_and_an_eighth_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def small(n_weights: float, gib: float) -> bool:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=gib * 2**30))
        return is_small_model(n_weights)

    assert small(268e6, gib=4)
    assert not small(269e6, gib=64)
    assert not small(135e6, gib=2)


def test_a_repacked_type_counts_in_the_way_that_the_engine_keeps_it() -> None:
    """Not repacked, where that is faster for batches (docs/decisions/0028)."""
    q4_k = KernelTimes({1: 0.017, 4: 0.039, 16: 0.125, 256: 1.92}, {1: 0.022, 4: 0.089, 16: 0.101, 256: 1.04})
    assert q4_k.batch_ms == pytest.approx(0.101 / 16 + 1.04 / 256)


def test_a_type_with_an_unknown_kernel_is_kept() -> None:
    assert target_type("NVFP4", times()) == "NVFP4"
    assert target_type("Q4_1", {}) == "Q4_1"


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "Q6_K"])
def test_with_lossy_the_fastest_types_are_chosen_and_the_best_of_those_that_are_about_as_fast(kind: str) -> None:
    assert target_type(kind, times(), lossy=True) == "IQ4_NL"
    assert target_type(kind, times(ROW_BY_ROW, {**BATCHED, "Q4_K": 0.052}), lossy=True) == "Q4_K"


def test_with_lossy_no_float_type_is_chosen_however_fast_because_a_single_row_is_bound_by_reading_it() -> None:
    fast_bf16 = times(ROW_BY_ROW, {**BATCHED, "BF16": 0.04})
    assert {target_type(kind, fast_bf16, lossy=True) for kind in ("Q4_1", "BF16", "F32")} == {"IQ4_NL"}


def test_with_lossy_a_type_that_is_about_as_fast_as_the_fastest_stays() -> None:
    assert target_type("Q4_0", times(), lossy=True) == "Q4_0"


# --- the plan of a file ---


def test_of_a_q4_k_m_only_the_q6_k_matrices_change(q4_k_m: Path) -> None:
    plan = plan_auto(q4_k_m, times_of)
    assert plan.changes == {name: ("Q6_K", "Q8_0") for name, (kind, _) in Q4_K_M.items() if kind == "Q6_K"}
    assert plan.counts == {("Q6_K", "Q8_0"): 3}
    assert (plan.default, plan.overrides) == ("Q4_K_M", dict.fromkeys(plan.changes, "Q8_0"))
    grown = sum(math.prod(Q4_K_M[name][1]) for name in plan.changes) * (bits("Q8_0") - bits("Q6_K")) / 8
    assert plan.n_bytes == q4_k_m.stat().st_size + grown


def test_the_embedding_is_converted_if_it_is_the_output_matrix_too(tmp_path: Path) -> None:
    tensors = {"token_embd.weight": ("Q6_K", (512, 256)), "blk.0.attn_q.weight": ("Q4_K", (256, 256))}
    tied = gguf_file(tmp_path / "tied.gguf", tensors, gguf.LlamaFileType.MOSTLY_Q4_K_S)
    assert plan_auto(tied, times_of).changes == {"token_embd.weight": ("Q6_K", "Q8_0")}
    untied = {**tensors, "output.weight": ("Q8_0", (512, 256))}
    assert not plan_auto(gguf_file(tmp_path / "u.gguf", untied, gguf.LlamaFileType.MOSTLY_Q4_K_S), times_of).changes
    pooled = gguf_file(tmp_path / "p.gguf", tensors, gguf.LlamaFileType.MOSTLY_Q4_K_S, llama__pooling_type=1)
    assert not plan_auto(pooled, times_of).changes, "an embedding model computes no logits"


def test_experts_stay_because_another_operation_multiplies_them(tmp_path: Path) -> None:
    tensors = {"blk.0.ffn_down_exps.weight": ("Q6_K", (8, 256, 256)), "blk.0.attn_q.weight": ("Q4_K", (256, 256))}
    path = gguf_file(tmp_path / "moe.gguf", tensors, gguf.LlamaFileType.MOSTLY_Q4_K_M)
    assert not plan_auto(path, times_of).changes
    assert plan_type(path, "Q8_0").counts == {("Q6_K", "Q8_0"): 1, ("Q4_K", "Q8_0"): 1}


def test_rows_that_are_not_whole_blocks_of_a_type_do_not_get_it(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", {"a.weight": ("Q8_0", (64, 576))}, gguf.LlamaFileType.MOSTLY_Q8_0)
    fast_k = {**times(), "Q4_K": times({}, {"Q4_K": 0.01})["Q4_K"]}
    assert plan_auto(path, lambda _kinds: fast_k, lossy=True).changes == {"a.weight": ("Q8_0", "IQ4_NL")}


def test_float_matrices_of_a_quantised_file_stay_and_those_of_a_float_file_change(tmp_path: Path, q4_k_m: Path) -> None:
    assert "blk.0.ffn_gate_inp.weight" not in plan_type(q4_k_m, "Q8_0").changes
    path = gguf_file(tmp_path / "f.gguf", {"a.weight": ("BF16", (64, 64))}, gguf.LlamaFileType.MOSTLY_BF16)
    plan = plan_auto(path, times_of)
    assert plan.changes == {"a.weight": ("BF16", "F16")}
    assert (plan.default, plan.overrides) == ("F16", {})


def test_the_file_type_is_that_of_most_weights_and_the_sources_own_if_that_fits(tmp_path: Path, q4_k_m: Path) -> None:
    assert plan_type(q4_k_m, "Q8_0").default == "Q8_0"
    small = gguf_file(tmp_path / "s.gguf", Q4_K_M, gguf.LlamaFileType.MOSTLY_Q4_K_S)
    assert plan_auto(small, times_of).default == "Q4_K_S"
    assert plan_type(small, "Q5_K", lossy=True).default == "Q5_K_M"


def test_float_types_side_by_side_are_all_named_because_llama_cpp_takes_them_only_beside_a_quantised_type(
    tmp_path: Path,
) -> None:
    tensors = {"a.weight": ("BF16", (64, 64)), "b.weight": ("F32", (64, 64))}
    path = gguf_file(tmp_path / "f.gguf", tensors, gguf.LlamaFileType.MOSTLY_BF16)
    plan = plan_auto(path, times_of)
    assert (plan.default, plan.overrides) == ("Q8_0", {"a.weight": "F16", "b.weight": "F32"})


# --- names ---


@pytest.mark.parametrize(
    ("source", "types", "copy"),
    [
        ("a.Q4_1.gguf", ["Q8_0"], "a.Q4_1-Q8_0.gguf"),
        ("a-Q4_K_M.gguf", ["Q8_0"], "a-Q4_K_M-Q8_0.gguf"),
        ("a.gguf", ["Q8_0", "Q4_0"], "a-Q8_0-Q4_0.gguf"),
    ],
)
def test_a_copy_is_named_after_its_source_and_the_new_types(source: str, types: list[str], copy: str) -> None:
    assert copy_path(Path("m", source), types) == Path("m", copy)
    assert is_copy(Path("m", copy), Path("m", source))
    assert not is_copy(Path("m", source), Path("m", copy))
    assert not is_copy(Path("n", copy), Path("m", source))


@pytest.mark.parametrize(
    ("name", "shorter"),
    [
        ("SmolLM2-135M-Instruct.Q4_1-Q8_0", ["SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M-Instruct"]),
        ("Llama-3.2-1B-Instruct-Q4_K_M", ["Llama-3.2-1B-Instruct"]),
        ("model.iq4_xs", ["model"]),
        ("model-bf16", ["model"]),
        ("tiny-llama", []),
        ("Qwen3-8B", []),
    ],
)
def test_a_name_without_its_types_of_weights(name: str, shorter: list[str]) -> None:
    assert list(shorter_names(name)) == shorter


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_that_can_be_asked_for_is_recognised_in_a_name(kind: str) -> None:
    assert list(shorter_names(f"model-{kind}")) == ["model"]


# --- refusals ---


def test_a_type_of_fewer_bits_needs_lossy_and_the_error_names_both(q4_k_m: Path) -> None:
    with pytest.raises(
        ModelError, match=r"Q4_0 has 4.5 bits per weight, fewer than 3 of 6 matrices .*Q6_K: 6.56.*--lossy"
    ):
        plan_type(q4_k_m, "Q4_0")
    assert len(plan_type(q4_k_m, "Q4_0", lossy=True).changes) == 6


def test_a_model_that_has_the_type_already_is_refused(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "m.gguf", {"a.weight": ("Q8_0", (64, 64))}, gguf.LlamaFileType.MOSTLY_Q8_0)
    with pytest.raises(ModelError, match=r"all matrices of m\.gguf are already Q8_0"):
        plan_type(path, "Q8_0")


def test_an_adapter_and_a_part_of_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"general\.type is 'adapter'"):
        plan_auto(write_lora(tmp_path / "lora.gguf"), times_of)
    part = gguf_file(tmp_path / "part.gguf", Q4_K_M, gguf.LlamaFileType.MOSTLY_Q4_K_M, split__count=3)
    with pytest.raises(ModelError, match="one of 3 parts of a model; merge them"):
        plan_auto(part, times_of)


def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a GGUF file"):
        plan_auto(tiny_models.not_gguf(tmp_path / "page.gguf"), times_of)
    with pytest.raises(ModelError, match="file not found"):
        plan_auto(tmp_path / "none.gguf", times_of)


def test_the_output_must_be_a_new_file(q4_k_m: Path, tmp_path: Path) -> None:
    plan = plan_auto(q4_k_m, times_of)
    with pytest.raises(ModelError, match="is the model itself"):
        check_target(plan, q4_k_m, overwrite=True)
    there = tmp_path / "there.gguf"
    there.touch()
    with pytest.raises(ModelError, match=r"there\.gguf already exists; .*--overwrite"):
        check_target(plan, there, overwrite=False)
    check_target(plan, there, overwrite=True)
    os.link(q4_k_m, tmp_path / "linked.gguf")
    with pytest.raises(ModelError, match="is the model itself"):
        check_target(plan, tmp_path / "linked.gguf", overwrite=True)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match=r"pipe\.gguf is not a regular file; choose another file with --output"):
        check_target(plan, tmp_path / "pipe.gguf", overwrite=True)
    with pytest.raises(ModelError, match=r"folder .*not found"):
        check_target(plan, tmp_path / "none" / "out.gguf", overwrite=False)


def test_too_little_room_on_the_disk_is_found_before_anything_is_written(
    q4_k_m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_auto(q4_k_m, times_of)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: SimpleNamespace(free=100_000))
    with pytest.raises(ModelError, match=r"takes 1 MB, but only 0 MB are free"):
        check_target(plan, plan.output, overwrite=False)


# --- the command ---


def test_where_nothing_is_to_be_gained_the_command_says_so_and_writes_nothing(
    q4_k_m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "kernel_times", lambda _kinds: times({}, dict.fromkeys(ROW_BY_ROW | BATCHED, 0.1)))
    monkeypatch.setattr(kernels, "has_gpu", lambda: False)
    result = CliRunner().invoke(models, ["requantize", str(q4_k_m)])
    assert result.exit_code == 0, result.output
    assert "nothing to gain" in result.output
    assert list(q4_k_m.parent.iterdir()) == [q4_k_m]


def test_on_a_gpu_nothing_is_requantised_and_no_kernel_is_timed(q4_k_m: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "kernel_times", lambda _kinds: pytest.fail("kernels were timed"))
    monkeypatch.setattr(kernels, "has_gpu", lambda: True)
    result = CliRunner().invoke(models, ["requantize", str(q4_k_m)])
    assert (result.exit_code, result.output.count("\n")) == (0, 1)
    assert "nothing to do: the model runs on the GPU" in result.output
    assert list(q4_k_m.parent.iterdir()) == [q4_k_m]


def test_on_a_gpu_too_a_file_that_is_not_a_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_gpu", lambda: True)
    (tmp_path / "text.gguf").write_text("no model")
    result = CliRunner().invoke(models, ["requantize", str(tmp_path / "text.gguf")])
    assert isinstance(result.exception, ModelError)


def test_an_unknown_type_is_refused_with_those_that_exist(q4_k_m: Path) -> None:
    result = CliRunner().invoke(models, ["requantize", str(q4_k_m), "--type", "q9"])
    assert result.exit_code == 2
    assert "'Q9' is not a known type; it must be one of auto, F32, BF16, F16, Q8_0" in result.output
