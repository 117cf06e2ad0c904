"""Several decoders for the pictures and videos of many requests: each decodes one file at a time, off the event
loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from perilune.core.messages import Video
from perilune.media.decoder import TURN_SECONDS, Decoder, Picture
from perilune.media.limits import Limits
from perilune.media.refusal import busy

T = TypeVar("T")
INTERRUPT_SECONDS = 0.1  # between tries to end a worker: at the first it may not have started


class DecoderPool:
    """At most `count` decoders, the next one made when all others are busy. Belongs to one event loop."""

    def __init__(self, limits: Limits, count: int) -> None:
        self._limits = limits
        self._room = asyncio.Semaphore(count)  # waiting callers are served in order
        # Half of the decoders are left to pictures: a video may take 45 s, and 512 MB that no budget counts meanwhile.
        self._videos = asyncio.Semaphore(max(1, count // 2))
        self._idle: list[Decoder] = []  # the last one used first: a quiet server keeps to one worker
        self.active = 0

    async def decode(self, data: bytes) -> Picture:
        """As Decoder.decode. A caller that is cancelled ends the work on its picture."""
        return await self._run(Decoder.decode, data)

    async def decode_video(self, data: bytes) -> Video:
        """As Decoder.decode_video, and as `decode`."""
        async with _turn(self._videos):
            return await self._run(Decoder.decode_video, data)

    async def _run(self, decode: Callable[[Decoder, bytes], T], data: bytes) -> T:
        async with _turn(self._room):
            return await self._decoded(decode, data)

    async def _decoded(self, decode: Callable[[Decoder, bytes], T], data: bytes) -> T:
        decoder = self._idle.pop() if self._idle else Decoder(self._limits)
        self.active += 1
        work = asyncio.ensure_future(asyncio.to_thread(decode, decoder, data))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            while not work.done():
                decoder.interrupt()
                with contextlib.suppress(asyncio.CancelledError):  # a second one changes nothing
                    await asyncio.wait((work,), timeout=INTERRUPT_SECONDS)
            work.exception()  # marks the error as read: the worker was ended above
            raise
        finally:
            self.active -= 1
            self._idle.append(decoder)

    def close(self) -> None:
        """Ends the workers; no picture may be in work."""
        for decoder in self._idle:
            decoder.close()
        self._idle.clear()


@contextlib.asynccontextmanager
async def _turn(room: asyncio.Semaphore) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(TURN_SECONDS):
            await room.acquire()
    except TimeoutError:
        raise busy("too many images are being decoded: try again") from None
    try:
        yield
    finally:
        room.release()
