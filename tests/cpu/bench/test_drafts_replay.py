"""The trace by table: the clock adds up, hindsight is never beaten, and the policy does not lose whatever time says."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from perilune.bench.drafts import settings_of
from perilune.bench.drafts_replay import Clock, Recorded, listen, oracle, play
from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.core.sampling import SamplingParams
from perilune.core.step import LEFT_OUT
from perilune.engine.engine import Engine
from perilune.formats.hub import resolve_model
from perilune.speculation.drafting import Speculator
from perilune.speculation.step_cost import Costs, Curve, StepKind

FLAT = Costs(Curve((1, 2, 9, 64), (1.0, 1.1, 1.3, 4.0)), Curve((1,), (0.0,)), Curve((1, 8), (0.05, 0.08)))
DEAR = Costs(Curve((1, 64), (1.0, 64.0)), Curve((1,), (0.0,)), Curve((1,), (1.0,)))  # every token its full price


def made(count: int, length: int, sure: float) -> list[Recorded]:
    """Requests without repetition; their chains are right with probability `sure` and know when they are, mostly."""
    rng = random.Random(0)
    trace = []
    for number in range(count):
        answer = [1000 * number + i for i in range(length)]
        chains = []
        for at in range(length):
            chain = []
            for k in range(8):
                right = rng.random() < sure
                token = answer[at + 1 + k] if right and at + 1 + k < length else 10**6
                chain.append((token, rng.uniform(0.85, 1.0) if right else rng.uniform(0.1, 0.95)))
            chains.append(tuple(chain))
        trace.append(Recorded("made", (7 * number + 1, 7 * number + 2), tuple(answer), length, tuple(chains)))
    return trace


def modelled(costs: Costs, fixed: int | None = None) -> Speculator:
    return Speculator(suffix=True, longest=8, fixed=fixed, costs=None if fixed else costs, shared=True)


TRAILING = Costs(  # of one H200 and the bundled model, in milliseconds
    Curve((1, 2, 3, 4, 6, 9, 16, 32, 64), (0.38, 0.39, 0.40, 0.41, 0.41, 0.47, 0.53, 0.63, 0.73)),
    Curve((1,), (0.0,)),
    Curve((1, 8), (0.05, 0.06)),
    Curve((1, 2, 4, 8, 16), (0.25, 0.27, 0.28, 0.30, 0.37)),
    Curve((1, 2, 3, 4, 6, 9, 16, 32, 64), (0.30, 0.32, 0.33, 0.33, 0.35, 0.40, 0.43, 0.49, 0.56)),
)


# ---- clock


def test_the_seconds_of_a_short_answer() -> None:
    trace = [Recorded("one", (1, 2, 3), (4, 5, 6, 7, 8), 5, tuple(((5 + i, 0.9), (6 + i, 0.9)) for i in range(5)))]
    clock = Clock(FLAT, wait=0.2, follow=0.01)
    plain = play(trace, 1, clock, None)
    assert (plain.tokens, plain.steps, plain.drafted) == (5, 5, 0) and plain.seconds == pytest.approx(5.0)
    drafted = play(trace, 1, clock, modelled(FLAT, fixed=2))
    # The prompt's step, then 2 right of 2, then the last token, behind which no draft fits.
    assert (drafted.tokens, drafted.steps, drafted.drafted, drafted.accepted) == (5, 3, 2, 2)
    step3 = FLAT.base(3)
    assert drafted.seconds == pytest.approx(1.0 + step3 + 1.0 + 3 * (0.01 + 2 * 0.05) + 2 * 0.2)
    assert clock.step([1], [3], LEFT_OUT, StepKind.OVERLAPPED) == 1.0


def test_chains_end_where_no_request_has_hope() -> None:
    clock = Clock(FLAT, floor=0.4)
    low, high = ((1, 0.9), (2, 0.3), (3, 0.9)), ((1, 0.9), (2, 0.9), (3, 0.4), (4, 0.9))
    assert clock.drafted([low]) == 2 and clock.drafted([low, high]) == 3 and clock.drafted([]) == 0
    assert Clock(FLAT).drafted([low]) == 3


# ---- play


@pytest.mark.parametrize("users", [1, 3, 8])
def test_every_token_is_told_once_whatever_is_drafted(users: int) -> None:
    trace = made(10, 40, 0.8)
    for speculator in (None, modelled(FLAT, 1), modelled(FLAT, 8), modelled(FLAT)):
        assert play(trace, users, Clock(FLAT), speculator).tokens == 400


def test_hindsight_is_never_beaten() -> None:
    for sure in (0.3, 0.8, 0.97):
        trace, clock = made(12, 60, sure), Clock(FLAT, wait=0.05)
        best = oracle(trace, clock)
        for fixed in (None, 1, 2, 4, 8):
            assert best < play(trace, 1, clock, modelled(FLAT, fixed)).seconds
        assert best < play(trace, 1, clock, None).seconds


@pytest.mark.parametrize("users", [1, 4])
def test_the_policy_is_as_good_as_the_best_fixed_length(users: int) -> None:
    for sure in (0.5, 0.8, 0.95):
        trace, clock = made(40, 60, sure), Clock(FLAT, wait=0.05)
        fixed = [play(trace, users, clock, modelled(FLAT, n)).seconds for n in (1, 2, 3, 4, 6, 8)]
        assert play(trace, users, clock, modelled(FLAT)).seconds < 1.03 * min(fixed)


@pytest.mark.parametrize("users", [1, 4])
@pytest.mark.parametrize("matches", [False, True])
def test_where_nothing_waits_it_is_as_good_and_never_beats_hindsight(users: int, matches: bool) -> None:
    for sure in (0.5, 0.8, 0.95):
        trace, clock = made(40, 60, sure), Clock(TRAILING)
        landed = Costs(TRAILING.base, TRAILING.attention, TRAILING.draft_token, TRAILING.overlapped)

        def policy(costs: Costs, fixed: int | None = None, matches: bool = matches) -> Speculator:
            return Speculator(suffix=matches, longest=8, fixed=fixed, costs=None if fixed else costs, shared=False)

        fixed = [play(trace, users, clock, policy(TRAILING, n, False)) for n in (1, 2, 3, 5, 8)]
        assert all(f.tokens == 40 * 60 and f.accepted for f in fixed)
        found = play(trace, users, clock, policy(TRAILING))
        assert found.seconds < 1.08 * min(f.seconds for f in fixed) and found.tokens == 40 * 60
        assert found.seconds < play(trace, users, Clock(landed), policy(landed)).seconds
        assert users > 1 or oracle(trace, clock) < min(found.seconds, *(f.seconds for f in fixed))


@pytest.mark.parametrize("users", [1, 4, 16])
def test_where_nothing_waits_it_does_not_lose_for_long_either(users: int) -> None:
    trace, clock = made(60 * users, 100, 0.05), Clock(TRAILING)
    speculator = Speculator(suffix=False, longest=8, costs=TRAILING, shared=False)
    plain = play(trace, users, clock, None).seconds
    play(trace[: 20 * users], users, clock, speculator)
    for rid in list(speculator._requests.states):
        speculator.drop(rid)
    assert play(trace, users, clock, speculator).seconds < 1.02 * plain


@pytest.mark.parametrize("users", [1, 4, 16])
@pytest.mark.parametrize("what", ["a text nobody foretells", "dear", "a table that is wrong", "waiting"])
def test_it_does_not_lose_for_long(what: str, users: int) -> None:
    """Over a long time within 2 % of no speculation: with hopeless drafts, with steps that pay for every token and
    a table that knows, with steps that do and a table that does not, and where waiting is as dear as a step."""
    count = min(60 * users, 480)
    trace = made(count, 100, 0.1 if what == "a text nobody foretells" else 0.6)
    true = FLAT if what in ("a text nobody foretells", "waiting") else DEAR
    wait = FLAT.base(users) if what == "waiting" else 0.02 * true.base(users)
    clock = Clock(true, wait=wait, follow=0.08 * true.base(users))
    speculator = modelled(DEAR if what == "dear" else FLAT)
    plain = play(trace, users, clock, None).seconds
    play(trace[: count // 3], users, clock, speculator)  # it learns
    for rid in list(speculator._requests.states):
        speculator.drop(rid)
    assert play(trace, users, clock, speculator).seconds < 1.02 * plain


def test_settings_by_name() -> None:
    assert settings_of("hybrid, eagle3:3,suffix:8") == [("hybrid", None), ("eagle3", 3), ("suffix", 8)]
    for bad in ("", "off", "hybrid:0", "hybrid:9", "eagle3:x", "hybrid,"):
        with pytest.raises(ConfigError, match="is none: suffix, eagle3, hybrid, alone or with :1 to :8"):
            settings_of(bad)


def test_what_an_engine_tells(path_to_nano: Path) -> None:
    config = EngineConfig(
        device="cpu", threads=1, max_num_seqs=2, max_model_len=256, prefix_cache=False, draft="hybrid"
    )
    engine = Engine(path_to_nano, config)
    try:
        asked: Sequence[tuple[str, tuple[int, ...], SamplingParams]] = [
            ("x", tuple(range(40 + i, 60 + i)), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
            for i in range(2)
        ]
        trace = listen(engine, asked)
        assert [len(one.answer) for one in trace] == [12, 12] and all(len(one.chains) == 12 for one in trace)
        assert all(len(chain) == 8 for one in trace for chain in one.chains)
        assert listen(engine, asked) == trace and engine.speculator is not None
        assert play(trace, 2, Clock(engine.costs), None).tokens == 24
    finally:
        engine.close()


@pytest.fixture(scope="module")
def path_to_nano() -> Path:
    return resolve_model("kimi-nano")
