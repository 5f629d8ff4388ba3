"""Cached prefixes of slots in files: saved, restored by another server, refused where they do not fit, erased."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cppbatch import LocalEngine
from cppbatch.cluster.engines.client import EngineClient
from cppbatch.cluster.engines.process import EngineProcess
from cppbatch.engine.disk.slots import read_slot_file, write_slot_file
from cppbatch.models.synthetic import LlamaShape, write_llama
from cppbatch.server.settings import ServerSettings
from tests.support.http_client import Http, answered, http_of, http_to, post
from tests.support.lora_files import write_lora
from tests.support.tiny_models import scale_tensor

Json = dict[str, Any]
ENGINE: Json = {"n_ctx": 512, "n_parallel": 2, "n_threads": 1, "spec": "off"}
WIDE = LlamaShape(n_embd=256, n_ff=512)
"""Of a file of several megabytes, of which samples would miss parts."""
PROMPT = list(range(5, 65))
ASKED: Json = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "ignore_eos": True, "return_tokens": True}


@asynccontextmanager
async def serve(model: Path, folder: Path, engine: Any = LocalEngine, **sizes: Any) -> AsyncIterator[Http]:
    settings = ServerSettings(slot_save_path=folder)
    async with engine(model, **ENGINE | sizes) as client, http_to(client, settings) as http:
        yield http


async def ask(http: Http, **fields: Any) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt came from the cache."""
    answer = await answered(http, "/completion", ASKED | fields)
    return answer["tokens"], answer["timings"]["cache_n"]


async def act(http: Http, slot: int, action: str, filename: str = "a.bin") -> tuple[int, Any]:
    return await post(http, f"/slots/{slot}?action={action}", {"filename": filename})


@pytest.mark.each_value
@pytest.mark.parametrize("engine", [LocalEngine, EngineProcess])
@pytest.mark.parametrize("layout", ["unified", "per-sequence"])
async def test_a_saved_slot_is_a_cached_prefix_of_another_server(
    tiny_llama: Path, tmp_path: Path, engine: type[EngineClient], layout: str
) -> None:
    async with serve(tiny_llama, tmp_path, engine, kv_layout=layout) as http:
        first, n_cached = await ask(http, id_slot=1)
        assert n_cached == 0
        status, saved = await act(http, 1, "save")
        assert (status, saved["id_slot"], saved["n_saved"]) == (200, 1, len(PROMPT) + 7), saved
        assert saved["n_written"] == (tmp_path / "a.bin").stat().st_size
    other = "per-sequence" if layout == "unified" else "unified"
    async with serve(tiny_llama, tmp_path, engine, kv_layout=other, flash_attn="on") as http:
        status, restored = await act(http, 0, "restore")
        assert (status, restored["n_restored"]) == (200, saved["n_saved"]), restored
        assert restored["n_read"] == saved["n_written"]
        again, n_cached = await ask(http)
        assert n_cached == len(PROMPT) - 1, "any request takes it"
        assert again == first
    assert os.listdir(tmp_path) == ["a.bin"], "no temporary file is left"
    assert (tmp_path / "a.bin").stat().st_mode & 0o777 == 0o600


async def test_a_recurrent_state_is_restored_whole(tiny_mamba: Path, tmp_path: Path) -> None:
    async with serve(tiny_mamba, tmp_path) as http:
        said, _ = await ask(http, id_slot=0)
        assert (await act(http, 0, "save"))[0] == 200
        longer = [*PROMPT, *said, 7, 8, 9]
        expected, _ = await ask(http, prompt=longer, cache_prompt=False)
    async with serve(tiny_mamba, tmp_path) as http:
        assert (await act(http, 1, "restore"))[0] == 200
        assert await ask(http, prompt=longer) == (expected, len(PROMPT) + 7)


async def test_an_erased_slot_is_computed_again_and_others_are_not(tiny_llama: Path, tmp_path: Path) -> None:
    async with serve(tiny_llama, tmp_path) as http:
        await ask(http, id_slot=0)
        await ask(http, id_slot=1, prompt=PROMPT[::-1])
        status, erased = await post(http, "/slots/0?action=erase")
        assert (status, erased) == (200, {"id_slot": 0, "n_erased": len(PROMPT) + 7})
        assert (await ask(http, n_predict=0))[1] == 0
        assert (await ask(http, prompt=PROMPT[::-1], n_predict=0))[1] == len(PROMPT) - 1
        assert (await post(http, "/slots/0?action=erase"))[1]["n_erased"] == 0
        status, answer = await act(http, 0, "save")
        assert (status, answer["error"]["param"]) == (400, "id_slot")


async def test_a_request_of_a_slot_prefers_its_prefix(tiny_llama: Path, tmp_path: Path) -> None:
    async with serve(tiny_llama, tmp_path, kv_layout="per-sequence") as http:
        await ask(http, id_slot=1)
        other = PROMPT[:12] + PROMPT[:30]
        assert (await ask(http, prompt=other))[1] == 0, "copying a large prefix for 12 tokens is slower"
        assert (await ask(http, prompt=[*PROMPT[:12], 70, 71, *PROMPT], id_slot=1))[1] == 12


async def test_files_that_do_not_fit_are_refused_in_one_sentence(
    tiny_llama: Path, tiny_mamba: Path, tmp_path: Path
) -> None:
    adapter = write_lora(tmp_path / "loud.gguf", seed=1)
    async with serve(tiny_llama, tmp_path, lora=((str(adapter), 1.0),)) as http:
        await ask(http, id_slot=0)
        assert (await act(http, 0, "save", "lora.bin"))[0] == 200
    async with serve(tiny_llama, tmp_path) as http:
        await ask(http, id_slot=0)
        assert (await act(http, 0, "save"))[0] == 200
        data = (tmp_path / "a.bin").read_bytes()
        (tmp_path / "torn.bin").write_bytes(data[:-1000])
        changed = (4, 8, 40, len(data) // 2, len(data) - 7)
        for at in changed:
            (tmp_path / f"changed-{at}.bin").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        (tmp_path / "empty.bin").touch()
        for file in ("torn.bin", "empty.bin", *(f"changed-{at}.bin" for at in changed)):
            status, answer = await act(http, 0, "restore", file)
            assert (status, answer["error"]["param"]) == (400, "filename"), file
            assert "not a complete slot file" in answer["error"]["message"]
        for file, why in (("lora.bin", "adapter or control vector that is not loaded"), ("none.bin", "cannot be read")):
            status, answer = await act(http, 0, "restore", file)
            assert status == 400
            assert why in answer["error"]["message"]
    for model, sizes, why in (
        (tiny_mamba, {}, "was saved for model 'tiny-llama'; this server runs"),
        (tiny_llama, {"cache_type_k": "f32"}, "-ctk"),
        (tiny_llama, {"prefix_cache_ram": 0}, "--prefix-cache-ram"),
    ):
        async with serve(model, tmp_path, **sizes) as http:
            status, answer = await act(http, 0, "restore")
            assert status == 400
            assert why in answer["error"]["message"]


async def test_a_state_of_other_weights_of_the_same_name_and_size_is_refused(tmp_path: Path) -> None:
    model, adapter = write_llama(tmp_path / "model.gguf", WIDE), write_lora(tmp_path / "loud.gguf", WIDE, seed=1)
    lora = {"lora": ((str(adapter), 1.0),)}
    other_weights = "was saved for model 'model'; this server runs 'model' with other weights; save it again"
    async with serve(model, tmp_path, **lora) as http:
        await ask(http, id_slot=0)
        assert (await act(http, 0, "save"))[0] == 200
        assert (await act(http, 0, "restore"))[0] == 200
        scale_tensor(model, "blk.1.attn_norm.weight", 0.25)  # its weights were copied or mapped: nobody knows
        for action in ("save", "restore"):
            status, answer = await act(http, 0, action)
            assert (status, answer["error"]["param"]) == (400, "filename")
            assert "model.gguf has changed since it was loaded; restart" in answer["error"]["message"]
    async with serve(model, tmp_path, EngineProcess, **lora) as http:
        status, answer = await act(http, 0, "restore")
        assert (status, answer["error"]["param"]) == (400, "filename")
        assert other_weights in answer["error"]["message"]
        assert (await ask(http))[1] == 0
    scale_tensor(model, "blk.1.attn_norm.weight", 4.0)
    async with serve(model, tmp_path, **lora) as http:
        assert (await act(http, 0, "restore"))[0] == 200
    scale_tensor(adapter, "blk.1.attn_q.weight.lora_a", 0.5)
    async with serve(model, tmp_path, **lora) as http:
        status, answer = await act(http, 0, "restore")
        assert status == 400
        assert "adapter or control vector that is not loaded" in answer["error"]["message"]


async def test_files_of_other_versions_and_settings_are_refused_and_the_worker_lives(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with serve(tiny_llama, tmp_path, EngineProcess) as http:
        await ask(http, id_slot=0)
        assert (await act(http, 0, "save"))[0] == 200
        tokens, state, footer, _ = read_slot_file(tmp_path / "a.bin")
        form = {name: value for name, value in footer.form.items() if name != "n_window_bytes"}
        assert form != footer.form
        write_slot_file(tmp_path / "form.bin", tokens, state, msgspec.structs.replace(footer, form=form))
        write_slot_file(tmp_path / "more.bin", tokens, state, msgspec.structs.replace(footer, form={**form, "new": 1}))
        other = {**footer.settings, "llama-cpp-python": "0.1"}
        write_slot_file(tmp_path / "library.bin", tokens, state, msgspec.structs.replace(footer, settings=other))
        write_slot_file(tmp_path / "none.bin", tokens, state, msgspec.structs.replace(footer, settings={}))
        for file, why in (
            ("form.bin", "another version of cppbatch"),
            ("more.bin", "another version of cppbatch"),
            ("library.bin", "other settings (llama-cpp-python); save it again"),
            ("none.bin", "other settings (llama-cpp-python); save it again"),
        ):
            status, answer = await act(http, 0, "restore", file)
            assert (status, answer["error"]["param"]) == (400, "filename"), answer
            assert why in answer["error"]["message"]
        assert (await act(http, 0, "restore"))[0] == 200
        async with http.get("/metrics") as metrics:
            assert 'cppbatch_worker_restarts_total{worker="0"} 0' in await metrics.text()


@pytest.mark.parametrize("name", ["../a.bin", "/tmp/a.bin", "a/b", "a\\b", ".", "..", ".a", "", "a\n", "c:a", "a" * 65])
async def test_only_names_within_the_folder_are_taken(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    async with serve(tiny_llama, inside) as http:
        await ask(http, id_slot=0)
        for action in ("save", "restore"):
            status, answer = await act(http, 0, action, name)
            assert (status, answer["error"]["param"]) == (400, "filename")
    assert os.listdir(tmp_path) == ["inside"]
    assert not os.listdir(inside)


@pytest.mark.parametrize("path", ["2?action=erase", "x?action=erase", "0?action=burn", "0"])
async def test_slots_and_actions_that_do_not_exist_are_refused(tiny_llama: Path, tmp_path: Path, path: str) -> None:
    async with serve(tiny_llama, tmp_path) as http:
        assert (await post(http, f"/slots/{path}", {"filename": "a.bin"}))[0] == 400


async def test_without_a_folder_slot_actions_are_refused(tiny_llama: Path) -> None:
    async with http_of(tiny_llama, **ENGINE) as http:
        status, answer = await act(http, 0, "erase")
        assert status == 501
        assert "--slot-save-path" in answer["error"]["message"]
