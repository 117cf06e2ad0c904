"""Reads the pictures and videos of a request: takes their bytes from the request or fetches them, decodes them within
bounds, and counts their memory until the answer has ended."""

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from perilune.core.config import ServerConfig
from perilune.core.errors import RequestError
from perilune.core.messages import EngineInfo, Picture, Video
from perilune.media.data_url import CHUNK_CHARS, of_data_url
from perilune.media.limits import Limits
from perilune.media.pool import DecoderPool
from perilune.server.call import current
from perilune.server.pictures.budget import Budget, Share, nbytes
from perilune.server.pictures.parts import Part, is_address, unsupported

if TYPE_CHECKING:
    from perilune.server.pictures.fetch import Fetcher

MAX_DECODERS = 4
FETCHES = 8  # files that are fetched or decoded at a time, of up to 32 MB each
TURN_SECONDS = 30.0  # longest wait to fetch a picture while those of other requests are fetched
PER_REQUEST = 4  # pictures of one request in work at a time, so that requests share the decoders
REQUEST_SECONDS = 60.0  # time limit for all pictures and videos of a request
SMALL_CHARS = 16_384  # a data: URL up to this length is decoded on the event loop, a longer one on a thread


class PictureReader:
    """Reads pictures for one served model. Belongs to one event loop."""

    def __init__(self, limits: Limits, config: ServerConfig) -> None:
        self.budget = Budget(config.media_memory_mb << 20)
        self.pool = DecoderPool(limits, min(MAX_DECODERS, os.cpu_count() or 1))
        self.max_pictures = config.max_pictures
        self._fetcher = _fetcher(config.media_allow_host)
        self._fetches = asyncio.Semaphore(FETCHES)

    def check(self, parts: Sequence[Part], info: EngineInfo, name: str) -> None:
        """RequestError, before anything is decoded, if the model `name` sees no pictures or they are too many."""
        if parts and not info.media:
            raise unsupported(
                parts[0].where,
                f"the model {name!r} does not see pictures: send text only, or serve a model that does "
                "(moonshotai/Kimi-K2.6)",
            )
        if len(parts) > self.max_pictures:
            raise RequestError(
                f"{len(parts)} pictures in one request, and at most {self.max_pictures} are read: send fewer",
                param=parts[self.max_pictures].where,
                code="too_many_pictures",
            )

    async def read(self, parts: Sequence[Part], share: Share) -> list[Picture | Video]:
        """The decoded pictures and videos, in order; they count in `share`. RequestError names the wrong part."""
        text = sum(len(part.url) for part in parts)
        share.take(text)
        made: dict[int, Picture | Video] = {}
        left = iter(enumerate(parts))

        async def some() -> None:
            for i, part in left:
                made[i] = await self._medium(part, share)

        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                tasks = [asyncio.create_task(some()) for _ in range(min(PER_REQUEST, len(parts)))]
                try:
                    await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
        except TimeoutError:
            raise RequestError(
                f"decoding the {len(parts)} pictures of this request takes longer than {REQUEST_SECONDS:g} s: "
                "send fewer, or smaller ones",
                param=parts[0].where,
                code="too_many_pictures",
            ) from None
        share.give(text)
        return [made[i] for i in range(len(parts))]

    async def close(self) -> None:
        if self._fetcher is not None:
            await self._fetcher.close()
        await asyncio.to_thread(self.pool.close)

    async def _medium(self, part: Part, share: Share) -> Picture | Video:
        what = "video" if part.is_video else "image"
        try:
            if part.url[:5].lower() == "data:":
                medium = await self._inline(part.url, part.is_video)
            elif not is_address(part.url):
                example = "video/mp4" if part.is_video else "image/png"
                raise RequestError(
                    f"the {what} must be sent as a data: URL, 'data:{example};base64,' and its file in base64",
                    code=f"invalid_{what}_url",
                )
            elif self._fetcher is None:
                raise RequestError(
                    f"the {what} must be sent as a data: URL: this server fetches none (serve --media-allow-host HOST "
                    "allows a host)",
                    code=f"invalid_{what}_url",
                )
            else:
                async with self._turn():
                    medium = await self._decode(await self._fetcher.fetch(part.url), part.is_video)
            share.take(nbytes(medium))
            return medium
        except RequestError as e:
            # The fetcher does not know whether a file should be a picture or a video: correct its error code.
            code = "invalid_video_url" if part.is_video and e.code == "invalid_image_url" else e.code
            raise RequestError(
                f"{part.where}: {e}", param=part.where, code=code, status=e.status, retry_seconds=e.retry_seconds
            ) from e

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Holds one of FETCHES slots; RequestError 503 if none is free within TURN_SECONDS."""
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._fetches.acquire()
        except TimeoutError:
            raise RequestError(
                "too many pictures are being fetched: try again", code="server_busy", status=503, retry_seconds=5
            ) from None
        try:
            yield
        finally:
            self._fetches.release()

    async def _inline(self, url: str, is_video: bool) -> Picture | Video:
        """The picture or video of a data: URL; cached for the next request of the same account with it."""
        account, small = current().account.name, len(url) < SMALL_CHARS
        key = _key(account, url, is_video) if small else await asyncio.to_thread(_key, account, url, is_video)
        if (kept := self.budget.get(key)) is not None:
            return kept
        data = of_data_url(url, is_video) if small else await asyncio.to_thread(of_data_url, url, is_video)
        medium = await self._decode(data, is_video)
        self.budget.keep(key, medium)
        return medium

    async def _decode(self, data: bytes, is_video: bool) -> Picture | Video:
        return await self.pool.decode_video(data) if is_video else await self.pool.decode(data)


def _key(account: str, url: str, is_video: bool = False) -> bytes:
    found = hashlib.sha256(account.encode() + (b"\0video\0" if is_video else b"\0"))
    for at in range(0, len(url), CHUNK_CHARS):
        found.update(url[at : at + CHUNK_CHARS].encode("utf-8", "surrogatepass"))
    return found.digest()


def _fetcher(hosts: Sequence[str]) -> "Fetcher | None":
    if not hosts:
        return None
    from perilune.server.pictures.fetch import Fetcher  # imported here: it imports httpx, 0.1 s

    return Fetcher(hosts)
