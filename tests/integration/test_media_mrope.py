"""Images in models with multi-dimensional positions (M-RoPE): Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen 3.5."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from cppbatch import BatchInferenceEngine, InvalidRequest, Media, MediaPrompt
from cppbatch.engine import runtime
from cppbatch.engine.kv.save_cost import DiskCost
from cppbatch.engine.load_check import check_projector
from cppbatch.engine.media import files as media_files
from cppbatch.errors import ModelError, OutOfRange
from cppbatch.llama import Context, EmbeddingBatch, ImageSizes, MediaEncoder, Model, selfcheck
from tests.integration.test_media import EXACT, LAYOUTS, FirstRow, first_rows, reference_row
from tests.support import tiny_models, tiny_projectors
from tests.support.fakes import greedy
from tests.support.media_files import picture
from tests.support.native_engines import OpenEngine

KINDS = ("qwen2vl", "qwen2.5vl", "qwen3vl", "qwen35")
SIZES = ((48, 40), (96, 64), (32, 144), (128, 48), (1, 1), (100, 1), (64, 64), (40, 128))
"""Width and height; each gives a different number of rows and columns."""


def write_pair(folder: Path, kind: str) -> None:
    """A text model and its projector: KIND.gguf and KIND-mmproj.gguf."""
    if kind == "qwen35":
        tiny_models.two_dimensional_hybrid(folder / "qwen35.gguf")
        tiny_projectors.qwen_vision(folder / "qwen35-mmproj.gguf", "qwen3vl")
        return
    n_deepstack = int(kind == "qwen3vl")
    architecture = "qwen3vl" if n_deepstack else "qwen2vl"
    tiny_models.two_dimensional(folder / f"{kind}.gguf", architecture=architecture, n_deepstack=n_deepstack)
    tiny_projectors.qwen_vision(folder / f"{kind}-mmproj.gguf", kind, n_deepstack=n_deepstack)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mrope")
    for kind in KINDS:
        write_pair(folder, kind)
    return folder


@pytest.fixture
def open_kind(files: Path, open_engine: OpenEngine) -> Callable[..., BatchInferenceEngine]:
    def open_kind(kind: str, **settings: Any) -> BatchInferenceEngine:
        return open_engine(
            files / f"{kind}.gguf", **{**EXACT, "mmproj": str(files / f"{kind}-mmproj.gguf"), **settings}
        )

    return open_kind


@pytest.fixture
def tried_projectors(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Projectors are tried in child processes, and none was tried before."""
    monkeypatch.setattr(runtime, "check_projector", check_projector)


def image(number: int) -> Media:
    """An image with a different size for each number up to 7."""
    return Media("image", picture(number, size=SIZES[number]))


PROMPTS: list[MediaPrompt | str] = [
    MediaPrompt(["What is it? ", image(0), " and then"]),
    MediaPrompt([image(1), " the end" * 5]),
    "What is it? " * 4,
    MediaPrompt(["See: " * 6, image(2), " and then", image(3), " differ"]),
    MediaPrompt([image(4), image(5), "x"]),
    "y",
    MediaPrompt(["z" * 40, image(6), " and then"]),
    MediaPrompt([image(7), " and " * 9, image(0), image(1), "?"]),
]


@pytest.fixture(scope="module")
def references(files: Path) -> Callable[[str], list[npt.NDArray[np.float32]]]:
    """The logits after each prompt as mtmd's own helper computes it."""
    known: dict[str, list[npt.NDArray[np.float32]]] = {}

    def references(kind: str) -> list[npt.NDArray[np.float32]]:
        if kind not in known:
            known[kind] = [reference_row(files, f"{kind}-mmproj", prompt, kind) for prompt in PROMPTS]
        return known[kind]

    return references


@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_mtmds_own_helper_alone_and_among_seven_others(
    kind: str,
    layout: str,
    open_kind: Callable[..., BatchInferenceEngine],
    references: Callable[[str], list[npt.NDArray[np.float32]]],
) -> None:
    engine = open_kind(kind, kv_layout=layout)
    alone = [first_rows(engine, [prompt], cache_prompt=False)[0] for prompt in PROMPTS]
    np.testing.assert_allclose(alone, references(kind), atol=2e-4)
    together = first_rows(engine, PROMPTS, cache_prompt=False)
    np.testing.assert_allclose(together, references(kind), atol=2e-4)
    assert len({row.argmax() for row in alone}) > 1


@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_the_same_if_images_are_computed_in_pieces(
    kind: str,
    layout: str,
    open_kind: Callable[..., BatchInferenceEngine],
    references: Callable[[str], list[npt.NDArray[np.float32]]],
) -> None:
    engine = open_kind(kind, kv_layout=layout, n_batch=16, n_ubatch=8)
    np.testing.assert_allclose(first_rows(engine, PROMPTS, cache_prompt=False), references(kind), atol=2e-4)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_in_a_conversation_is_encoded_and_computed_once(
    kind: str, layout: str, open_kind: Callable[..., BatchInferenceEngine]
) -> None:
    engine = open_kind(kind, kv_layout=layout)
    media = engine.core.runtime.media
    assert media
    prompt: list[str | Media] = ["What is it? ", image(1), " and then " * 2, image(2), " the end"]
    for _ in range(3):
        alone = engine.generate([MediaPrompt(prompt)], greedy(12, ignore_eos=True), cache_prompt=False)[0]
        (row,) = first_rows(engine, [MediaPrompt(prompt)], cache_prompt=False)
        answer = engine.generate([MediaPrompt(prompt)], greedy(12, ignore_eos=True))[0]
        assert answer.tokens == alone.tokens
        np.testing.assert_allclose(first_rows(engine, [MediaPrompt(prompt)])[0], row, atol=2e-4)
        prompt = [*prompt, answer.text, " and now?"]
        follow_up = engine.generate([MediaPrompt(prompt)], greedy(1))[0]
        assert follow_up.usage.cached_tokens >= answer.usage.prompt_tokens
    assert media.n_encoded == 2


@pytest.mark.parametrize("kind", ["qwen2vl", "qwen35"])
def test_concurrent_requests_share_an_image_that_is_being_computed(
    kind: str, open_kind: Callable[..., BatchInferenceEngine]
) -> None:
    prompts = [MediaPrompt(["Look: " * 5, image(3), f" what is {i}?"]) for i in range(6)]
    engine = open_kind(kind, n_batch=16, n_ubatch=16)
    alone = [engine.generate([prompt], greedy(8), cache_prompt=False)[0].tokens for prompt in prompts]
    together = engine.generate(prompts, greedy(8))
    assert [result.tokens for result in together] == alone
    n_before = prompts_tokens_before_the_end(engine, prompts[0])
    assert sum(result.usage.cached_tokens >= n_before for result in together) == 5


def prompts_tokens_before_the_end(engine: BatchInferenceEngine, prompt: MediaPrompt) -> int:
    """Up to the end of its image."""
    return len(engine.tokens(MediaPrompt(prompt.parts[:2])))


@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_that_is_swapped_out_within_an_image_continues_with_it(
    kind: str,
    layout: str,
    open_kind: Callable[..., BatchInferenceEngine],
    references: Callable[[str], list[npt.NDArray[np.float32]]],
) -> None:
    engine = open_kind(kind, kv_layout=layout, n_batch=16, n_ubatch=16)
    keepers = [FirstRow() for _ in PROMPTS]
    ids = [
        engine.add_request(prompt, greedy(1, logits_processor=keeper))
        for prompt, keeper in zip(PROMPTS, keepers, strict=True)
    ]
    n_within = 0
    while engine.has_work:
        engine.step()
        sequences = [engine.core.sequences[each] for each in ids if each in engine.core.sequences]
        within = [each for each in sequences if each.next_run and each.next_run.start < each.n_computed]
        if within and n_within < 6:
            n_within += len(within)
            engine.core.scheduler.preempt_all()
            engine.core.kv.apply()
            engine.core.kv.check()
    assert n_within >= 3
    assert engine.stats().swaps > n_within
    rows = [keeper.row for keeper in keepers if keeper.row is not None]
    np.testing.assert_allclose(rows, references(kind), atol=2e-4)


def test_sequences_continue_with_the_same_text_when_cells_run_out(
    open_kind: Callable[..., BatchInferenceEngine],
) -> None:
    roomy = open_kind("qwen2vl", kv_layout="unified")
    expected = [roomy.generate([prompt], greedy(30, ignore_eos=True))[0].tokens for prompt in PROMPTS]
    for swap_space in (64, 0):  # saved, and computed again
        engine = open_kind("qwen2vl", kv_layout="unified", n_ctx=320, swap_space=swap_space)
        results = engine.generate(PROMPTS, greedy(30, ignore_eos=True))
        assert [result.tokens for result in results] == expected
        stats = engine.stats()
        assert (stats.swaps if swap_space else stats.recomputes) > 0


def test_an_engine_switches_its_layout_with_images_in_flight(open_kind: Callable[..., BatchInferenceEngine]) -> None:
    prompts = [*PROMPTS, "x" * 600]  # the last one is longer than a stream
    expected = open_kind("qwen2vl", kv_layout="unified").generate(prompts, greedy(12))
    engine = open_kind("qwen2vl", kv_layout="auto")
    assert [each.tokens for each in engine.generate(prompts, greedy(12))] == [each.tokens for each in expected]
    assert engine.stats().layout_switches > 0


@pytest.mark.parametrize("kind", ["qwen2vl", "qwen35"])
def test_a_prefix_with_an_image_is_on_disk_and_in_slots_after_a_restart(
    kind: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskCost, "is_worth", lambda *of: True)  # a tiny model computes faster than any disk reads
    prompt = MediaPrompt(["What is it? " * 20, image(1), " and then" * 20, image(2), " the end" * 10])
    followed = MediaPrompt([*prompt.parts, "x"])
    settings = {**EXACT, "mmproj": str(files / f"{kind}-mmproj.gguf"), "n_ctx": 8192}

    def engine(**more: Any) -> BatchInferenceEngine:
        return BatchInferenceEngine(files / f"{kind}.gguf", **settings, **more)

    with engine(prefix_cache_disk=str(tmp_path / "disk")) as before:
        expected = before.generate([followed], greedy(8), cache_prompt=False)[0].tokens
        n = before.generate([prompt], greedy(1), id_slot=0)[0].usage.prompt_tokens
        before.core.slots.write(tmp_path / "slot", before.core.slots.take(0))
    with engine(prefix_cache_disk=str(tmp_path / "disk")) as after:
        result = after.generate([followed], greedy(8))[0]
        assert (result.usage.cached_tokens, result.tokens) == (n, expected)
    with engine() as after:
        after.core.slots.put(0, after.core.slots.read(tmp_path / "slot"))
        result = after.generate([followed], greedy(8), id_slot=0)[0]
        assert (result.usage.cached_tokens, result.tokens) == (n, expected)


def test_a_lost_worker_costs_only_a_recomputed_prompt(open_kind: Callable[..., BatchInferenceEngine]) -> None:
    engine = open_kind("qwen3vl", n_batch=16, n_ubatch=16)
    expected = engine.generate([PROMPTS[3]], greedy(8, ignore_eos=True))[0].tokens
    engine.clear_prefix_cache()
    request_id = engine.add_request(PROMPTS[3], greedy(8, ignore_eos=True))
    events = [event for _ in range(4) for event in engine.step()]
    engine.core.restart()
    while engine.has_work:
        events += engine.step()
    assert [token for event in events if event.request_id == request_id for token in event.tokens] == expected


def test_an_image_has_rows_and_columns_by_its_size(files: Path) -> None:
    with Model(files / "qwen2vl.gguf") as model:
        assert model.n_dimensions == 4
        encoder = MediaEncoder(model, files / "qwen2vl-mmproj.gguf", n_threads=1)
        for size, grid in (((96, 64), (4, 6)), ((64, 96), (6, 4)), ((48, 40), (3, 3)), ((1, 100), (29, 1))):
            before, chunk, after = encoder.split_image(media_files.decode_image(picture(1, size=size)))
            positions = chunk.positions
            assert positions is not None
            rows, columns = grid
            assert positions[0].tolist() == positions[3].tolist() == [0] * rows * columns
            assert positions[1].tolist() == [row for row in range(rows) for _ in range(columns)]
            assert positions[2].tolist() == [*range(columns)] * rows
            assert (chunk.n_tokens, chunk.n_positions) == (rows * columns, max(rows, columns))
            assert encoder.encode(chunk).shape == (rows * columns, 64)
            assert (before.n_positions, after.n_positions) == (1, 1)


@pytest.mark.parametrize(
    ("sizes", "size", "within"),
    [
        (ImageSizes(max_tokens=8), (96, 64), range(1, 9)),
        (ImageSizes(min_tokens=40), (96, 64), range(40, 80)),
        (ImageSizes(min_tokens=30, max_tokens=36), (32, 32), range(30, 37)),
        (ImageSizes(batch_tokens=1), (96, 64), range(24, 25)),
    ],
)
def test_an_image_is_scaled_to_the_tokens_that_the_settings_allow(
    files: Path, sizes: ImageSizes, size: tuple[int, int], within: range
) -> None:
    with Model(files / "qwen2vl.gguf") as model:
        encoder = MediaEncoder(model, files / "qwen2vl-mmproj.gguf", n_threads=1, sizes=sizes)
        _, chunk, _ = encoder.split_image(media_files.decode_image(picture(1, size=size)))
        assert chunk.n_tokens in within
        assert encoder.encode(chunk).shape == (chunk.n_tokens, 64)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_images_of_any_size_are_computed_or_refused(kind: str, open_kind: Callable[..., BatchInferenceEngine]) -> None:
    engine = open_kind(kind)
    for size in ((1, 1), (2, 1), (1, 100), (100, 1), (200, 3), (200, 150), (31, 33)):
        assert engine.generate([MediaPrompt([Media("image", picture(1, size=size)), "x"])], greedy(2))[0].tokens
    with pytest.raises(InvalidRequest, match="the aspect ratio must not exceed 100:1"):
        engine.generate([MediaPrompt([Media("image", picture(1, size=(300, 1))), "x"])], greedy(2))
    with pytest.raises(InvalidRequest, match=r"prompt: has \d+ tokens"):  # before it is encoded
        engine.generate([MediaPrompt([Media("image", picture(1, size=(1000, 750))), "x"])], greedy(2))


class _Vectors:
    """Three vectors in a row."""

    seq_id = 0

    def __init__(self, n_dimensions: int, start: int = 0) -> None:
        self._positions = np.zeros((n_dimensions, 3), np.int32) + start

    def media_vectors(self, n: int) -> npt.NDArray[np.float32]:
        return np.ones((n, 64), np.float32)

    def media_positions(self, n: int) -> npt.NDArray[np.int32]:
        return self._positions[:, :n]


@pytest.mark.parametrize(("n_dimensions", "start"), [(1, 0), (4, 256), (4, -1)])
def test_vectors_with_wrong_positions_never_reach_c(tiny_mrope: Path, n_dimensions: int, start: int) -> None:
    with Model(tiny_mrope) as model, Context(model, n_ctx=256, n_threads=1) as context:
        batch = EmbeddingBatch(8, 64, n_dimensions)
        batch.refill_vectors([(_Vectors(n_dimensions, start), 3)])
        with pytest.raises(OutOfRange, match="64 numbers with 4 positions" if n_dimensions == 1 else "has position"):
            context.decode_vectors(batch, causal=True)
        good = EmbeddingBatch(8, 64, 4)
        good.refill_vectors([(_Vectors(4), 3)])
        context.decode_vectors(good, causal=True)
        assert context.last_position(0) == 0


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_projector_that_lacks_any_tensor_is_refused_by_its_name(kind: str, files: Path, tmp_path: Path) -> None:
    n_deepstack = int(kind == "qwen3vl")
    whole = gguf.GGUFReader(files / f"{kind}-mmproj.gguf")
    with Model(files / f"{kind}.gguf") as model:
        for tensor in whole.tensors:
            options = {"n_deepstack": n_deepstack, "without": tensor.name}
            path = tiny_projectors.qwen_vision(tmp_path / "damaged.gguf", kind, **options)
            with pytest.raises(ModelError, match=rf"a projector of type .* requires {tensor.name}\. Download it again"):
                MediaEncoder(model, path, n_threads=1)


@pytest.mark.usefixtures("tried_projectors")
@pytest.mark.parametrize("without", ["v.patch_embd.weight", "v.blk.0.attn_q.weight"])
def test_a_projector_that_crashes_llama_cpp_is_refused(
    without: str, tiny_llama: Path, tmp_path: Path, open_engine: OpenEngine
) -> None:
    path = tiny_projectors.vision(tmp_path / "damaged.gguf", without=without)
    with pytest.raises(
        ModelError, match=r"damaged\.gguf cannot be used: llama\.cpp crashes when loading it \(killed by SIG"
    ):
        open_engine(tiny_llama, mmproj=str(path))


@pytest.mark.usefixtures("tried_projectors")
def test_a_projector_is_tried_once(
    files: Path, monkeypatch: pytest.MonkeyPatch, open_kind: Callable[..., BatchInferenceEngine]
) -> None:
    tried: list[str] = []

    def record(command: list[str], timeout_s: float | None = None) -> selfcheck.Failure | None:
        if "mmproj" in command[-1]:  # the kernels may be tried too, once in a process
            tried.append(command[-1])
        return run_child(command, timeout_s)

    run_child = selfcheck.run_child
    monkeypatch.setattr(selfcheck, "run_child", record)
    for _ in range(2):
        open_kind("qwen2vl")
    assert tried == [str(files / "qwen2vl-mmproj.gguf")]
