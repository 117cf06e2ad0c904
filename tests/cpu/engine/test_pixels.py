"""Pixels on their way to the engine process: they arrive as they are, and no descriptor or copy of them stays behind.

The engine here computes nothing. The first id of a prompt says what it does with the pixels that it asked for:
1  answers with 1 if all of them have their digest, else 0
2  keeps them and does not answer
3  asks for them again and again, and takes none
A prompt without pictures is answered with its number of descriptors, mappings of pixels and KB of memory of its own.
"""

import asyncio
import contextlib
import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perilune.core.config import EngineConfig
from perilune.core.errors import EngineUnavailable, RequestError
from perilune.core.messages import Picture
from perilune.core.sampling import SamplingParams
from perilune.core.sealed import SealedFile
from perilune.engine.client import EngineClient
from perilune.media import decoder
from perilune.media.decoder import Decoder
from perilune.media.limits import Limits
from tests import seeing
from tests.cpu.media.pictures import file, scene
from tests.serving import served

PAD = 5
ENGINE = """
import os, re, socket, sys, time
import numpy as np
from perilune.core.messages import Cancel, Delta, EngineInfo, Pixels, Shutdown, Submit, Want
from perilune.engine.wire import Channel
from perilune.media.patches import digest

def held():
    status = open("/proc/self/status").read()
    maps = open("/proc/self/maps").read().count("memfd:patches")
    return len(os.listdir("/proc/self/fd")), maps, int(re.search(r"RssAnon:\\s*(\\d+)", status)[1])

channel, live = Channel(socket.socket(fileno=int(sys.argv[1]))), {}
channel.read_body()
channel.send([EngineInfo("pixels", 10**6, 10**6, (), 64, 16, 4, media_pad=5)])
while True:
    for message in channel.receive(None):
        if isinstance(message, Shutdown):
            sys.exit()
        elif isinstance(message, Cancel):
            live.pop(message.rid, None)
        elif isinstance(message, Submit) and not message.pictures:
            channel.send([Delta(message.rid, held(), finish_reason="length")])
        elif isinstance(message, Submit):
            live[message.rid] = message, {}
            wants = [Want(message.rid, i) for i in range(len(message.pictures))]
            channel.send(wants * (5000 if message.prompt[0] == 3 else 1))
            if message.prompt[0] == 3:
                time.sleep(1000)
        elif isinstance(message, Pixels) and message.rid in live:
            submit, pixels = live[message.rid]
            pixels[message.item] = message.patches
            if submit.prompt[0] == 2:
                channel.send([Delta(message.rid, (2,))])
            elif len(pixels) == len(submit.pictures):
                same = [
                    digest(np.frombuffer(pixels[i], np.uint8).reshape(-1, 3, 14, 14), p.grid) == p.digest
                    for i, p in enumerate(submit.pictures)
                ]
                channel.send([Delta(message.rid, (int(all(same)),), finish_reason="length")])
                del live[message.rid], submit, pixels, same
    message = None
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")


def with_client(test: Callable[[EngineClient], Coroutine[Any, Any, None]], **how: Any) -> None:
    async def main() -> None:
        client = await EngineClient.start(Path(), EngineConfig(), command=(sys.executable, "-c", ENGINE), **how)
        try:
            await test(client)
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 200))


async def ask(client: EngineClient, kind: int, pictures: list[Picture]) -> list[int]:
    ids = [kind, *(t for p in pictures for t in [PAD] * p.tokens + [6])]
    return [t async for d in client.generate(ids, SamplingParams(), pictures=pictures) for t in d.tokens]


async def keep(client: EngineClient, pictures: list[Picture], count: int) -> None:
    """Cancels the request when the engine has got its pixels `count` times."""
    ids = [2, *(t for p in pictures for t in [PAD] * p.tokens + [6])]
    async with contextlib.aclosing(client.generate(ids, SamplingParams(), pictures=pictures)) as deltas:
        while count > 0:
            count -= len((await anext(deltas)).tokens)


def held() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:patches")


@functools.cache
def turned(quarters: int) -> bytes:
    return file(scene(1792, 1792).rotate(90 * quarters))


def large(seed: int) -> Picture:
    """9.6 MB, as the decoder gives it."""
    with Decoder(Limits()) as decoder:
        return decoder.decode(turned(seed % 4))


def neighbours() -> list[Picture]:
    """Pictures that lie one after the other in one file, as chunks of a video do."""
    found = [seeing.picture(2 * n, 8, n, frames=n) for n in (1, 2, 3)]
    whole, start = SealedFile.of(memoryview(b"".join(p.patches.tobytes() for p in found))), 0
    for p in found:
        p.shared, start = (whole, start), start + p.patches.nbytes
    return found


@served(by=with_client)
async def test_pixels_arrive_as_they_are(client: EngineClient) -> None:
    first = large(0)
    assert first.shared is not None and first.patches.nbytes == 9_633_792
    alone = seeing.picture(6, 4, 9)
    assert alone.shared is None
    for pictures in ([first], neighbours(), [alone], [first, alone, *neighbours(), first]):
        assert await ask(client, 1, pictures) == [1]
    wrong = neighbours()
    wrong[1].shared = wrong[0].shared
    assert await ask(client, 1, wrong) == [0]


def test_nothing_stays_behind() -> None:
    """After answers, cancelled and refused requests, and an engine that was killed with pixels in hand."""
    before = held()

    async def test(client: EngineClient) -> None:
        picture, small = large(0), seeing.picture(8, 8, 1)
        await ask(client, 1, [picture, small])
        ours, theirs = held(), await ask(client, 0, [])
        for i in range(50):
            assert await ask(client, 1, [large(i), small] if i % 10 == 0 else [picture, small]) == [1]
        for _ in range(10):
            await keep(client, [picture, small], 2)
            waiting = asyncio.create_task(ask(client, 2, [picture, small]))
            await asyncio.sleep(0.001)  # cancelled while pixels are on their way
            waiting.cancel()
            await asyncio.wait([waiting])
            with pytest.raises(RequestError, match="which has 4096 tokens"):
                [_ async for _ in client.generate([1, PAD], SamplingParams(), pictures=[picture])]
        await asyncio.sleep(0.1)
        await ask(client, 1, [small])
        assert held() == ours and (await ask(client, 0, []))[:2] == theirs[:2]
        waiting = asyncio.create_task(keep(client, [picture, small], 3))
        while (await ask(client, 0, []))[1] < 1:
            await asyncio.sleep(0.01)
        os.kill(client._process.process.pid, signal.SIGSTOP)
        one = asyncio.create_task(ask(client, 1, [picture]))  # it produced nothing: it runs again
        await asyncio.sleep(0.05)
        os.kill(client._process.process.pid, signal.SIGKILL)
        with pytest.raises(EngineUnavailable):
            await waiting
        assert await one == [1]
        assert client.restarts == 1 and held() == ours

    with_client(test, supervised=True)
    assert held() == before


@served(by=with_client)
async def test_the_engine_maps_and_does_not_copy(client: EngineClient) -> None:
    pictures = [large(i) for i in range(4)]
    await ask(client, 1, pictures)
    _, maps, before = await ask(client, 0, [])
    async with contextlib.aclosing(
        client.generate([2, *[PAD] * 4096, 6], SamplingParams(), pictures=pictures[:1])
    ) as one:
        await anext(one)
        waiting = asyncio.create_task(ask(client, 2, pictures))
        while (now := await ask(client, 0, []))[1] < maps + 5:
            await asyncio.sleep(0.01)
        assert now[2] - before < 5_000, "KB; the pixels have 48,000"
        waiting.cancel()
        await asyncio.wait([waiting])


@served(by=with_client)
async def test_an_engine_that_takes_no_pixels_is_ended(client: EngineClient) -> None:
    before = held()[0]
    with pytest.raises(EngineUnavailable, match="pixels cannot be sent to the engine: Resource temporarily un"):
        await ask(client, 3, [large(0)])
    assert held()[0] < before, "its sockets are closed"


def test_small_pictures_keep_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    with Decoder(Limits()) as reader:
        data = file(scene(300, 300))
        reader.decode(data)
        before = held()
        kept = [reader.decode(data) for _ in range(9)]
        assert held() == before and all(p.shared is None and not p.patches.flags.writeable for p in kept)
        monkeypatch.setattr(decoder, "COPIED_BYTES", 1)
        shared = reader.decode(data)
        assert shared.shared is not None and np.array_equal(shared.patches, kept[0].patches)
