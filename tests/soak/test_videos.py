"""Damaged video files of every format: one line each, in time, and the decoder goes on in bounded memory."""

import random
import re
import time
from collections import Counter
from pathlib import Path

from perilune.core.errors import RequestError
from perilune.media.decoder import Decoder
from perilune.media.limits import Limits
from perilune.media.worker import FULL_BYTES
from tests.cpu.media.videos import colours, video

FORMS = [
    ("mp4", "libx264"), ("mp4", "libx265"), ("mp4", "libsvtav1"), ("mp4", "mpeg4"), ("mov", "mjpeg"),
    ("webm", "libvpx"), ("webm", "libvpx-vp9"), ("matroska", "mpeg2video"), ("avi", "mjpeg"), ("gif", "gif"),
]  # fmt: skip


def test_damaged_files(share: float) -> None:
    rng, said, seconds = random.Random(28), Counter[str](), 0.0
    files = [video(colours(12, (64, 48)), form=form, codec=codec, fps=25) for form, codec in FORMS]
    with Decoder(Limits(), video_seconds=10) as decoder:
        for file in files:
            assert decoder.decode_video(file).tokens == 6
        workers, largest = {decoder._worker}, 0
        end = time.monotonic() + 1200 * share
        while time.monotonic() < end:
            data = bytearray(rng.choice(files))
            for _ in range(rng.choice((1, 3, 10, 60))):
                data[rng.randrange(len(data))] = rng.randrange(256)
            if rng.random() < 0.2:
                data = data[: rng.randrange(len(data))]
            start = time.monotonic()
            try:
                decoder.decode_video(bytes(data))
                said["read"] += 1
            except RequestError as e:
                text = str(e)
                assert e.status == 400 and "\n" not in text and len(text) < 300, text
                said[re.sub(r"[\d,.]+", "N", text.removeprefix("the video cannot be used: "))[:40]] += 1
            seconds = max(seconds, time.monotonic() - start)
            if (worker := decoder._worker) is not None:
                workers.add(worker)
                largest = max(largest, address_space(worker.pid))
    found = f"{said.total()} files, the slowest {seconds:.2f} s, {len(workers)} workers of at most {largest >> 20} MB"
    print(f"{found}: {said}")
    assert seconds < 10 and largest < FULL_BYTES + (256 << 20)
    assert not any("ended the decoder" in text for text in said)


def address_space(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * 4096
