"""Decodes image and video files in a worker process, so that a hostile file can neither fill this process' memory nor
crash or delay it. There is no thread or queue: callers wait for their turn, for a bounded time."""

import contextlib
import dataclasses
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from perilune.core.errors import RequestError
from perilune.core.interpreter import environment
from perilune.core.messages import Video
from perilune.core.sealed import SEALS as SEALS
from perilune.core.sealed import SealedFile
from perilune.media.limits import Limits
from perilune.media.refusal import busy, refused

MAX_FILE_BYTES = 32 << 20  # of one file; a screenshot of 4K as PNG has about 3 MB
DECODE_SECONDS = 15.0  # for one image; 100 megapixels of PNG take about 3 s
VIDEO_SECONDS = 45.0  # for one video; a minute of 1920 x 1080 MPEG-4 at 30 frames per second takes 10 s of a core
TURN_SECONDS = 30.0  # longest wait while files of other requests are decoded
END_SECONDS = 0.2  # until a worker that does not end by itself is killed; closing a server waits for all workers
REPLY_BYTES = 1 << 20  # largest answer of the worker: about 100 bytes per chunk of a video, and at most 4,096 chunks
PART_BYTES = 1 << 16  # of the answer, read per call
REQUEST = struct.Struct("<?dQ")  # header before a file: is it a video, seconds to decode it, bytes of the file
NO_PILLOW = 3  # exit code of a worker that cannot import it
COPIED_BYTES = 1 << 20  # Below it patches are copied instead of mapped: a mapped file holds two descriptors.


@dataclasses.dataclass(slots=True)
class Picture:
    """A decoded image, or a chunk of a video. `patches` of COPIED_BYTES or more are a mapping of the worker's file."""

    patches: NDArray[np.uint8]  # [frames * rows * columns, 3, P, P], read-only
    grid: tuple[int, int, int]  # frames, rows, columns; 1 frame of an image
    tokens: int
    digest: bytes  # 32 bytes: of pixels and grid
    shared: tuple[SealedFile, int] | None = None  # the file that holds `patches`, and where they begin in it


class Decoder:
    """One worker process, started for the first file and restarted after it was ended. Any thread may call it."""

    def __init__(
        self,
        limits: Limits,
        *,
        seconds: float = DECODE_SECONDS,
        video_seconds: float = VIDEO_SECONDS,
        turn_seconds: float = TURN_SECONDS,
    ) -> None:
        self._limits, self._turn_seconds = limits, turn_seconds
        self._seconds, self._video_seconds = seconds, video_seconds
        self._turn = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._interrupted: subprocess.Popen[bytes] | None = None  # gets no further file: it is ending, or has ended
        self._link: socket.socket | None = None

    def decode(self, data: bytes) -> Picture:
        """The picture in an image file's bytes.

        RequestError in one line: 400 for a file that is too large, too slow, damaged or no image; 503 if the images of
        other requests take too long, or no worker can be started.
        """
        (picture,), _ = self._in_turn(data, False)
        return picture

    def decode_video(self, data: bytes) -> Video:
        """The chunks of a video file's bytes. RequestError as for images."""
        chunks, times = self._in_turn(data, True)
        return Video(tuple(chunks), tuple(times))

    def _in_turn(self, data: bytes, is_video: bool) -> tuple[list[Picture], list[str]]:
        what = _noun(is_video)
        if not data:
            raise refused("it is empty", what)
        if len(data) > MAX_FILE_BYTES:
            raise refused(f"the file has {len(data):,} bytes, and at most {MAX_FILE_BYTES:,} are read", what)
        if not self._turn.acquire(timeout=self._turn_seconds):
            raise busy("too many images are being decoded: try again")
        try:
            return self._ask(data, is_video)
        except RequestError:
            raise
        except BaseException:
            self._end()  # e.g. after KeyboardInterrupt, the worker may be in the middle of a message
            raise
        finally:
            self._turn.release()

    def interrupt(self) -> None:
        """From another thread: kills the worker; `decode` in progress, if any, raises an error."""
        if (worker := self._worker) is not None:
            self._interrupted = worker
            worker.kill()

    def close(self) -> None:
        with self._turn:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, data: bytes, is_video: bool) -> tuple[list[Picture], list[str]]:
        """The picture, or the chunks of a video and their times."""
        link, seconds, what = self._started(), self._video_seconds if is_video else self._seconds, _noun(is_video)
        deadline = time.monotonic() + seconds
        try:
            link.settimeout(seconds)
            link.sendall(REQUEST.pack(is_video, seconds, len(data)))
            link.sendall(data)
            reply, handles = self._reply(link, deadline)
        except TimeoutError:
            self._end()
            raise refused(f"decoding it takes longer than {seconds:g} s: send a smaller one", what) from None
        except (OSError, EOFError):
            raise self._died(what) from None
        if reply["full"]:
            self._end()
        if "error" in reply:
            raise RequestError(str(reply["error"]), code=str(reply["code"]))
        (memory,) = map(SealedFile, handles)
        side, merged = self._limits.patch_size, self._limits.merge_kernel_size
        counts = [math.prod(grid) for grid in reply["grids"]]
        size = sum(counts) * 3 * side * side
        pages = memory.mapped(0, size)
        if pages.nbytes != size:
            raise self._died(what)
        copied = size < COPIED_BYTES
        patches = np.frombuffer(bytes(pages) if copied else pages, np.uint8).reshape(-1, 3, side, side)
        found, start = [], 0
        for (frames, rows, columns), count, digest in zip(reply["grids"], counts, reply["digests"], strict=True):
            own, shared = patches[start : start + count], None if copied else (memory, start * 3 * side * side)
            tokens, start = rows * columns // (merged * merged), start + count
            found.append(Picture(own, (frames, rows, columns), tokens, bytes.fromhex(digest), shared))
        return found, reply["times"]

    def _reply(self, link: socket.socket, deadline: float) -> tuple[dict[str, Any], list[int]]:
        data, handles = b"", list[int]()
        try:
            while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "little"):
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                link.settimeout(left)
                part, some, *_ = socket.recv_fds(link, PART_BYTES, 1)
                handles += some
                if not part or len(data) > REPLY_BYTES:
                    raise EOFError
                data += part
            reply = json.loads(data[4:])
            assert isinstance(reply, dict)
            return reply, handles
        except BaseException:
            for handle in handles:
                os.close(handle)
            raise

    def _started(self) -> socket.socket:
        worker = self._worker
        usable = worker is not None and worker is not self._interrupted and worker.poll() is None
        if self._link is not None and usable:
            return self._link
        self._end()
        ours, theirs = socket.socketpair()
        settings = json.dumps(dataclasses.asdict(self._limits))
        command = [sys.executable, "-m", "perilune.media.worker", str(theirs.fileno()), settings]
        # Threads of numpy's BLAS, which is not used, would reserve more address space than pictures need.
        threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        try:
            self._worker = subprocess.Popen(
                command,
                env=environment() | threads,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        except OSError as e:
            ours.close()
            raise busy(f"the image decoder cannot be started: {e.strerror}") from e
        finally:
            theirs.close()
        self._link = ours
        return ours

    def _died(self, what: str) -> RequestError:
        """Cleans up after a worker that closed its socket early, and returns the error that says why."""
        worker = self._worker
        assert worker is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(2)  # its link closes a moment before it ends
        self._end()
        code = worker.returncode
        if code == NO_PILLOW:
            return busy("the image decoder cannot run: is Pillow installed? pip install pillow")
        cause = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
        return refused(f"decoding it ended the decoder ({cause}): the file is damaged or too large", what)

    def _end(self) -> None:
        """Ends the worker, if there is one; its exit code, if it ended before, is kept."""
        if self._link is not None:
            self._link.close()
        if self._worker is not None:
            try:
                self._worker.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._worker.kill()
                self._worker.wait()
        self._link = self._worker = None


def _noun(is_video: bool) -> str:
    return "video" if is_video else "image"
