"""Replaying traces: what a line means, that generated sessions are the same every time, and that counts and times add
up, on an engine and over HTTP."""

import asyncio
import gzip
import json
from collections.abc import Iterator
from itertools import chain, count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from perilune.bench import replay, traces
from perilune.bench.replay import Call, Options, judge, percentile, summary
from perilune.bench.trace_formats import sessions_of
from perilune.bench.traces import Agents, Piece, generate, read
from perilune.cli.main import cli
from perilune.core.config import EngineConfig, build
from perilune.core.errors import ConfigError, EngineError
from perilune.core.messages import EngineStats
from perilune.engine.engine import Engine
from perilune.kv.tiers import HOST
from tests.fake_endpoint import FakeEndpoint, chunk, usage

MOONCAKE = [
    {"timestamp": 27482, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 26482, "input_length": 1024, "output_length": 9, "hash_ids": [46, 47]},
]


def test_a_mooncake_line_is_a_whole_prompt() -> None:
    first, second = sessions_of(MOONCAKE)
    assert (first.start, second.start) == (0.0, 1.0), "by time, from the first on"
    assert first.turns[0].pieces == (Piece("46", 512), Piece("47", 512))
    assert second.turns[0].pieces == (Piece("46", 512), Piece("47", 512), Piece("48", 276))
    assert second.turns[0].output_tokens == 52
    (half, _) = sessions_of(MOONCAKE, scale=0.5)
    assert [p.tokens for p in half.turns[0].pieces] == [256, 256] and half.turns[0].output_tokens == 4


def test_an_aiperf_session_has_turns(tmp_path: Path) -> None:
    lines = [
        {"session_id": "a", "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"session_id": "b", "text_input": "Hello there", "output_length": 3},
        {"session_id": "a", "input_length": 100, "output_length": 6, "delay": 2500},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
    ]
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    a, b, c = sessions_of(read(path))
    assert [t.delay for t in a.turns] == [0.0, 2.5] and a.turns[1].pieces == (Piece("line 2", 100),)
    assert b.turns[0].pieces[0].text == "Hello there" and c.turns[0].pieces[0].text == "Hi"


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "no request"),
        ("{", "line 1 is no JSON"),
        ("{}\n[]", "line 2 is no object"),
        ('{"input_length": -4}', "input_length must be between 0"),
        ('{"input_length": 4, "output_length": "x"}', "output_length must be"),
        ("{}", "input_length must be"),
        ('{"input_length": 0}', "has no input"),
        ('{"input_length": 9, "hash_ids": 4}', "hash_ids must be a list"),
    ],
)
def test_a_bad_line_is_named(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=says):
        sessions_of(read(tmp_path / "t.jsonl"))
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "none")


def test_generated_sessions_are_the_same_every_time_and_like_the_published_ones() -> None:
    lines = generate(Agents(sessions=40, seed=3))
    assert lines == generate(Agents(sessions=40, seed=3)) != generate(Agents(sessions=40, seed=4))
    made = sessions_of(lines)
    assert len(made) == 40 and {len(s.turns) for s in made} == {33}
    ends, inputs, outputs, delays = [], 0, 0, []
    for session in made:
        context = 0
        for turn in session.turns:
            context += sum(p.tokens for p in turn.pieces)
            inputs += context
            context += turn.output_tokens
            outputs += turn.output_tokens
            delays.append(turn.delay)
        ends.append(context)
    assert 70_000 < percentile(ends, 0.5) < 95_000 and 100 < inputs / outputs < 170
    assert 4.0 < percentile(delays, 0.5) < 7.0 and 50 < percentile(delays, 0.99) < 130
    shared = [p for p in made[0].turns[0].pieces if p in made[1].turns[0].pieces]
    assert sum(p.tokens for p in shared) == 8192
    longer = sessions_of(generate(Agents(sessions=40, turns=5, seed=3)))
    assert [len(s.turns) for s in longer] == [5] * 40


def call(session: int, prompt: list[tuple[int, int]], begin: float, *arrivals: tuple[float, int], **more: Any) -> Call:
    tokens = sum(count for _, count in prompt)
    return Call(session, 0, begin, list(arrivals), tokens, prompt=prompt, **more)


def test_the_ideal_knows_what_was_computed_before() -> None:
    calls = [
        call(0, [(1, 10), (2, 10)], 0.0, (1.0, 1), (3.0, 4), answer=3),
        call(1, [(1, 10), (9, 30)], 0.5, (0.9, 1), answer=19),  # at the same time, quicker
        call(2, [(1, 10), (2, 10), (3, 5), (4, 15)], 2.0, (3.5, 1), answer=5),
        call(3, [(1, 10), (2, 10), (3, 5), (4, 15)], 2.0, (2.9, 1), answer=6),  # the first answer had not ended
    ]
    judge(calls)
    assert [c.ideal for c in calls] == [0.5, 0.0, 1.0, 0.5]


def test_a_row_from_times_by_hand() -> None:
    quick = call(0, [(1, 100)], 10.0, (10.5, 1), (11.5, 10), answer=2, cached=80)
    slow = call(1, [(3, 100)], 10.0, (16.0, 2), (18.0, 2), answer=4, cached=0)
    failed = call(2, [(5, 9)], 10.0, error="no")
    row = summary([quick, slow, failed], Options(ttft_limit=1.0, inter_token_limit=0.2))
    assert (row["requests"], row["failed"], row["hit_share"], row["ideal_share"]) == (2, 1, 0.4, 0.0)
    assert (row["ttft_p50_s"], row["ttft_p99_s"]) == (6.0, 6.0) and row["inter_token_p90_s"] == 1.0
    assert row["tokens_per_s"] == pytest.approx(15 / 8) and row["interactivity"] == pytest.approx(1 / 2.0)
    assert row["good_share"] == pytest.approx(1 / 3, abs=1e-5) and row["goodput_requests_per_s"] == pytest.approx(1 / 8)
    early = call(3, [(7, 9)], 9.0, error="no", warm_up=True)  # before the clock started: not asked in the measured time
    assert summary([early, quick, slow], Options(ttft_limit=1.0, inter_token_limit=0.2))["good_share"] == 0.5
    assert row["ttft_later_turns_p50_s"] is None and "later turns" not in replay.describe(row)  # there is none
    assert summary([failed], Options())["requests"] == 0
    assert replay.describe(summary([failed], Options())) == "no request was answered, 1 failed"
    said = replay.describe(row | {"hit_share_by_tier": {"pages": 0.1, "host": 0.3}, "restore_s": 1.0, "saved_s": 2.0})
    for part in (
        "2 in 8.0 s, 1 failed", "40.0% of prompt tokens, 0.0% possible (pages 10.0%, host 30.0%)",
        "restores took 1.00 s, computing 3.00", "first token     p50 6000.0, p90 6000.0, p99 6000.0 ms",
        "between tokens  p50 1000.0, p90 1000.0, p99 1000.0 ms", "1.9 of answers, 25.0 of prompts",
        "interactivity   0.5 tokens/s", "0.12 requests/s: 33% had the first token within 1 s and others within 0.2 s",
    ):  # fmt: skip
        assert part in said, (part, said)


def invoke(*arguments: str) -> tuple[dict[str, Any], str]:
    found = CliRunner().invoke(cli, ["bench", "replay", *arguments], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout.splitlines()[-1]), found.stderr


@pytest.mark.usefixtures("worth_it")
def test_an_engine_with_tiers_comes_close_to_the_ideal(tiny: Path, tmp_path: Path) -> None:
    small = ["--scale", "0.008", "--speed", "0", "--sessions", "5", "--turns", "4", "--max-model-len", "240"]
    small += ["--set", "kv_blocks=40", "--set", "block_size=8", "--set", "max_num_seqs=1", "--set", "threads=1"]
    small += ["--draft", "off", "--kv-host-gb", "0.05"]
    written = tmp_path / "t.jsonl"
    row, said = invoke(
        "agents", str(tiny), *small, "--compare", "--write", str(written), "--plot", str(tmp_path / "p.svg")
    )
    assert row["requests"] == 20 and row["failed"] == 0 and row["tiers"] == ["kv_host_gb"]
    assert row["ideal_share"] >= row["hit_share"] >= 0.85 * row["ideal_share"]  # blocks of 8 of prompts of 100 to 200
    assert sum(row["hit_share_by_tier"].values()) == pytest.approx(row["hit_share"], abs=1e-3)
    assert row["hit_share_by_tier"]["host"] > 0.1
    assert row["ttft_p50_no_tiers_s"] > 0 and row["tokens_per_s_no_tiers"] > 0 and row["restore_gb_s"] > 0
    assert {"layers", "gpus", "tp", "ep", "kv_layout", "kv_dtype", "expert_format", "rest_dtype"} <= row.keys()
    assert row["hit_share_no_tiers"] < row["hit_share"]
    assert "20 of 20 requests" in said and (tmp_path / "p.svg").read_text().count("<circle") == 20
    again, _ = invoke(str(written), str(tiny), *small)
    assert again["prompt_tokens"] == row["prompt_tokens"] and again["hit_share"] == pytest.approx(
        row["hit_share"], abs=0.05
    )


def test_a_context_that_is_full_ends_a_session_with_its_reason(tiny: Path) -> None:
    small = ["--scale", "0.01", "--speed", "0", "--sessions", "1", "--max-model-len", "200", "--draft", "off"]
    row, said = invoke("agents", str(tiny), *small)
    assert row["failed"] == 1 and row["requests"] >= 2 and "context of 200 tokens is full" in said


def test_any_endpoint(fake: FakeEndpoint) -> None:
    def answer(body: dict[str, Any]) -> list[Any]:
        counted = usage(50, 3)
        counted["usage"]["prompt_tokens_details"] = {"cached_tokens": 40 if len(body["messages"]) > 1 else 0}
        words = [(0.0, chunk(content=text)) for text in ("a", "b", "c")]
        return [*words, (0.0, chunk(finish="length")), (0.0, counted), (0.0, "[DONE]")]

    fake.answer = answer
    row, _ = invoke("agents", fake.url, "--scale", "0.01", "--speed", "0", "--sessions", "2", "--turns", "3")
    assert (
        row["requests"] == 6 and row["prompt_tokens"] == 300 and row["hit_share"] == pytest.approx(160 / 300, abs=1e-4)
    )
    assert row["server"] == "endpoint" and "hit_share_by_tier" not in row
    turns = sorted(len(body["messages"]) for body in fake.bodies)
    assert turns == [1, 1, 3, 3, 5, 5]
    last = max(fake.bodies, key=lambda body: len(body["messages"]))
    assert [m["role"] for m in last["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert last["messages"][1]["content"] == "abc" and last["ignore_eos"] is True


def test_an_endpoint_that_does_not_count_hits_has_none_of_zero(fake: FakeEndpoint) -> None:
    fake.answer = lambda body: [
        (0.0, chunk(content="a")),
        (0.0, chunk(finish="length")),
        (0.0, usage(50, 1)),
        (0.0, "[DONE]"),
    ]
    row, said = invoke("agents", fake.url, "--scale", "0.01", "--speed", "0", "--sessions", "1", "--turns", "2")
    assert row["hit_share"] is None and "cache hits      not known" in said and "hits 0" not in said


def test_an_endpoint_that_counts_nothing_has_no_hit_share(fake: FakeEndpoint) -> None:
    fake.answer = lambda body: [(0.0, chunk(content="a")), (0.0, chunk(finish="length")), (0.0, "[DONE]")]
    row, said = invoke("agents", fake.url, "--scale", "0.01", "--speed", "0", "--sessions", "1", "--turns", "2")
    assert row["hit_share"] is None and "cache hits      not known" in said and row["ideal_share"] > 0.3
    cut = call(0, [(1, 10)], 0.0, (1.0, 1), cut=True)  # its usage had not come
    cut.prompt_tokens, cut.says_cached = 0, False
    whole = call(0, [(1, 10)], 0.0, (1.0, 1), says_cached=False)
    assert summary([whole, cut], Options())["hit_share"] is None


def test_options_that_do_not_go_together(fake: FakeEndpoint) -> None:
    found = CliRunner().invoke(cli, ["bench", "replay", "agents", fake.url, "--kv-host-gb", "1"])
    assert isinstance(found.exception, ConfigError) and "not for an endpoint" in str(found.exception)
    assert traces.HASH_TOKENS == 512
    found = CliRunner().invoke(cli, ["bench", "replay", "agents", "kimi-nano", "--compare"])
    assert isinstance(found.exception, ConfigError) and "give --kv-host-gb or --kv-disk" in str(found.exception)


def test_the_clock_starts_when_host_memory_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "STALLED_SECONDS", 0.3)
    lines: list[str] = []
    pinned = chain([10, 10, 10, 30, 60], repeat(100))

    def stats(ready: Iterator[int], limit: int = 100) -> EngineStats:
        return EngineStats(tiers=((HOST, 0, 0, limit),), host_blocks_ready=next(ready))

    asyncio.run(replay.host_memory(lambda: stats(pinned), lines.append))
    assert next(pinned) == 100 and lines[-1].startswith("host memory for 100 blocks")
    asyncio.run(replay.host_memory(lambda: stats(repeat(40)), lines.append))  # pinning failed at 40
    assert lines[-1].startswith("host memory for 40 blocks")
    before = len(lines)
    asyncio.run(replay.host_memory(EngineStats, lines.append))  # no tiers
    assert len(lines) == before


def test_without_tiers_the_same_is_computed_beforehand(tiny: Path) -> None:
    """Else the comparison would show what was computed, and not the tiers: here pages hold every session."""
    small = ["--scale", "0.004", "--speed", "0", "--sessions", "3", "--turns", "5", "--max-model-len", "240"]
    small += ["--set", "kv_blocks=200", "--set", "block_size=8", "--max-num-seqs", "1", "--set", "threads=1"]
    row, said = invoke("agents", str(tiny), *small, "--begin-after", "2", "--kv-host-gb", "0.05", "--compare")
    assert row["hit_share_no_tiers"] == row["hit_share"] > 0.7 and row["hit_share_by_tier"]["host"] == 0.0
    assert said.index("cache hits") < said.index("once more") < said.rindex("cache hits")


def test_sessions_that_have_gone_on_before() -> None:
    """What was said before is one prompt, with an answer of one token."""
    (session,) = sessions_of(generate(Agents(sessions=1, turns=4)))
    warm = traces.begun(session, 2)
    assert len(warm.turns) == 3 and warm.turns[0].output_tokens == 1
    before = [p.tokens for turn in session.turns[:2] for p in turn.pieces]
    answers = [turn.output_tokens for turn in session.turns[:2]]
    assert sum(p.tokens for p in warm.turns[0].pieces) == sum(before) + sum(answers)
    assert warm.turns[1:] == session.turns[2:]
    with pytest.raises(ConfigError, match="cannot begin after 4"):
        traces.begun(session, 4)


@pytest.mark.usefixtures("worth_it")
def test_the_clock_starts_after_the_warm_up_and_ends(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ["--scale", "0.004", "--speed", "0", "--sessions", "5", "--turns", "5", "--max-model-len", "240"]
    small += ["--set", "kv_blocks=40", "--set", "block_size=8", "--max-num-seqs", "1", "--set", "threads=1"]
    row, said = invoke("agents", str(tiny), *small, "--begin-after", "2", "--draft", "off", "--kv-host-gb", "0.05")
    assert row["requests"] == 15 and row["failed"] == 0, "three turns of five sessions"
    assert row["hit_share"] >= 0.85 * row["ideal_share"] and row["ideal_share"] > 0.7, "the warm-up is known"
    assert sum(row["hit_share_by_tier"].values()) == pytest.approx(row["hit_share"], abs=1e-3)
    assert "15 of 15 requests" in said and "what 5 sessions had said before" in said
    # A clock of this test's own: 1 ms passes between two looks at it, however fast the machine is.
    milliseconds = count()
    monkeypatch.setattr(replay, "time", SimpleNamespace(perf_counter=lambda: next(milliseconds) / 1000))
    short, _ = invoke("agents", str(tiny), *small, "--begin-after", "2", "--draft", "off", "--seconds", "0.02")
    assert short["requests"] < 15 and short["failed"] == 0


@pytest.mark.usefixtures("worth_it")
def test_sessions_that_the_cache_is_taken_to_hold(tiny: Path) -> None:
    """Nothing is computed before the clock starts, and hits are as if it had been; what pages have no room for is in
    host memory."""
    config = {"device": "cpu", "draft": "off", "kv_host_gb": 0.05, "max_num_seqs": 1, "threads": 1}
    engine = Engine(tiny, build(EngineConfig, {**config, "kv_blocks": 40, "block_size": 8, "max_model_len": 240}))
    engine.runner.zero(40)
    made = [traces.begun(s, 2) for s in sessions_of(generate(Agents(sessions=5, turns=4)), scale=0.008)]
    lines: list[str] = []

    async def played() -> tuple[dict[str, Any], list[Call]]:
        async with replay.Local(engine) as target:
            return await replay.measure(target, made, Options(speed=0.0, warm_up=True, adopt=True), lines.append)

    try:
        row, calls = asyncio.run(played())
        assert engine.stats().prompt_tokens == row["prompt_tokens"] == sum(c.prompt_tokens for c in calls if c.turn)
    finally:
        engine.close()
    assert row["requests"] == 10 and row["failed"] == row["cut"] == row["blocks_dropped"] == 0
    assert row["hit_share"] >= 0.85 * row["ideal_share"] > 0.6 and row["hit_share_by_tier"]["host"] > 0.1
    assert any("what 5 sessions had said before was taken as cached" in line for line in lines)


def test_a_session_that_the_cache_has_no_room_for(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "STALLED_SECONDS", 0.05)
    engine = Engine(tiny, build(EngineConfig, {"device": "cpu", "draft": "off", "kv_blocks": 4, "block_size": 8}))

    async def adopted() -> None:
        async with replay.Local(engine) as target:
            await target.adopt(list(range(50)))

    try:
        with pytest.raises(ConfigError, match="no room for a session of 50 tokens: give more kv_blocks"):
            asyncio.run(adopted())
    finally:
        engine.close()


class Slow:
    """A target of which every second session answers two tokens and then no more."""

    def __init__(self) -> None:
        self.asked = 0

    def conversation(self, seed: int) -> "Slow":
        return self

    async def adopt(self, turn: traces.Turn, call: Call) -> None: ...

    async def ask(self, turn: traces.Turn, call: Call) -> None:
        self.asked += 1
        call.prompt_tokens, call.arrivals = 10, [(call.begin + 0.5, 1), (call.begin + 1.0, 1)]
        if self.asked % 2 == 0:
            await asyncio.Event().wait()


def test_what_has_not_ended_is_cut_and_counts_until_then() -> None:
    made = sessions_of([{"session_id": f"s{n}", "input_length": 10, "output_length": 2} for n in range(4)])
    options = Options(speed=0.0, end_seconds=0.05)
    row, calls = asyncio.run(replay.measure(Slow(), made, options, lambda line: None))
    assert (row["requests"], row["failed"], row["cut"]) == (4, 0, 2) and sum(c.tokens for c in calls) == 8
    assert "4 in 1.0 s, 2 cut" in replay.describe(row)
    silent = [Call(0, 0, cut=True), *calls]
    assert summary(silent, options)["failed"] == 0 and summary(silent[:1], options)["cut"] == 1


def test_weka_traces_of_agents_and_their_subagents(tmp_path: Path) -> None:
    trace: dict[str, Any] = {"id": "t1", "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
    inner = {"t": 1.5, "type": "s", "model": "m", "in": 65, "out": 3, "hash_ids": [1, 9]}
    trace["requests"] = [
        {"t": 0.0, "type": "n", "model": "m", "in": 150, "out": 20, "hash_ids": [1, 2], "api_time": 2.0},
        {"t": 4.0, "type": "subagent", "agent_id": "a", "requests": [inner], "models": []},
        {"t": 9.0, "type": "s", "model": "m", "in": 128, "out": 5, "hash_ids": [1, 3], "think_time": 0.5},
        {"t": 20.0, "type": "n", "model": "m", "in": 0, "out": 5},
    ]
    (tmp_path / "trace_1.json").write_text(json.dumps(trace, indent=1))
    (tmp_path / "trace_2.json").write_text(json.dumps([{**trace, "id": "t2"}]))
    first, other, agent, _ = sessions_of(read(tmp_path))
    assert [t.whole for t in first.turns] == [True, True] and [t.delay for t in first.turns] == [0.0, 0.5]
    assert [(p.name, p.tokens) for p in first.turns[0].pieces] == [
        ("trace t1 1", 64),
        ("trace t1 2", 64),
        ("line 0", 22),
    ]
    assert first.turns[1].pieces[0] == first.turns[0].pieces[0] == agent.turns[0].pieces[0]
    assert agent.start == 5.5 and agent.turns[0].pieces[1].tokens == 1 and other.turns[0].pieces[0].name == "trace t2 1"


def test_a_bailian_chat_is_whole_prompts_in_order() -> None:
    def chat(number: int, parent: int, at: float, length: int, ids: list[int]) -> dict[str, Any]:
        line = {"chat_id": number, "parent_chat_id": parent, "timestamp": at, "type": "text", "turn": 1 + (parent > 0)}
        return {**line, "input_length": length, "output_length": 2, "hash_ids": ids}

    lines = [
        chat(1, -1, 60.0, 40, [5, 6, 7]),
        chat(9, -1, 61.0, 16, [8]),
        chat(2, 1, 64.5, 48, [5, 6, 4]),
    ]
    one, other = sessions_of(lines)
    assert other.start == 1.0 and [p.tokens for p in one.turns[0].pieces] == [16, 16, 8]
    assert one.turns[1].whole and one.turns[1].delay == 4.5 and one.turns[1].pieces[0] == one.turns[0].pieces[0]


def test_aiperf_conversations_and_messages() -> None:
    said = [{"role": "user", "content": "Hi"}]
    lines: list[dict[str, Any]] = [
        {
            "session_id": "m",
            "turns": [{"role": "system", "text": "Short."}, {"text": "A"}, {"texts": ["B", "C"], "delay": 500}],
        },
        {"session_id": "h", "messages": said, "timestamp": 0},
        {"session_id": "h", "messages": [*said, {"role": "assistant", "content": "Ho"}, *said], "timestamp": 2000},
        {"session_id": "d", "messages": said, "message_mode": "delta"},
        {"session_id": "d", "messages": said, "message_mode": "delta", "delay": 100},
        {"text": "Alone", "output_length": 7},
        {"payload": {"prompt": "Hello", "max_tokens": 50}, "timestamp": 1000},
    ]
    found = {s.name: s for s in sessions_of(lines)}
    many, history, delta = (found[f"session {name}"].turns for name in "mhd")
    assert [p.text for p in many[0].pieces] == ["Short.", "A"] and many[0].pieces[0].role == "system"
    assert many[1].pieces[0].text == "B\nC" and many[1].delay == 0.5 and not many[1].whole
    assert (
        history[1].whole
        and history[1].delay == 2.0
        and [p.role for p in history[1].pieces] == ["user", "assistant", "user"]
    )
    assert not delta[1].whole and delta[1].delay == 0.1
    assert found["request 5"].turns[0].output_tokens == 7 and found["request 6"].turns[0].output_tokens == 50
    for bad, says in (
        ({"turns": []}, "turns must be a list"),
        ({"text": ""}, "no text"),
        ({"messages": [3]}, "messages must"),
        ({"requests": [4], "block_size": 64}, "has 4 where"),
        ({"chat_id": 1}, "input_length"),
    ):
        with pytest.raises(ConfigError, match=says):
            sessions_of([bad])


def test_a_whole_prompt_replaces_what_was_said(fake: FakeEndpoint, tmp_path: Path) -> None:
    fake.answer = lambda body: [(0.0, chunk(content="live")), (0.0, usage(9, 1)), (0.0, "[DONE]")]
    hi, ho = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
    lines = [
        {"session_id": "h", "messages": [hi]},
        {"session_id": "h", "messages": [hi, ho, {**hi, "content": "More"}]},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    row, _ = invoke(str(tmp_path / "t.jsonl"), fake.url)
    assert row["requests"] == 2 and row["ideal_share"] > 0, "the second begins with the first"
    assert fake.bodies[1]["messages"] == [hi, ho, {**hi, "content": "More"}], "recorded, not the live answer"


def test_the_lines_that_are_played_are_written(fake: FakeEndpoint, tmp_path: Path) -> None:
    fake.answer = lambda body: [(0.0, chunk(content="a")), (0.0, usage(9, 1)), (0.0, "[DONE]")]
    lines = [
        {"session_id": name, "timestamp": at, "input_length": 9, "hash_ids": [number]}
        for number, (name, at) in enumerate([("late", 5), ("b", 1), ("a", 0), ("b", 2), ("a", 3), ("a", 4)])
    ]
    trace, written = tmp_path / "t.jsonl", tmp_path / "w.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    row, _ = invoke(str(trace), fake.url, "--sessions", "2", "--turns", "2", "--write", str(written))
    assert row["requests"] == 4 and read(written) == lines[1:5]


def test_a_gzipped_trace_that_is_cut_or_damaged(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"input_length": 40, "output_length": 4, "hash_ids": [1]}\n' * 50)
    middle = len(whole) // 2
    for wrong in (whole[:-20], whole[:middle] + bytes(8) + whole[middle + 8 :], b"no gzip"):
        (tmp_path / "t.jsonl.gz").write_bytes(wrong)
        with pytest.raises(ConfigError, match=r"cannot read the trace .*t\.jsonl\.gz|no JSON"):
            read(tmp_path / "t.jsonl.gz")


def test_lines_that_say_nothing_to_send() -> None:
    for lines in (
        [{"requests": [{"type": "subagent"}], "block_size": 16}],
        [{"requests": [{"in": 0}], "block_size": 16}],
    ):
        with pytest.raises(ConfigError, match="the trace has no request with input"):
            sessions_of(lines)
    for wrong in ({"chat_id": [1]}, {"chat_id": 1, "parent_chat_id": {}}):
        with pytest.raises(ConfigError, match="line 2 of the trace: chat_id and parent_chat_id must be numbers"):
            sessions_of([{"chat_id": 1, "input_length": 16}, wrong])


def test_a_trace_of_which_nothing_was_answered_is_an_error(tiny: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9000, "output_length": 2, "hash_ids": []}\n')
    found = CliRunner().invoke(
        cli, ["bench", "replay", str(trace), str(tiny), "--max-model-len", "200", "--draft", "off"]
    )
    assert isinstance(found.exception, EngineError)
    assert str(found.exception).startswith("no request was answered, 1 failed; the first: the context of 200 tokens")
