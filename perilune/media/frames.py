"""From the bytes of a video file to chunks of frames, cut into patches. Runs in the worker process (worker.py), never
in a server: files come from anyone.

The format is chosen by the file's first bytes: FFmpeg's own detection would also accept playlists, which name other
files and addresses. Frames are turned upright as the file says; sound is not read.
"""

import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from perilune.core.errors import RequestError
from perilune.media.kinds import kind_of, unread_kind_of, video_kind_of
from perilune.media.limits import Limits
from perilune.media.patches import Patches, cut
from perilune.media.refusal import refused

FORMATS = {"mp4": "mov", "webm": "matroska", "avi": "avi", "gif": "gif"}  # a file's kind, and PyAV's name of its format
KINDS = "MP4, QuickTime, WebM, Matroska, AVI, GIF"
CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mpeg2video", "mjpeg", "gif")
MAX_FRAME_PIXELS = 16_000_000  # 4K has 8.3 million. More: a codec's reference frames would not fit the worker's memory
MAX_PATCH_BYTES = 512 << 20  # of all frames taken, at 2 per second: 110 s of 1920 x 1080 pixels, 6 minutes of 640 x 360
MAX_FRAMES = 4096  # limit of frames taken: 34 minutes at 2 per second
MIN_SHARE = 0.9  # of the frames that the file declares; with fewer it is truncated
MAX_RATE_ERROR = 0.1  # relative; above it the declared frames per second give way to the frames' times
VP8_SHOWN = 0x10
MAX_MISSING = 2  # frames that a decoder may not deliver at the end; the last one before them is taken instead
Chunk = tuple[Patches, tuple[int, int, int], str]  # patches, (frames, rows, columns), time of the first frame


def chunks(data: bytes, limits: Limits) -> Iterator[Chunk]:
    """The chunks of a video file, in order.

    RequestError, in one line, if the file is no video of a known kind, damaged, truncated or too large, or if PyAV,
    which reads videos, is not installed.
    """
    try:
        import av
    except ImportError:
        raise RequestError(
            "videos are not read here: PyAV is not installed (pip install 'perilune[video]'); send frames as pictures",
            code="unsupported_media",
        ) from None
    if (kind := video_kind_of(data)) is None:
        if kind_of(data) or unread_kind_of(data):
            raise _refused(f"it is an image, none of {KINDS}: send it as an image part")
        raise _refused(f"it is none of {KINDS}, or its header is damaged")
    try:
        with _opened(av, data, kind) as container:
            count, fps = _measured(container, _track(container))
        with _opened(av, data, kind) as container:
            yield from _cut(container, limits, count, fps)
    except RequestError:
        raise
    except MemoryError:
        raise _refused("decoding it takes too much memory: send a smaller one") from None
    except Exception as e:  # FFmpeg's errors, and for hostile files also ValueError, OverflowError and others of PyAV's
        raise _refused(f"it is damaged or truncated ({type(e).__name__})") from None


def _opened(av: Any, data: bytes, kind: str) -> Any:
    """The opened file. Titles and other metadata are not read, so wrong encodings in them are no error."""
    return av.open(io.BytesIO(data), format=FORMATS[kind], metadata_errors="ignore")


def _track(container: Any) -> Any:
    """The first video track, set to one thread. RequestError if there is none, or it is not read."""
    if not container.streams.video:
        raise _refused("it has no pictures, only sound" if container.streams.audio else "it has no video track")
    track = container.streams.video[0]
    if (codec := track.codec_context) is None or codec.name not in CODECS:
        name = "unknown" if codec is None else codec.name
        raise _refused(f"its codec {name[:40]} is not read: send H.264, H.265, VP8, VP9 or AV1")
    _check_size(codec.width, codec.height)
    codec.thread_count = 1  # each further thread takes address space, of which the process has little
    return track


def _measured(container: Any, track: Any) -> tuple[int, float]:
    """(frames, frames per second), by reading the packets without decoding them.

    The rate is the declared one, by which the vendor chooses frames, unless the frames' times contradict it: recordings
    of browsers declare none, and the library then estimates up to 1,000.
    """
    count, end, first, last = 0, 0.0, math.inf, -math.inf
    vp8 = track.codec_context.name == "vp8"
    for packet in container.demux(track):
        # VP8 has frames that are only referred to (alternate references); a bit of the first byte says "shown".
        if packet.size and not (vp8 and not memoryview(packet)[0] & VP8_SHOWN):
            count += 1
            end = max(end, float(((packet.pts or 0) + (packet.duration or 0)) * packet.time_base))
            if packet.pts is not None:
                at = float(packet.pts * packet.time_base)
                first, last = min(first, at), max(last, at)
    if not count:
        raise _refused("it has no frames")
    if count < MIN_SHARE * track.frames:
        raise _refused(f"it is truncated: {count:,} of its {track.frames:,} frames are there")
    declared = (container.duration or 0) / 1e6 if len(container.streams) == 1 else 0.0  # seconds; sound may last longer
    if end < MIN_SHARE * declared:
        raise _refused(f"it is truncated: {end:.1f} of its {declared:.1f} seconds are there")
    fps = float(track.average_rate or track.guessed_rate or 0)
    if last > first:
        found = (count - 1) / (last - first)
        if abs(fps - found) > MAX_RATE_ERROR * found:
            fps = found
    if not 0 < fps < math.inf:
        raise _refused("it does not say how many frames a second has")
    return count, fps


def _cut(container: Any, limits: Limits, count: int, fps: float) -> Iterator[Chunk]:
    track = _track(container)
    wanted, size = limits.frames(count, fps), limits.temporal_merge_kernel_size
    if len(wanted) > MAX_FRAMES:
        raise _refused(
            f"{len(wanted):,} of its frames would be taken, and at most {MAX_FRAMES:,} are: send a shorter one"
        )
    fit = limits.fit(track.codec_context.width, track.codec_context.height, frames=min(size, len(wanted)))
    if (total := len(wanted) * fit.rows * fit.columns * 3 * limits.patch_size**2) > MAX_PATCH_BYTES:
        raise _refused(
            f"its {len(wanted):,} frames ({limits.sample_fps:g} a second) take {total >> 20:,} MB, and at most "
            f"{MAX_PATCH_BYTES >> 20} are read: send a shorter or smaller one"
        )
    frames, total = _upright(container, track, wanted), 0
    for first in range(0, len(wanted), size):
        own = [next(frames) for _ in wanted[first : first + size]]
        parts = [cut(image, limits, frames=len(own), size=own[0].size) for image in own]
        _, rows, columns = parts[0][1]
        patches = np.concatenate([patches for patches, _ in parts])
        if (total := total + patches.nbytes) > MAX_PATCH_BYTES:  # frames may be larger than the header says
            raise _refused(f"its frames take more than {MAX_PATCH_BYTES >> 20} MB: send a shorter or smaller one")
        yield patches, (len(own), rows, columns), clock(wanted[first] / fps)


def _upright(container: Any, track: Any, wanted: list[int]) -> Iterator[Image.Image]:
    """The frames with the numbers `wanted`, which are in ascending order, turned upright."""
    left = iter(wanted)
    number, last = next(left), None
    for i, frame in enumerate(container.decode(track)):
        _check_size(frame.width, frame.height)
        while number == i:
            last = frame.to_image()
            if frame.rotation:
                last = last.rotate(frame.rotation, expand=True)
            yield last
            if (number := next(left, -1)) < 0:
                return
    if last is None or number < wanted[-1] - MAX_MISSING:
        raise _refused(f"it is damaged: frame {number:,} of {wanted[-1] + 1:,} cannot be decoded")
    for _ in (number, *left):
        yield last


def clock(seconds: float) -> str:
    """HH:MM:SS.mmm, with milliseconds cut off."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{int(seconds % 1 * 1000):03d}"


def _check_size(width: int, height: int) -> None:
    if min(width, height) < 1:
        raise _refused("its header does not say how large its frames are")
    if width * height > MAX_FRAME_PIXELS:
        raise _refused(
            f"its frames have {width:,} x {height:,} pixels, and at most {MAX_FRAME_PIXELS:,} are decoded: send a "
            "smaller one"
        )


def _refused(why: str) -> RequestError:
    return refused(why, "video")
