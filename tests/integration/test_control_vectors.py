"""Control vectors: the logits of llama-cpp-python's own class, and texts of requests that each have their own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from cppbatch import BatchInferenceEngine, InvalidRequest, LocalEngine
from cppbatch.cli.batch_command import batch
from cppbatch.config import EngineConfig, KvLayout
from cppbatch.engine.disk.slots import StateKey, weight_files
from cppbatch.engine.runtime import Runtime, load_runtime
from cppbatch.errors import ConfigError, ModelError
from cppbatch.models.synthetic import LlamaShape
from cppbatch.server.settings import ServerSettings
from tests.integration.test_model_changes import NO_REPACK, SIZES, logits_there
from tests.support import tiny_models
from tests.support.contexts import PROMPT, Row, decode
from tests.support.fakes import greedy
from tests.support.http_client import answered, http_to, post
from tests.support.lora_files import write_lora
from tests.support.lora_texts import FLOATS, STORY

Scales = dict[str | int, float]

N_NEW = 24
GREEDY = greedy(N_NEW, ignore_eos=True)


def control_vector(path: Path, directions: dict[int, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "controlvector")
    for layer, direction in directions.items():
        writer.add_tensor(f"direction.{layer}", np.asarray(direction, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("deep") / "deep.gguf", shape=LlamaShape(n_layer=4))


def steered(runtime: Runtime, adapters: tuple[tuple[int, float], ...] = ((0, 1.0),), seq_id: int = 0) -> Row:
    """The logits of a runtime with these numbers and scales."""
    runtime.context.use_adapters(adapters)
    runtime.context.remove(seq_id, 0)
    return decode(runtime.context, PROMPT, seq_id)  # type: ignore[arg-type]


# --- logits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(), (2, 3), (1, 1)])
def test_control_vectors_are_summed_with_their_scales_in_the_layers_of_the_range(
    deep: Path, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    random = np.random.default_rng(0)
    one = {layer: random.normal(size=64) for layer in (1, 2, 3)}
    two = {layer: random.normal(size=64) for layer in (2, 9)}  # the model has no layer 9
    files = (str(control_vector(tmp_path / "1.gguf", one)), 1.0), (str(control_vector(tmp_path / "2.gguf", two)), -0.5)
    there = np.array([one[1], one[2] - 0.5 * two[2], one[3]])
    settings: dict[str, Any] = {"control_vectors": files, "control_vector_layers": layers, **SIZES, **NO_REPACK}
    runtime = load_runtime(EngineConfig(str(deep), **settings))
    here = steered(runtime, ((0, 1.0), (1, -0.5)))
    runtime.close()
    start, end = layers or (1, 99)
    assert np.allclose(here, logits_there(deep, there, (start, end)), rtol=0, atol=1e-4)
    assert np.abs(here - logits_there(deep)).max() > 1e-2


def test_a_control_vector_also_applies_after_the_layout_has_changed(deep: Path, tmp_path: Path) -> None:
    files = ((str(control_vector(tmp_path / "1.gguf", {2: np.ones(64)})), 1.0),)
    runtime = load_runtime(EngineConfig(str(deep), **SIZES, **NO_REPACK, control_vectors=files))
    try:
        before = steered(runtime)
        runtime.context.reopen(n_ctx=256, kv_unified=False, flash_attn="off")  # type: ignore[attr-defined]
        after = steered(runtime)
    finally:
        runtime.close()
    assert np.allclose(before, after, rtol=0, atol=1e-3)
    assert np.abs(after - logits_there(deep)).max() > 1e-2


def test_a_context_computes_as_before_when_its_control_vector_is_taken_away(deep: Path, tmp_path: Path) -> None:
    files = ((str(control_vector(tmp_path / "1.gguf", {2: np.ones(64)})), 1.0),)
    runtime = load_runtime(EngineConfig(str(deep), **SIZES, **NO_REPACK, control_vectors=files))
    try:
        plain = decode(runtime.context, PROMPT)  # type: ignore[arg-type]
        changed = [steered(runtime, ((0, scale),), seq_id=1) for scale in (1.0, -2.0)]
        runtime.context.remove(1, 0)
        again = steered(runtime, (), seq_id=1)
    finally:
        runtime.close()
    assert np.array_equal(plain, again)
    assert min(np.abs(each - plain).max() for each in changed) > 1e-2 < np.abs(changed[0] - changed[1]).max()


@pytest.mark.parametrize(
    ("directions", "problem"),
    [
        ({1: np.ones(63)}, "is for a model whose vectors have 63 dimensions; those of this model have 64"),
        ({0: np.ones(64)}, "has the tensor direction.0 of type F32"),
        ({1: np.ones((2, 32))}, "has the tensor direction.1"),
    ],
)
def test_a_file_that_is_not_a_control_vector_of_the_model_is_refused(
    deep: Path, tmp_path: Path, directions: dict[int, Any], problem: str
) -> None:
    file = control_vector(tmp_path / "1.gguf", directions)
    with pytest.raises(ModelError, match=problem):
        load_runtime(EngineConfig(str(deep), **SIZES, control_vectors=((str(file), 1.0),)))


def test_two_control_vectors_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a/v.gguf and b/v.gguf have the same name 'v'; rename one"):
        EngineConfig("m.gguf", control_vectors=(("a/v.gguf", 1.0), ("b/v.gguf", 1.0)))


# --- texts of requests ------------------------------------------------------------------------------------------------


WANTED: list[tuple[Scales, Scales]] = [
    ({"calm": 1}, {}), ({}, {}), ({"loud": 1}, {}), ({"calm": -0.5, "loud": 1}, {}), ({"calm": 1}, {"x": 1}),
    ({}, {"x": 1}),
]  # fmt: skip
"""Control vectors and LoRA adapters of requests."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, random = tmp_path_factory.mktemp("vectors"), np.random.default_rng(1)
    vectors = {
        name: control_vector(folder / f"{name}.gguf", {layer: random.normal(size=64) for layer in (1, 2, 3)})
        for name in ("calm", "loud")
    }
    return {**vectors, "x": write_lora(folder / "x.gguf", LlamaShape(n_layer=4), seed=1)}


def settings_of(files: dict[str, Path], vectors: Scales, lora: Scales) -> dict[str, Any]:
    def given(scales: Scales) -> tuple[tuple[str, float], ...]:
        return tuple((str(files[str(name)]), scale) for name, scale in scales.items())

    return {"control_vectors": given(vectors), "lora": given(lora), **FLOATS}


@pytest.fixture(scope="module")
def expected(deep: Path, files: dict[str, Path]) -> list[str]:
    """Of each of `WANTED`, in an engine that has just these."""
    texts = []
    for vectors, lora in WANTED:
        settings = settings_of(files, vectors, lora)
        with BatchInferenceEngine(deep, n_ctx=1024, n_parallel=1, prefix_cache=False, **settings) as engine:
            texts.append(engine.generate([STORY], GREEDY)[0].text)
    assert len(set(texts)) == len(texts)
    return texts


def together(engine: BatchInferenceEngine, n_each: int) -> list[str]:
    names = [
        engine.add_request(STORY, GREEDY, control_vectors=vectors, lora=lora)
        for _ in range(n_each)
        for vectors, lora in WANTED
    ]
    texts = dict.fromkeys(names, "")
    while engine.has_work:
        for event in engine.step():
            texts[event.request_id] += event.text
    return [texts[name] for name in names]


@pytest.mark.parametrize(
    "settings",
    [{"kv_layout": "unified"}, {"kv_layout": "per-sequence"}, {"n_ctx": 256, "n_parallel": 8, "swap_space": 0}],
)
def test_requests_with_one_prompt_each_get_the_text_of_their_own_control_vectors(
    deep: Path, files: dict[str, Path], expected: list[str], settings: dict[str, Any]
) -> None:
    given = {"n_ctx": 8192, "n_parallel": 12, **settings_of(files, {"calm": 1, "loud": 0}, {"x": 0}), **settings}
    with BatchInferenceEngine(deep, **given) as engine:
        assert together(engine, 2) == expected * 2
        assert together(engine, 2) == expected * 2  # from the prefix cache
        stats = engine.stats()
    assert stats.prefix_hits > 0
    assert (stats.recomputes > 0) is ("swap_space" in settings)


def test_a_request_without_control_vectors_gets_those_of_the_start(
    deep: Path, files: dict[str, Path], expected: list[str]
) -> None:
    with BatchInferenceEngine(deep, n_ctx=1024, **settings_of(files, {"calm": -0.5, "loud": 1}, {"x": 0})) as engine:
        assert [(each.name, each.scale) for each in engine.info.control_vectors] == [("calm", -0.5), ("loud", 1)]
        by_number: Scales = {1: 1, 0: -0.5}
        assert [engine.generate([STORY], GREEDY, control_vectors=each)[0].text for each in (None, by_number)] == [
            expected[3],
            expected[3],
        ]


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"grim": 1}, r"control vector 'grim' not found; available: 'calm' \(0\)"),
        ({1: 1}, "control vector 1 not found"),
        ({"calm": 1, 0: 1}, "control vector 'calm' twice"),
        ({"calm": 1001}, "is 1001 for 'calm'; it must be from -1000 to 1000"),
        (["calm"], "must be an object that maps names to scales"),
    ],
)
def test_control_vectors_that_do_not_exist_are_refused(
    deep: Path, files: dict[str, Path], wanted: Any, reason: str
) -> None:
    with BatchInferenceEngine(deep, n_ctx=256, **settings_of(files, {"calm": 1}, {})) as engine:
        with pytest.raises(InvalidRequest, match=reason) as raised:
            engine.add_request("a", control_vectors=wanted)
        assert raised.value.field == "control_vectors"


async def test_over_http_each_request_chooses_its_control_vectors(
    deep: Path, files: dict[str, Path], expected: list[str], tmp_path: Path
) -> None:
    settings = settings_of(files, {"calm": 1, "loud": 0}, {"x": 0})
    body = {"prompt": STORY, "temperature": 0, "max_tokens": N_NEW, "ignore_eos": True}
    engine = LocalEngine(deep, n_ctx=1024, n_parallel=2, **settings)
    async with engine as client, http_to(client, ServerSettings(slot_save_path=tmp_path)) as http:
        for text, (vectors, lora) in zip(expected, WANTED, strict=True):
            fields = {"control_vectors": vectors, "lora": lora}
            answer = await answered(http, "/v1/completions", {**body, **fields, "id_slot": 1})
            assert answer["choices"][0]["text"] == text
        status, error = await post(http, "/v1/completions", {**body, "control_vectors": {"grim": 1}})
        assert (status, error["error"]["param"]) == (400, "control_vectors")


def test_embeddings_are_those_of_their_control_vectors_in_one_batch(deep: Path, files: dict[str, Path]) -> None:
    def vectors(scale: float, *wanted: Scales | None) -> list[Any]:
        settings = settings_of(files, {"calm": scale}, {})
        with BatchInferenceEngine(deep, n_ctx=512, n_parallel=4, pooling="mean", **settings) as engine:
            ids = [engine.add_request(STORY, task="embed", control_vectors=each) for each in wanted]
            found = dict[str, Any]()
            while engine.has_work:
                found |= {event.request_id: np.frombuffer(event.embedding or b"", "<f4") for event in engine.step()}
        return [found[each] for each in ids]

    plain, calm = vectors(0, None)[0], vectors(1, None)[0]
    assert np.abs(np.subtract(plain, calm)).max() > 1e-2
    together = vectors(1, None, {}, {"calm": 1}, {"calm": 0})
    for found, expected in zip(together, (calm, plain, calm, plain), strict=True):
        assert np.allclose(found, expected, rtol=0, atol=1e-5)


# --- saved states -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
async def test_a_slot_saved_under_a_control_vector_is_a_prefix_only_under_it(
    deep: Path, files: dict[str, Path], tmp_path: Path, layout: KvLayout
) -> None:
    def serving(*vectors: str) -> Any:
        settings = settings_of(files, dict.fromkeys(vectors, 0), {})
        return LocalEngine(deep, n_ctx=1024, n_parallel=2, kv_layout=layout, **settings)

    folder = ServerSettings(slot_save_path=tmp_path)
    body = {"prompt": STORY, "n_predict": 2, "temperature": 0, "id_slot": 1}
    async with serving("calm") as client, http_to(client, folder) as http:
        await answered(http, "/completion", {**body, "control_vectors": {"calm": 1}})
        assert (await post(http, "/slots/1?action=save", {"filename": "a.bin"}))[0] == 200
    async with serving("loud", "calm") as client, http_to(client, folder) as http:  # under another number
        assert (await post(http, "/slots/1?action=restore", {"filename": "a.bin"}))[0] == 200
        cached = [
            (await answered(http, "/completion", {**body, "control_vectors": scales}))["timings"]["cache_n"] > 0
            for scales in ({"calm": 0.5}, {"loud": 1}, {}, {"calm": 1})
        ]
        assert cached == [False, False, False, True]
    async with serving("loud") as client, http_to(client, folder) as http:
        status, error = await post(http, "/slots/1?action=restore", {"filename": "a.bin"})
        assert status == 400
        assert "with a LoRA adapter or control vector that is not loaded" in error["error"]["message"]


def test_saved_states_tell_layers_and_contents_of_control_vectors_apart(deep: Path, tmp_path: Path) -> None:
    file = control_vector(tmp_path / "1.gguf", {1: np.ones(64)})

    def key(**changed: Any) -> tuple[str, object]:
        config = EngineConfig(str(deep), **SIZES, control_vectors=((str(file), 1.0),), **changed)
        runtime, weights = load_runtime(config), weight_files(config)
        try:
            weights.read()
            found = StateKey(runtime.info, config, runtime.state_settings, weights)
            return found.short, found.adapter_digests(((0, 1.0),))
        finally:
            runtime.close()

    first = key()
    assert first == key()
    assert key(control_vector_layers=(1, 2))[0] != first[0]
    control_vector(file, {1: np.zeros(64)})
    assert key()[1] != first[1]


# --- batch jobs -------------------------------------------------------------------------------------------------------


def test_a_batch_job_never_continues_with_another_adapter_or_control_vector(
    deep: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    job, flags = tmp_path / "job.txt", ["-m", str(deep), "-c", "256", "-np", "1", "-t", "1", "-n", "2", "--in-process"]
    job.write_text("one\n")
    lora, vector = (shutil.copy(files[name], tmp_path) for name in ("x", "calm"))

    def run(*more: str) -> tuple[int, str]:
        with job.open("a") as file:
            file.write("three\n")  # so that there is something left to do
        result = CliRunner().invoke(batch, [str(job), "-o", str(tmp_path / "out.jsonl"), *flags, *more])
        return result.exit_code, f"{result.output} {result.exception}"

    given = ["--lora", str(lora), "--control-vector", str(vector)]
    for _ in range(2):
        code, said = run(*given)
        assert code == 0, said
    code, said = run("--lora", f"{lora}:0.5", *given[2:])
    assert code
    assert 'was started with lora [["x.gguf",1.0]], but lora is now [["x.gguf",0.5]]' in said
    code, said = run(*given[:2])
    assert code
    assert 'was started with control_vectors [["calm.gguf",1.0]], but control_vectors is now unset' in said
    shutil.copy(files["loud"], vector)
    code, said = run(*given)
    assert code
    assert f"was started with another file named calm.gguf than {vector}: use that file to resume" in said
