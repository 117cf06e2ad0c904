"""Small video files, written with PyAV."""

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cpu.media.pictures import scene

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def video(
    frames: Sequence[Image.Image], *, form: str = "mp4", codec: str = "libx264", fps: int = 4, sound: bool = False
) -> bytes:
    """A video file of these frames. Skips the test where PyAV is not installed."""
    av = pytest.importorskip("av", reason="PyAV is not installed (the extra `video`)")
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        track = None
        if frames:
            track = container.add_stream(codec, rate=fps)
            track.width, track.height = frames[0].size
            track.pix_fmt = {"gif": "rgb8", "mjpeg": "yuvj420p"}.get(codec, "yuv420p")
        voice = container.add_stream("aac", rate=16_000) if sound or not frames else None
        for image in frames:
            assert track is not None
            container.mux(track.encode(av.VideoFrame.from_image(image)))
        if voice is not None:
            for start in range(0, 16_000, 1024):
                heard = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
                heard.sample_rate, heard.pts = 16_000, start
                container.mux(voice.encode(heard))
        for stream in (track, voice):
            if stream is not None:
                container.mux(stream.encode())
    return out.getvalue()


def colours(count: int, size: tuple[int, int] = (56, 28)) -> list[Image.Image]:
    """Frames of one colour each, which change with every frame."""
    return [Image.new("RGB", size, (40 * i % 256, 255 - 24 * i % 256, 90)) for i in range(count)]


def scenes(count: int, size: tuple[int, int] = (56, 28)) -> list[Image.Image]:
    return [scene(*size)] * count


def growing(*sizes: tuple[int, int]) -> bytes:
    """An AVI file at 2 frames a second with four frames of each size; its header has the first."""
    av = pytest.importorskip("av", reason="PyAV is not installed (the extra `video`)")
    out = io.BytesIO()
    with av.open(out, "w", format="avi") as container:
        track = container.add_stream("mjpeg", rate=2)
        track.width, track.height = sizes[0]
        track.pix_fmt = "yuvj420p"
        for i, size in enumerate(sizes):
            coder = av.CodecContext.create("mjpeg", "w")
            coder.width, coder.height, coder.pix_fmt = *size, "yuvj420p"
            coder.framerate, coder.time_base = 2, Fraction(1, 2)
            for j, image in enumerate(scenes(4, size)):
                frame = av.VideoFrame.from_image(image)
                frame.pts, frame.time_base = 4 * i + j, Fraction(1, 2)
                for packet in coder.encode(frame):
                    packet.stream = track
                    container.mux(packet)
    return out.getvalue()


def recorded(times_ms: Sequence[int], *, hidden: int = 0) -> bytes:
    """A WebM file as a browser records it: with the time of each frame, and no frames per second.

    hidden  a frame that is not shown follows each `hidden` frames; 0: none
    """
    av = pytest.importorskip("av", reason="PyAV is not installed (the extra `video`)")
    out = io.BytesIO()
    with av.open(out, "w", format="webm") as container:
        track = container.add_stream("libvpx")
        track.width, track.height, track.pix_fmt = 56, 28, "yuv420p"
        coder = track.codec_context
        coder.framerate, coder.time_base = Fraction(0), Fraction(1, 1000)
        for i, (time, image) in enumerate(zip(times_ms, colours(len(times_ms)))):
            frame = av.VideoFrame.from_image(image)
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            for packet in [*track.encode(frame), *(track.encode() if i + 1 == len(times_ms) else ())]:
                container.mux(packet)
                if hidden and i % hidden == hidden - 1:
                    data = bytearray(bytes(packet))
                    data[0] &= ~0x10
                    copy = av.Packet(bytes(data))
                    copy.stream, copy.pts, copy.dts = track, packet.pts, packet.dts
                    copy.time_base = packet.time_base
                    container.mux(copy)
    return out.getvalue()


def turned(data: bytes) -> bytes:
    """The MP4 file with a display matrix that turns it by 90 degrees."""
    unit, at = 1 << 16, data.index(b"tkhd")
    plain = [unit, 0, 0, 0, unit, 0, 0, 0, 1 << 30]
    matrix = [0, unit, 0, -unit, 0, 0, 0, 0, 1 << 30]

    def spelled(values: list[int]) -> bytes:
        return b"".join(v.to_bytes(4, "big", signed=True) for v in values)

    where = data.index(spelled(plain), at)
    return data[:where] + spelled(matrix) + data[where + 36 :]


def part(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url, **more}}
