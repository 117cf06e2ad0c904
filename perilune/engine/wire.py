"""How messages travel between the server process and the engine process: length-prefixed msgpack frames.

Nothing is ever executed on receipt (no pickle), a frame has a bounded size, and every payload is checked against the
dataclass it claims to be.
"""

import struct
from typing import Any

import msgspec

from perilune.core import messages
from perilune.core.errors import EngineError

MAX_FRAME = 256 << 20
HEADER = struct.Struct(">I")

_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        messages.Submit,
        messages.Cancel,
        messages.Shutdown,
        messages.Delta,
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


def encode(batch: list[Any]) -> bytes:
    """One frame with all messages of `batch`, header included."""
    body = _encoder.encode([(type(m).__name__, m) for m in batch])
    return HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME:
        raise EngineError(f"a message of {length} bytes exceeds the bound of {MAX_FRAME}")
    return int(length)


def decode(body: bytes) -> list[Any]:
    """The messages of a frame's body. EngineError if it is malformed."""
    try:
        return [_decoders[name].decode(payload) for name, payload in _frame_decoder.decode(body)]
    except (msgspec.DecodeError, KeyError) as e:
        raise EngineError(f"a malformed message reached this process: {e}") from e
