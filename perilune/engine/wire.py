"""The encoding of messages between the server process and the engine process: length-prefixed msgpack frames.

No code is executed on receipt (no pickle), a frame has a bounded size, and every payload is checked against the
dataclass that it names.

Pixels have a socket of their own; its descriptor comes with the header of the first frame. Each picture is a record of
PIXELS and the descriptor of the file that holds the pixels, which the engine maps: neither process copies them.
"""

import contextlib
import dataclasses
import itertools
import operator
import select
import socket
import struct
import threading
import typing
from functools import partial
from typing import Any

import msgspec

from perilune.core import messages
from perilune.core.errors import EngineError
from perilune.core.sealed import SealedFile

MAX_FRAME_BYTES = 256 << 20
PIECE_BYTES = 1 << 20  # Bytes the engine reads between two steps, at most. More: many long prompts delay a step.
HEADER = struct.Struct(">I")
PIXELS = struct.Struct(">4Q")  # rid, item, where the patches begin in the file, their bytes

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        messages.Submit,
        messages.Want,
        messages.Cancel,
        messages.Shutdown,
        messages.EngineInfo,
        messages.EngineStats,
        messages.Failed,
    )
}
_encoder = msgspec.msgpack.Encoder()
_frame_decoder = msgspec.msgpack.Decoder(list[tuple[str, msgspec.Raw]])
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    name: msgspec.msgpack.Decoder(kind) for name, kind in _KINDS.items()
}
# Deltas, one per request and step, travel as lists of values: a third of the bytes and of the time that names take.
_DELTAS = "Deltas"
_FIELDS = [f.name for f in dataclasses.fields(messages.Delta) if not f.kw_only]
_values = operator.attrgetter(*_FIELDS)
_hints = typing.get_type_hints(messages.Delta)
_delta_decoder = msgspec.msgpack.Decoder(list[tuple[*(_hints[name] for name in _FIELDS)]])  # type: ignore[misc]  # types read at run time


def encode(batch: list[Any]) -> bytearray:
    """One frame with all messages of `batch`, header included."""
    entries: list[tuple[str, Any]] = []
    for kind, group in itertools.groupby(batch, type):
        if kind is messages.Delta:
            entries.append((_DELTAS, [_values(delta) for delta in group]))
        else:
            entries += [(kind.__name__, message) for message in group]
    frame = bytearray(HEADER.size)
    _encoder.encode_into(entries, frame, HEADER.size)
    HEADER.pack_into(frame, 0, len(frame) - HEADER.size)
    return frame


def body_length(header: bytes) -> int:
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise EngineError(f"a message of {length} bytes exceeds the bound of {MAX_FRAME_BYTES}")
    return int(length)


def decode(body: bytes) -> list[Any]:
    """The messages of a frame's body. EngineError if it is malformed."""
    found: list[Any] = []
    try:
        for name, payload in _frame_decoder.decode(body):
            if name == _DELTAS:
                found += itertools.starmap(messages.Delta, _delta_decoder.decode(payload))
            else:
                found.append(_decoders[name].decode(payload))
        return found
    except (msgspec.DecodeError, KeyError) as e:
        raise EngineError(f"a malformed message reached this process: {e}") from e


def send_pixels(link: socket.socket, pixels: messages.Pixels) -> None:
    """Sends pixels over the non-blocking socket for them, or nothing if the engine has ended. They are copied only if
    no file holds them yet. EngineError if the engine does not take those that it asked for."""
    start, size, descriptors = 0, pixels.patches.nbytes, list[int]()
    with contextlib.suppress(OSError):  # no descriptor or memory is left: without the file this request fails alone
        file, start = pixels.shared or (SealedFile.of(pixels.patches), 0)
        descriptors = [file.descriptor]
    try:
        socket.send_fds(link, [PIXELS.pack(pixels.rid, pixels.item, start, size)], descriptors)
    except ConnectionError:
        return
    except OSError as e:
        raise EngineError(f"pixels cannot be sent to the engine: {e.strerror}") from e


def receive_pixels(link: socket.socket) -> messages.Pixels | None:
    """The next pixels, mapped; None: none have come, and the socket is non-blocking. EOFError when it is closed. If the
    file is shorter than the record says, or cannot be mapped, the patches are too few: Engine.provide refuses them."""
    try:
        record, descriptors, *_ = socket.recv_fds(link, PIXELS.size, 1)
    except BlockingIOError:
        return None
    if not record:
        raise EOFError
    rid, item, start, size = PIXELS.unpack(record)
    patches = memoryview(b"")
    for file in map(SealedFile, descriptors):
        with contextlib.suppress(OSError):
            patches = file.mapped(start, size)
    return messages.Pixels(rid, item, patches)


class Channel:
    """The engine's blocking end of the socket, and of the one for pixels once the first frame has come."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._pixels: list[socket.socket] = []  # one at most
        self._lock = threading.Lock()  # the thread that watches other ranks sends too
        self._data = bytearray()  # received, but not a whole frame yet

    def receive(self, wait_seconds: float | None) -> list[Any]:
        """The messages of all complete frames, and pixels. Waits up to `wait_seconds` for bytes, None: without a limit;
        does not wait for the rest of a frame. EOFError when a socket is closed."""
        batch: list[Any] = []
        while not batch and wait_seconds is None:
            batch = self._arrived(None)
        return batch + self._arrived(0 if batch else wait_seconds)

    def read_body(self) -> bytes:
        """The first frame's body."""
        header, descriptors, *_ = socket.recv_fds(self.sock, HEADER.size, 1)
        self._data += header
        self._pixels = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        for sock in self._pixels:
            sock.setblocking(False)
        while (body := self._body()) is None:
            self._take()
        return body

    def send(self, batch: list[Any]) -> None:
        with self._lock:
            self.sock.sendall(encode(batch))

    def _arrived(self, wait_seconds: float | None) -> list[Any]:
        batch: list[Any] = []
        for sock in select.select([self.sock, *self._pixels], [], [], wait_seconds)[0]:
            if sock is self.sock:
                self._take()
                batch += self._complete()
            else:
                batch += iter(partial(receive_pixels, sock), None)
        return batch

    def _take(self) -> None:
        piece = self.sock.recv(PIECE_BYTES)
        if not piece:
            raise EOFError
        self._data += piece

    def _complete(self) -> list[Any]:
        batch: list[Any] = []
        while (body := self._body()) is not None:
            batch += decode(body)
        return batch

    def _body(self) -> bytes | None:
        if len(self._data) < HEADER.size:
            return None
        end = HEADER.size + body_length(bytes(self._data[: HEADER.size]))
        if len(self._data) < end:
            return None
        body = bytes(memoryview(self._data)[HEADER.size : end])
        del self._data[:end]
        return body
