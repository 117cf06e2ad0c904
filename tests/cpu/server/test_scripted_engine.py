"""The engine's test double, behind the real EngineClient and its socket."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from perilune.core.config import EngineConfig
from perilune.core.errors import EngineError
from perilune.core.messages import Delta, joined
from perilune.core.sampling import SamplingParams
from perilune.engine.client import EngineClient
from perilune.server.openai.protocol import Predictions
from tests.scripted_engine import command
from tests.serving import HANG_SECONDS, served

END = 9


def with_engine(test: Callable[[EngineClient], Coroutine[Any, Any, None]], *options: str) -> None:
    async def main() -> None:
        start = EngineClient.start(
            Path("."), EngineConfig(), stop_token_ids=[END], command=command("--vocab", "512", *options)
        )
        client = await asyncio.wait_for(start, HANG_SECONDS)
        try:
            await asyncio.wait_for(test(client), HANG_SECONDS)
        finally:
            await client.close()

    asyncio.run(main())


async def answer(client: EngineClient, prompt: list[int], **params: Any) -> list[Delta]:
    return [delta async for delta in client.generate(prompt, SamplingParams(**params))]


def ids(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


@served(by=with_engine)
async def test_computed_answers(client: EngineClient) -> None:
    assert client.info.model == "scripted" and client.info.max_model_len == 262_144
    deltas = await answer(client, [5] * 100_000, max_tokens=20, ignore_eos=True, logprobs=1)
    assert len(ids(deltas)) == 20 and deltas[-1].finish_reason == "length"
    assert deltas[0].logprobs[0].token == deltas[0].tokens[0]
    assert ids(deltas) == ids(await answer(client, [5] * 100_000, max_tokens=20, ignore_eos=True))
    assert ids(deltas) != ids(await answer(client, [6] * 100_000, max_tokens=20, ignore_eos=True))
    assert all(0 <= token < 256 for token in ids(deltas))


@served(by=with_engine)
async def test_the_prefix_cache_is_simulated(client: EngineClient) -> None:
    async def cached(client: EngineClient, prompt: list[int], *keys: str) -> int:
        deltas = [d async for d in client.generate(prompt, SamplingParams(max_tokens=1), cache_keys=keys)]
        return deltas[0].cached_tokens

    prompt = list(range(200))
    assert [await cached(client, p) for p in (prompt, prompt, [*prompt[:130], 7])] == [0, 192, 128]
    assert await cached(client, prompt, "salt:a") == 0
    assert await cached(client, prompt, "salt:a") == 192


def test_a_script_is_played_and_cancelled_requests_end(tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text(
        "".join(
            json.dumps(line) + "\n" for line in ({"after": [1, 2], "tokens": [4, 5, 6, END, 8]}, {"tokens": [7] * 40})
        )
    )

    async def test(client: EngineClient) -> None:
        first = await answer(client, [3, 1, 2])
        assert ids(first) == [4, 5, 6, END] and first[-1].finish_reason == "stop"
        assert sum(d.drafted for d in first) == sum(d.accepted for d in first) == 2
        assert ids(await answer(client, [3])) == [7] * 40
        async with contextlib.aclosing(client.generate([3], SamplingParams())) as deltas:
            await anext(deltas)
        assert ids(await answer(client, [1, 2])) == [4, 5, 6, END]
        while client.stats.running or client.stats.generated_tokens < 48:
            await asyncio.sleep(0.01)

    with_engine(test, "--script", str(script), "--width", "3")


def test_a_damaged_script_is_one_clear_error(tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('{"tokens": "abc"}\n')
    with pytest.raises(EngineError, match=r"the script .*script\.jsonl cannot be read"):
        with_engine(lambda client: answer(client, [1]), "--script", str(script))  # type: ignore[arg-type, return-value]


@served("--width", "2", by=with_engine)
async def test_deltas_that_came_while_the_consumer_was_busy_are_one(client: EngineClient) -> None:
    before = await answer(client, [5, 6], max_tokens=40, ignore_eos=True, stop=("x",), logprobs=0)
    assert len(before) == 20 and all(d.drafted == 1 for d in before)  # the consumer counts each one's drafts
    found = []
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0)
    async for delta in client.generate([5, 6], params):
        found.append(delta)
        while client.stats.generated_tokens < 80:
            await asyncio.sleep(0.01)
    assert ids(found) == ids(before) and len(found) <= 3 and found[-1].finish_reason == "length"
    assert [entry.token for delta in found for entry in delta.logprobs] == ids(found)
    counted, whole = Predictions(), Predictions()
    for delta in before:
        counted.add(delta)
    for delta in found:
        whole.add(delta)
    assert counted == whole == Predictions(20, 20, 20)


@pytest.mark.parametrize("last", [Delta(1, finish_reason="error", error="why"), Delta(1, finish_reason="deadline")])
def test_an_error_is_not_joined_to_the_tokens_before_it(last: Delta) -> None:
    assert joined([Delta(1, (3,), cached_tokens=5), Delta(1, (4,)), last]) == [Delta(1, (3, 4), cached_tokens=5), last]
