"""The process that decodes images and videos: `python -m perilune.media.worker SOCKET LIMITS`, started by decoder.py.

Its address space is bounded, and it ends by itself when a file takes longer than the parent waits, or the parent is
gone. It reads a REQUEST and the file from the inherited Unix socket, and answers with 4 bytes of length and JSON:
{"error", "code"}, or {"grids", "digests", "times"} with the descriptor of a memory file of all chunks' patches,
concatenated; both with "full": whether to start another process for the next file. A picture is one chunk without a
time.
"""

import json
import math
import resource
import signal
import socket
import sys
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from perilune.core.errors import RequestError
from perilune.core.sealed import SealedFile
from perilune.media.decoder import NO_PILLOW, REQUEST
from perilune.media.limits import Limits
from perilune.media.refusal import refused

ADDRESS_SPACE_BYTES = 2 << 30  # the interpreter's 0.2 GB and a picture of 100 megapixels; PyAV's libraries 0.3 GB
FULL_BYTES = 1 << 30  # With more address space the process ends after a file; usual: 0.3 GB. FFmpeg leaks memory.
Patches = NDArray[np.uint8]
SPARE_SECONDS = 2  # beyond the parent's time limit, for the case that the parent is gone


def main() -> None:
    try:
        from perilune.media.patches import digest, patches_of
    except ImportError:
        sys.exit(NO_PILLOW)
    link = socket.socket(fileno=int(sys.argv[1]))
    limits = Limits.from_dict(json.loads(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt in a terminal is the parent's
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (request := received(link, REQUEST.size)) is not None:
        is_video, seconds, length = REQUEST.unpack(request)
        if (data := received(link, length)) is None:
            return
        signal.alarm(math.ceil(seconds) + SPARE_SECONDS)  # SIGALRM ends the process
        grids, digests, times = list[tuple[int, int, int]](), list[str](), list[str]()
        memory = SealedFile.empty()
        try:
            for patches, grid, time in _chunks(data, limits) if is_video else [(*patches_of(data, limits), "")]:
                memory.write(patches.data.cast("B"))
                grids.append(grid)
                digests.append(digest(patches, grid).hex())
                times.append(time)
                del patches  # before the next ones are decoded
            memory.seal()
        except (RequestError, MemoryError) as e:
            what = "video" if is_video else "image"
            error = e if isinstance(e, RequestError) else refused("it takes too much memory: send a smaller one", what)
            _send(link, {"error": str(error), "code": error.code, "full": _full()}, [])
        else:
            _send(link, {"grids": grids, "digests": digests, "times": times, "full": _full()}, [memory.descriptor])
        del data, memory
        signal.alarm(0)


def _chunks(data: bytes, limits: Limits) -> Iterator[tuple[Patches, tuple[int, int, int], str]]:
    from perilune.media.frames import chunks

    return chunks(data, limits)


def received(link: socket.socket, count: int) -> bytes | None:
    """`count` bytes; None if the other side has closed."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        if not (n := link.recv_into(view[done:])):
            return None
        done += n
    return bytes(data)


def _send(link: socket.socket, message: dict[str, object], descriptors: list[int]) -> None:
    text = json.dumps(message).encode()
    whole = len(text).to_bytes(4, "little") + text
    sent = socket.send_fds(link, [whole], descriptors)
    if left := whole[sent:]:
        link.sendall(left)


def _full() -> bool:
    if sys.platform != "linux":
        return False
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize() > FULL_BYTES


if __name__ == "__main__":
    main()
