"""A draft model that is given up costs nothing: steps are then those of an engine without drafts."""

import random
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType

import pytest

from perilune import LLM, SamplingParams
from perilune.core.messages import Delta, Submit
from perilune.core.step import LEFT_OUT, PENDING, StepPlan, Work
from perilune.engine.engine import Engine
from perilune.model.eagle3_config import Eagle3Config
from perilune.speculation.adaptive import Adaptive
from perilune.speculation.drafting import Speculator
from perilune.speculation.modes import Batch, Mode, ModeChoice
from perilune.speculation.pausing import PAUSE_STEPS
from tests import oracle
from tests.cpu.engine.test_graphs import ungraphed
from tests.cpu.model.test_eagle3 import tensors_of, written
from tests.cpu.speculation.test_chained_steps import FLAT
from tests.cpu.speculation.test_speculation import CONFIG, DRAFTS, launches

USERS, STEPS = 3, 3 * PAUSE_STEPS


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """With a draft model of random weights."""
    path = oracle.make(tmp_path_factory.mktemp("tiny") / "model").path
    base, change = DRAFTS[next(iter(DRAFTS))]
    raw = base | {"hidden_size": 128, "vocab_size": 512, "draft_vocab_size": 512} | change
    drafter = written(path.parent / "drafter", raw, tensors_of(Eagle3Config.from_dict(raw), 3))
    with LLM(path, **CONFIG | dict(draft="hybrid", draft_tokens=1, drafter=str(drafter), max_model_len=1024)) as llm:
        assert llm._engine is not None
        ungraphed(llm._engine)
        llm._engine._costs[True] = FLAT
        yield llm._engine


def choice_of(speculator: Speculator, batch: Batch) -> ModeChoice:
    assert isinstance(speculator._policy, Adaptive)
    return speculator._policy.modes.choice(batch)


def begun(engine: Engine, draft: str) -> dict[int, list[int]]:
    """Requests that decode, drafting given up for long; what they have said so far."""
    engine.use_drafts(draft, None, shared=False)
    rng, said = random.Random(1), dict[int, list[int]]()
    for rid in range(USERS):
        prompt = tuple(rng.randrange(3, 500) for _ in range(9))
        engine.submit(Submit(rid, prompt, SamplingParams(temperature=0.7, seed=rid, max_tokens=900, ignore_eos=True)))
        said[rid] = []
    if (speculator := engine.speculator) is not None:
        choice = choice_of(speculator, Batch(USERS, 100))
        choice.mode, choice.trial, choice.steps_left = Mode.PLAIN, None, 10**6
    for _ in range(6):
        take(said, engine.step())
    return said


def take(said: dict[int, list[int]], deltas: list[Delta]) -> None:
    for delta in deltas:
        said[delta.rid] += delta.tokens


def ended(engine: Engine) -> None:
    for rid in range(USERS):
        engine.cancel(rid)
    while engine.busy:
        engine.step()


def test_steps_are_those_of_an_engine_without_drafts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, tuple[dict[int, list[int]], list[tuple[bool, int]], list[int]]] = {}
    plans, calls = launches(engine, monkeypatch), Counter[str]()

    def counted(frame: FrameType, event: str, _: object) -> None:
        calls[event] += 1

    try:
        for draft in ("off", "eagle3", "hybrid"):
            said, spent = begun(engine, draft), []
            plans.clear()
            for _ in range(STEPS):
                calls.clear()
                sys.setprofile(counted)
                deltas = engine.step()
                sys.setprofile(None)
                spent.append(calls["call"])
                take(said, deltas)
            ahead = [(w.tokens == (PENDING,), p.chain) for p in plans for w in p.work]
            assert draft == "off" or (engine.speculator is not None and engine.speculator.paused)
            found[draft] = said, ahead, spent
            ended(engine)
    finally:
        sys.setprofile(None)
    said, ahead, spent = found["off"]
    assert all(pending and chain == LEFT_OUT for pending, chain in ahead)
    for draft in ("eagle3", "hybrid"):
        assert found[draft][:2] == (said, ahead)
        assert sorted(found[draft][2])[STEPS // 2] <= 1.02 * sorted(spent)[STEPS // 2]
        assert sum(found[draft][2]) <= 1.05 * sum(spent)


def test_what_was_said_meanwhile_is_known_afterwards(engine: Engine) -> None:
    said = begun(engine, "hybrid")
    for _ in range(STEPS):
        take(said, engine.step())
    speculator = engine.speculator
    assert speculator is not None and speculator.paused > 1
    speculator._resume()
    for rid, state in speculator._requests.states.items():
        assert state.matcher is not None
        assert [*state.matcher.tokens[state.matcher.prompt_len :], *state.pending] == said[rid]
        assert state.known_tokens == 9 + len(said[rid])
    ended(engine)


def test_it_ends_with_the_trial_that_is_due_and_where_requests_come_or_go() -> None:
    def paused(left: int) -> Speculator:
        s = Speculator(suffix=False, longest=8, costs=FLAT, shared=False)
        choice = choice_of(s, Batch(3, 10))
        choice.mode, choice.steps_left = Mode.PLAIN, left
        s.open(1, [1, 2, 3])
        work = Work(1, 1, 9, (PENDING,), (0,), True, 7, SamplingParams(), 0, left=50)
        for step in range(2):
            assert not s.paused and s.chain_length(StepPlan(step, (work, work, work))) == LEFT_OUT
        assert s.paused == min(left, PAUSE_STEPS)
        return s

    for left in (5, 1000):
        s = paused(left)
        for _ in range(min(left, PAUSE_STEPS)):
            assert s.paused
            s.record_paused(3, [])
        assert not s.paused
    for requests, goes_on in ((4, True), (5, False), (2, False)):
        s = paused(1000)
        s.record_paused(requests, [])
        assert bool(s.paused) == goes_on
    for left, goes_on in ((1000, True), (20, False)):  # for a prompt
        s = paused(left)
        s.open(2, [4, 5, 6])
        assert bool(s.paused) == goes_on
