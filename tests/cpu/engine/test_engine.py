"""The engine through its two doors: `LLM` in this process, `EngineClient` over a socket to another."""

import asyncio
import contextlib
import gc
import itertools
import math
import shutil
import sys
import weakref
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from perilune import LLM, SamplingParams
from perilune.core.config import EngineConfig
from perilune.core.errors import CheckpointError, ConfigError, EngineError, RequestError
from perilune.core.messages import Cancel, Delta, EngineInfo, EngineStats, Failed, Shutdown, Submit
from perilune.core.step import TokenLogprob
from perilune.engine import build, wire
from perilune.engine.client import EngineClient
from perilune.engine.sampler import uniform
from perilune.engine.step_times.pacing import Pacer
from tests import oracle

POISON = 7  # the token whose embedding is NaN in the `poisoned` checkpoint
CONFIG: dict[str, Any] = dict(dtype="float32", device="cpu", max_model_len=256, max_num_seqs=8, threads=1)


def poison(model: Path, path: Path) -> Path:
    """A copy of the model at `path`, in which token POISON makes everything NaN."""
    shutil.copytree(model, path)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = math.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def poisoned(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return poison(tiny, tmp_path_factory.mktemp("poisoned") / "model")


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Any:
    with LLM(tiny, **CONFIG) as llm:
        yield llm


PROMPTS = [[t for t in p if t != POISON] for p in oracle.random_prompts(5, [9, 30, 17, 3])]


# ---- LLM


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=s, max_tokens=10) for s in range(4)]
    together = [c.token_ids for c in llm.generate(PROMPTS, params)]
    alone = [llm.generate(p, q)[0].token_ids for p, q in zip(PROMPTS, params)]
    assert together == alone
    other = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, top_p=0.9, seed=99, max_tokens=10))
    assert other[0].token_ids != alone[0]


def test_a_prompt_in_parts_beside_others_gives_the_same_tokens(
    tiny: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any size, or none for a step: what a pacer grants where steps take long."""
    sizes, granted = itertools.cycle((0, 1, 7, 2, 64)), set[int]()

    class Script(Pacer):
        def prompt_tokens(self, decoding: int, prompts: Sequence[tuple[int, int, float]]) -> int:
            granted.add(size := next(sizes) if decoding else 5)
            return size

    monkeypatch.setattr(build, "Pacer", Script)
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=10, ignore_eos=True) for s in range(8)]
    expected = [c.token_ids for c in llm.generate(PROMPTS * 2, params)]
    with LLM(tiny, **CONFIG, draft="suffix", draft_tokens=2, kv_blocks=33, block_size=8) as cut:
        assert [c.token_ids for c in cut.generate(PROMPTS * 2, params)] == expected
    assert granted == {0, 1, 2, 5, 7, 64}


def test_requests_without_a_seed_differ(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10)
    assert len({c.token_ids for c in llm.generate([PROMPTS[0]] * 4, params)}) == 4


def test_logprobs_agree_with_score(llm: LLM) -> None:
    (got,) = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=6, logprobs=3))
    scores = llm.score([*PROMPTS[1], *got.token_ids])[-6:]
    assert [r.logprob for r in got.logprobs] == pytest.approx(scores, abs=1e-5)
    for record in got.logprobs:
        assert len(record.top) == 3
        assert record.top[0] == (record.token, pytest.approx(record.logprob))


def test_cached_tokens_are_shared_by_calls_of_equal_keys(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2)
    prompt = [int(t) for t in oracle.random_prompts(77, [50])[0] if t != POISON][:40]
    calls = [(), ("salt:a",), (), ("salt:a",), ("salt:b",), ("salt:b", "image:1"), ["salt:b"]]
    found = [llm.generate(prompt, params, cache_keys=keys)[0] for keys in calls]
    assert [c.cached_tokens for c in found] == [0, 0, 32, 32, 0, 0, 32]
    assert len({c.token_ids for c in found}) == 1


def test_stop_token_ends_a_request_and_is_reported(llm: LLM) -> None:
    (free,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=8))
    third = free.token_ids[2]
    (cut,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(third,)))
    end = free.token_ids.index(third) + 1
    assert cut.token_ids == free.token_ids[:end] and cut.finish_reason == "stop"
    assert free.finish_reason == "length" and free.text is None


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_an_array_is_a_prompt_or_several(llm: LLM, array: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    expected = llm.generate([[5, 6, 7], [8, 9, 10]], params)
    assert llm.generate(array([[5, 6, 7], [8, 9, 10]]), params) == expected
    assert llm.generate(array([5, 6, 7]), params)[0].token_ids == expected[0].token_ids


def test_a_stop_string_in_the_last_token_is_reported(path: Path) -> None:
    with LLM(path, device="cpu", threads=1, draft="off", max_model_len=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (free,) = llm.generate("one two three four", params)
        assert free.text is not None and free.finish_reason == "length"
        (cut,) = llm.generate("one two three four", replace(params, stop=(free.text,)))
        assert (cut.text, cut.finish_reason) == ("", "stop") and cut.token_ids == free.token_ids


class Lost:
    """Ranks of which one is lost between two steps."""

    failure: str | None = None

    def check(self) -> None:
        if self.failure is not None:
            raise EngineError(self.failure)

    def read(self, digest: int) -> None:
        pass

    explained = contextlib.nullcontext


def test_a_rank_that_is_lost_between_steps_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ranks = llm._engine, Lost()
    assert engine is not None
    step = engine.step

    def loses() -> list[Delta]:
        deltas = step()
        ranks.failure = "rank 1 ended" if deltas else None
        return deltas

    monkeypatch.setattr(engine, "_ranks", ranks)
    monkeypatch.setattr(engine, "step", loses)
    with pytest.raises(EngineError, match="rank 1 ended"):
        llm.generate([5, 6, 7], SamplingParams(max_tokens=8))
    monkeypatch.undo()
    engine.step()  # the step in flight


def test_the_context_is_the_limit_when_no_other_is_given(llm: LLM) -> None:
    (got,) = llm.generate([1] * 250, SamplingParams(temperature=0))
    assert len(got.token_ids) == 6 and got.finish_reason == "length"


@pytest.mark.parametrize(
    "prompt, says", [([], "empty"), ([1] * 256, "256 tokens"), ([512], "between 0 and 511"), ("text", "tiktoken")]
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM, prompt: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate([PROMPTS[0], prompt])
    assert len(llm.generate(PROMPTS[0], SamplingParams(max_tokens=2))[0].token_ids) == 2


def test_nan_fails_its_own_request_only_and_is_not_cached(poisoned: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=5)
    bad = [*range(100, 140), POISON, *range(140, 180)]
    with LLM(poisoned, **CONFIG) as llm:
        expected = [c.token_ids for c in llm.generate(PROMPTS, greedy)]
        with pytest.raises(EngineError, match="NaN"):
            llm.generate([*PROMPTS, bad], greedy)
        with pytest.raises(EngineError, match="NaN"):
            llm.score(bad)
        assert [c.token_ids for c in llm.generate(PROMPTS, greedy)] == expected
        # The same prefix up to the poison is computed anew: nothing of the failed request was kept.
        (again,) = llm.generate(bad[:40], greedy)
        assert again.cached_tokens == 0


def test_two_models_and_closing(tiny: Path) -> None:
    first, second = LLM(tiny, **CONFIG), LLM(tiny, **CONFIG, ops={"mla_absorbed": "reference"})
    greedy = SamplingParams(temperature=0, max_tokens=4)
    assert first.generate(PROMPTS, greedy) == second.generate(PROMPTS, greedy)
    first.close()
    first.close()
    with pytest.raises(ConfigError, match="closed"):
        first.generate(PROMPTS, greedy)
    assert second.generate(PROMPTS[0], greedy)
    second.close()


def test_closing_frees_weights_and_cache_at_once(tiny: Path) -> None:
    """Not when the garbage collector next runs: on a GPU the memory is wanted for the next model."""
    llm = LLM(tiny, **CONFIG)
    runner = llm._engine.runner
    held = [weakref.ref(t) for t in (runner.pages.data, runner.model.weights.lm_head.weight, runner.model.cos)]
    del runner
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=2))
    gc.disable()
    try:
        llm.close()
        assert [ref() for ref in held] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "config, says",
    [
        (dict(max_sequences=3), "unknown config key 'max_sequences'"),
        (dict(ops={"mla": "fast"}), "mla"),
        (dict(ops={"linear": "fast"}), "fast"),
        (dict(dtype="float16"), "dtype"),
        (dict(device="tpu"), "device"),
        (dict(max_model_len=10**6), "max_model_len"),
        (dict(kv_blocks=10**12), "kv_blocks"),
        (dict(tp=3), "3 ranks"),
        (dict(draft="eagle3"), "draft"),
    ],
)
def test_a_bad_configuration_is_one_clear_error(tiny: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(tiny, **config)


def test_bfloat16_runs_and_agrees_roughly(tiny: Path, llm: LLM) -> None:
    with LLM(tiny, **(CONFIG | dict(dtype="bfloat16"))) as low:
        got, expected = torch.tensor(low.score(PROMPTS[1])), torch.tensor(llm.score(PROMPTS[1]))
    # bf16 keeps 8 bits: with logits of about 1 log-probabilities agree to a few hundredths, but for tokens at which
    # the router's choice is close and falls on another expert.
    difference = (got - expected).abs()
    assert 0 < difference.mean() < 0.03 and difference.max() < 0.5


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 200))


# An engine process that waits for the next message after each delta of a request that ignores ends: on a busy machine
# its answer would otherwise be complete before the test has cancelled it, or killed the process.
WAITING = """
from perilune.engine import process
submit, step, receive = process.Engine.submit, process.Engine.step, process.Channel.receive
held, waits = set(), []

def submitted(engine, message):
    if message.params.ignore_eos:
        held.add(message.rid)
    submit(engine, message)

def stepped(engine):
    deltas = step(engine)
    waits.extend(delta for delta in deltas if delta.rid in held)
    return deltas

def received(channel, wait_seconds):
    wait_seconds = None if waits else wait_seconds
    waits.clear()
    return receive(channel, wait_seconds)

process.Engine.submit, process.Engine.step, process.Channel.receive = submitted, stepped, received
process.main()
"""


async def start_waiting(path: Path) -> EngineClient:
    return await EngineClient.start(path, EngineConfig(**CONFIG), command=(sys.executable, "-c", WAITING))


async def collect(client: EngineClient, prompt: list[int], params: SamplingParams) -> list[int]:
    return [t async for d in client.generate(prompt, params) for t in d.tokens]


# ---- client


def test_a_day_in_the_life(tiny: Path, llm: LLM) -> None:
    """Concurrent requests, an abandoned one, a refused one, statistics, shutdown."""

    async def work() -> None:
        client = await start_waiting(tiny)
        assert client.alive and client.info.max_model_len == 256
        while not client.stats.blocks_total:  # /metrics has all figures before the first request
            await asyncio.sleep(0.01)
        params = SamplingParams(temperature=0, max_tokens=12)
        expected = [list(c.token_ids) for c in llm.generate(PROMPTS, params)]
        assert await asyncio.gather(*(collect(client, p, params) for p in PROMPTS)) == expected

        hits = []
        for keys in (("salt:a",), ("salt:a",), ("salt:b",)):
            stream = client.generate(PROMPTS[1], params, cache_keys=keys)
            hits.append(sum([d.cached_tokens async for d in stream]))
        assert hits == [0, 16, 0]

        before = client.stats.generated_tokens
        abandoned = client.generate(PROMPTS[0], SamplingParams(max_tokens=240, ignore_eos=True))
        assert (await anext(abandoned)).tokens
        await abandoned.aclose()
        with pytest.raises(RequestError, match="empty"):
            await collect(client, [], params)

        while client.stats.running or client.stats.generated_tokens == before:
            await asyncio.sleep(0.05)
        assert client.stats.blocks_owned == 0
        assert client.stats.generated_tokens < before + 20, "the abandoned request did not run to its end"
        await client.close()
        assert not client.alive
        with pytest.raises(EngineError, match="shut down"):
            await collect(client, PROMPTS[0], params)

    run(work())


def test_a_killed_engine_fails_what_is_in_flight(tiny: Path) -> None:
    async def work() -> None:
        client = await start_waiting(tiny)
        stream = client.generate(PROMPTS[0], SamplingParams(ignore_eos=True))
        await anext(stream)
        client._process.process.kill()
        with pytest.raises(EngineError, match="ended unexpectedly"):
            async for _ in stream:
                pass
        assert not client.alive
        await client.close()

    run(work())


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match=r"config\.json"):
        run(EngineClient.start(tmp_path, EngineConfig(**CONFIG)))


def test_a_bad_checkpoint_is_a_checkpoint_error_in_process(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        LLM(tmp_path)


# ---- wire


def test_every_message_survives() -> None:
    params = SamplingParams(temperature=0.5, stop=("a", "b"), seed=3, logprobs=2, stop_token_ids=(4,))
    record = TokenLogprob(3, -0.5, ((3, -0.5), (9, -1.5)))
    batch = [
        Submit(1, (1, 2, 3), params),
        Submit(2, (1, 2, 3), params, cache_keys=("salt:a", "image:ä")),
        Cancel(2),
        Shutdown(),
        Delta(1, (3,), (record,), (record,), "error", "why", 16),
        EngineInfo("m", 10, 20, (1,), 5, 16, 8, (("a", "b", "c"),)),
        EngineStats(running=3, step_seconds=0.5),
        Failed("x"),
    ]
    frame = wire.encode(batch)
    assert wire.body_length(frame[: wire.HEADER.size]) == len(frame) - wire.HEADER.size
    assert wire.decode(frame[wire.HEADER.size :]) == batch


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91\x92\xa3abc\x80", b"\x91\x92\xa6Submit\x80"])
def test_garbage_is_an_error(body: bytes) -> None:
    with pytest.raises(EngineError, match="malformed"):
        wire.decode(body)


def test_a_frame_has_a_bound() -> None:
    with pytest.raises(EngineError, match="exceeds"):
        wire.body_length(b"\xff\xff\xff\xff")


def test_uniform_numbers_are_uniform_and_independent_of_order() -> None:
    numbers = torch.tensor([[uniform(seed, draw) for draw in range(50)] for seed in range(200)], dtype=torch.float64)
    assert 0 <= numbers.min() and numbers.max() < 1
    counts = torch.histc(numbers, 20, 0, 1)
    # 10,000 numbers in 20 cells: chi-square with 19 degrees of freedom stays below 43.8 with probability 0.999.
    assert float(((counts - 500) ** 2 / 500).sum()) < 43.8
    neighbours = torch.corrcoef(torch.stack([numbers[:, :-1].flatten(), numbers[:, 1:].flatten()]))[0, 1]
    assert abs(float(neighbours)) < 0.04
