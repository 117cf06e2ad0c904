"""The process that decodes images: `python -m perilune.media.worker SOCKET SECONDS LIMITS`, started by decoder.py.

Its address space is bounded, and it ends by itself when a picture takes longer than the parent waits, or the parent is
gone. Over the Unix socket, which is inherited, come 8 bytes of length and the file; back go 4 bytes of length and JSON:
{"error", "code"}, or {"grid", "digest"} with the descriptor of a memory that holds the patches.
"""

import fcntl
import json
import math
import os
import resource
import signal
import socket
import sys
import tempfile

import numpy as np
from numpy.typing import NDArray

from perilune.core.errors import RequestError
from perilune.media.decoder import NO_PILLOW, SEALS
from perilune.media.limits import Limits
from perilune.media.refusal import refused

ADDRESS_SPACE_BYTES = 2 << 30  # the interpreter's 0.2 GB and a picture of 100 megapixels
SPARE_SECONDS = 2  # beyond the parent's patience, for the case that the parent is gone


def main() -> None:
    try:
        from perilune.media.patches import digest, patches_of
    except ImportError:
        sys.exit(NO_PILLOW)
    link = socket.socket(fileno=int(sys.argv[1]))
    limits = Limits.from_dict(json.loads(sys.argv[3]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt in a terminal is the parent's
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (length := received(link, 8)) is not None:
        if (data := received(link, int.from_bytes(length, "little"))) is None:
            return
        signal.alarm(math.ceil(float(sys.argv[2])) + SPARE_SECONDS)  # SIGALRM ends the process
        try:
            patches, grid = patches_of(data, limits)
            memory = _memory(patches)
        except (RequestError, MemoryError) as e:
            error = e if isinstance(e, RequestError) else refused("it takes too much memory: send a smaller one")
            _send(link, {"error": str(error), "code": error.code}, [])
        else:
            _send(link, {"grid": grid, "digest": digest(patches, grid).hex()}, [memory])
            os.close(memory)
            del patches  # before the next one is decoded
        signal.alarm(0)


def received(link: socket.socket, count: int) -> bytes | None:
    """So many bytes; None if the other side has closed."""
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        if not (n := link.recv_into(view[done:])):
            return None
        done += n
    return bytes(data)


def _send(link: socket.socket, message: dict[str, object], descriptors: list[int]) -> None:
    text = json.dumps(message).encode()
    whole = len(text).to_bytes(4, "little") + text  # shorter than any socket buffer
    socket.send_fds(link, [whole], descriptors)


def _memory(patches: NDArray[np.uint8]) -> int:
    """The descriptor of a file without a name that holds the patches; in memory where the system has such files."""
    if sys.platform == "linux":
        handle = os.memfd_create("patches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    left = patches.data.cast("B")
    while left:
        left = left[os.write(handle, left) :]
    if sys.platform == "linux":
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, SEALS)
    return handle


if __name__ == "__main__":
    main()
