"""What decode and verify graphs are fed and what is read from them: the same classes, running instead of replaying.

Captures themselves need a GPU: tests/gpu/speculation/test_speculation.py.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perilune import LLM, SamplingParams
from perilune.core.config import EngineConfig, build
from perilune.core.messages import Submit
from perilune.core.step import StepPlan
from perilune.engine.engine import Engine
from perilune.engine.graphs.decode import MAX_BYTES, DecodeGraphs
from perilune.engine.graphs.inputs import Key
from perilune.engine.graphs.recorder import Recorder as GraphRecorder
from perilune.engine.graphs.recorder import Replay
from perilune.engine.sampler import FAILED, on_device, uniform, uniforms
from perilune.formats.hub import resolve_model
from perilune.ops.drafts.accept_drafts import Report, accept_drafts
from perilune.ops.drafts.continuation import Continuation
from perilune.speculation.acceptance import accept
from perilune.text.tokenizer import Tokenizer
from tests.cpu.engine.test_constraint_engine import run
from tests.cpu.engine.test_engine import POISON, poison
from tests.cpu.speculation.test_speculation import (  # noqa: F401
    CONFIG,
    PARAMS,
    PROMPTS,
    TIGHT,
    Recorder,
    Scripted,
    alike,
    constrained,
    drafter,
)


class Running(GraphRecorder):
    """Replays by running."""

    def record(self, work: Callable[[], None], name: str) -> Replay:
        work()
        return work


class Uncaptured(DecodeGraphs):
    keys: set[Key]

    def _replay(self, plan: StepPlan, *, whole: bool) -> tuple[Key, Any] | None:
        found = super()._replay(plan, whole=whole)
        assert found is not None, self.broken
        self.keys = getattr(self, "keys", set()) | {found[0]}
        return found


def ungraphed(engine: Engine | None) -> Uncaptured:
    assert engine is not None and engine.config.max_model_len
    runner = engine.runner
    recorder = Running(runner.last_tokens.device)
    graphs = Uncaptured(runner.model, runner.pages, runner.last_tokens, engine.config.max_model_len, recorder)
    runner.graphs = graphs
    runner.follow(runner.drafter)
    return graphs


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Any:
    with LLM(tiny, **CONFIG, draft="off") as llm:
        yield llm


@pytest.mark.parametrize("setting", [{}, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("draft", ["off", "hostile", "perfect"])
def test_answers_through_graphs_are_those_without(tiny: Path, plain: LLM, setting: dict[str, Any], draft: str) -> None:
    params = [PARAMS[kind][i % len(PARAMS[kind])] for i, kind in enumerate([*PARAMS, "hot"])]
    params = [replace(p, max_tokens=20 + 4 * i) for i, p in enumerate(params)]
    expected = plain.generate(PROMPTS, params)
    with LLM(tiny, **(CONFIG | setting), draft="off") as llm:
        graphs = ungraphed(llm._engine)
        if draft != "off":
            rng = random.Random(1) if draft == "hostile" else None
            llm._engine.speculator = Scripted([c.token_ids for c in expected], rng)  # type: ignore[union-attr, assignment]
        alike(llm.generate(PROMPTS, params), expected)
        sizes = {key.each for key in graphs.keys}
        assert sizes == {1} if draft == "off" else len(sizes) > 1 and max(sizes) == 9
        assert len({key.requests for key in graphs.keys}) > 1
        assert {key.whole for key in graphs.keys} == {False, True}


@pytest.mark.parametrize("draft", ["off", "hostile", "perfect"])
def test_requests_that_choose_freely_are_drawn_by_the_graph(tiny: Path, plain: LLM, draft: str) -> None:
    params = [p for kind in ("greedy", "hot", "filters") for p in PARAMS[kind][:2]]
    params = [replace(params[i % len(params)], max_tokens=16 + 5 * i) for i in range(len(PROMPTS))]
    expected = plain.generate(PROMPTS, params)
    with LLM(tiny, **CONFIG, draft="off") as llm:
        graphs = ungraphed(llm._engine)
        if draft != "off":
            rng = random.Random(3) if draft == "hostile" else None
            llm._engine.speculator = Scripted([c.token_ids for c in expected], rng)  # type: ignore[union-attr, assignment]
        alike(llm.generate(PROMPTS, params), expected)
        assert all(key.whole for key in graphs.keys) and len(graphs.keys) > 2


@pytest.mark.parametrize("free", [True, False])
def test_what_fails_in_a_graph_fails_where_it_would(tiny: Path, tmp_path: Path, free: bool) -> None:
    """Requests that say the poisonous token, drawn by the graph or, with a bias, call by call."""
    path = poison(tiny, tmp_path / "poisoned")
    params = [SamplingParams(seed=i, max_tokens=120, temperature=4.0) for i in range(2 * len(PROMPTS))]
    if not free:
        params = [replace(p, max_tokens=40, temperature=1.0, logit_bias={POISON: 4.0}) for p in params]
    requests = [Submit(i, tuple(PROMPTS[i % len(PROMPTS)]), p.ending_with(())) for i, p in enumerate(params)]

    def outcome(draft: Scripted | None, through_graphs: bool) -> Any:
        engine = Engine(path, build(EngineConfig, CONFIG | {"draft": "off", "max_num_seqs": 4}))
        graphs = ungraphed(engine) if through_graphs else None
        engine.speculator = draft  # type: ignore[assignment]
        found = [(tokens, reason) for tokens, reason, _ in run(engine, requests).values()]
        assert graphs is None or {key.whole for key in graphs.keys} == {free}
        engine.close()
        return found

    expected = outcome(None, False)
    assert sum(end == "error" for _, end in expected) > 2
    for rng in (None, random.Random(3)):
        scripted = Scripted((), rng)
        scripted.by_rid = {i: tokens for i, (tokens, _) in enumerate(expected)}
        assert outcome(scripted, True) == expected
    assert outcome(None, True) == expected


@pytest.mark.parametrize("seed", [None, 1])
def test_constrained_answers_through_graphs(seed: int | None) -> None:
    path = resolve_model("kimi-nano")
    tokenizer = Tokenizer.from_directory(path)
    engine = Engine(path, build(EngineConfig, CONFIG | {"max_model_len": 512, "max_num_seqs": 16, "draft": "off"}))
    requests = constrained(path, tokenizer)
    expected = run(engine, requests)
    ungraphed(engine)
    scripted = Scripted((), None if seed is None else random.Random(seed), tokenizer.vocab_size)
    scripted.by_rid = {rid: tokens for rid, (tokens, _, _) in expected.items()}
    engine.speculator = scripted  # type: ignore[assignment]
    assert run(engine, requests) == expected
    assert scripted.accepted > 60
    engine.close()


def test_graphs_that_hold_too_much_go_all_at_once(tiny: Path, plain: LLM) -> None:
    params = [SamplingParams(seed=i, max_tokens=10 + 3 * i) for i in range(len(PROMPTS))]
    sizes = []

    class Heavy(Running):
        def record(self, work: Callable[[], None], name: str) -> Replay:
            self.nbytes += MAX_BYTES
            sizes.append(len(runner.graphs))
            return super().record(work, name)

    with LLM(tiny, **CONFIG, draft="off") as llm:
        runner = llm._engine.runner  # type: ignore[union-attr]
        recorder = Heavy(runner.last_tokens.device)
        runner.graphs = Uncaptured(runner.model, runner.pages, runner.last_tokens, 256, recorder)
        alike(llm.generate(PROMPTS, params), plain.generate(PROMPTS, params))
        assert len(sizes) > 3 and set(sizes) == {0, 1}


def test_sizes_that_cannot_be_captured_run_call_by_call(tiny: Path, plain: LLM) -> None:
    params = [SamplingParams(seed=i, max_tokens=10 + 5 * i) for i in range(len(PROMPTS))]

    class Small(Uncaptured):
        def _capture(self, key: Key, plan: StepPlan) -> Any:
            if key.requests > 2:
                raise RuntimeError("too many\nfor this machine")
            return super()._capture(key, plan)

        _replay = DecodeGraphs._replay

    with LLM(tiny, **CONFIG, draft="off") as llm:
        runner = llm._engine.runner  # type: ignore[union-attr]
        recorder = Running(runner.last_tokens.device)
        runner.graphs = graphs = Small(runner.model, runner.pages, runner.last_tokens, 256, recorder)
        alike(llm.generate(PROMPTS, params), plain.generate(PROMPTS, params))
        assert graphs.broken is None and {key.requests for key in graphs._graphs} == {1, 2}


def test_graphs_and_calls_accept_the_same_drafts() -> None:
    rng = random.Random(5)
    for _ in range(100):
        drafts = [rng.randrange(6) for _ in range(rng.randrange(1, 6))]
        each, cut = max(drafts) + 1 + rng.randrange(2), {i: rng.randint(0, n) for i, n in enumerate(drafts)}
        rows = [[rng.choice([0, 1, 0, 1, FAILED]) for _ in range(n + 1)] for n in drafts]
        guesses = [[rng.randrange(2) for _ in range(n)] for n in drafts]
        told = [token for row in rows for token in row]
        want = accept(torch.tensor(told), drafts, [g[: cut[i]] for i, g in enumerate(guesses)], on_device)
        front = torch.tensor([each - n - 1 for n in drafts], dtype=torch.int32)
        stop = front + torch.tensor([cut[i] for i in range(len(drafts))], dtype=torch.int32)
        drawn = torch.tensor([[1] * (each - len(row)) + row for row in rows])
        ids = torch.tensor([[1] * (each - len(guess)) + guess for guess in guesses])
        last_tokens, out = torch.full((len(drafts) + 1,), 7), torch.zeros(len(drafts), each + 2, dtype=torch.float64)
        following, last = torch.zeros(ids.numel(), dtype=torch.int64), torch.zeros(len(drafts), dtype=torch.int64)
        slots, shifts = torch.randperm(len(drafts)), torch.full_like(last_tokens, -7)
        state = Continuation(last_tokens, shifts, torch.zeros(len(shifts), 1, dtype=torch.int64))
        report = Report(out, following, last)
        accept_drafts(drawn.flatten(), ids.flatten(), front, stop, slots, state, report)
        assert out[:, each].tolist() == want.lengths.tolist() and out[:, each + 1].bool().equal(want.spoilt)
        ends = drawn.flatten()[last].clamp_min(0)
        assert last_tokens[slots].equal(ends) and int(last_tokens[-1]) == 7
        assert shifts[slots].equal(want.lengths - 1 + want.spoilt.long()) and int(shifts[-1]) == -7
        assert (last - each * torch.arange(len(drafts)) - front + 1 - want.spoilt.long()).equal(want.lengths)


def test_many_random_numbers_are_those_of_one_by_one() -> None:
    rng = random.Random(0)
    seeds = [0, -1, 2**63 - 1, -(2**63), *(rng.getrandbits(63) for _ in range(20))]
    draws = np.array([[0, 1, 2, rng.randrange(1 << 20)] for _ in seeds])
    assert uniforms(seeds, draws).tolist() == [[uniform(s, d) for d in row] for s, row in zip(seeds, draws.tolist())]


def test_chains_behind_graphs_are_those_behind_steps(tiny: Path, plain: LLM, drafter: Path) -> None:  # noqa: F811
    params = SamplingParams(temperature=0.0, max_tokens=20)
    truths = [c.token_ids for c in plain.generate(PROMPTS, params)]
    config = CONFIG | dict(draft="eagle3", draft_tokens=4, drafter=str(drafter), prefix_cache=False)
    chains = []
    for graphs in (False, True):
        with LLM(tiny, **config) as llm:
            held = ungraphed(llm._engine) if graphs else None
            recorder = Recorder(truths, random.Random(2))
            llm._engine.speculator = recorder  # type: ignore[union-attr, assignment]
            llm.generate(PROMPTS, params)
            chains.append(recorder.chains)
            if held is not None:  # behind prompts and behind steps of any size the same ones
                begun = held._known._chains.values()  # type: ignore[union-attr]
                assert {k for known in begun for k in known.replays} == {4} and len(begun) > 2
    assert chains[0].keys() == chains[1].keys() and len(chains[0]) > 30
    same = sum(chains[0][text] == chains[1][text] for text in chains[0])
    assert same >= len(chains[0]) - 2  # float32 in another order may turn a close choice
