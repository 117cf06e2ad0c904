"""The Artificial-Analysis protocol: its arithmetic on made-up times, and the whole run against a scripted server."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import perilune
from perilune.bench import aa
from perilune.bench.aa import Sample, sample, summary
from perilune.cli.bench import aa as bench_aa
from perilune.client.endpoint import Chunk, Endpoint, EndpointError, Reply, Usage
from perilune.core.errors import ConfigError
from perilune.text.chat import template_for
from perilune.text.stream import Content, Reasoning
from perilune.text.tokenizer import Tokenizer
from tests.fake_endpoint import FakeEndpoint, chunk, refusal, usage, whole

NANO = Path(perilune.__file__).parent / "bundled" / "kimi-nano"


def stream(start: float, thoughts: int, words: int, *, end: bool = True) -> list[Chunk]:
    """One token every 10 ms from `start` on, the finish reason with the last."""
    kinds = [Reasoning("r")] * thoughts + [Content("c")] * words
    chunks = [Chunk(start + 0.01 * i, (e,)) for i, e in enumerate(kinds)]
    return [*chunks, Chunk(chunks[-1].at, finish_reason="stop")] if end else chunks


def test_the_figures_of_one_request() -> None:
    s = sample(100.0, [*stream(100.5, 100, 600), Chunk(200.0, usage=Usage(9000, 700, 100))])
    assert s.first_at == pytest.approx(0.5) and s.answer_at == pytest.approx(1.5)
    assert s.end_at == pytest.approx(0.5 + 6.99), "the usage chunk, which comes later, is no token"
    assert s.speed == pytest.approx(100.0)
    assert s.end_to_end == pytest.approx(1.5 + 4.99)
    assert (s.prompt_tokens, s.tokens, s.answer_tokens, s.counted) == (9000, 700, 600, True)


def test_a_short_answer_is_extrapolated() -> None:
    s = sample(0.0, [*stream(0.2, 0, 11), Chunk(9.0, usage=Usage(10, 11, 0))])
    assert s.first_at == s.answer_at == pytest.approx(0.2)
    assert s.end_to_end == pytest.approx(0.2 + 4.99)
    assert summary([s])["extrapolated"] == 1
    assert summary([sample(0.0, [*stream(0.2, 0, 500), Chunk(9.0, usage=Usage(10, 500, 0))])])["extrapolated"] == 0


def test_answer_speed_is_the_answers_own() -> None:
    """Thinking at 100 tokens/s, answering at 10."""
    answer = [Chunk(2.0 + 0.1 * i, (Content("c"),)) for i in range(21)]
    s = sample(
        0.0, [*stream(1.0, 50, 0, end=False), *answer, Chunk(4.0, finish_reason="length", usage=Usage(5, 71, 50))]
    )
    assert s.end_to_end == pytest.approx(2.0 + 49.9)
    assert s.speed == pytest.approx(70 / 3.0)


def test_several_tokens_in_a_chunk_are_counted_by_the_server() -> None:
    chunks = [Chunk(1.0, (Content("a b"),)), Chunk(2.0, (Content("c d"),)), Chunk(3.0, (Content("e"),), "stop")]
    counted = sample(0.0, [*chunks, Chunk(3.0, usage=Usage(5, 9, None))])
    assert counted.speed == pytest.approx(8 / 2.0) and counted.answer_tokens == 9
    alone = sample(0.0, chunks)
    assert alone.speed == pytest.approx(2 / 2.0) and not alone.counted
    assert summary([counted, alone])["token_count"] == "streamed pieces"


def test_without_reasoning_counts_the_pieces_tell_the_shares() -> None:
    s = sample(0.0, [*stream(1.0, 30, 10), Chunk(2.0, usage=Usage(5, 80, None))])
    assert s.tokens == 80 and s.answer_tokens == 20


def test_an_answer_that_never_comes() -> None:
    s = sample(0.0, [*stream(1.0, 20, 0), Chunk(2.0, usage=Usage(5, 20, 20))])
    assert s.answer_at is None and s.end_to_end is None and s.speed == pytest.approx(100.0)
    good = sample(0.0, [*stream(1.0, 0, 20), Chunk(2.0, usage=Usage(5, 20, 0))])
    row = summary([s, good])
    assert (row["samples"], row["answered"], row["ttfat_s"]) == (2, 1, 1.0)
    assert summary([s])["e2e_500_s"] is None and "end-to-end 500 none" in aa.describe(summary([s]))
    with pytest.raises(EndpointError, match="without any token"):
        sample(0.0, [Chunk(1.0, finish_reason="stop")])


def test_one_token_has_no_speed() -> None:
    s = sample(0.0, [Chunk(1.0, (Content("a"),), "stop", Usage(3, 1, 0))])
    assert s.speed is None and s.end_to_end is None and s.answer_at == 1.0


def test_medians() -> None:
    def one(first: float) -> Sample:
        return Sample(first, first, first + 1, 10, 101, 101, True)

    row = summary([one(3.0), one(1.0), one(2.0), one(50.0)])
    assert row["ttft_s"] == 2.5 and row["output_tokens_per_s"] == 100.0
    assert row["e2e_500_s"] == pytest.approx(2.5 + 4.99)


def test_the_prompt_is_clamped_to_the_context() -> None:
    assert aa.fit(10_000, 1_500, None) == aa.fit(10_000, 1_500, 11_532) == 10_000
    assert aa.fit(10_000, 1_500, 4096) == 4096 - 1500 - aa.SLACK
    with pytest.raises(ConfigError, match="lower --output-tokens"):
        aa.fit(10_000, 1_500, 1_550)


def words(body: dict[str, Any]) -> int:
    """A tokenizer of 3 tokens per word, 20 for the template."""
    return 20 + 3 * len(body["messages"][0]["content"].split())


@pytest.mark.parametrize("tokenizes", [True, False])
@pytest.mark.parametrize("goal", [300, 5000])
def test_prompts_have_the_asked_length_and_are_unique(fake: FakeEndpoint, tokenizes: bool, goal: int) -> None:
    fake.answer = lambda body: whole("x", prompt=words(body))
    fake.count = words if tokenizes else None

    async def work() -> list[Any]:
        async with Endpoint(fake.url) as endpoint:
            prompts = aa.Prompts(endpoint, goal)
            await prompts.calibrate()
            return [await prompts.new() for _ in range(3)]

    found = asyncio.run(work())
    assert all(goal * 0.97 <= words({"messages": m}) <= goal for m in found)
    starts = [m[0]["content"][:20] for m in found]
    assert len(set(starts)) == 3, "the very beginning differs, or a prefix cache would help"


def script(body: dict[str, Any]) -> Any:
    if not body.get("stream"):
        return whole("ok", prompt=words(body))
    return [
        (0.05, chunk(reasoning_content="a")),
        (0.05, chunk(content="b")),
        *[(0.01, chunk(content="c")) for _ in range(5)],
        (0.0, chunk(finish="length")),
        (0.0, usage(words(body), 7, 1)),
        (0.0, "[DONE]"),
    ]


def test_a_whole_run(fake: FakeEndpoint, tmp_path: Path) -> None:
    fake.answer, fake.count = script, words
    args = [
        fake.url,
        "--runs",
        "2",
        "--parallel",
        "3",
        "--output-tokens",
        "1000",
        "--no-thinking",
        "--ledger",
        str(tmp_path),
    ]
    result = CliRunner().invoke(bench_aa.command, args, catch_exceptions=False)
    row = json.loads(result.stdout.splitlines()[-1])
    assert row == json.loads((tmp_path / "aa.jsonl").read_text())
    assert (row["bench"], row["model"], row["parallel"], row["runs"], row["samples"]) == ("aa", "fake", 3, 2, 6)
    assert row["ttft_s"] >= 0.05 and row["ttfat_s"] >= 0.1 and row["output_tokens_per_s"] > 0
    assert row["extrapolated"] == 6 and row["output_tokens"] == 7 and row["answer_tokens"] == 6
    assert row["ignore_eos"] is True and row["thinking"] is False
    assert "the prompt is 3064 tokens instead of 10000" in result.stderr and "extrapolated" in result.stderr
    streamed = [b for b in fake.bodies if b.get("stream")]
    assert len(streamed) == 6 and fake.most <= 3
    for body in streamed:
        assert body["max_tokens"] == 1000 and body["ignore_eos"] is True and "temperature" not in body
        assert body["thinking"] == {"type": "disabled"}
        assert 0.97 * 3064 <= words(body) <= 3064
    assert len({b["messages"][0]["content"] for b in streamed}) == 6


def test_extensions_go_only_to_servers_known_to_have_them(fake: FakeEndpoint) -> None:
    fake.answer = script
    fake.models = [{"id": "gpt", "owned_by": "someone"}]
    args = [fake.url, "--runs", "1", "--output-tokens", "50", "--prompt-tokens", "100"]
    row = json.loads(CliRunner().invoke(bench_aa.command, args, catch_exceptions=False).stdout.splitlines()[-1])
    assert row["ignore_eos"] is False and row["cpu"] is None
    assert not any({"ignore_eos", "thinking", "chat_template_kwargs"} & set(b) for b in fake.bodies)
    CliRunner().invoke(bench_aa.command, [*args, "--ignore-eos"], catch_exceptions=False)
    assert fake.bodies[-1]["ignore_eos"] is True


def test_a_failing_request_ends_the_run(fake: FakeEndpoint) -> None:
    fake.answer = lambda body: script(body) if not body.get("stream") else refusal(503, "overloaded")
    result = CliRunner().invoke(bench_aa.command, [fake.url, "--parallel", "4"])
    assert isinstance(result.exception, EndpointError) and "answered 503: overloaded" in str(result.exception)
    assert result.stdout == ""


class Counting:
    """Counts like the bundled model's server, without one."""

    def __init__(self) -> None:
        self.counts = 0
        self._tokenizer, self._template = Tokenizer.from_directory(NANO), template_for(NANO)

    async def count(self, messages: list[dict[str, Any]]) -> int:
        self.counts += 1
        return len(self._template.render_ids(self._tokenizer, messages))

    async def complete(self, body: dict[str, Any]) -> Reply:
        return Reply("", "", (), None, Usage(await self.count(body["messages"]), 2, None))


@pytest.mark.skipif(not (NANO / "config.json").is_file(), reason=f"the bundled model kimi-nano is not at {NANO}")
def test_a_thousand_prompts_of_the_bundled_model_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """184 tokens: each word takes 1 to 4 of them, the nonce 11 to 16."""
    rng, server = random.Random(1), Counting()
    monkeypatch.setattr(aa.secrets, "token_hex", lambda n: rng.randbytes(n).hex())

    async def lengths() -> list[int]:
        found = []
        for _ in range(500):
            prompts = aa.Prompts(server, 184)  # type: ignore[arg-type]
            await prompts.calibrate()
            found += [await server.count(await prompts.new()) for _ in range(2)]
        return found

    found = asyncio.run(lengths())
    assert all(184 - 3 <= n <= 184 for n in found), sorted(found)[:10]
    assert server.counts <= 500 * (2 + 2 * (1 + 3)), "two requests to calibrate, 3 tries a prompt on average"


@pytest.mark.parametrize("per_word", [0.2, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("beside", [0.0, 150.0])
def test_a_wrong_calibration_costs_tries_not_length(
    monkeypatch: pytest.MonkeyPatch, per_word: float, beside: float
) -> None:
    class Server:  # a word takes as many tokens as it has letters
        async def count(self, messages: list[dict[str, Any]]) -> int:
            return len(messages[0]["content"].replace(" ", ""))

    rng, server = random.Random(2), Server()
    monkeypatch.setattr(aa.secrets, "token_hex", lambda n: rng.randbytes(n).hex())

    async def lengths() -> list[int]:
        found = []
        for _ in range(30):
            prompts = aa.Prompts(server, 400)  # type: ignore[arg-type]
            prompts._per_word, prompts._fixed_tokens = per_word, beside
            found.append(await server.count(await prompts.new()))
        return found

    longest = max(map(len, (*aa._NOUNS, *aa._VERBS, *aa._ADJECTIVES)))
    assert all(400 - longest < n <= 400 for n in asyncio.run(lengths()))


def test_prompts_whose_words_differ_in_length_still_fit() -> None:
    class Server:  # a word takes as many tokens as it has letters, the question and the template 20
        async def count(self, messages: list[dict[str, Any]]) -> int:
            return 20 + sum(map(len, messages[0]["content"].split("\n\n")[0].split()[2:]))

    async def lengths() -> list[int]:
        server, found = Server(), []
        prompts = aa.Prompts(server, 184)  # type: ignore[arg-type]
        prompts._per_word, prompts._fixed_tokens = 5.0, 20.0  # as calibrated
        for _ in range(50):
            found.append(await server.count(await prompts.new()))
        return found

    # What is within the margin is not always there; the longest that fits is a word short of it at worst.
    longest = max(map(len, (*aa._NOUNS, *aa._VERBS, *aa._ADJECTIVES)))
    assert all(184 - longest - 4 <= n <= 184 for n in asyncio.run(lengths()))
