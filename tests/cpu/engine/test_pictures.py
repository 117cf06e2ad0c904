"""Prompts with pictures, from the front doors to the tokens: against transformers, which computes them whole."""

import asyncio
import errno
import json
import os
import random
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from perilune import LLM, SamplingParams
from perilune.core.config import EngineConfig
from perilune.core.errors import CheckpointError, ConfigError, RequestError
from perilune.core.messages import Cancel, Media, Pixels, Submit
from perilune.core.sealed import SealedFile
from perilune.core.step import Slice, Work
from perilune.dist.group import ALONE
from perilune.engine import wire
from perilune.engine.client import EngineClient
from perilune.engine.vision import encoder as encoder_module
from perilune.engine.vision.cells import Cells
from perilune.engine.vision.encoder import Encoder
from perilune.engine.vision.open import open_tower, weight_bytes
from perilune.engine.vision.tower import sizes_of
from perilune.engine.wire import Channel
from perilune.media.decoder import Decoder, Picture
from perilune.media.limits import Limits
from perilune.model import names
from tests import oracle, seeing
from tests.cpu.media.pictures import file, scene
from tests.seeing import PAD, Seeing, picture

CONFIG: dict[str, Any] = dict(
    dtype="float32", device="cpu", max_model_len=256, max_num_seqs=8, threads=1, draft="off", vision_cache_gb=0.001,
    qk_norm_eps=1e-6,  # as transformers
)  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=6)
TEXTS = oracle.random_prompts(3, [5, 20, 7, 9, 33], vocab=PAD)
PICTURES = [picture(8, 8, 1), picture(4, 10, 2), picture(12, 6, 3), picture(2, 2, 4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return seeing.make(tmp_path_factory.mktemp("seeing") / "model", patch_limit=72)


@pytest.fixture(scope="module")
def llm(checkpoint: Seeing) -> Iterator[LLM]:
    with LLM(checkpoint.path, **CONFIG) as llm:
        yield llm


def prompt(texts: list[list[int]], pictures: list[Picture]) -> list[int]:
    """Text, picture, text, picture, .. text."""
    found = list(texts[0])
    for text, p in zip(texts[1:], pictures, strict=True):
        found += [PAD] * p.tokens + text
    return found


def encoder(llm: LLM) -> Encoder:
    assert llm._engine is not None and llm._engine.scheduler.encoder is not None
    return llm._engine.scheduler.encoder


# ---- against transformers


@pytest.mark.parametrize("how", [{}, {"max_step_tokens": 7}], ids=["whole prompts", "chunks of 7"])
def test_tokens_and_probabilities(checkpoint: Seeing, how: dict[str, Any]) -> None:
    cases = [
        (prompt(TEXTS[:2], PICTURES[:1]), PICTURES[:1]),
        (prompt(TEXTS, PICTURES), PICTURES),
        (TEXTS[1], []),
        (prompt([[], TEXTS[0]], PICTURES[1:2]), PICTURES[1:2]),
        (prompt([TEXTS[0], []], PICTURES[3:]), PICTURES[3:]),
    ]
    scored = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
    with LLM(checkpoint.path, **CONFIG, **how) as llm:
        found = llm.generate([p for p, _ in cases], scored, pictures=[shown for _, shown in cases])
    for (ids, shown), got in zip(cases, found, strict=True):
        assert list(got.token_ids) == checkpoint.greedy(ids, shown, 6)
        logits = checkpoint.logits([*ids, *got.token_ids], shown)[len(ids) - 1 : -1]
        want = logits.log_softmax(-1)[torch.arange(6), torch.tensor(got.token_ids)]
        assert [r.logprob for r in got.logprobs] == pytest.approx(want.tolist(), abs=1e-5)


@pytest.mark.parametrize("pad", [0, 7, 40], ids=["plain", "padded", "padded to more than a picture"])
@pytest.mark.parametrize("seed", range(3))
def test_slices_of_any_size_make_the_same_rows(
    checkpoint: Seeing, seed: int, pad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several pictures in turns, one cell or many at a time, in groups that do not divide them. `pad`: as on a GPU."""
    rng = random.Random(seed)
    monkeypatch.setattr(Cells, "GROUP_PATCHES", rng.choice((5, 12, 30)))
    with torch.inference_mode():
        tower = open_tower(checkpoint.path, torch.float32, torch.device("cpu"), ALONE)
        tower.model.pad, tower._sizes = pad, replace(sizes_of(tower.model), group=pad)
        tower.warm(96)
        assert bool(tower.measured()) and not tower._rows and not tower._passes
        at = {p.digest: 0 for p in PICTURES}
        left = list(PICTURES)
        while left:
            p = rng.choice(left)
            total, start = Cells(sizes_of(tower.model), len(p.patches)).total, at[p.digest]
            at[p.digest] = stop = min(start + rng.randint(1, 20), total)
            patches = memoryview(p.patches).cast("B") if start == 0 else None
            tower.run([Slice(0, p.digest, p.grid, start, stop, patches)], [])
            if stop == total:
                left = [other for other in left if other is not p]
        for p in PICTURES:
            work = Work(0, 0, 0, (PAD,) * p.tokens, (), False, 0, GREEDY, 0, media=((p.digest, 0, 0, p.tokens),))
            replaced = tower.replaced([work], [0])
            assert replaced is not None and replaced[0].tolist() == list(range(p.tokens))
            torch.testing.assert_close(replaced[1], checkpoint.rows(p), rtol=0, atol=1e-5)


def test_cached_blocks_are_those_of_the_same_pictures(checkpoint: Seeing, llm: LLM) -> None:
    """Text before a picture is shared by all; from the picture on, nothing with another picture."""
    texts = oracle.random_prompts(8, [40, 20], vocab=PAD)
    a, b = picture(8, 8, 11), picture(8, 8, 12)
    ids = prompt(texts, [a])
    assert len(ids) == 76
    found = [llm.generate(ids, GREEDY, pictures=[p])[0] for p in (a, b, a, b)]
    assert [c.cached_tokens for c in found] == [0, 32, 64, 64]
    assert [list(c.token_ids) for c in found] == [checkpoint.greedy(ids, [p], 6) for p in (a, b, a, b)]
    assert found[0].token_ids != found[1].token_ids
    once = encoder(llm).encoded
    llm.generate([*ids, *found[0].token_ids, 3, 4, *[PAD] * a.tokens, 5], GREEDY, pictures=[a, a])
    assert encoder(llm).encoded == once, "rows of the same picture are kept"


def test_all_answers_to_a_prompt_see_one_encoding(llm: LLM) -> None:
    before = encoder(llm).encoded
    p = picture(6, 6, 21)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=5)
    found = llm.generate(prompt(TEXTS[:2], [p]), params, n=4, pictures=[p])
    assert len(found) == 4 and encoder(llm).encoded == before + 1
    assert llm.generate(prompt(TEXTS[:2], [p]), params, pictures=[p])[0].token_ids == found[0].token_ids


def test_image_files_and_single_placeholders(checkpoint: Seeing, llm: LLM, tmp_path: Path) -> None:
    data = file(scene(130, 50))
    (tmp_path / "a.png").write_bytes(data)
    short = [*TEXTS[0], PAD, *TEXTS[1]]
    by_path, by_bytes = (llm.generate(short, GREEDY, pictures=[x])[0] for x in (tmp_path / "a.png", data))
    with Decoder(Limits.from_directory(checkpoint.path)) as decoder:
        decoded = decoder.decode(data)
    whole = prompt(TEXTS[:2], [decoded])
    assert len(whole) == len(short) - 1 + 10
    assert by_path.token_ids == by_bytes.token_ids == tuple(checkpoint.greedy(whole, [decoded], 6))
    assert by_bytes.cached_tokens > 0
    with pytest.raises(RequestError, match=r"cannot read the picture .*none.png: No such file"):
        llm.generate(short, GREEDY, pictures=[tmp_path / "none.png"])
    with pytest.raises(RequestError, match="SVG is not read"):
        llm.generate(short, GREEDY, pictures=[b"<svg></svg>"])


@pytest.mark.parametrize(
    ("ids", "shown", "says"),
    [
        ([1, PAD, 2], [], "media item 0, which does not exist"),
        ([1, 2], PICTURES[:1], "no placeholder for media item 0, which has 16 tokens"),
        ([1, PAD, PAD, 2], PICTURES[:1], "2 placeholder tokens for media item 0, which has 16 tokens"),
        ([[1, 2], [3]], [[], [], []], "2 prompts, but pictures for 3"),
    ],
)
def test_pictures_that_the_prompt_does_not_have_are_refused(llm: LLM, ids: Any, shown: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate(ids, GREEDY, pictures=shown)
    assert llm.generate(TEXTS[0], GREEDY)[0].finish_reason == "length"


def test_a_model_that_sees_nothing_says_so(checkpoint: Seeing, tiny: Path) -> None:
    with LLM(tiny, **CONFIG) as llm:
        assert not llm.info.media
        with pytest.raises(RequestError, match="does not see pictures: send text alone"):
            llm.generate([1, PAD, 2], GREEDY, pictures=PICTURES[:1])
    with LLM(checkpoint.path, **CONFIG, vision="off") as llm:
        assert not llm.info.media and "pictures are refused" in str(llm.info.choices)
        with pytest.raises(RequestError, match="does not see pictures"):
            llm.generate([1, PAD, 2], GREEDY, pictures=PICTURES[:1])
    with pytest.raises(ConfigError, match="vision_cache_gb=1e-05 is too small for one picture of up to 20 tokens"):
        LLM(checkpoint.path, **CONFIG | {"vision_cache_gb": 1e-5})


def test_memory_is_planned_for_the_tower_and_its_rows(checkpoint: Seeing, llm: LLM) -> None:
    tower = [t for name, t in load_file(checkpoint.path / "model.safetensors").items() if name.startswith(names.VISION)]
    assert weight_bytes(checkpoint.path, 4) == sum(t.nbytes for t in tower) > 0
    assert "vision 0.00" in next(reason for key, _, reason in llm.info.choices if key == "memory")
    with pytest.raises(ConfigError, match=r"the model does not fit: .* vision 90000.00.* would fit: vision=off"):
        LLM(checkpoint.path, **CONFIG | {"vision_cache_gb": 90_000})


def test_a_tower_that_cannot_be_read_is_one_line(checkpoint: Seeing, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint.path, tmp_path / "model")
    (path / "preprocessor_config.json").write_text('{"media_proc_cfg": {"patch_size": 16}}')
    with pytest.raises(CheckpointError, match=r"patches of 16 pixels in preprocessor_config.json, and of 14 in config"):
        LLM(path, **CONFIG)
    config = json.loads((path / "config.json").read_text())
    vision = config["vision_config"] | {"vt_num_hidden_layers": 4}
    (path / "config.json").write_text(json.dumps(config | {"vision_config": vision}))
    with pytest.raises(CheckpointError, match=r"the vision tower lacks .*; vision=off serves text without it"):
        LLM(path, **CONFIG)
    (path / "config.json").write_text(json.dumps(config | {"media_placeholder_token_id": 512}))
    with pytest.raises(CheckpointError, match="placeholder of pictures, 512, is outside of the vocabulary of 512"):
        LLM(path, **CONFIG)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> tuple[list[list[int]], list[list[Picture]], list[tuple[int, ...]]]:
    """Ten prompts with up to four pictures, and their answers one by one."""
    rng = random.Random(7)
    texts, ids, shown = oracle.random_prompts(9, [rng.randint(1, 30) for _ in range(60)], vocab=PAD), [], []
    for _ in range(10):
        some = [rng.choice(PICTURES) for _ in range(rng.randint(0, 4))]
        ids.append(prompt([texts.pop() for _ in range(len(some) + 1)], some))
        shown.append(some)
    return ids, shown, [llm.generate(i, GREEDY, pictures=s)[0].token_ids for i, s in zip(ids, shown)]


# ---- any order: whatever happens to requests on the way, each gets the tokens that it gets alone.


@pytest.mark.parametrize(
    "how",
    [
        dict(kv_blocks=18, block_size=16, max_step_tokens=64, max_num_seqs=6),
        dict(vision_cache_gb=1.1e-5, max_step_tokens=16, prefix_cache=False),
        dict(draft="suffix", draft_tokens=3),
        dict(kv_host_gb=0.01, kv_blocks=40, block_size=8),
    ],
    ids=["few blocks", "few rows", "drafts", "tiers"],
)
def test_tokens_are_the_same(checkpoint: Seeing, alone: Any, how: dict[str, Any]) -> None:
    ids, shown, expected = alone
    with LLM(checkpoint.path, **CONFIG | how) as llm:
        for _ in range(2):
            found = llm.generate(ids, GREEDY, pictures=shown)
            assert [c.token_ids for c in found] == expected
        assert llm._engine is not None
        llm._engine.scheduler.check_integrity()
        stats = llm._engine.stats()
        if "kv_host_gb" in how:
            assert sum(count for _, count, _, _ in stats.tiers)
        if "vision_cache_gb" in how:
            assert encoder(llm).encoded > len(PICTURES), "rows were dropped and made again"


def test_cancelled_while_it_is_encoded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "IDLE_SECONDS", 0.0)  # a cell at a time
    engine, p = llm._engine, picture(16, 16, 31)
    assert engine is not None
    engine.submit(Submit(10**6, tuple(prompt(TEXTS[:2], [p])), GREEDY, pictures=(Media.of(p),)))
    engine.step()
    engine.step()
    (want,) = engine.wants()
    engine.provide(Pixels(want.rid, want.item, memoryview(p.patches).cast("B")))
    for _ in range(3):
        assert engine.step() == []
    assert encoder(llm)._jobs
    engine.cancel(10**6)
    assert not engine.scheduler.has_work
    llm.generate(TEXTS[0], GREEDY)
    assert not encoder(llm)._jobs
    encoder(llm).check()


# ---- another process


def test_pixels_cross_when_they_are_wanted_and_again_after_a_crash(checkpoint: Seeing) -> None:
    p = picture(12, 10, 41)
    ids = prompt(TEXTS[:2], [p])
    expected = checkpoint.greedy(ids, [p], 6)
    sent: list[Any] = []

    async def main() -> None:
        client = await EngineClient.start(checkpoint.path, EngineConfig(**CONFIG), supervised=True)
        try:
            assert client.info.media and client.info.media_pad == PAD
            send = client._process.send
            client._process.send = lambda m: (sent.append(m), send(m))[1]  # type: ignore[method-assign]

            async def ask(pictures: list[Picture]) -> list[int]:
                return [t async for d in client.generate(ids, GREEDY, pictures=pictures) for t in d.tokens]

            assert await ask([p]) == await ask([p]) == expected
            assert [type(m).__name__ for m in sent] == ["Submit", "Pixels", "Submit"]
            with pytest.raises(RequestError, match="which has 4 tokens"):
                await ask([picture(4, 4, 1)])
            os.kill(client._process.process.pid, signal.SIGSTOP)
            asked = asyncio.create_task(ask([p]))
            await asyncio.sleep(0.05)
            os.kill(client._process.process.pid, signal.SIGKILL)
            assert await asked == expected and client.restarts == 1
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 200))


def test_pixels_that_cannot_be_mapped_fail_their_request_alone(
    checkpoint: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor() -> SealedFile:
        raise OSError(errno.EMFILE, "Too many open files")

    async def check(client: EngineClient, number: int, how: str) -> None:
        p, other = picture(12, 10, 42 + number), picture(8, 8, 62 + number)
        ids, others = prompt(TEXTS[:2], [p]), prompt(TEXTS[:2], [other])
        file = SealedFile.of(memoryview(p.patches.tobytes()[:-1]))
        if how == "unsealed":
            file = SealedFile.empty()
            file.write(memoryview(p.patches.tobytes()))
        elif how == "another kind":
            file = SealedFile(os.open(os.devnull, os.O_RDONLY))

        async def ask(ids: list[int], p: Picture) -> list[Any]:
            return [d async for d in client.generate(ids, GREEDY, pictures=[p])]

        with monkeypatch.context() as patch:
            if how == "none left":
                patch.setattr(SealedFile, "empty", no_descriptor)
            (last,) = await ask(ids, p if how == "none left" else replace(p, shared=(file, 0)))
        kept = p.patches.nbytes - 1 if how == "short" else 0
        assert last.finish_reason == "error", how
        assert f"{kept} bytes of pixels instead of {p.patches.nbytes}" in last.error
        wrong = ask(ids, replace(p, shared=(file, 0)))
        right, _ = await asyncio.gather(ask(others, other), wrong)
        assert [t for d in right for t in d.tokens] == checkpoint.greedy(others, [other], 6)
        assert [t for d in await ask(ids, p) for t in d.tokens] == checkpoint.greedy(ids, [p], 6)

    async def main() -> None:
        client = await EngineClient.start(checkpoint.path, EngineConfig(**CONFIG))
        try:
            for number, how in enumerate(("short", "unsealed", "another kind", "none left")):
                await check(client, number, how)
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 200))


def test_a_frame_that_comes_slowly_delays_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(theirs)
        submit = Submit(1, (100_000,) * 60_000, GREEDY)
        first, large = wire.encode([Cancel(1)]), wire.encode([submit])
        assert len(large) > 300_000
        ours.sendall(first + large[:50_000])
        assert channel.receive(0.0) == [Cancel(1)]
        assert channel.receive(0.0) == []
        ours.sendall(large[50_000:150_000])
        assert channel.receive(0.01) == []
        threading.Timer(0.05, ours.sendall, [large[150_000:] + first]).start()
        found: list[Any] = []
        while len(found) < 2:
            found += channel.receive(None)
        assert found == [submit, Cancel(1)]
        ours.close()
        with pytest.raises(EOFError):
            channel.receive(None)
