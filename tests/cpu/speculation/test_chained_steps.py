"""Chained steps (queued behind drafts in flight): the same answers, however many drafts are accepted.

Graphs run instead of replaying; what a draft model would draft is written into their buffers by hand, right or wrong.
"""
# ruff: noqa: F811

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune import LLM, SamplingParams
from perilune.bench.drafts import play, trace
from perilune.core.config import EngineConfig, build
from perilune.core.messages import Delta, Submit
from perilune.core.step import LEFT_OUT, MAX_DRAFTS, StepPlan, Work
from perilune.engine.engine import Engine
from perilune.engine.graphs.decode import DecodeGraphs
from perilune.engine.graphs.inputs import Key
from perilune.engine.runner import Runner
from perilune.engine.sampler import uniforms
from perilune.formats.hub import resolve_model
from perilune.ops.drafts.advance_inputs import Columns, Requests, advance_inputs
from perilune.ops.drafts.continuation import Continuation
from perilune.speculation.step_cost import Costs, Curve
from tests.cpu.engine.test_engine import POISON, poison
from tests.cpu.engine.test_graphs import Running, ungraphed
from tests.cpu.speculation.test_speculation import (
    CONFIG,
    PARAMS,
    PROMPTS,
    TIGHT,
    Scripted,
    alike,
    drafter,  # noqa: F401
    launches,
    outcomes,
)


class Chaining(Scripted):
    """Has steps planned behind one another wherever that is allowed, on chains that continue the true answers.

    `rng` None: all drafts are right and every step is planned so; else right as far as chance has it, of any number,
    and now and then a step lands first. `slip` is a token that stands among the drafts now and then.
    """

    def __init__(self, truths: Sequence[Sequence[int]], rng: random.Random | None, slip: int | None = None) -> None:
        super().__init__(truths, rng)
        self.slip = slip
        self.known: dict[int, int] = {}  # output tokens of each that the device has
        self.chained_steps, self.works = 0, list[Work]()

    def attach(self, engine: Engine) -> "Chaining":
        runner = engine.runner
        graphs = runner.graphs
        assert graphs is not None

        def seen(plan: StepPlan) -> Any:
            readout = Runner.run(runner, plan)
            self.chained_steps += any(w.chained for w in plan.work)
            self.works += [w for w in plan.work if w.chained]
            for w in plan.work:
                if w.sample:
                    before = self.known[w.rid] if w.chained else w.output_index
                    self.known[w.rid] = before + int(graphs.shifts[w.slot]) + 1
                    chain = [*self.continued(w.rid, self.known[w.rid]), *[0] * MAX_DRAFTS][:MAX_DRAFTS]
                    graphs.draft_buffer[w.slot] = torch.tensor(chain)
            return readout

        runner.run = seen  # type: ignore[method-assign]
        engine.speculator = self  # type: ignore[assignment]
        return self

    def continued(self, rid: int, known: int) -> list[int]:
        true = list(self.by_rid[rid][known:])
        if self.rng is None:
            return true
        right = true[: self.rng.choice([0, 1, 2, 4, 8])]
        chain = [*right, *(self.rng.randrange(self.vocabulary) for _ in range(MAX_DRAFTS))]
        if self.slip is not None and self.rng.random() < 0.3:
            chain[self.rng.randrange(3)] = self.slip
        return chain

    def chained(self, running: StepPlan) -> int | None:
        return MAX_DRAFTS if self.rng is None else self.rng.choice([None, 0, 1, 3, 5, 8, 8])


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, **CONFIG, draft="off") as llm:
        yield llm


def drafted(drafter: Path, **setting: Any) -> dict[str, Any]:
    return CONFIG | setting | dict(draft="eagle3", draft_tokens=4, drafter=str(drafter))


@pytest.mark.parametrize("setting", [{}, TIGHT | {"max_step_tokens": 40}], ids=["roomy", "tight"])
@pytest.mark.parametrize("hostile", [False, True])
def test_answers_stay_the_same(tiny: Path, plain: LLM, drafter: Path, setting: dict[str, Any], hostile: bool) -> None:
    kinds = [p for kind in ("greedy", "hot", "filters") for p in PARAMS[kind][:3]]
    params = [replace(kinds[i % len(kinds)], max_tokens=20 + 7 * i) for i in range(len(PROMPTS))]
    params[1] = replace(params[1], stop_token_ids=tuple(range(3, 512, 19)))
    expected = plain.generate(PROMPTS, params)
    with LLM(tiny, **drafted(drafter, **setting)) as llm:
        engine = llm._engine
        assert engine is not None
        ungraphed(engine)
        for seed in range(3 if hostile else 1):
            chaining = Chaining([c.token_ids for c in expected], random.Random(seed) if hostile else None)
            chaining.attach(engine)
            alike(llm.generate(PROMPTS, params), expected)
            engine.scheduler.check_integrity()
            assert chaining.chained_steps > 5 and chaining.accepted > 30
        assert not setting or engine.stats().preemptions > 0


def test_who_needs_the_host_between_steps_has_it(tiny: Path, plain: LLM, drafter: Path) -> None:
    """Penalties, biases and log-probabilities among requests that choose freely, which end first or last."""
    for hurry in (1, 6):
        params = [PARAMS[kind][i % len(PARAMS[kind])] for i, kind in enumerate([*PARAMS, "hot"])]
        params = [replace(p, max_tokens=10 + 4 * (i if hurry == 1 else hurry - i)) for i, p in enumerate(params)]
        expected = plain.generate(PROMPTS, params)
        with LLM(tiny, **drafted(drafter)) as llm:
            engine = llm._engine
            assert engine is not None
            ungraphed(engine)
            chaining = Chaining([c.token_ids for c in expected], random.Random(hurry)).attach(engine)
            alike(llm.generate(PROMPTS, params), expected)
            assert chaining.drafted > 0
            for w in chaining.works:
                assert not w.params.penalized and w.params.logprobs is None


def test_a_step_that_a_penalized_request_joins_samples_at_the_real_positions(
    tiny: Path,
    plain: LLM,
    drafter: Path,
) -> None:
    """As where a request waits for a block that is being copied to a KV tier: it is left out of one step."""
    params = [SamplingParams(seed=i, max_tokens=60, ignore_eos=True) for i in range(3)]
    params[2] = replace(params[2], presence_penalty=1.0)
    expected = plain.generate(PROMPTS[:3], params)
    with LLM(tiny, **drafted(drafter)) as llm:
        engine = llm._engine
        assert engine is not None
        ungraphed(engine)
        chaining = Chaining([c.token_ids for c in expected], None).attach(engine)
        plan, launch, mixed = engine.scheduler.plan, engine.runner.launch, 0

        def leaves_out(chain: int = 0) -> StepPlan | None:
            running = engine.scheduler._running
            last = [r for r in running if r.params.penalized and r.known > r.prompt_len and len(running) > 1]
            for request in last:
                request.drafted += 1
            found = plan(chain)
            for request in last:
                request.drafted -= 1
            return found

        def seen(plan: StepPlan) -> Any:
            nonlocal mixed
            mixed += any(w.chained for w in plan.work) and any(w.params.penalized for w in plan.work)
            return launch(plan)

        engine.scheduler.plan = leaves_out  # type: ignore[method-assign]
        engine.runner.launch = seen  # type: ignore[method-assign]
        alike(llm.generate(PROMPTS[:3], params), expected)
        assert mixed and chaining.accepted > 10


@pytest.mark.parametrize("slip", [None, POISON])
def test_what_fails_behind_drafts_fails_where_it_would(
    tiny: Path,
    tmp_path: Path,
    drafter: Path,
    slip: int | None,
) -> None:
    """Requests that say the poisonous token, and drafts that have it where plain decoding would not."""
    path = poison(tiny, tmp_path / "poisoned")
    params = [SamplingParams(seed=i, max_tokens=120, temperature=4.0) for i in range(2 * len(PROMPTS))]
    requests = [Submit(i, tuple(PROMPTS[i % len(PROMPTS)]), p.ending_with(())) for i, p in enumerate(params)]

    def outcome(chaining: Chaining | None) -> list[tuple[list[int], str | None]]:
        setting = CONFIG | {"max_num_seqs": 4}
        own = {"draft": "off"} if chaining is None else {"draft": "eagle3", "draft_tokens": 4, "drafter": str(drafter)}
        engine = Engine(path, build(EngineConfig, setting | own))
        if chaining is not None:
            ungraphed(engine)
            chaining.attach(engine)
        return outcomes(engine, requests)

    expected = outcome(None)
    assert sum(end == "error" for _, end in expected) > 2
    for rng in (None, random.Random(3)):
        chaining = Chaining([tokens for tokens, _ in expected], rng, slip)
        assert outcome(chaining) == expected
        assert chaining.chained_steps > 10 and chaining.accepted > 10


def test_cancelled_requests_leave_nothing_behind(tiny: Path, plain: LLM, drafter: Path) -> None:
    params = [SamplingParams(seed=i, max_tokens=30 + 5 * i).ending_with(()) for i in range(len(PROMPTS))]
    expected = plain.generate(PROMPTS, params)
    engine = Engine(tiny, build(EngineConfig, drafted(drafter)))
    ungraphed(engine)
    chaining = Chaining([c.token_ids for c in expected], random.Random(5)).attach(engine)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for i, (prompt, p) in enumerate(zip(PROMPTS, params)):
        engine.submit(Submit(i, tuple(prompt), p))
    steps = 0
    while engine.busy:
        deltas: list[Delta] = engine.step()
        for delta in deltas:
            tokens[delta.rid] += delta.tokens
        steps += 1
        if steps in (5, 9):
            engine.cancel(steps - 5)
        engine.scheduler.check_integrity()
    assert chaining.chained_steps > 5 and engine.scheduler.stats().blocks_owned == 0
    for i, (got, want) in enumerate(zip(tokens, expected)):
        assert got == list(want.token_ids) if i not in (0, 4) else got == list(want.token_ids[: len(got)])
    engine.close()


def test_steps_without_the_draft_model_are_plain_ones(tiny: Path, plain: LLM, drafter: Path) -> None:
    """The same graphs, planned ahead, as if there were no draft model."""

    class LeftOut(Scripted):
        def worth_waiting(self, running: StepPlan) -> bool:
            return False

        def propose(self, plan: StepPlan) -> dict[int, Sequence[int]]:
            return {}

        def chain_length(self, plan: StepPlan) -> int:
            return LEFT_OUT

    params = [SamplingParams(seed=i, max_tokens=20 + 5 * i) for i in range(len(PROMPTS))]
    expected = plain.generate(PROMPTS, params)
    found = []
    for speculator in (None, LeftOut((), None)):
        with LLM(tiny, **drafted(drafter)) as llm:
            engine = llm._engine
            assert engine is not None
            engine.speculator = speculator  # type: ignore[assignment]
            if speculator is None:
                engine.runner.follow(None)
            graphs, plans = ungraphed(engine), list[StepPlan]()
            launch = engine.runner.launch

            def seen(plan: StepPlan, plans: list[StepPlan] = plans, launch: Any = launch) -> Any:
                plans.append(plan)
                return launch(plan)

            engine.runner.launch = seen  # type: ignore[method-assign]
            alike(llm.generate(PROMPTS, params), expected)
            found.append((graphs.keys, [[(w.rid, w.tokens, w.start) for w in p.work] for p in plans]))
    assert found[0] == found[1] and not any(key.followed for key in found[0][0])


def test_steps_that_cannot_be_captured_wait_for_what_they_need(tiny: Path, plain: LLM, drafter: Path) -> None:
    """Whatever sizes fail first: the last request decodes alone for 90 tokens, in steps of one or two rows too."""
    params = [SamplingParams(seed=i, max_tokens=30 + 5 * i, ignore_eos=True) for i in range(len(PROMPTS))]
    params[-1] = replace(params[-1], max_tokens=145)
    expected = plain.generate(PROMPTS, params)

    class Small(DecodeGraphs):
        def _capture(self, key: Key, plan: StepPlan) -> Any:
            if key.requests > 2:
                raise RuntimeError("too many\nfor this machine")
            return super()._capture(key, plan)

    with LLM(tiny, **drafted(drafter)) as llm:
        engine = llm._engine
        assert engine is not None
        runner = engine.runner
        recorder = Running(runner.last_tokens.device)
        runner.graphs = graphs = Small(runner.model, runner.pages, runner.last_tokens, 256, recorder)
        runner.follow(runner.drafter)
        chaining = Chaining([c.token_ids for c in expected], random.Random(2)).attach(engine)
        alike(llm.generate(PROMPTS, params), expected)
        assert graphs.broken is None and graphs._graphs and max(key.requests for key in graphs._graphs) <= 2
        assert chaining.chained_steps > 10


FLAT = Costs(
    Curve((1, 9, 64), (1.5, 1.6, 2.0)),
    Curve((1,), (0.0,)),
    Curve((1,), (0.02,)),
    Curve((1, 8), (1.0, 1.1)),
    Curve((1, 9, 64), (1.1, 1.2, 1.6)),
)


@pytest.mark.parametrize("users", [1, 4])
def test_the_bundled_model_answers_alike(users: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the engine's own speculator and the bundled draft model."""
    path = resolve_model("kimi-nano")
    config = dict(device="cpu", max_model_len=1024, max_num_seqs=8, threads=1, prefix_cache=False, draft_tokens=1)
    engine = Engine(path, build(EngineConfig, config))
    if engine.config.draft != "hybrid":
        pytest.skip("no draft model is bundled")
    asked = [replace(a, params=replace(a.params, max_tokens=64)) for a in trace(path, 4, 300)]
    engine.use_drafts("off", None, shared=True)
    expected = play(engine, asked, [users])
    ungraphed(engine)
    engine._costs[True] = FLAT
    plans = launches(engine, monkeypatch)
    settings: tuple[tuple[str, int | None], ...] = (("eagle3", 3), ("hybrid", None))
    for source, count in settings:
        engine.use_drafts(source, count, shared=True)
        got = play(engine, asked, [users])
        assert got.answers == expected.answers
        behind = [p for p in plans if any(w.chained for w in p.work)]
        assert len(behind) > 4
        assert count is None or {w.drafts for p in behind for w in p.work if w.left > 9} <= {0, count}
        drafts = {(s, i): (d, a) for s, i, d, a in engine.stats().drafts}
        assert drafts["eagle3", 0][0] > 4 and drafts["eagle3", 0][1] > drafts["eagle3", 0][0] / 2
        assert sum(d for d, _ in drafts.values()) == got.drafted
        assert sum(a for _, a in drafts.values()) == got.accepted
        plans.clear()
    engine.close()


def test_random_numbers_on_the_device_are_the_hosts() -> None:
    rng = random.Random(1)
    seeds = [0, -1, 2**63 - 1, -(2**63), *(rng.getrandbits(63) for _ in range(12))]
    B, m = len(seeds), 5
    grid, ahead, draws = (
        torch.zeros(B, m, dtype=torch.int64),
        torch.zeros(B, 4, dtype=torch.int64),
        torch.tensor([rng.randrange(1 << 20) for _ in seeds]),
    )
    u, each = torch.zeros(B, m, dtype=torch.float64), torch.zeros(B, dtype=torch.int32)
    rows, shifts = torch.arange(B), torch.tensor([rng.randrange(9) for _ in seeds])
    advance_inputs(
        grid.clone(),
        Columns(grid.clone(), grid.clone(), u),
        Requests(
            each.clone(), each.clone(), torch.ones_like(each), torch.zeros(B, 4, dtype=torch.int32), rows,
            torch.tensor(seeds), draws,
        ),
        Continuation(rows, shifts, ahead),
        64,
    )  # fmt: skip
    numbers = (draws + shifts)[:, None].numpy() + torch.arange(m).numpy()
    assert u.tolist() == uniforms(seeds, numbers).tolist()
