"""Videos: which frames are taken, their times and sizes; files that are damaged, lie or are too much."""

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perilune.core.errors import CheckpointError, RequestError
from perilune.core.messages import Video, pictures_of
from perilune.media import decoder as decoder_module
from perilune.media import decoder as module
from perilune.media import frames
from perilune.media.data_url import of_data_url
from perilune.media.decoder import Decoder
from perilune.media.frames import chunks, clock
from perilune.media.kinds import video_kind_of
from perilune.media.limits import Limits
from perilune.media.patches import digest, patches_of
from perilune.media.pool import DecoderPool
from tests.cpu.media.pictures import file, scene
from tests.cpu.media.videos import colours, growing, recorded, scenes, turned, video

LIMITS = Limits()


@pytest.fixture(scope="module")
def shared() -> Iterator[Decoder]:
    with Decoder(LIMITS) as decoder:
        yield decoder


def refused(data: bytes, limits: Limits = LIMITS) -> str:
    with pytest.raises(RequestError) as e:
        list(chunks(data, limits))
    assert (e.value.status, e.value.code) == (400, "invalid_video") and "\n" not in str(e.value)
    return str(e.value).removeprefix("the video cannot be used: ")


# ---- frames


@pytest.mark.parametrize(
    ("count", "fps", "taken"),
    [
        (1, 30.0, [0]),
        (10, 1.0, list(range(10))),  # slower than two frames a second: all
        (8, 4.0, [0, 2, 5, 7]),
        (9, 4.0, [0, 3, 5, 8]),
        (29, 30.0, [0, 28]),
        (14, 30.0, [0]),
        (150, 29.97, [0, 17, 33, 50, 66, 83, 99, 116, 132, 149]),
    ],
)
def test_which_are_taken(count: int, fps: float, taken: list[int]) -> None:
    """round(N min(2, fps) / fps) frames, evenly from the first to the last, by numpy's rounding to even."""
    assert LIMITS.frames(count, fps) == taken
    assert Limits(max_num_frames_each_video=1).frames(count, fps) == [0]
    assert max(Limits(sample_fps=240).frames(count, fps)) == count - 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "00:00:00.000"),
        (1.9999, "00:00:01.999"),
        (59.5, "00:00:59.500"),
        (3661.0625, "01:01:01.062"),
        (100 * 3600, "100:00:00.000"),
    ],
)
def test_times_are_cut_off_not_rounded(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_sizes() -> None:
    assert LIMITS.fit(1920, 1080, frames=4).tokens == 1032
    bounded = Limits(in_patch_limit_video=400)
    assert bounded.fit(1000, 1000, frames=4).rows ** 2 <= 12**2 < bounded.fit(1000, 1000, frames=1).rows ** 2
    assert bounded.fit(1000, 1000).tokens == LIMITS.fit(1000, 1000).tokens, "of pictures nothing changes"
    assert LIMITS.max_patches == 16384
    small = Limits(in_patch_limit=100)
    assert small.fit(1000, 1000, frames=4).tokens == small.fit(1000, 1000).tokens and small.max_patches == 400


def test_the_preprocessor_of_a_checkpoint() -> None:
    found = Limits.from_dict({"sample_fps": 1, "temporal_merge_kernel_size": 2, "timestamp_mode": "hh:mm:ss.fff"})
    assert (found.sample_fps, found.temporal_merge_kernel_size) == (1.0, 2)
    for wrong in ({"sample_fps": 0}, {"sample_fps": True}, {"timestamp_mode": "mm:ss"}):
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            Limits.from_dict(wrong)


# ---- chunks


@pytest.mark.parametrize(
    ("form", "codec"),
    [("mp4", "libx264"), ("mp4", "mpeg4"), ("webm", "libvpx-vp9"), ("avi", "mjpeg"), ("gif", "gif")],
)
def test_formats(form: str, codec: str) -> None:
    """Twelve frames of one colour each, 4 a second: six are taken, in a chunk of four and one of two."""
    shots = colours(12, (56, 56))
    found = list(chunks(video(shots, form=form, codec=codec), LIMITS))
    assert [(grid, time) for _, grid, time in found] == [((4, 4, 4), "00:00:00.000"), ((2, 4, 4), "00:00:02.250")]
    taken = [shots[i] for i in (0, 2, 4, 7, 9, 11)]
    seen = [frame for patches, grid, _ in found for frame in patches.reshape(grid[0], -1, 3, 196)]
    for shot, frame in zip(taken, seen, strict=True):
        assert np.abs(frame.mean((0, 2)) - np.array(shot.getpixel((0, 0)))).max() < 12


def test_a_frame_is_cut_as_a_picture_is() -> None:
    """Also where it is padded; motion JPEG without loss of position."""
    (patches, grid, _), *_ = chunks(video(scenes(2, (70, 30)), form="avi", codec="mjpeg", fps=2), LIMITS)
    alone, one = patches_of(file(scene(70, 30)), LIMITS)
    assert grid == (2, 4, 6) and one == (1, 4, 6)
    first, second = patches.reshape(2, *alone.shape).astype(int)
    assert np.abs(first - alone).mean() < 4 and np.abs(second - alone).mean() < 4


def test_it_is_turned_upright() -> None:
    data = video(scenes(1, (56, 28)))
    ((lying, grid, _),) = chunks(data, LIMITS)
    ((upright, other, _),) = chunks(turned(data), LIMITS)
    assert grid == (1, 2, 4) and other == (1, 4, 2)
    corner = lying.reshape(2, 4, 3, -1).mean(3), upright.reshape(4, 2, 3, -1).mean(3)
    assert np.abs(corner[0][0, 0] - corner[1][0, 1]).max() < 8, "the first corner is at the right above"


@pytest.mark.parametrize(("form", "codec"), [("mp4", "libx264"), ("webm", "libvpx-vp9")])
def test_metadata_of_any_bytes(form: str, codec: str) -> None:
    data = video(scenes(2), form=form, codec=codec)
    assert b"Lavf" in data
    assert len(list(chunks(data.replace(b"Lavf", b"\xffavf"), LIMITS))) == 1


@pytest.mark.parametrize("hidden", [0, 2])
def test_a_recording_of_a_browser(hidden: int) -> None:
    """Three seconds at about 30 frames a second, none of it declared, also with frames that are not shown: six
    frames, where the library's guess of 1,000 a second gave one."""
    times = [33 * i + (0, 14, 3, 9, 1)[i % 5] for i in range(90)]
    found = list(chunks(recorded(times, hidden=hidden), LIMITS))
    assert [(grid[0], time) for _, grid, time in found] == [(4, "00:00:00.000"), (2, "00:00:02.343")]


def test_a_rate_that_the_times_contradict() -> None:
    """A slide show: one frame every two seconds, all of which are taken."""
    found = list(chunks(recorded([0, 2000, 4000, 6000, 8000]), LIMITS))
    assert [(grid[0], time) for _, grid, time in found] == [(4, "00:00:00.000"), (1, "00:00:08.000")]


def test_sound_beside_pictures_is_not_read() -> None:
    assert [grid for _, grid, _ in chunks(video(scenes(4), sound=True), LIMITS)] == [(2, 2, 4)]


# ---- refused videos


@pytest.mark.parametrize(
    ("form", "codec", "share"),
    [("mp4", "libx264", 0.5), ("mp4", "mpeg4", 0.9), ("webm", "libvpx-vp9", 0.6), ("avi", "mjpeg", 0.5)],
)
def test_truncated(form: str, codec: str, share: float) -> None:
    data = video(colours(24), form=form, codec=codec)
    assert any(word in refused(data[: int(len(data) * share)]) for word in ("truncated", "no frames", "no video"))


def test_not_a_video() -> None:
    pytest.importorskip("av")
    for data in (
        b"no video",
        file(scene(9, 9)),
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0",
    ):
        assert "none of MP4" in refused(data)
    for data in (file(scene(9, 9)), b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"):
        assert "it is an image" in refused(data) and "send it as an image part" in refused(data)
    assert "damaged or truncated" in refused(b"\0\0\0\x20ftypisom" + os.urandom(200))
    assert refused(video([])) == "it has no pictures, only sound"


def test_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    data = video(scenes(8))
    monkeypatch.setattr(frames, "MAX_PATCH_BYTES", 4 * 2 * 4 * 588 - 1)
    assert refused(data).startswith("its 4 frames (2 a second) take 0 MB")
    monkeypatch.setattr(frames, "MAX_FRAMES", 3)
    assert refused(data).startswith("4 of its frames would be taken, and at most 3")
    monkeypatch.setattr(frames, "MAX_FRAME_PIXELS", 56 * 28 - 1)
    assert refused(data).startswith("its frames have 56 x 28 pixels")
    monkeypatch.setattr(frames, "CODECS", ("vp9",))
    assert refused(data).startswith("its codec h264 is not read")


def test_frames_larger_than_the_header_says(monkeypatch: pytest.MonkeyPatch) -> None:
    data = growing((28, 28), (280, 280))
    assert [grid for _, grid, _ in chunks(data, LIMITS)] == [(4, 2, 2), (4, 20, 20)]
    monkeypatch.setattr(frames, "MAX_PATCH_BYTES", 4 * (4 + 300) * 588)
    assert "take more than 0 MB" in refused(data)


def test_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(RequestError, match=r"pip install 'perilune\[video\]'") as e:
        list(chunks(b"\0\0\0\x20ftypisom", LIMITS))
    assert (e.value.status, e.value.code) == (400, "unsupported_media")


def test_a_url_that_lies() -> None:
    for url, says in (
        ("data:image/png;base64,AAAA", "send it as an image part"),
        ("data:,", "its URL must be 'data:video/mp4;base64,...'"),
        ("data:video/mp4;base64,?", "its data is not base64"),
    ):
        with pytest.raises(RequestError) as e:
            of_data_url(url, is_video=True)
        assert says in str(e.value) and e.value.code == "invalid_video"
    for said in ("quicktime", "webm"):  # the bytes decide
        assert video_kind_of(of_data_url(f"data:video/{said};base64,AAAAIGZ0eXBpc29t", is_video=True)) == "mp4"
    assert of_data_url("data:image/gif;base64,R0lGODlh", is_video=True) == b"GIF89a"


# ---- worker


def test_chunks_come_back_as_they_are(shared: Decoder) -> None:
    data = video(colours(12))
    found, expected = shared.decode_video(data), list(chunks(data, LIMITS))
    assert found.times == ("00:00:00.000", "00:00:02.250") and found.tokens == 4
    assert pictures_of([found, shared.decode(file(scene(9, 9)))])[:2] == [*found.chunks]
    for chunk, (patches, grid, _) in zip(found.chunks, expected, strict=True):
        assert chunk.grid == grid and chunk.tokens == 2 and chunk.digest == digest(patches, grid)
        assert np.array_equal(chunk.patches, patches) and not chunk.patches.flags.writeable
    first, second = found.chunks
    assert first.digest != second.digest


def test_a_bad_video_is_refused_and_the_worker_goes_on(shared: Decoder) -> None:
    good = video(scenes(2))
    assert isinstance(shared.decode_video(good), Video)
    worker = shared._worker
    for data, says in ((b"", "empty"), (good[: len(good) // 2], "truncated|no video"), (b"x", "none of MP4")):
        with pytest.raises(RequestError, match=f"^the video cannot be used: .*({says})"):
            shared.decode_video(data)
    assert shared.decode_video(good).tokens == 2 and shared._worker is worker


def test_time_and_memory_are_bounded() -> None:
    data = video([Image.new("RGB", (640, 480))] * 2)
    with Decoder(LIMITS, video_seconds=0.01) as decoder, pytest.raises(RequestError, match=r"longer than 0.01 s"):
        decoder.decode_video(data)
    with Decoder(LIMITS) as decoder:
        decoder.decode_video(data)
        assert decoder._worker is not None
        size = Path(f"/proc/{decoder._worker.pid}/statm").read_text().split()[0]
        assert int(size) * os.sysconf("SC_PAGE_SIZE") < 1.5 * 2**30, "of 2 GB, PyAV leaves enough for frames"
        assert not module.Decoder.decode_video(decoder, data).chunks[0].patches.flags.writeable


def test_videos_leave_decoders_for_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four decoders, two at most have videos."""
    begun, go_on = [], threading.Event()

    def slow(self: Decoder, data: bytes) -> Video:
        begun.append(data)
        assert go_on.wait(120)
        return Video((), ())

    async def test() -> None:
        pool = DecoderPool(LIMITS, 4)
        videos = [asyncio.create_task(pool.decode_video(b"%d" % i)) for i in range(5)]
        assert (await pool.decode(file(scene(9, 9)))).tokens == 1
        while len(begun) < 2:
            await asyncio.sleep(0.001)
        assert sorted(begun) == [b"0", b"1"] and pool.active == 2
        go_on.set()
        assert len(await asyncio.gather(*videos)) == len(begun) == 5 and pool.active == 0
        pool.close()

    monkeypatch.setattr(Decoder, "decode_video", slow)
    asyncio.run(test())


def test_a_worker_that_has_grown_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    real, wait = Decoder._reply, module.subprocess.Popen.wait
    # It ends by itself; one that a busy machine is slow to end is otherwise killed after 0.2 s.
    monkeypatch.setattr(module.subprocess.Popen, "wait", lambda self, timeout=None: wait(self, timeout and 30))

    def grown(self: Decoder, *args: Any) -> Any:
        reply, handles = real(self, *args)
        return {**reply, "full": True}, handles

    monkeypatch.setattr(decoder_module, "END_SECONDS", 60)  # a busy machine takes more than 0.2 s
    with Decoder(LIMITS) as decoder:
        assert decoder.decode(file(scene(9, 9))).tokens == 1
        first = decoder._worker
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "_reply", grown)
            assert decoder.decode(file(scene(9, 9))).tokens == 1 and decoder._worker is None
            with pytest.raises(RequestError, match="none of PNG"):
                decoder.decode(b"x")
        assert first is not None and first.poll() == 0
        assert decoder.decode(file(scene(9, 9))).tokens == 1
