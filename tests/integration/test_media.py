"""Images and audio in llama.cpp: tiny random encoders, compared with mtmd's own evaluation of a prompt."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from cppbatch import BatchInferenceEngine, InvalidRequest, Media, MediaPrompt, SamplingParams
from cppbatch.engine.kv.save_cost import DiskCost
from cppbatch.engine.media.files import decode_image
from cppbatch.errors import LibraryError, LlamaError, ModelError
from cppbatch.llama import Context, MediaEncoder, Model
from cppbatch.llama import media_encoder as media_encoder_module
from cppbatch.models.synthetic import byte_vocab
from tests.support import tiny_models, tiny_projectors
from tests.support.fakes import greedy
from tests.support.lora_files import write_lora
from tests.support.media_files import image, picture, sound, tone
from tests.support.native_engines import OpenEngine
from tests.support.tiny_projectors import IMAGE_TOKENS, SAMPLE_RATE, SOUND_TOKENS

LAYOUTS = ("unified", "per-sequence")
SIZES = ((1, 1), (2, 1), (1, 100), (100, 1), (200, 3), (640, 480), (31, 33), (1000, 1000))
WORDS = ("What is it? ", " and then", " the end")
EXACT: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32", "spec": "off", "n_parallel": 8, "n_ctx": 2048}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    tiny_models.llama(folder / "text.gguf")
    for kind in ("vision", "non_causal_vision", "audio"):
        getattr(tiny_projectors, kind)(folder / f"{kind}.gguf")
    return folder


@pytest.fixture
def open_media(files: Path, open_engine: OpenEngine) -> Callable[..., BatchInferenceEngine]:
    def open_media(projector: str = "vision", *, text: str = "text", **settings: Any) -> BatchInferenceEngine:
        options = {**EXACT, "mmproj": str(files / f"{projector}.gguf"), **settings}
        return open_engine(files / f"{text}.gguf", **options)

    return open_media


def load(files: Path, projector: str, text: str = "text") -> tuple[Model, MediaEncoder]:
    model = Model(files / f"{text}.gguf")
    return model, MediaEncoder(model, files / f"{projector}.gguf", n_threads=1)


def text_of(model: Model, tokens: npt.NDArray[np.int32]) -> str:
    return b"".join(model.vocab.piece(token, special=True) for token in tokens.tolist()).decode()


class FirstRow:
    """Keeps the logits of the first token of a text, float32[n_vocab]."""

    def __init__(self) -> None:
        self.row: npt.NDArray[np.float32] | None = None

    def __call__(self, tokens: npt.NDArray[np.int32], row: npt.NDArray[np.float32]) -> None:
        self.row = row.copy() if self.row is None else self.row


def first_rows(engine: BatchInferenceEngine, prompts: list[Any], **options: Any) -> list[npt.NDArray[np.float32]]:
    """The logits after each prompt, all computed together."""
    keepers = [FirstRow() for _ in prompts]
    params = [greedy(1, logits_processor=keeper) for keeper in keepers]
    engine.generate(prompts, params, **options)
    assert all(keeper.row is not None for keeper in keepers)
    return [keeper.row for keeper in keepers if keeper.row is not None]


# --- the encoder ------------------------------------------------------------------------------------------------------


def test_an_image_becomes_vectors_for_the_text_model(files: Path) -> None:
    model, encoder = load(files, "vision")
    with model:
        assert (encoder.modalities, encoder.n_embd, encoder.images_are_whole) == (("image",), 64, False)
        (chunk,) = encoder.split_image(decode_image(picture(1)))
        assert (chunk.kind, chunk.n_tokens, chunk.is_whole) == ("image", IMAGE_TOKENS, False)
        vectors = encoder.encode(chunk)
        assert vectors.shape == (IMAGE_TOKENS, 64)
        np.testing.assert_array_equal(encoder.encode(encoder.split_image(decode_image(picture(1)))[0]), vectors)
        assert np.abs(encoder.encode(encoder.split_image(decode_image(picture(2)))[0]) - vectors).max() > 0.1
    with pytest.raises(LlamaError, match=r"the projector vision\.gguf is closed"):
        encoder.encode(chunk)


def test_gemmas_images_attend_to_each_other_and_have_text_around_them(files: Path) -> None:
    model, encoder = load(files, "non_causal_vision")
    with model:
        before, chunk, after = encoder.split_image(decode_image(picture(1)))
        assert (chunk.kind, chunk.n_tokens, chunk.is_whole, encoder.images_are_whole) == ("image", 16, True, True)
        assert text_of(model, before.tokens) == "<start_of_image>"
        assert text_of(model, after.tokens) == "<end_of_image>"


def test_half_minutes_of_audio_are_encoded_separately(files: Path) -> None:
    model, encoder = load(files, "audio")
    with model:
        assert (encoder.modalities, encoder.sample_rate) == (("audio",), SAMPLE_RATE)
        assert [chunk.n_tokens for chunk in encoder.split_audio(tone(1.0))] == [SOUND_TOKENS]
        chunks = encoder.split_audio(tone(40.0))
        assert [(chunk.kind, chunk.n_tokens) for chunk in chunks] == [("audio", SOUND_TOKENS)] * 2
        assert encoder.encode(chunks[1]).shape == (SOUND_TOKENS, 64)


def test_a_large_image_becomes_tiles_between_control_tokens(tmp_path: Path) -> None:
    vocab = byte_vocab()
    marks = ["\n\n", "<fake_token_around_image>", "<global-img>"]
    kinds = [gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    vocab = replace(vocab, pieces=vocab.pieces[:-3] + marks, types=vocab.types[:-3] + kinds)
    tiny_models.llama(tmp_path / "text.gguf", vocab=vocab)
    tiny_projectors.tiled_vision(tmp_path / "vision.gguf")
    model, encoder = load(tmp_path, "vision")
    with model:
        with pytest.raises(LlamaError, match="resize target 0x64 is out of range"):  # before anything aborts
            encoder.split_image(decode_image(picture(1, size=(1, 100))))
        for size in (size for size in SIZES if max(size) < 20 * min(size)):
            pieces = [chunk for chunk in encoder.split_image(decode_image(picture(1, size=size))) if chunk.kind]
            assert all(encoder.encode(chunk).shape == (chunk.n_tokens, 64) for chunk in pieces[:2])
        chunks = encoder.split_image(decode_image(picture(1, size=(64, 64))))
        assert [chunk.n_tokens for chunk in chunks if chunk.kind] == [4] * 5  # four tiles and the whole
        assert {509, 510, 511} <= {token for chunk in chunks for token in chunk.tokens.tolist()}


@pytest.mark.parametrize("projector", ["vision", "non_causal_vision"])
def test_images_of_any_size_are_encoded(files: Path, projector: str) -> None:
    model, encoder = load(files, projector)
    with model:
        for size in SIZES:
            pieces = [chunk for chunk in encoder.split_image(decode_image(picture(1, size=size))) if chunk.kind]
            assert [encoder.encode(chunk).shape for chunk in pieces] == [(IMAGE_TOKENS, 64)]


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3), (4, 4, 4)])
def test_pixels_of_a_wrong_shape_never_reach_c(files: Path, shape: tuple[int, ...]) -> None:
    model, encoder = load(files, "vision")
    with model, pytest.raises(LlamaError, match="cannot be encoded"):
        encoder.split_image(np.zeros(shape, np.uint8))


@pytest.mark.parametrize("samples", [np.zeros(0), np.zeros(1), np.array([0, np.nan, 0])], ids=["none", "one", "nan"])
def test_samples_that_cannot_be_encoded_never_reach_c(files: Path, samples: npt.NDArray[np.float32]) -> None:
    model, encoder = load(files, "audio")
    with model, pytest.raises(LlamaError, match="cannot be encoded"):
        encoder.split_audio(samples.astype(np.float32))


# --- projectors that cannot be used -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("projector", "message"),
    [
        ("missing", "projector file not found: .*missing.gguf"),
        ("text", "is not a projector: its architecture is llama, but an mmproj file has clip"),
        ("wide", r"mismatch between text model \(n_embd = 64\) and mmproj \(n_embd = 128\)$"),
        ("torn", "is damaged or truncated"),
        ("noise", "is not a GGUF file"),
    ],
)
def test_a_file_that_is_not_a_projector_of_this_model_is_refused(files: Path, projector: str, message: str) -> None:
    tiny_projectors.vision(files / "wide.gguf", n_embd=128)
    whole = (files / "vision.gguf").read_bytes()
    (files / "torn.gguf").write_bytes(whole[: len(whole) // 2])
    (files / "noise.gguf").write_bytes(np.random.default_rng(0).bytes(10_000))
    with Model(files / "text.gguf") as model, pytest.raises(ModelError, match=message):
        MediaEncoder(model, files / f"{projector}.gguf", n_threads=1)


def test_a_projector_is_not_a_model(files: Path) -> None:
    with pytest.raises(ModelError, match="use it with --mmproj instead"):
        Model(files / "vision.gguf")


def test_a_ubatch_that_is_too_small_for_an_image_is_refused(open_media: Callable[..., BatchInferenceEngine]) -> None:
    with pytest.raises(ModelError, match=r"an image has 16 tokens.* n_ubatch \(-ub\) is 8; set it to 16"):
        open_media("non_causal_vision", n_ubatch=8)
    open_media("vision", n_ubatch=8)


def test_deterministic_logits_with_images_are_refused(open_media: Callable[..., BatchInferenceEngine]) -> None:
    with pytest.raises(ModelError, match="works for text only"):
        open_media(deterministic=True, flash_attn="auto")


def test_a_model_that_returns_vectors_takes_no_projector(files: Path, open_engine: OpenEngine) -> None:
    text = tiny_models.encoder_only(files / "bert.gguf")
    with pytest.raises(ModelError, match=r"bert\.gguf returns vectors"):
        open_engine(text, mmproj=str(files / "vision.gguf"))


def test_a_library_without_mtmd_is_an_error_with_the_build_command(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp.mtmd_cpp", None)  # importing it fails
    monkeypatch.delattr(__import__("llama_cpp"), "mtmd_cpp", raising=False)
    media_encoder_module._mtmd.cache_clear()
    try:
        with Model(files / "text.gguf") as model, pytest.raises(LibraryError, match="DLLAVA_BUILD=ON"):
            MediaEncoder(model, files / "vision.gguf", n_threads=1)
    finally:
        media_encoder_module._mtmd.cache_clear()


# --- the engine -------------------------------------------------------------------------------------------------------


def reference_row(
    files: Path, projector: str, prompt: MediaPrompt | str, text: str = "text"
) -> npt.NDArray[np.float32]:
    """The logits after a prompt as `mtmd_helper_eval_chunks` computes it, with a marker for each image."""
    from llama_cpp import llama_cpp, mtmd_cpp

    parts = [prompt] if isinstance(prompt, str) else prompt.parts
    model, encoder = load(files, projector, text)
    with model, Context(model, n_ctx=512, n_threads=1, flash_attn="off", type_k="f32", type_v="f32") as context:
        marker = mtmd_cpp.mtmd_default_marker().decode()
        marked = "".join(part if isinstance(part, str) else marker for part in parts).encode()
        pictures = [np.ascontiguousarray(decode_image(part.data)) for part in parts if isinstance(part, Media)]
        made = [
            mtmd_cpp.mtmd_bitmap_init(width, height, pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
            for pixels in pictures
            for height, width, _ in [pixels.shape]
        ]
        chunks = mtmd_cpp.mtmd_input_chunks_init()
        given = mtmd_cpp.mtmd_input_text(text=marked, text_len=len(marked), add_special=True, parse_special=True)
        bitmaps = (ctypes.c_void_p * max(1, len(made)))(*made)
        assert mtmd_cpp.mtmd_tokenize(encoder.handle, chunks, ctypes.byref(given), bitmaps, len(made)) == 0
        n_past = llama_cpp.llama_pos(0)
        evaluate = mtmd_cpp.mtmd_helper_eval_chunks
        assert evaluate(encoder.handle, context.handle, chunks, 0, 0, 512, True, ctypes.byref(n_past)) == 0
        row: npt.NDArray[np.float32]
        row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context.handle, -1), (model.vocab.n_tokens,)).copy()
        mtmd_cpp.mtmd_input_chunks_free(chunks)
        for bitmap in made:
            mtmd_cpp.mtmd_bitmap_free(bitmap)
    return row


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("projector", ["vision", "non_causal_vision"])
def test_logits_are_those_of_mtmds_own_helper(
    files: Path, open_media: Callable[..., BatchInferenceEngine], projector: str, layout: str
) -> None:
    prompt = MediaPrompt([WORDS[0], image(3), WORDS[1]])
    expected = reference_row(files, projector, prompt)
    engine = open_media(projector, kv_layout=layout)
    (row,) = first_rows(engine, [prompt])
    np.testing.assert_allclose(row, expected, atol=2e-4)
    (other,) = first_rows(engine, [MediaPrompt([WORDS[0], image(4), WORDS[1]])])
    assert np.abs(other - expected).max() > 0.5


def mixed_prompts(medium: Callable[[int], Media]) -> list[MediaPrompt | str]:
    """Prompts with one medium, with two, and texts."""
    return [
        MediaPrompt([WORDS[0], medium(0), WORDS[1]]),
        MediaPrompt([medium(1), WORDS[2] * 5]),
        WORDS[0] * 4,
        MediaPrompt([WORDS[0] * 6, medium(2), WORDS[1], medium(3), WORDS[2]]),
        MediaPrompt([medium(4), medium(5), "x"]),
        "y",
        MediaPrompt(["z" * 40, medium(6), WORDS[1]]),
        MediaPrompt(["", medium(7), WORDS[1] * 9]),
    ]


@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("projector", ["vision", "non_causal_vision", "audio"])
def test_a_text_with_images_or_audio_is_the_same_alone_and_among_seven_others(
    open_media: Callable[..., BatchInferenceEngine], projector: str, layout: str
) -> None:
    engine = open_media(projector, kv_layout=layout)

    def medium(number: int) -> Media:
        return sound(0.5, hertz=200.0 * (number + 1)) if projector == "audio" else image(number)

    prompts = mixed_prompts(medium)
    alone = [engine.generate([prompt], greedy(16), cache_prompt=False)[0] for prompt in prompts]
    together = engine.generate(prompts, greedy(16), cache_prompt=False)
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert len({result.text for result in alone}) == 8
    rows = [first_rows(engine, [prompt], cache_prompt=False)[0] for prompt in prompts]
    for row, of_batch in zip(rows, first_rows(engine, prompts, cache_prompt=False), strict=True):
        np.testing.assert_allclose(of_batch, row, atol=1e-4)
    counts = [result.usage.n_media_tokens for result in together]
    each = SOUND_TOKENS if projector == "audio" else IMAGE_TOKENS
    assert counts == [each, each, 0, 2 * each, 2 * each, 0, each, each]


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["mamba", "hybrid", "sliding_window"])
@pytest.mark.parametrize("projector", ["vision", "non_causal_vision"])
def test_models_with_other_memory_take_images_too(
    files: Path, open_media: Callable[..., BatchInferenceEngine], kind: str, projector: str
) -> None:
    if not (files / f"{kind}.gguf").exists():
        getattr(tiny_models, kind)(files / f"{kind}.gguf")
    engine = open_media(projector, text=kind)
    prompts = mixed_prompts(image)
    alone = [engine.generate([prompt], greedy(12))[0] for prompt in prompts]
    together = engine.generate(prompts, greedy(12))
    assert [result.tokens for result in together] == [result.tokens for result in alone]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_request_shares_the_image_and_does_not_encode_it(
    open_media: Callable[..., BatchInferenceEngine], layout: str
) -> None:
    engine = open_media(kv_layout=layout)
    media = engine.core.runtime.media
    assert media
    prompt: list[str | Media] = [WORDS[0] * 2, image(1), WORDS[1] * 2]
    alone = engine.generate([MediaPrompt([*prompt, "x"])], greedy(12), cache_prompt=False)[0]
    first = engine.generate([MediaPrompt(prompt)], greedy(12))[0]
    again = engine.generate([MediaPrompt([*prompt, "x"])], greedy(12))[0]
    assert first.usage.cached_tokens == 0
    assert again.usage.cached_tokens == first.usage.prompt_tokens
    assert again.tokens == alone.tokens
    assert media.n_encoded == 1


def test_a_prefix_with_an_image_is_on_disk_after_a_restart_and_belongs_to_its_projector(
    files: Path, tmp_path: Path, open_media: Callable[..., BatchInferenceEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskCost, "is_worth", lambda *of: True)  # a tiny model computes faster than any disk reads
    tiny_projectors.vision(files / "other.gguf", seed=1)
    prompt = MediaPrompt([WORDS[0] * 50, image(1), WORDS[1] * 50])
    followed = MediaPrompt([*prompt.parts, "x"])
    expected = open_media().generate([followed], greedy(8))[0].tokens
    cached = []
    for projector in ("vision", "vision", "other"):
        with BatchInferenceEngine(
            files / "text.gguf", **EXACT, mmproj=str(files / f"{projector}.gguf"), prefix_cache_disk=str(tmp_path)
        ) as engine:
            result = engine.generate([followed], greedy(8))[0]
            cached.append(result.usage.cached_tokens > 0)
            assert (result.tokens == expected) == (projector == "vision")
    assert cached == [False, True, False]


def test_preempted_sequences_with_images_continue_with_the_same_text(
    open_media: Callable[..., BatchInferenceEngine],
) -> None:
    prompts = mixed_prompts(image)
    roomy = open_media(kv_layout="unified")
    expected = [roomy.generate([prompt], greedy(40, ignore_eos=True))[0].tokens for prompt in prompts]
    for swap_space in (64, 0):  # saved, and computed again
        engine = open_media(kv_layout="unified", n_ctx=384, swap_space=swap_space, prefix_cache=False)
        results = engine.generate(prompts, greedy(40, ignore_eos=True))
        assert [result.tokens for result in results] == expected
        stats = engine.stats()
        assert (stats.swaps if swap_space else stats.recomputes) > 0


def test_an_engine_switches_its_layout_with_images_in_flight(open_media: Callable[..., BatchInferenceEngine]) -> None:
    prompts = [*mixed_prompts(image), "x" * 600]  # the last one is longer than a stream
    expected = open_media(kv_layout="unified").generate(prompts, greedy(20, ignore_eos=True))
    engine = open_media(kv_layout="auto")
    results = engine.generate(prompts, greedy(20, ignore_eos=True))
    assert [result.tokens for result in results] == [result.tokens for result in expected]
    assert engine.stats().layout_switches > 0


def test_a_lora_adapter_computes_images_too(
    files: Path, tmp_path: Path, open_media: Callable[..., BatchInferenceEngine]
) -> None:
    engine = open_media(lora=((str(write_lora(tmp_path / "x.gguf")), 0.0),))
    prompt = MediaPrompt([WORDS[0], image(1), WORDS[1]])
    off, on = (first_rows(engine, [prompt], lora={"x": scale})[0] for scale in (0, 1))
    assert np.abs(on - off).max() > 0.1
    without = first_rows(open_media(), [prompt])[0]
    np.testing.assert_allclose(off, without, atol=1e-4)


def test_after_a_refused_prompt_the_engine_continues(open_media: Callable[..., BatchInferenceEngine]) -> None:
    engine = open_media()
    for bad in (b"", b"\x89PNG\r\n\x1a\n", picture(1)[:100]):
        with pytest.raises(InvalidRequest, match="prompt: contains an image"):
            engine.generate([MediaPrompt([Media("image", bad), "x"])], SamplingParams(max_tokens=1))
    assert engine.generate([MediaPrompt([image(1), "x"])], greedy(2))[0].tokens


def test_the_memory_plan_counts_the_projector(files: Path) -> None:
    from cppbatch.config import EngineConfig
    from cppbatch.sizing.estimate import estimate_memory

    config = EngineConfig(str(files / "text.gguf"), n_ctx=512, n_parallel=4, mmproj=str(files / "vision.gguf"))
    (footprint,) = estimate_memory([config]).footprints
    assert footprint.error is None
    sizes = {buffer.kind: buffer.n_bytes for buffer in footprint.buffers}
    tensors = gguf.GGUFReader(files / "vision.gguf").tensors
    assert sizes["projector"] == sum(int(tensor.n_bytes) for tensor in tensors)
    assert sizes["vectors"] == config.n_batch * 64 * 4
    assert sizes["encoding"] > 0
