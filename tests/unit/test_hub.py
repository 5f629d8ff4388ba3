"""Models of the hub by name: missing files are fetched, existing ones need no network, and wrong names get a reason."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cppbatch.cli.engine_options import engine_options
from cppbatch.cli.model_sources import Catalog, ModelSources
from cppbatch.cli.models_command import models
from cppbatch.cluster.deployment import Deployment
from cppbatch.config import EngineConfig
from cppbatch.errors import ConfigError, ModelError
from cppbatch.models import pull
from cppbatch.models.find import find_model, models_in
from cppbatch.models.hub import HubModel, choose_file, choose_projector, hub_model, pull_model
from cppbatch.models.pull import choose_model
from cppbatch.server.settings import ServerSettings
from tests.support import tiny_models
from tests.support.fake_hub import FakeHub

FILES = ["README.md", "mmproj-F16.gguf", "Tiny-Q8_0.gguf", "Tiny-Q4_K_M.gguf", "Tiny-Q4_0.gguf", "Tiny-UD-Q4_K_XL.gguf"]
PARTS = [f"Q6_K/Big-Q6_K-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models folder."""
    monkeypatch.setenv("CPPBATCH_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_models.llama(tmp_path_factory.mktemp("hub") / "m.gguf").read_bytes()


@pytest.fixture
def hub(model_bytes: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with a repository of each kind."""
    repositories = {
        "owner/Tiny-GGUF": dict.fromkeys(FILES, model_bytes),
        "owner/Big-GGUF": dict.fromkeys(PARTS, model_bytes),
        "owner/safetensors": {"model.safetensors": b"{}"},
        "owner/broken-GGUF": {"page.Q4_0.gguf": b"<html>"},
        "owner/gated-GGUF": {"m.gguf": model_bytes},
    }
    with FakeHub(repositories, gated=("owner/gated-GGUF",)).running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def test_llama_cpps_variable_for_a_mirror_comes_first(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("MODEL_ENDPOINT", hub.url)
    assert choose_model("owner/Tiny-GGUF:Q4_0").name == "Tiny-Q4_0.gguf"


def test_a_model_of_a_container_registry_is_given_by_a_flag(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPPBATCH_DOCKER_REGISTRY", "http://127.0.0.1:9")
    (here := folder / "127.0.0.1_9" / "ai" / "smollm2").mkdir(parents=True)
    present = tiny_models.llama(here / "smollm2-135M-Q4_0.gguf")
    assert config_of("-dr", "smollm2:135M-Q4_0").model_path == str(present)


def test_a_draft_model_may_be_on_the_hub_too(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    config = config_of("-hf", "owner/Tiny-GGUF:Q8_0", "-hfd", "owner/Tiny-GGUF:Q4_0", "--no-mmproj", "-hft", "secret")
    assert config.model_path == str(folder / "owner/Tiny-GGUF/Tiny-Q8_0.gguf")
    assert config.draft_model == str(folder / "owner/Tiny-GGUF/Tiny-Q4_0.gguf")
    assert os.environ["HF_TOKEN"] == "secret"


def test_presets_name_models_of_the_hub_which_are_downloaded_when_they_are_used(
    hub: FakeHub, folder: Path, tmp_path: Path
) -> None:
    preset = tmp_path / "models.ini"
    preset.write_text(
        "[one]\nhf = owner/Tiny-GGUF:Q8_0\nctx-size = 512\n\n"
        "[two]\nhf-repo = owner/Tiny-GGUF\nhf-file = Tiny-Q4_0.gguf\nno-mmproj = true\nhfd = owner/Tiny-GGUF:Q4_0\n\n"
        "[owner/Tiny-GGUF:Q8_0]\nc = 1024\n"
    )
    sources = ModelSources(settings_file=preset)
    config, deployment = EngineConfig(model_path=""), Deployment()
    catalog = Catalog(sources, config, set(), deployment, ServerSettings())
    assert all(each.is_elsewhere for each in catalog.read().specs)
    assert hub.requests == []
    catalog.fetch("one")
    assert {each.name for each in catalog.read().specs if each.is_elsewhere} == {"two"}
    catalog.fetch("two")
    specs = {each.name: each.config for each in catalog.read().specs if not each.is_elsewhere}
    here = folder / "owner" / "Tiny-GGUF"
    assert {name: Path(config.model_path).name for name, config in specs.items()} == {
        "one": "Tiny-Q8_0.gguf", "two": "Tiny-Q4_0.gguf", "owner/Tiny-GGUF:Q8_0": "Tiny-Q8_0.gguf",
    }  # fmt: skip
    assert (specs["one"].n_ctx, specs["owner/Tiny-GGUF:Q8_0"].n_ctx) == (512, 1024)
    assert specs["two"].draft_model == specs["two"].model_path
    assert (specs["one"].mmproj, specs["two"].mmproj) == (str(here / "mmproj-F16.gguf"), "")


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("owner/Tiny-GGUF", HubModel("owner/Tiny-GGUF")),
        ("owner/Tiny-GGUF:Q4_K_M", HubModel("owner/Tiny-GGUF", "Q4_K_M")),
        ("owner/Big-GGUF:Q6_K/Big.gguf", HubModel("owner/Big-GGUF", "Q6_K/Big.gguf")),
        ("models/m.gguf", None),
        ("m.gguf", None),
        ("tiny", None),
        ("/abs/dir", None),
        ("a/b/c", None),
        ("tests/unit", None),  # a folder, here
    ],
)
def test_which_names_are_those_of_the_hub(name: str, model: HubModel | None) -> None:
    assert hub_model(name) == model


@pytest.mark.parametrize(
    ("choice", "file"),
    [
        ("", "Tiny-Q4_K_M.gguf"),
        ("Q8_0", "Tiny-Q8_0.gguf"),
        ("q8_0", "Tiny-Q8_0.gguf"),
        ("Q4_K_XL", "Tiny-UD-Q4_K_XL.gguf"),
        ("UD-Q4_K_XL", "Tiny-UD-Q4_K_XL.gguf"),
        ("Tiny-Q4_0.gguf", "Tiny-Q4_0.gguf"),
        ("Q4", None),
        ("F16", None),  # of the projector for images only
        ("Other.gguf", None),
    ],
)
def test_which_file_of_a_repository_is_meant(choice: str, file: str | None) -> None:
    assert choose_file(FILES, choice) == file


def test_without_the_usual_type_the_first_file_is_meant_and_of_a_split_model_its_first_part() -> None:
    assert choose_file(["b-Q5_0.gguf", "a-Q8_0.gguf"], "") == "a-Q8_0.gguf"
    assert choose_file(PARTS, "Q6_K") == choose_file(PARTS, "") == PARTS[0]
    assert choose_file(PARTS, PARTS[0]) == choose_file(PARTS, PARTS[0].rpartition("/")[2]) == PARTS[0]
    assert choose_file(["README.md"], "") is None


# --- fetching ---------------------------------------------------------------------------------------------------------


def test_a_missing_model_is_fetched_once(hub: FakeHub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = choose_model("owner/Tiny-GGUF:Q4_0")
    assert path == folder / "owner" / "Tiny-GGUF" / "Tiny-Q4_0.gguf"
    out, err = capsys.readouterr()
    assert out == ""
    assert f"looking for owner/Tiny-GGUF:Q4_0 on {hub.url}\n" in err
    assert "downloading Tiny-Q4_0.gguf from owner/Tiny-GGUF (0.00 GB) into " in err
    hub.requests.clear()
    assert choose_model("owner/Tiny-GGUF:Q4_0") == choose_model("owner/Tiny-GGUF") == path
    assert choose_model("Tiny-Q4_0") == choose_model("tiny") == path  # its short name, also without the type
    assert hub.requests == []


def test_all_parts_of_a_split_model_are_fetched(hub: FakeHub, folder: Path) -> None:
    path = pull_model(HubModel("owner/Big-GGUF"))
    assert path == folder / "owner" / "Big-GGUF" / PARTS[0]
    assert sorted(each.name for each in path.parent.glob("*.gguf")) == [part.rpartition("/")[2] for part in PARTS]
    assert models_in(folder) == [path]
    path.with_name(PARTS[2].rpartition("/")[2]).unlink()  # as after an interruption
    hub.requests.clear()
    assert pull_model(HubModel("owner/Big-GGUF")) == path
    assert [request for request in hub.requests if request.startswith("GET") and "resolve" in request] == [
        f"GET /owner/Big-GGUF/resolve/main/{PARTS[2]}"
    ]


def test_an_interrupted_download_leaves_no_model_and_continues(hub: FakeHub, folder: Path, model_bytes: bytes) -> None:
    hub.cut_after = 100
    try:
        path = pull_model(HubModel("owner/Tiny-GGUF", "Q8_0"))
    except ModelError:
        assert models_in(folder) == []
        path = pull_model(HubModel("owner/Tiny-GGUF", "Q8_0"))
    assert hub.cut_after is None
    assert path.read_bytes() == model_bytes


def test_a_copy_with_other_weights_is_not_taken_for_the_file_of_the_hub(hub: FakeHub, folder: Path) -> None:
    path = pull_model(HubModel("owner/Tiny-GGUF", "Q4_0"))
    shutil.copy(path, path.with_name("Tiny-Q4_0-Q8_0.gguf"))
    assert pull_model(HubModel("owner/Tiny-GGUF", "Q8_0")).name == "Tiny-Q8_0.gguf"
    assert pull_model(HubModel("owner/Tiny-GGUF", "Q4_0")) == path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owner/Tiny-GGUF:IQ2_M", r"IQ2_M not found in owner/Tiny-GGUF; available: Q4_0, Q4_K_M, Q8_0, UD-Q4_K_XL$"),
        ("owner/Tiny-GGUF:no.gguf", r"no\.gguf not found in .*; available: Tiny-Q4_0\.gguf, "),
        ("owner/safetensors", "has no GGUF files"),
        ("owner/nothing", r"owner/nothing is neither an existing file nor, on http://127.* set HF_TOKEN"),
        ("owner/gated-GGUF", r"requires you to accept its terms: open http.*/owner/gated-GGUF, then set HF_TOKEN"),
        ("owner/broken-GGUF", "is not a GGUF file"),
    ],
)
def test_a_failed_fetch_is_an_error_with_the_reason(hub: FakeHub, folder: Path, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        choose_model(name)


def test_without_a_network_the_address_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port: nothing listens
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(ModelError, match=r"could not be downloaded from http://127\.0\.0\.1:9: .*Check the network"):
        choose_model("owner/Tiny-GGUF")
    assert pauses == [], "the client has retried"


def test_a_full_disk_is_noticed_before_the_download(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: usage)
    with pytest.raises(ModelError, match=r"has 0\.00 GB, but .* has only 0\.00 GB free"):
        choose_model("owner/Tiny-GGUF")


def test_without_the_client_the_command_that_installs_it_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r'requires huggingface-hub: pip install "cppbatch\[hub\]"'):
        choose_model("owner/Tiny-GGUF")


# --- short names, and the command ------------------------------------------------------------------------------------


def test_a_short_name_that_may_be_several_models_is_refused_with_their_names(folder: Path) -> None:
    for name in ("a/x/Tiny-Q4_0.gguf", "Tiny-Q8_0.gguf", "Tiny-Q8_0-BF16.gguf"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        tiny_models.llama(folder / name)
    assert find_model(folder, "tiny-q4_0") == folder / "a/x/Tiny-Q4_0.gguf"
    assert find_model(folder, "Tiny-Q8_0") == folder / "Tiny-Q8_0.gguf"
    with pytest.raises(ModelError, match=r"tiny is ambiguous: Tiny-Q8_0-BF16, Tiny-Q4_0\. Give one of these"):
        find_model(folder, "tiny")
    (folder / "a/x/Tiny-Q4_0.gguf").unlink()
    assert find_model(folder, "tiny") == folder / "Tiny-Q8_0-BF16.gguf"  # a copy counts as its source


def test_pull_prints_the_path(hub: FakeHub, folder: Path) -> None:
    result = CliRunner().invoke(models, ["pull", "owner/Tiny-GGUF:Q8_0"])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(folder / "owner" / "Tiny-GGUF" / "Tiny-Q8_0.gguf")


@pytest.mark.parametrize("name", ["foo", "a/b/c:file.gguf", "name:file.gguf", "owner/name.gguf"])
def test_an_invalid_name_is_refused_with_the_required_form(folder: Path, name: str) -> None:
    result = CliRunner().invoke(models, ["pull", name])
    assert result.exit_code == 2
    assert "OWNER/REPO:TYPE" in " ".join(result.output.split())


# --- projectors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "files", "projector"),
    [
        ("m-Q4_K_M.gguf", ["mmproj-F32.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf"], "mmproj-F16.gguf"),
        ("m-Q4_K_M.gguf", ["mmproj-F32.gguf", "mmproj-m-Q8_0.gguf", "mmproj-BF16.gguf"], "mmproj-m-Q8_0.gguf"),
        ("m-F32.gguf", ["mmproj-F32.gguf", "mmproj-F16.gguf"], "mmproj-F32.gguf"),
        ("m.gguf", ["m-mmproj-f16.gguf"], "m-mmproj-f16.gguf"),
        ("a/m-Q8_0.gguf", ["mmproj-F16.gguf", "a/mmproj-F32.gguf", "b/mmproj-F16.gguf"], "a/mmproj-F32.gguf"),
        ("a/m-Q8_0.gguf", ["ab/mmproj-F16.gguf"], None),
        ("m.gguf", ["README.md", "mmproj.txt", "other.gguf"], None),
        (PARTS[0], ["mmproj-F16.gguf", "mmproj-Q6_K.gguf"], "mmproj-Q6_K.gguf"),
    ],
)
def test_the_projector_of_a_model_is_the_one_that_llama_cpp_takes(
    model: str, files: list[str], projector: str | None
) -> None:
    assert choose_projector([model, *files], model) == projector
    assert choose_file([*files, model], "") in (model, "other.gguf")


def test_a_projector_is_fetched_before_its_model_and_kept(hub: FakeHub, folder: Path) -> None:
    of_repository = folder / "owner" / "Tiny-GGUF"
    assert pull.choose_projector("owner/Tiny-GGUF:Q4_0") == of_repository / "mmproj-F16.gguf"
    assert [path.name for path in of_repository.glob("*.gguf")] == ["mmproj-F16.gguf"]
    path = choose_model("owner/Tiny-GGUF:Q4_0")
    hub.requests.clear()
    assert pull.choose_projector("owner/Tiny-GGUF:Q4_0") == of_repository / "mmproj-F16.gguf"
    assert pull.choose_projector(str(path)) is None  # a file: --mmproj says which one it shall have
    assert hub.requests == []
    assert pull.choose_projector("owner/Big-GGUF") is None
    assert pull.choose_projector("tiny") is None


def test_pull_fetches_the_projector_too_and_rm_deletes_it_with_the_last_model(hub: FakeHub, folder: Path) -> None:
    here = folder / "owner/Tiny-GGUF"
    for kind in ("Q8_0", "Q4_0"):
        assert CliRunner().invoke(models, ["pull", f"owner/Tiny-GGUF:{kind}"]).exit_code == 0
    assert {path.name for path in here.glob("*.gguf")} == {"Tiny-Q8_0.gguf", "Tiny-Q4_0.gguf", "mmproj-F16.gguf"}
    assert CliRunner().invoke(models, ["rm", "Tiny-Q8_0"]).output == f"deleted {here / 'Tiny-Q8_0.gguf'}\n"
    deleted = CliRunner().invoke(models, ["rm", "Tiny-Q4_0"]).output.split()
    assert deleted == ["deleted", str(here / "Tiny-Q4_0.gguf"), "deleted", str(here / "mmproj-F16.gguf")]
    assert not list(here.glob("*.gguf"))


def config_of(*flags: str) -> EngineConfig:
    """The settings of a command line."""
    found: list[EngineConfig] = []

    def keep(config: EngineConfig) -> None:
        found.append(config)

    result = CliRunner().invoke(click.command(engine_options(keep)), flags)
    assert not result.exception, (result.output, result.exception)
    return found[0]


@pytest.mark.usefixtures("hub")
def test_a_model_of_the_hub_has_its_projector_unless_disabled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cppbatch.llama.media_encoder.has_mtmd", lambda: True)
    projector = str(folder / "owner" / "Tiny-GGUF" / "mmproj-F16.gguf")
    of_hub = ["-hf", "owner/Tiny-GGUF:Q4_0"]
    assert config_of(*of_hub, "--no-mmproj").mmproj == config_of(*of_hub, "--no-mmproj-auto").mmproj == ""
    assert not Path(projector).exists()
    assert (
        config_of("-hf", "owner/Tiny-GGUF:Q8_0").mmproj == config_of("-m", "owner/Tiny-GGUF:Q8_0").mmproj == projector
    )
    assert config_of(*of_hub).mmproj == projector  # it is beside the model now
    (tmp_path / "mine.gguf").write_bytes(Path(projector).read_bytes())
    assert config_of(*of_hub, "--mmproj", str(tmp_path / "mine.gguf")).mmproj == str(tmp_path / "mine.gguf")
    assert config_of(*of_hub, "--pooling", "mean").mmproj == ""
    assert config_of("-m", str(folder / "owner" / "Tiny-GGUF" / "Tiny-Q4_0.gguf")).mmproj == ""
