"""The models of --models-dir, several -m and --models-config, with their settings; no file is loaded."""

from __future__ import annotations

import re
import struct
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest

from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.model_settings import parse_settings, read_settings
from cppbatch.cli.model_sources import Catalog, ModelSources, many_models, model_source_options
from cppbatch.cluster.deployment import Deployment
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError
from cppbatch.server.models.loader import ModelSpec
from cppbatch.server.settings import ServerSettings

BASE = EngineConfig("", n_ctx=4096)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    for name in (
        "a-Q4_0.gguf",
        "b.gguf",
        "sub/b.gguf",
        "sub/mmproj-b.gguf",
        "mmproj.gguf",
        "split/c-00001-of-00002.gguf",
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF")
    return folder


def catalog(folder: Path | None = None, text: str = "", suffix: str = ".toml", **options: Any) -> Catalog:
    file = None
    if text and folder:
        file = folder.parent / f"settings{suffix}"
        file.write_text(text)
    settings = ServerSettings(sampling_defaults={"temperature": 0.9}, **options.pop("server", {}))
    sources = ModelSources(folder=folder, settings_file=file, **options)
    return Catalog(sources, BASE, {"n_ctx"}, Deployment(step_timeout=60), settings)


def specs(made: Catalog) -> dict[str, ModelSpec]:
    return {spec.name: spec for spec in made.read().specs}


def test_each_model_has_its_own_projector(folder: Path) -> None:
    projector = folder / "sub" / "mmproj-b.gguf"
    projector.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 1, 0))
    found = specs(catalog(folder, f'[models."sub/b"]\nmmproj = "{projector}"\n'))
    assert {name: spec.config.mmproj for name, spec in found.items() if spec.config.mmproj} == {"sub/b": str(projector)}


def test_a_model_in_a_folder_of_its_own_has_the_projector_beside_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cppbatch.llama.media_encoder.has_mtmd", lambda: True)
    beside = folder / "sub" / "mmproj-b.gguf"

    def with_projector(text: str = "", **options: Any) -> dict[str, str]:
        found = specs(catalog(folder, text, **options))
        return {name: spec.config.mmproj for name, spec in found.items() if spec.config.mmproj}

    assert with_projector() == {"sub/b": str(beside)}, "mmproj.gguf of the folder itself is of no model"
    for setting in ("pooling = 'mean'", "deterministic = true", "no-mmproj = true"):
        assert with_projector(f"[models.'sub/b']\n{setting}\n") == {}, setting
    assert with_projector(projectors=False) == {}, "--no-mmproj"
    (folder / "sub/b-Q4_0.gguf").write_bytes(b"GGUF")
    assert with_projector().keys() == {"sub/b", "b-Q4_0"}, "the same model in another type"
    (folder / "sub/other.gguf").write_bytes(b"GGUF")
    assert with_projector() == {}, "it may be of either"


def test_a_model_has_the_name_of_its_file_and_of_its_folder_where_two_have_it(folder: Path) -> None:
    assert list(specs(catalog(folder))) == ["a-Q4_0", "b", "c", "sub/b"]
    assert catalog(folder).read().default is None


def test_files_come_first_and_the_first_of_them_is_the_default(folder: Path) -> None:
    files = (folder / "b.gguf", folder / "a-Q4_0.gguf")
    assert catalog(files=files).read().default == "b"
    assert list(specs(catalog(folder, files=files))) == ["b", "a-Q4_0", "c", "sub/b"]


def test_files_of_the_same_name_and_folder_name_are_all_served(tmp_path: Path) -> None:
    files = tuple(tmp_path / version / "q4" / "model.gguf" for version in ("v1", "v2", "v3"))
    found = specs(catalog(files=(*files, files[0])))
    assert list(found) == ["model", "q4/model", "v3/q4/model"]
    assert [spec.config.model_path for spec in found.values()] == [str(path) for path in files]


def test_a_file_whose_names_are_all_used_is_refused() -> None:
    files = tuple(Path(f"/m{part}.gguf") for part in ("", "-00001-of-00002", "-00001-of-00003"))
    with pytest.raises(ConfigError, match=r"the name .m. of \S+-00003\.gguf is used for other models"):
        catalog(files=files).read()


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_section_with_a_file_is_never_a_model_of_the_folder(folder: Path, name: str) -> None:
    (folder.parent / "small.gguf").touch()
    found = specs(catalog(folder, f"[models.{name}]\nmodel = 'small.gguf'\nctx-size = 512"))
    assert (found[name].config.model_path, found[name].config.n_ctx) == (str(folder.parent / "small.gguf"), 512)
    others = {spec.config.model_path: spec.config.n_ctx for spec in found.values() if spec.name != name}
    assert others == {
        str(folder / each): 4096 for each in ("a-Q4_0.gguf", "b.gguf", "sub/b.gguf", "split/c-00001-of-00002.gguf")
    }


def test_a_section_may_name_the_file_that_it_would_have_anyway(folder: Path) -> None:
    found = specs(catalog(folder, "[models.b]\nmodel = 'b.gguf'\nctx-size = 512"))
    assert {name: spec.config.n_ctx for name, spec in found.items()} == {
        "a-Q4_0": 4096, "b": 512, "c": 4096, "sub/b": 4096,
    }  # fmt: skip


def test_settings_of_a_model_come_before_the_defaults_and_these_before_the_command_line(folder: Path) -> None:
    text = """
default = "a-Q4_0"
[defaults]
np = 4
ttl = 60
temp = 0.5
[models.a]
ctx-size = 8192
pinned = true
alias = ["gpt", "small"]
top-k = 10
flash-attn = true
no-prefix-cache = true
chat-template-kwargs = {x = 1}
devices = [0, 1]
[models.other]
model = "models/b.gguf"
ttl = -1
load-on-startup = true
"""
    found = specs(catalog(folder, text))
    a = found["a-Q4_0"]
    assert (a.config.n_ctx, a.config.n_parallel, a.config.flash_attn, a.config.prefix_cache) == (8192, 4, "on", False)
    assert a.given == {"n_ctx", "n_parallel", "flash_attn", "prefix_cache"}
    assert (a.pinned, a.ttl, a.settings.aliases) == (True, 60, ("gpt", "small"))
    assert a.settings.sampling_defaults == {"temperature": 0.5, "top_k": 10}
    assert a.settings.template_variables == {"x": 1}
    assert (a.deployment.devices, a.deployment.step_timeout, a.deployment.sleep_idle_seconds) == ((0, 1), 60, -1)
    assert (found["b"].config.n_ctx, found["b"].config.n_parallel, found["b"].ttl) == (4096, 4, 60)
    other = found["other"]
    assert (other.config.model_path, other.ttl, other.preload) == (str(folder / "b.gguf"), -1, True)
    assert catalog(folder, text).read().default == "a-Q4_0"


def test_a_context_of_no_size_is_that_of_each_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cppbatch.cli.model_sources.choose_model", Path)
    lengths = {"a-Q4_0.gguf": 1111, "b.gguf": 2222}
    monkeypatch.setattr("cppbatch.cli.model_settings.context_length", lambda path: lengths[path.name])
    found = {}

    @click.command()
    @model_source_options
    @partial(engine_options, several=True)
    def serve(sources: ModelSources, config: EngineConfig, **_: object) -> None:
        content = Catalog(sources, config, set(), Deployment(step_timeout=60), ServerSettings()).read()
        found.update({spec.name: spec.config.n_ctx for spec in content.specs})

    serve.main(["-m", str(folder / "a-Q4_0.gguf"), "-m", str(folder / "b.gguf"), "-c", "0"], standalone_mode=False)
    assert sorted(found.values()) == [1111, 2222]


def test_llama_servers_presets_are_read(folder: Path) -> None:
    text = """
version = 1
; a comment
[*]
c = 2048
[b]
n-gpu-layers = 12
jinja = true
cache-prompt = false
no-kv-unified = true
"""
    found = specs(catalog(folder, text, ".ini"))
    assert (found["a-Q4_0"].config.n_ctx, found["a-Q4_0"].config.n_gpu_layers) == (2048, -1)
    b = found["b"].config
    assert (b.n_ctx, b.n_gpu_layers, b.prefix_cache, b.kv_layout) == (2048, 12, False, "per-sequence")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.b]\nctxsize = 1", "model 'b': unknown model setting 'ctxsize'; did you mean ctx-size?"),
        ("[models.b]\napi-key = 'x'", "unknown model setting 'api-key'"),
        ("[models.b]\nnp = 'many'", "'many' is not a valid int"),
        ("[models.b]\nnp = 0", "it must be from 1"),
        ("[models.b]\npinned = 'maybe'", "pinned is 'maybe'; it must be true or false"),
        ("[models.b]\nin-process = true", "in-process applies to a server with a single model"),
        ("[models.new]\nnp = 1", "'new' not found in --models-dir; set its file"),
        ("default = 'new'", "default is 'new'; it must be one of"),
        ("[models.b]\nalias = ['x']\n[models.c]\nalias = ['x']", "alias 'x' is used for both 'b' and 'c'"),
        ("[model.b]\nnp = 1", "unknown field `model`"),
        ("[models.b", "--models-config"),
    ],
)
def test_a_wrong_setting_is_named(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        catalog(folder, text).read()
    assert message in str(wrong.value)


def test_settings_that_are_for_one_model_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--alias applies to a server with a single model"):
        catalog(folder, server={"aliases": ("x",)})
    for sources, message in (
        (ModelSources(folder=folder, any_model=True), "--any-model requires a default model"),
        (ModelSources(folder=folder, memory_mib=1, memory_check=False), "--models-memory requires memory estimates"),
    ):
        with pytest.raises(ConfigError, match=message):
            many_models(sources, BASE, set(), Deployment(), ServerSettings())


def test_the_environment_is_not_a_models_own_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPPBATCH_TEMP", "0.1")
    monkeypatch.setenv("CPPBATCH_PARALLEL", "3")
    own = parse_settings({"ctx-size": 512}, "here")
    assert (own.engine, own.server, own.deployment) == ({"n_ctx": 512}, {}, {})


def test_a_settings_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(tmp_path)
    (tmp_path / "models.toml").write_text(f"defaults = {'[' * 3000}{']' * 3000}")
    with pytest.raises(ConfigError, match=r"models\.toml: .* nested too deep"):
        read_settings(tmp_path / "models.toml")


def test_the_settings_of_the_docs_are_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "Qwen2.5-7B-Instruct-Q4_K_M.gguf").write_bytes(b"GGUF")
    found = specs(catalog(folder, example))
    assert list(found) == ["Qwen2.5-7B-Instruct-Q4_K_M", "qwen", "embed"]
    assert (found["qwen"].ttl, found["qwen"].settings.aliases) == (600, ("gpt-4o-mini", "small"))
    assert found["Qwen2.5-7B-Instruct-Q4_K_M"].pinned
    assert found["embed"].preload


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF")
    return path


def meanings(made: Catalog) -> dict[str, str]:
    """The names of the models, with their files relative to the models folder."""
    return {name: spec.config.model_path.partition("/models/")[2] for name, spec in specs(made).items()}


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def test_a_file_directly_in_the_folder_keeps_its_name_beside_one_in_another_folder(shelf: Path) -> None:
    put(shelf / "tiny.gguf")
    put(shelf / "alice/repo/tiny.gguf")
    assert meanings(catalog(shelf)) == {"tiny": "tiny.gguf", "alice/repo/tiny": "alice/repo/tiny.gguf"}


def test_a_name_that_files_of_several_folders_have_is_the_name_of_none_of_them(shelf: Path) -> None:
    """Else the next folder that comes first in the alphabet would take it over at a restart."""
    put(shelf / "bob/repo/tiny.gguf")
    put(shelf / "carol/repo/tiny.gguf")
    assert list(meanings(catalog(shelf))) == ["bob/repo/tiny", "carol/repo/tiny"]


@pytest.mark.parametrize("first", ["tiny.gguf", "bob/repo/tiny.gguf", "tiny/tiny.gguf"])
@pytest.mark.parametrize("later", ["tiny.gguf", "alice/repo/tiny.gguf", "zoe/repo/tiny.gguf", "tiny/tiny.gguf"])
def test_a_new_file_never_takes_a_name_that_had_another_meaning(shelf: Path, first: str, later: str) -> None:
    path = put(shelf / first)
    made = catalog(shelf)
    assert meanings(made) == {"tiny": first}
    put(shelf / later)
    assert meanings(made)["tiny"] == first
    assert sorted(meanings(made).values()) == sorted({first, later})
    path.unlink()
    assert meanings(made).get("tiny") in (None, first)
    put(shelf / first)
    assert meanings(made)["tiny"] == first


def test_a_new_file_does_not_take_a_name_that_a_model_has_without_its_weight_type(shelf: Path) -> None:
    put(shelf / "tiny-Q8_0.gguf")
    made = catalog(shelf)
    made.read()
    put(shelf / "tiny.gguf")
    assert meanings(made) == {"tiny-Q8_0": "tiny-Q8_0.gguf", "models/tiny": "tiny.gguf"}


def test_a_file_does_not_take_an_alias_of_the_settings_file(shelf: Path) -> None:
    put(shelf / "tiny.gguf")
    put(shelf / "alice/repo/gpt.gguf")
    found = specs(catalog(shelf, '[models.tiny]\nalias = "gpt,other"'))
    assert (list(found), found["tiny"].settings.aliases) == (["tiny", "alice/repo/gpt"], ("gpt", "other"))


def test_a_file_with_an_impossible_context_length_does_not_stop_the_others(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cppbatch.cli.model_settings.context_length", lambda path: 2**40 if path.stem == "x" else 512)
    put(shelf / "x.gguf")
    put(shelf / "tiny.gguf")
    found = specs(catalog(shelf, "[defaults]\nctx-size = 0"))
    assert {name: spec.config.n_ctx for name, spec in found.items()} == {"x": 4096, "tiny": 512}
