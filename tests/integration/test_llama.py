"""Model, Backend, library and requantisation: loading reports what it loads, or the reason for a failure."""

from __future__ import annotations

import ast
import logging
import re
import signal
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp import mtmd_cpp

from cppbatch.errors import DecodeFailed, LibraryError, LlamaError, ModelError
from cppbatch.llama import Backend, Batch, Context, Model, library
from cppbatch.llama.quantize_child import quantize
from tests.support import tiny_models


def test_loading_reports_rising_fractions_up_to_one(tiny_llama: Path) -> None:
    fractions = []

    def note(fraction: float) -> bool:
        fractions.append(fraction)
        return True

    Model(tiny_llama, progress=note).close()
    assert fractions == sorted(fractions)
    assert fractions[0] == 0.0
    assert fractions[-1] == 1.0


def test_loading_stops_when_progress_returns_false(tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match=r"tiny-llama\.gguf was stopped"):
        Model(tiny_llama, progress=lambda fraction: fraction < 0.5)


class _Interrupting(logging.Handler):
    """Presses Ctrl-C once, at the first line of llama.cpp's log, which a callback from C writes."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("cppbatch.llama").removeHandler(self)
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_in_a_callback_of_llama_cpp_is_raised_and_not_lost(
    tiny_llama: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("cppbatch.llama")
    with caplog.at_level(logging.DEBUG, log.name):
        log.addHandler(_Interrupting())
        with pytest.raises(KeyboardInterrupt):
            Model(tiny_llama)
        with Model(tiny_llama) as model:
            log.addHandler(_Interrupting())
            with pytest.raises(KeyboardInterrupt):
                Context(model, n_ctx=64, n_threads=1)
            Context(model, n_ctx=64, n_threads=1).close()
    assert capfd.readouterr().err == ""


def test_an_exception_in_progress_reaches_the_caller(tiny_llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def progress(fraction: float) -> bool:
        raise ZeroDivisionError("a bug in progress")

    with pytest.raises(ZeroDivisionError):
        Model(tiny_llama, progress=progress)
    assert "Exception ignored" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "write", [tiny_models.truncated, tiny_models.empty, tiny_models.not_gguf, tiny_models.vocab_only]
)
def test_a_broken_file_raises_an_error_with_its_path_and_a_remedy(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "broken.gguf")
    with pytest.raises(ModelError) as caught:
        Model(path)
    assert str(caught.value).startswith(f"{path} ")
    assert re.search(
        r"\. (Download it again|Download a \.gguf version of it|Use the GGUF file of the model itself)$",
        str(caught.value),
    )


@pytest.mark.parametrize("n_bytes", [0, 2, 30, 1000, 20_000, 100_000])
def test_a_file_that_is_cut_off_anywhere_is_to_be_downloaded_again(
    tiny_llama: Path, tmp_path: Path, n_bytes: int
) -> None:
    (path := tmp_path / "cut.gguf").write_bytes(tiny_llama.read_bytes()[:n_bytes])
    with pytest.raises(ModelError, match=r"\. Download it again$"):
        Model(path)


def test_another_kind_of_file_is_not_the_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a GGUF file .* Download a \.gguf version of it$"):
        Model(tiny_models.not_gguf(tmp_path / "page.gguf"))


def test_a_missing_file_and_a_folder_raise_an_error_with_their_path(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.gguf", tmp_path):
        with pytest.raises(ModelError, match=str(path)):
            Model(path)


def test_a_model_reports_the_metadata_of_its_file(llama_model: Model) -> None:
    assert llama_model.metadata["general.architecture"] == "llama"
    assert llama_model.metadata["llama.context_length"] == "4096"
    assert llama_model.n_ctx_train == 4096
    assert llama_model.n_params == 139_584
    assert llama_model.size_bytes == 4 * llama_model.n_params
    assert "llama" in llama_model.description
    assert llama_model.n_swa == 0


def test_a_chat_template_is_given_only_when_the_file_has_one(llama_model: Model, tmp_path: Path) -> None:
    assert llama_model.chat_template is None
    template = "{% for m in messages %}{{ m.content }}é{% endfor %}"
    with Model(tiny_models.llama(tmp_path / "chat.gguf", chat_template=template)) as chatty:
        assert chatty.chat_template == template


def test_long_metadata_comes_whole(tmp_path: Path) -> None:
    template = "x" * 5000
    with Model(tiny_models.llama(tmp_path / "long.gguf", chat_template=template)) as model:
        assert model.metadata["tokenizer.chat_template"] == template


@pytest.mark.parametrize(
    ("kind", "recurrent", "generates"),
    [
        ("llama", False, True),
        ("swa", False, True),
        ("mamba", True, True),
        ("hybrid", True, True),
        ("encoder", False, False),
    ],
)
def test_a_model_reports_its_kind(kind: str, recurrent: bool, generates: bool, request: pytest.FixtureRequest) -> None:
    with Model(request.getfixturevalue(f"tiny_{kind}")) as model:
        assert (model.is_recurrent, model.can_generate) == (recurrent, generates)


def test_a_sliding_window_is_reported(tiny_swa: Path) -> None:
    with Model(tiny_swa) as model:
        assert model.n_swa == tiny_models.WINDOW


def test_a_closed_model_refuses_use(tiny_llama: Path) -> None:
    with Model(tiny_llama) as model:
        pass
    model.close()
    for use in (lambda: model.handle, lambda: model.description, lambda: model.n_params, lambda: model.can_generate):
        with pytest.raises(LlamaError, match="is closed"):
            use()
    with pytest.raises(LlamaError, match="is closed"):
        Context(model, n_ctx=256, n_threads=1)


def test_the_vocabulary_of_a_closed_model_refuses_use(tiny_llama: Path) -> None:
    with Model(tiny_llama) as model:
        vocab = model.vocab
    for use in (lambda: vocab.tokenize("x"), lambda: vocab.piece(300), lambda: vocab.text(1)):
        with pytest.raises(LlamaError, match="is closed"):
            use()


def test_the_backend_lists_the_cpu_and_its_own_version_and_features() -> None:
    backend = Backend.get()
    cpu = next(device for device in backend.devices() if device.kind == "CPU")
    assert cpu.name
    assert 0 < cpu.memory_free <= cpu.memory_total
    assert backend.version
    assert backend.build_flags
    assert all(flag == flag.strip() != "" for flag in backend.build_flags)
    assert Path(backend.library_path).is_file()
    assert backend.supports_gpu is any("GPU" in device.kind for device in backend.devices())  # also if built with RPC
    assert Backend.get() is backend


def test_llama_cpps_log_reaches_logging_line_by_line(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "cppbatch.llama"):
        Model(tiny_llama).close()
    lines = [record.message for record in caplog.records if record.name == "cppbatch.llama"]
    assert any("general.architecture" in line for line in lines)
    assert not any("\n" in line for line in lines)


def test_llama_cpps_errors_are_collected_on_demand_and_logged_otherwise(
    llama_model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    batch = Batch(8)
    batch.add_run(np.array([7], np.int32), 5, 0, n_logits=1)
    with Context(llama_model, n_ctx=256, n_threads=1) as context:
        context.decode(_run_from(0))
        with caplog.at_level(logging.ERROR, "cppbatch.llama"):
            with Backend.get().errors() as lines, pytest.raises(DecodeFailed):
                context.decode(batch)
            assert lines
            assert not caplog.records
            with pytest.raises(DecodeFailed):
                context.decode(batch)
            assert [record.message for record in caplog.records] == lines


def _run_from(position: int) -> Batch:
    batch = Batch(8)
    batch.add_run(np.array([7], np.int32), position, 0, n_logits=1)
    return batch


def test_a_library_without_a_needed_function_is_refused_with_its_name_and_the_line_that_rebuilds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(llama_cpp.llama_cpp, "llama_memory_seq_cp")
    with pytest.raises(LibraryError) as caught:
        library._load()
    assert "lacks llama_memory_seq_cp" in str(caught.value)
    assert library.REINSTALL in str(caught.value)


def test_another_version_of_the_library_is_refused_with_both_versions_and_the_line_that_installs_the_right_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llama_cpp, "__version__", "0.3.99")
    with pytest.raises(LibraryError) as caught:
        library._load()
    assert "0.3.99" in str(caught.value)
    assert library.PINNED_VERSION in str(caught.value)
    assert library.REINSTALL in str(caught.value)


def test_each_parameter_that_is_set_is_a_field_of_llama_cpps_structs() -> None:
    # ctypes takes any attribute: one that llama.cpp has renamed would have no effect, without an error
    structs = (
        llama_cpp.llama_model_params, llama_cpp.llama_context_params, llama_cpp.llama_sampler_chain_params,
        llama_cpp.llama_model_quantize_params, mtmd_cpp.mtmd_context_params,
    )  # fmt: skip
    fields = {name for struct in structs for name, _ in struct._fields_}
    assigned = {
        node.attr
        for file in Path(library.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "params"
    }
    assert len(assigned) > 35
    assert assigned <= fields


def test_a_missing_library_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(LibraryError, match="cannot be imported") as caught:
        library._load()
    assert library.REINSTALL in str(caught.value)


def test_a_requantised_model_loads_and_computes(tiny_llama: Path, tmp_path: Path) -> None:
    path = quantize(tiny_llama, tmp_path / "q8.gguf", "Q8_0")
    assert path.stat().st_size < tiny_llama.stat().st_size
    with Model(path) as model, Context(model, n_ctx=256, n_threads=1) as context:
        assert "Q8_0" in model.description
        context.decode(_run_from(0))
        assert np.isfinite(context.logits(1)).all()


def test_requantising_a_file_that_is_not_a_model_raises_an_error_with_its_path(tmp_path: Path) -> None:
    source = tiny_models.not_gguf(tmp_path / "page.gguf")
    with pytest.raises(ModelError, match=str(source)):
        quantize(source, tmp_path / "out.gguf", "Q8_0")
