"""The frames of videos, as images: ffmpeg decodes them, a program of the machine."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from cppbatch import child_processes
from cppbatch.engine.request import Media
from cppbatch.errors import InvalidRequest

_MOST_FRAMES = 1024
_TIMEOUT_S = 60
# Not those that name other files or addresses, such as playlists.
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,mpegvideo,flv,ogg,gif,asf"
_END = b"\xff\xd9"  # of a JPEG; it does not occur in its data


class VideoSettings(NamedTuple):
    """How videos are read."""

    fps: float = 4.0
    """Frames per second of the video."""
    timestamp_interval: int = 5000
    """Milliseconds between timestamps, which are texts; 0: none."""
    ffmpeg_dir: Path | None = None
    """The folder of ffmpeg; None: it is searched in PATH."""

    @property
    def ffmpeg(self) -> str | None:
        """The path of ffmpeg; None: it is not installed."""
        return shutil.which("ffmpeg", path=str(self.ffmpeg_dir) if self.ffmpeg_dir else None)


def read_video(field: str, data: bytes, settings: VideoSettings, most_bytes: int) -> list[str | Media]:
    """The texts and images that stand for a video, in llama-server's order. `most_bytes`: of all images.

    Takes long. Raises `InvalidRequest`, which names `field`.
    """
    program = settings.ffmpeg
    if program is None:
        message = "is a video, and this server has no ffmpeg: install it, or name its folder with --video-ffmpeg-dir"
        raise InvalidRequest(field, message)
    frames = [frame + _END for frame in _decode(field, program, data, settings.fps, most_bytes).split(_END)[:-1]]
    if len(frames) > _MOST_FRAMES:
        message = (
            f"has more than {_MOST_FRAMES} frames at {settings.fps:g} per second; shorten it, or lower --video-fps"
        )
        raise InvalidRequest(field, message)
    parts: list[str | Media] = ["Video:"]
    next_stamp = 0.0
    for i, frame in enumerate(frames):
        parts.append(Media("image", frame))
        seconds = i / settings.fps
        if settings.timestamp_interval and seconds * 1000 >= next_stamp:
            parts.append(f"[{int(seconds // 60)}m{seconds % 60:.2f}s]")
            next_stamp += settings.timestamp_interval
    return parts


def _decode(field: str, program: str, data: bytes, fps: float, most_bytes: int) -> bytes:
    """JPEG files, one after the other."""
    with tempfile.TemporaryDirectory(prefix="cppbatch-video-") as folder:
        file = Path(folder, "video")  # a pipe has no end, where MP4 files have a table
        file.write_bytes(data)
        of_input = ["-protocol_whitelist", "file,pipe", "-format_whitelist", _FORMATS, "-max_pixels", str(7680 * 4320)]
        of_output = ["-map", "0:v:0", "-vf", f"fps={fps:g}", "-frames:v", str(_MOST_FRAMES + 1), "-fs", str(most_bytes)]
        command = [program, "-nostdin", "-loglevel", "error", *of_input, "-i", str(file), *of_output]
        command += ["-f", "image2pipe", "-c:v", "mjpeg", "-q:v", "2", "-threads", "1", "pipe:1"]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT_S,
                check=False,
                preexec_fn=child_processes.ends_with_parent(),
            )
        except subprocess.TimeoutExpired:
            raise InvalidRequest(
                field, f"is a video that takes more than {_TIMEOUT_S} s to decode; shorten it"
            ) from None
    if len(done.stdout) >= most_bytes:
        raise InvalidRequest(
            field, f"has frames of more than {most_bytes:,} bytes (--max-media-mb); shorten it, or lower --video-fps"
        )
    if not done.stdout:
        lines = done.stderr.decode(errors="replace").replace(str(file), "the file").strip().splitlines()
        raise InvalidRequest(
            field, f"is not a video that ffmpeg can read: {lines[-1] if lines else 'no frames'!s:.200}"
        )
    return done.stdout
