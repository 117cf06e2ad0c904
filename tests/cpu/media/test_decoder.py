"""The worker process: pictures by shared memory, and bounds on memory and time that hold."""

import fcntl
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perilune.core.errors import RequestError
from perilune.media import decoder as module
from perilune.media.decoder import Decoder
from perilune.media.limits import Limits
from perilune.media.patches import digest, patches_of
from perilune.media.worker import ADDRESS_SPACE_BYTES
from tests.cpu.media.pictures import file, scene

LIMITS = Limits()


@pytest.fixture(scope="module")
def shared() -> Iterator[Decoder]:
    with Decoder(LIMITS) as decoder:
        yield decoder


waited = subprocess.Popen.wait


def pid(decoder: Decoder) -> int:
    assert decoder._worker is not None
    return decoder._worker.pid


def test_patches_come_back_as_they_are(shared: Decoder) -> None:
    for size in ((1, 1), (640, 480), (2500, 1200), (1, 8000)):
        data = file(scene(*size))
        patches, grid = patches_of(data, LIMITS)
        picture = shared.decode(data)
        assert (picture.grid, picture.tokens) == (grid, LIMITS.fit(*size).tokens)
        assert np.array_equal(picture.patches, patches) and picture.digest == digest(patches, grid)
        assert not picture.patches.flags.writeable


TURNED = Image.Exif()
TURNED[0x0112] = 6
ONE = scene(57, 29)
FILES = {
    "1 x 1": (file(scene(1, 1)), 2, 2),
    "1 x 8000": (file(scene(1, 8000)), 512, 2),
    "turned": (file(scene(100, 30), "JPEG", exif=TURNED), 8, 4),
    "palette": (file(ONE.quantize(16)), 4, 6),
    "16-bit": (file(Image.fromarray(np.full((28, 85), 40_000, np.uint16))), 2, 8),
    "CMYK": (file(scene(640, 480).convert("CMYK"), "JPEG"), 36, 46),
    "alpha": (file(scene(29, 28).convert("RGBA")), 2, 4),
    **{form: (file(ONE, form, save_all=True, append_images=[ONE.rotate(9)]), 4, 6) for form in ("GIF", "WEBP")},
}


@pytest.mark.parametrize("kind", FILES)
def test_golden_grids_of_files(shared: Decoder, kind: str) -> None:
    data, rows, columns = FILES[kind]
    picture = shared.decode(data)
    assert (picture.grid, picture.tokens) == ((1, rows, columns), rows * columns // 4)


def test_the_model_is_not_imported_and_nothing_stays_behind(shared: Decoder) -> None:
    """Descriptors and mappings go with the pictures."""
    data = file(scene(300, 300))
    shared.decode(data)
    gc.collect()  # or descriptors that other tests left are closed meanwhile
    handles, worker = len(os.listdir("/proc/self/fd")), Path(f"/proc/{pid(shared)}")
    kept = Path("/proc/self/maps").read_text().count("memfd:patches")  # by other tests
    for _ in range(20):
        shared.decode(data)
    assert len(os.listdir("/proc/self/fd")) == handles
    # 0, 1, 2, the link, and for a moment after its answer the last picture's memory.
    assert len(list((worker / "fd").iterdir())) <= 5
    maps = Path("/proc/self/maps").read_text()
    assert maps.count("memfd:patches") <= kept + 1  # the last one's, if that
    assert "libtorch" not in (worker / "maps").read_text()


def test_a_bad_file_is_refused_and_the_worker_goes_on(shared: Decoder) -> None:
    shared.decode(file(scene(9, 9)))
    worker = pid(shared)
    for data, says in ((b"", "empty"), (b"no image", "none of PNG"), (file(scene(300, 300))[:500], "damaged or trun")):
        with pytest.raises(RequestError, match=says) as e:
            shared.decode(data)
        assert (e.value.status, e.value.code) == (400, "invalid_image")
    with pytest.raises(RequestError, match="33,554,433 bytes, and at most 33,554,432"):
        shared.decode(bytes((32 << 20) + 1))
    assert shared.decode(file(scene(9, 9))).tokens == 1 and pid(shared) == worker


def test_random_damage_is_refused_or_harmless(shared: Decoder) -> None:
    shared.decode(file(ONE))
    worker, rng, refusals = pid(shared), random.Random(1), 0
    files = [file(scene(90, 70), form) for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")]
    for i in range(420):
        data = bytearray(files[i % 6])
        for _ in range(i % 7):
            data[rng.randrange(len(data))] = rng.randrange(256)
        data = data[: rng.randrange(len(data)) if i % 5 == 0 else None]
        try:
            assert shared.decode(bytes(data)).tokens
        except RequestError as e:
            refusals += 1
            assert e.status == 400 and "\n" not in str(e)
    assert 100 < refusals < 400 and pid(shared) == worker


def test_memory_is_bounded(shared: Decoder) -> None:
    shared.decode(file(scene(9, 9)))
    limits = Path(f"/proc/{pid(shared)}/limits").read_text()
    found = re.search(r"Max address space +(\d+) +(\d+)", limits)
    assert found is not None and {*map(int, found.groups())} == {ADDRESS_SPACE_BYTES}


@pytest.mark.slow
def test_a_hundred_megapixels_fit_the_limits() -> None:
    size = 10_000, 10_000
    turned = file(Image.new("RGB", (12_500, 8_000)), "JPEG", exif=TURNED)
    with Decoder(LIMITS) as decoder:
        for data in (*(file(Image.new(mode, size), compress_level=1) for mode in ("RGB", "RGBA")), turned):
            assert decoder.decode(data).tokens > 4000
            peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid(decoder)}/status").read_text())
            assert peak is not None and int(peak[1]) < 1 << 20


def test_a_picture_that_takes_too_long_is_refused_and_the_next_is_served() -> None:
    with Decoder(LIMITS) as decoder:
        data = file(scene(9, 9))
        decoder.decode(data)
        worker = pid(decoder)
        os.kill(worker, signal.SIGSTOP)
        decoder._seconds = 0.3
        with pytest.raises(RequestError, match=r"takes longer than 0.3 s: send a smaller one") as e:
            decoder.decode(data)
        assert e.value.status == 400
        assert not Path(f"/proc/{worker}").exists(), "the slow worker is still there"
        decoder._seconds = 15
        assert decoder.decode(data).tokens == 1


def test_a_worker_that_dies_in_the_middle_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with Decoder(LIMITS) as decoder:
        data = file(scene(9, 9))
        decoder.decode(data)
        os.kill(pid(decoder), signal.SIGSTOP)
        real = Decoder._reply

        def killed(self: Decoder, *args: Any) -> Any:  # it has the picture, and no answer is there yet
            os.kill(pid(self), signal.SIGKILL)
            return real(self, *args)

        with monkeypatch.context() as patch, pytest.raises(RequestError, match=r"the decoder \(SIGKILL\)") as e:
            patch.setattr(Decoder, "_reply", killed)
            decoder.decode(data)
        assert e.value.status == 400
        assert decoder.decode(data).tokens == 1
        # One that died between two pictures is replaced, and no picture is blamed.
        os.kill(pid(decoder), signal.SIGKILL)
        assert decoder._worker is not None
        decoder._worker.wait()
        assert decoder.decode(data).tokens == 1


def test_an_interrupt_that_comes_after_the_answer_ends_no_other_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that left as its picture was done: the killed worker may still be dying when the next picture comes."""
    with Decoder(LIMITS) as decoder:
        decoder.decode(file(scene(9, 9)))
        monkeypatch.setattr(subprocess.Popen, "poll", lambda self: None)
        decoder.interrupt()
        assert decoder.decode(file(scene(30, 30))).tokens == 4


def test_a_missing_pillow_is_one_line_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "PIL.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(module.__file__).parents[2]}")
    with Decoder(LIMITS) as decoder, pytest.raises(RequestError, match="pip install pillow") as e:
        decoder.decode(file(scene(9, 9)))
    assert e.value.status == 503
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with Decoder(LIMITS) as decoder, pytest.raises(RequestError, match="cannot be started: No such file") as e:
        decoder.decode(file(scene(9, 9)))
    assert e.value.status == 503


def test_callers_take_turns_and_wait_for_a_bounded_time(shared: Decoder) -> None:
    pictures = {n: file(scene(20 * n, 30)) for n in range(1, 9)}
    wrong: list[int] = []

    def one(n: int) -> None:
        if shared.decode(pictures[n]).tokens != LIMITS.fit(20 * n, 30).tokens:
            wrong.append(n)

    threads = [threading.Thread(target=one, args=(n,)) for n in pictures]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    with Decoder(LIMITS, turn_seconds=0.05) as busy, busy._turn, pytest.raises(RequestError, match="try again") as e:
        busy.decode(pictures[1])
    assert (e.value.status, e.value.retry_seconds) == (503, 5)


def test_a_worker_that_lies_about_its_memory_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that could be cut shorter later, or is shorter than its grid, is never mapped."""
    real = Decoder._reply
    for length in (1, 588 * 4):
        with Decoder(LIMITS) as decoder:
            data = file(scene(9, 9))
            decoder.decode(data)
            worker = decoder._worker

            def lying(self: Decoder, *args: Any, length: int = length) -> Any:
                reply, handles = real(self, *args)
                os.close(handles[0])
                handle = os.memfd_create("lies", os.MFD_ALLOW_SEALING)
                os.truncate(handle, length)
                if length == 1:
                    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, module.SEALS)
                return reply, [handle]

            with monkeypatch.context() as patch, pytest.raises(RequestError, match="ended the decoder"):
                patch.setattr(Decoder, "_reply", lying)
                patch.setattr(module.subprocess.Popen, "wait", lambda self, timeout=None: waited(self, timeout and 0.1))
                decoder.decode(data)
            assert worker is not None and worker.poll() is not None
            assert decoder.decode(data).tokens == 1


def test_the_worker_ends_with_its_parent() -> None:
    decoder = Decoder(LIMITS)
    decoder.decode(file(Image.new("L", (3, 3))))
    worker, process = pid(decoder), decoder._worker
    assert decoder._link is not None and process is not None
    decoder._link.close()  # as when the parent is killed
    assert process.wait(60) == 0 and not Path(f"/proc/{worker}").exists()
    decoder.close()
