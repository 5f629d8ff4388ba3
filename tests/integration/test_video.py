"""Videos in chats: their frames as images, with llama-server's texts between them; what is refused and limited.

ffmpeg is replaced by a script, except in the last tests, which need it.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cppbatch import LocalEngine
from cppbatch.engine.request import Media
from cppbatch.errors import InvalidRequest
from cppbatch.server.settings import ServerSettings
from cppbatch.server.video import VideoSettings, read_video
from tests.support import tiny_projectors
from tests.support.http_client import Http, answered, get, http_to, post
from tests.support.media_samples import BLUE, RED, as_base64, as_url
from tests.support.tiny_projectors import IMAGE_TOKENS

Json = dict[str, Any]
SAID: Json = {"type": "text", "text": "What is this?"}
VIDEO = b"two frames"


def jpeg(png: bytes) -> bytes:
    from PIL import Image

    written = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").save(written, "JPEG", quality=95)
    return written.getvalue()


FRAMES = [jpeg(RED), jpeg(BLUE)]


@pytest.fixture
def ffmpeg(tmp_path: Path) -> Path:
    """A folder with a program that reads `VIDEO` and writes `FRAMES`, once for each of its arguments `fps=`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "ffmpeg"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, sys\n"
        f"open({str(tmp_path / 'arguments.json')!r}, 'w').write(json.dumps(sys.argv))\n"
        "data = open(sys.argv[sys.argv.index('-i') + 1], 'rb').read()\n"
        f"if data == {VIDEO!r}: sys.stdout.buffer.write({b''.join(FRAMES)!r})\n"
        "else: print('Invalid data', file=sys.stderr)\n"
    )
    program.chmod(0o755)
    return folder


@pytest.fixture
async def http(tiny_llama: Path, tmp_path: Path, ffmpeg: Path) -> AsyncIterator[Http]:
    eyes = tiny_projectors.vision(tmp_path / "mmproj.gguf")
    settings = ServerSettings(video=VideoSettings(fps=0.5, ffmpeg_dir=ffmpeg), media_path=tmp_path)
    engine = LocalEngine(tiny_llama, mmproj=str(eyes), n_ctx=1024, n_parallel=2, n_threads=1)
    async with engine as client, http_to(client, settings) as found:
        yield found


async def ask(http: Http, *parts: Json) -> Any:
    body = {"messages": [{"role": "user", "content": [*parts, SAID]}], "max_tokens": 8, "temperature": 0}
    return await answered(http, "/v1/chat/completions", body | {"ignore_eos": True})


async def test_a_video_is_its_frames_with_texts_between_them(http: Http, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(VIDEO)
    url = as_base64(VIDEO)
    videos: list[Json] = [
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{url}"}},
        {"type": "input_video", "input_video": {"data": url}},
        {"type": "video_url", "video_url": {"url": "file:clip.mp4"}},
    ]
    answers = [await ask(http, video) for video in videos]
    assert len({each["choices"][0]["message"]["content"] for each in answers}) == 1
    details = answers[0]["usage"]["prompt_tokens_details"]
    assert details["image_tokens"] == 2 * IMAGE_TOKENS
    images = [{"type": "image_url", "image_url": {"url": as_url(frame)}} for frame in FRAMES]
    start, stamp = ({"type": "text", "text": text} for text in ("Video:", "[0m0.00s]"))
    apart = await ask(http, start, images[0], stamp, images[1])
    assert apart["choices"][0]["message"] == answers[0]["choices"][0]["message"]
    assert apart["usage"]["prompt_tokens"] == answers[0]["usage"]["prompt_tokens"]
    assert (await get(http, "/props"))[1]["modalities"] == {"vision": True, "video": True, "audio": False}


def test_ffmpeg_reads_no_other_file_and_no_address(ffmpeg: Path, tmp_path: Path) -> None:
    read_video("v", VIDEO, VideoSettings(fps=0.5, ffmpeg_dir=ffmpeg), 1 << 20)
    arguments = json.loads((tmp_path / "arguments.json").read_text())
    given = dict(pairwise(arguments))
    assert given["-protocol_whitelist"] == "file,pipe"
    assert not {"hls", "concat", "dash", "image2"} & set(given["-format_whitelist"].split(","))
    assert arguments.index("-format_whitelist") < arguments.index("-i")  # for the input
    assert given["-vf"] == "fps=0.5"
    assert not Path(given["-i"]).exists()


@pytest.mark.parametrize(
    ("part", "field", "problem"),
    [
        ({"type": "input_video", "input_video": {"data": "eA=="}}, "input_video.data", "is not a video that"),
        ({"type": "input_video"}, "input_video.url", "is required"),
        ({"type": "video_url", "video_url": "https://a.example/v.mp4"}, "video_url", "is not allowed"),
        ({"type": "video_url", "video_url": "file:none.mp4"}, "video_url", "file not found"),
    ],
)
async def test_what_is_not_a_video_is_refused(http: Http, part: Json, field: str, problem: str) -> None:
    status, answer = await post(http, "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    assert status == 400
    assert answer["error"]["param"].endswith(field)
    assert problem in answer["error"]["message"]


async def test_a_model_without_eyes_refuses_videos(tiny_llama: Path) -> None:
    part = {"type": "input_video", "input_video": {"data": as_base64(VIDEO)}}
    engine = LocalEngine(tiny_llama, n_ctx=256, n_parallel=1, n_threads=1)
    async with engine as client, http_to(client, ServerSettings()) as http:
        status, answer = await post(http, "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
        assert status == 400
        assert "is a video, but" in answer["error"]["message"]
        assert not (await get(http, "/props"))[1]["modalities"]["video"]


def test_without_ffmpeg_a_video_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"has no ffmpeg: install it, or name its folder with --video-ffmpeg-dir"):
        read_video("v", VIDEO, VideoSettings(ffmpeg_dir=tmp_path), 1 << 20)


def test_times_are_as_far_apart_as_asked(ffmpeg: Path) -> None:
    def texts(**settings: Any) -> list[str]:
        found = read_video("v", VIDEO, VideoSettings(ffmpeg_dir=ffmpeg, **settings), 1 << 20)
        assert [each.data for each in found if isinstance(each, Media)] == FRAMES
        return [each for each in found if isinstance(each, str)]

    assert texts() == ["Video:", "[0m0.00s]"]
    assert texts(fps=0.01) == ["Video:", "[0m0.00s]", "[1m40.00s]"]
    assert texts(timestamp_interval=0) == ["Video:"]
    assert texts(fps=2, timestamp_interval=100) == ["Video:", "[0m0.00s]", "[0m0.50s]"]


def test_frames_beyond_the_limit_in_bytes_are_refused(ffmpeg: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"frames of more than 100 bytes \(--max-media-mb\); shorten it, or lower"):
        read_video("v", VIDEO, VideoSettings(ffmpeg_dir=ffmpeg), 100)


needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg")


@needs_ffmpeg
@pytest.mark.parametrize("name", ["t.mp4", "t.mkv", "t.avi", "t.gif"])
def test_ffmpeg_decodes_videos_into_frames(tmp_path: Path, name: str) -> None:
    source = ["-f", "lavfi", "-i", "testsrc=duration=3:size=64x48:rate=10", "-pix_fmt", "yuv420p"]
    source = source[:4] if name == "t.gif" else source
    subprocess.run(["ffmpeg", "-loglevel", "error", *source, str(tmp_path / name)], check=True)
    found = read_video("v", (tmp_path / name).read_bytes(), VideoSettings(fps=2), 1 << 20)
    frames = [each.data for each in found if isinstance(each, Media)]
    assert len(frames) == 6
    assert all(frame.startswith(b"\xff\xd8") for frame in frames)


@needs_ffmpeg
@pytest.mark.parametrize("text", ["#EXTM3U\n#EXTINF:9,\nfile://{}\n#EXT-X-ENDLIST\n", "ffconcat version 1.0\nfile {}"])
def test_ffmpeg_follows_no_playlist(tmp_path: Path, text: str) -> None:
    command = ["ffmpeg", "-loglevel", "error", "-f", "lavfi", "-i", "testsrc=duration=1", str(tmp_path / "t.avi")]
    subprocess.run(command, check=True)
    with pytest.raises(InvalidRequest, match="is not a video that ffmpeg can read"):
        read_video("v", text.format(tmp_path / "t.avi").encode(), VideoSettings(), 1 << 20)
