"""The measuring programs in scripts/, with few tokens: each prints its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fake_peers import write_llama_server, write_program
from tests.support.scripts import ROOT, columns, number, rows, script

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama_server(tmp_path_factory.mktemp("peers") / "llama-server")


def test_both_servers_are_measured_alternately(llama_server: Path, tiny_llama: Path) -> None:
    few = ["--load", "shared-prefix", "--clients", "2", "--requests", 2, "--turns", 1]
    printed = script("bench_servers.py", llama_server, "-m", tiny_llama, *few, "--ours=-np 2")
    assert "Kept: `--no-kv-unified -fa on -ctk q8_0 -ctv q8_0`" in printed
    figures = rows(printed)
    ours, theirs, ratio = map(number, figures["shared-prefix: output tokens/s"])
    assert ratio == pytest.approx(ours / theirs, abs=0.01)
    assert figures["shared-prefix: failed requests"][:2] == ["0 of 2", "0 of 2"]
    for time in ("TTFT p50, ms", "TTFT p95, ms", "inter-token p95, ms"):
        assert number(figures[f"shared-prefix: {time}"][0]) > 0


def test_llama_server_s_drafts_are_tried_where_texts_repeat(llama_server: Path, tiny_llama: Path) -> None:
    few = ["--load", "job", "--clients", "2", "--requests", 2, "--turns", 1, "--ours=-np 2"]
    known = "--theirs=--no-kv-unified -fa on"
    printed = script("bench_servers.py", llama_server, "-m", tiny_llama, *few, known)
    assert "Kept: `--no-kv-unified -fa on --spec-type ngram-mod" in printed
    assert "2 requests, 2 at once" in printed
    assert rows(printed)["job: failed requests"][:2] == ["0 of 2", "0 of 2"]


def test_every_layer_is_measured_beside_the_bare_loop(tiny_llama: Path) -> None:
    printed = script("bench_process.py", "-m", tiny_llama, "-n", 2, "--tokens", 8, "--turns", 1, "-t", 1)
    figures = columns(printed.partition("\n\n")[0])
    for layer in ("bare loop", "engine", "LocalEngine", "EngineProcess", "HTTP"):
        assert number(figures[layer]["tokens/s"]) > 0
        assert " to " in figures[layer]["of the bare loop"]
    assert figures["bare loop"]["other CPU, %"] == "-"
    assert number(figures["HTTP"]["other CPU, %"]) > 0


def test_two_settings_are_compared_step_by_step(tiny_llama: Path) -> None:
    few = ["-B", 2, "--requests", 3, "--longest", 30, "--rounds", 1]
    settings = ('one={ROOT}:{"n_threads": 1}', 'two={ROOT}:{"n_threads": 1, "n_batch": 64}')  # they wait for no thread
    variants = [each.replace("{ROOT}", str(ROOT)) for each in settings]
    figures = rows(script("bench_steps_in_turns.py", "-m", tiny_llama, *few, *variants))
    speeds = [number(figures[name][0]) for name in ("one", "two")]
    ratio = float(figures["two"][0].split("(")[1].split(",")[0])
    assert ratio == pytest.approx(speeds[1] / speeds[0], abs=0.02)


def test_a_draft_head_is_compared_step_by_step_on_the_text_that_it_knows(tmp_path: Path) -> None:
    script("bench_draft_head.py", "--models", tmp_path, "--acceptance", 100, "--layers", 1, "--width", 512)
    few = ["-B", 1, "--requests", 1, "--rounds", 1, "--cycle"]
    figures = rows(
        script(
            "bench_steps_in_turns.py",
            "-m",
            tmp_path / "head-100.gguf",
            *few,
            f"off={ROOT}",
            f'mtp={ROOT}:{{"spec": "mtp"}}',
        )
    )
    assert number(figures["off"][0]) > 0
    assert number(figures["mtp"][0]) > 0


def test_settings_of_the_server_are_compared_under_one_load(tiny_llama: Path) -> None:
    few = ["--load", "shared-prefix", "--requests", 4, "--turns", 1, "--ours=-np 2 -c 4096 -t 1 --spec off"]
    figures = rows(script("bench_servers.py", "-m", tiny_llama, "plain@2=--no-prefix-cache", "cached@2=", *few))
    plain, cached = map(number, figures["shared-prefix: KV cells of running and finished requests"][:2])
    assert plain == 0
    assert cached > 500
    assert number(figures["shared-prefix: output tokens/s"][2]) > 0


def test_streams_are_measured_alone_and_beside_images_and_texts(default_model: Path) -> None:
    names = ["images", "texts"]
    few = ["--turns", 1, "--seconds", 3, "--streams", 2, "--tokens", 16]
    figures = columns(script("bench_beside.py", ",".join(names), "-m", default_model, *few))
    assert list(figures) == ["alone", *names]
    for each in figures.values():
        p50, p95, longest = (number(each[title]) for title in ("inter-token p50, ms", "p95", "longest"))
        assert 0 < p50 <= p95 <= longest
        assert each["failed"] == "0"
    assert number(figures["images"]["arrived"]) >= 1


def test_a_backlog_is_measured_beside_interactive_requests(tiny_llama: Path) -> None:
    printed = script("bench_background.py", "-m", tiny_llama, "--turns", 1)
    for n in ("20", "100", "400"):
        idle, busy, queue, _ = map(number, rows(printed)[n])
        assert min(idle, busy) > 0
        assert queue <= busy


# --- beside OpenVINO GenAI and mistral.rs ---

FAKE_OPENVINO = """
from types import SimpleNamespace
class SchedulerConfig: pass
class GenerationConfig: pass
GenerationStatus = SimpleNamespace(RUNNING=0, FINISHED=1)
class Handle:
    def __init__(self, n): self.left, self.unread = n, 0
    def can_read(self): return self.unread > 0
    def read(self):
        self.unread -= 1
        return {0: SimpleNamespace(generated_ids=[7])}
    def get_status(self): return GenerationStatus.RUNNING if self.left else GenerationStatus.FINISHED
class ContinuousBatchingPipeline:
    def __init__(self, *settings): self.handles = []
    def add_request(self, i, ids, config):
        self.handles.append(Handle(config.max_new_tokens))
        return self.handles[-1]
    def step(self):
        for handle in self.handles:
            if handle.left: handle.left, handle.unread = handle.left - 1, 1
"""
RUN_SCRIPT = """
import runpy, sys
sys.path.insert(0, {folder!r})
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FAKE_MISTRALRS = """
from types import SimpleNamespace
class ChatCompletionRequest(SimpleNamespace): pass
Which = SimpleNamespace(GGUF=SimpleNamespace)
class Runner:
    def __init__(self, **settings): pass
    def send_chat_completion_request(self, request):
        for i in range(request.max_tokens):
            yield SimpleNamespace(usage=SimpleNamespace(completion_tokens=i + 1))
"""


def test_the_engine_is_measured_beside_packages_of_other_environments(default_model: Path, tmp_path: Path) -> None:
    for name, text in (("openvino_genai", FAKE_OPENVINO), ("openvino", "Tensor = list"), ("mistralrs", FAKE_MISTRALRS)):
        (tmp_path / f"{name}.py").write_text(text)
    python = write_program(tmp_path / "python", RUN_SCRIPT.format(folder=str(tmp_path)))
    few = ["-m", default_model, "--requests", 2, "--at-once", 2, "--turns", 1]
    printed = script("bench_python_peers.py", *few, "--openvino", python, "--mistralrs", python)
    figures = columns(printed)
    assert list(figures) == ["cppbatch", "OpenVINO GenAI", "mistral.rs"]
    for each in figures.values():
        assert number(each["tokens/s"]) > 0
        assert number(each["TTFT p50, ms"]) <= number(each["TTFT p95, ms"])
