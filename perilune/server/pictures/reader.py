"""The pictures of a request: their bytes, from the request or fetched; decoded within bounds; counted until the end."""

import asyncio
import binascii
import hashlib
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from perilune.core.config import ServerConfig
from perilune.core.errors import RequestError
from perilune.core.messages import EngineInfo, Picture
from perilune.media.decoder import MAX_FILE_BYTES
from perilune.media.limits import Limits
from perilune.media.pool import DecoderPool
from perilune.server.call import current
from perilune.server.pictures.budget import Budget, Share
from perilune.server.pictures.parts import Part, unsupported

if TYPE_CHECKING:
    from perilune.server.pictures.fetch import Fetcher

MAX_DECODERS = 4
FETCHES = 8  # at once; with their files, of up to 32 MB each, until these are decoded
PER_REQUEST = 4  # pictures of one request in work at once: the others' requests take turns with it
REQUEST_SECONDS = 60.0  # for all pictures of a request
CHUNK_CHARS = 1 << 20  # of base64 decoded in one call, which holds the interpreter's lock
SMALL_CHARS = 16_384  # of a data: URL that is decoded on the event loop
MAX_HEAD_CHARS = 200  # of a data: URL before its comma
_HEAD = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w.+-]+=[^;,]*)*(;base64)?,", re.IGNORECASE)


class PictureReader:
    """Of one served model. Belongs to one event loop."""

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

    async def read(self, parts: Sequence[Part], share: Share) -> list[Picture]:
        """The decoded pictures, in order; they count in `share`. RequestError names the part that is wrong."""
        text = sum(len(part.url) for part in parts)
        share.take(text)
        made: dict[int, Picture] = {}
        left = iter(enumerate(parts))

        async def some() -> None:
            for i, part in left:
                made[i] = await self._picture(part, share)

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

    async def _picture(self, part: Part, share: Share) -> Picture:
        try:
            if part.url[:5].lower() == "data:":
                picture = await self._inline(part.url)
            elif self._fetcher is None:
                raise RequestError(
                    "the image must be sent as a data: URL: this server fetches none (serve --media-allow-host HOST "
                    "allows a host)",
                    code="invalid_image_url",
                )
            else:
                async with self._fetches:
                    picture = await self.pool.decode(await self._fetcher.fetch(part.url))
            share.take(picture.patches.nbytes)
            return picture
        except RequestError as e:
            raise RequestError(
                f"{part.where}: {e}", param=part.where, code=e.code, status=e.status, retry_seconds=e.retry_seconds
            ) from e

    async def _inline(self, url: str) -> Picture:
        """The picture of a data: URL, kept for the same account's next request with it."""
        account, small = current().account.name, len(url) < SMALL_CHARS
        key = _key(account, url) if small else await asyncio.to_thread(_key, account, url)
        if (kept := self.budget.get(key)) is not None:
            return kept
        picture = await self.pool.decode(of_data_url(url) if small else await asyncio.to_thread(of_data_url, url))
        self.budget.keep(key, picture)
        return picture


def _key(account: str, url: str) -> bytes:
    found = hashlib.sha256(account.encode() + b"\0")
    for at in range(0, len(url), CHUNK_CHARS):
        found.update(url[at : at + CHUNK_CHARS].encode("utf-8", "surrogatepass"))
    return found.digest()


def _fetcher(hosts: Sequence[str]) -> "Fetcher | None":
    if not hosts:
        return None
    from perilune.server.pictures.fetch import Fetcher  # with httpx, which takes 0.1 s to import

    return Fetcher(hosts)


def of_data_url(url: str) -> bytes:
    """The file in a data: URL; RequestError if it is not one. The type that the URL says is not read: clients often say
    image/jpeg for every file, and the bytes say what it is.

    Takes 5 ms per MB: to be called on a thread if it is long.
    """
    head = _HEAD.match(url[:MAX_HEAD_CHARS])
    if head is None or head[2] is None:
        raise _wrong("its URL must be 'data:image/png;base64,...', with the type of the file")
    data = bytearray()
    text = url[head.end() :]
    if any(space in text for space in "\n\r "):  # as the command base64 writes lines
        text = "".join(text.split())
    if len(text) * 3 // 4 > MAX_FILE_BYTES + 2:
        raise _wrong(f"the file has more than {MAX_FILE_BYTES >> 20} MB")
    for at in range(0, len(text), CHUNK_CHARS):
        try:
            data += binascii.a2b_base64(text[at : at + CHUNK_CHARS], strict_mode=True)
        except ValueError:  # of binascii, and of characters beyond ASCII
            raise _wrong("its data is not base64") from None
    return bytes(data)


def _wrong(why: str) -> RequestError:
    return RequestError(f"the image cannot be used: {why}", code="invalid_image")
