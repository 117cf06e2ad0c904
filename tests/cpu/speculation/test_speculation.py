"""Speculation never changes an answer: real models, with drafters that are hostile, perfect, or the engine's own."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perilune import LLM, SamplingParams
from perilune.bench import drafts as drafts_bench
from perilune.bench.drafts import KINDS, play, trace
from perilune.core.config import EngineConfig, build
from perilune.core.errors import ConfigError, EngineError
from perilune.core.messages import Delta, EngineStats, Submit
from perilune.core.step import LEFT_OUT, MAX_DRAFTS, PENDING, Output, StepPlan, Work, samples
from perilune.engine import sampler
from perilune.engine.engine import Engine
from perilune.engine.llm import Completion
from perilune.grammar.constrain import AnswerFormat, constrain
from perilune.grammar.enforcer import Enforcer
from perilune.grammar.matcher import GrammarError
from perilune.model.eagle3_config import Eagle3Config
from perilune.ops.sampling.sample import sample
from perilune.speculation.acceptance import accept, rows_kept
from perilune.speculation.drafting import Speculator
from perilune.speculation.step_cost import Costs, Curve
from perilune.text.tokenizer import Tokenizer
from perilune.text.tools import parse_tools
from tests import oracle
from tests.cpu.engine.test_constraint_engine import ask, function, hot, person, run, start
from tests.cpu.engine.test_engine import CONFIG, POISON, poison
from tests.cpu.model.test_eagle3 import MHA, MLA, tensors_of, written
from tests.schemas import SCHEMAS

PROMPTS = [[t for t in p if t != POISON] for p in oracle.random_prompts(7, [9, 40, 17, 3, 33, 21])]


class Scripted:
    """Stands in for a Speculator: drafts from the answers of plain decoding, more or less right.

    `truths` by request, in the order they are opened, or given in `by_rid`. `rng` None drafts everything right;
    otherwise lengths and mistakes are random, and now and then it drafts nothing.
    """

    min_confidence = 0.0
    paused = 0

    def __init__(self, truths: Iterable[Sequence[int]], rng: random.Random | None, vocabulary: int = 512) -> None:
        self.truths = list(truths)
        self.rng = rng
        self.vocabulary = vocabulary
        self.by_rid: dict[int, Sequence[int]] = {}
        self.drafted = self.accepted = self.steps = 0

    def open(self, rid: int, prompt: Sequence[int], root: bytes = b"") -> None:
        if self.truths:
            self.by_rid[rid] = self.truths.pop(0)

    def drop(self, rid: int) -> None:
        pass

    def maintain(self) -> None:
        pass

    def report(self, stats: EngineStats) -> EngineStats:
        return stats

    def worth_waiting(self, running: StepPlan) -> bool:
        return self.rng is None or self.rng.random() < 0.7

    def chained(self, running: StepPlan) -> int | None:
        return None

    def chain_length(self, plan: StepPlan) -> int:
        return 0

    def record_time(self, plan: StepPlan, seconds: float, alone: bool) -> None:
        pass

    def observe(self, deltas: Sequence[Delta], outputs: Sequence[Output]) -> None:
        for delta in deltas:
            self.drafted += delta.drafted
            self.accepted += delta.accepted

    def propose(self, plan: StepPlan) -> dict[int, Sequence[int]]:
        self.steps += 1
        return {w.rid: self.drafts_of(w) for w in plan.work if w.sample and w.tokens[-1] != PENDING}

    def drafts_of(self, work: Work) -> Sequence[int]:
        true = self.by_rid[work.rid][work.output_index :]
        if self.rng is None:
            return true[:MAX_DRAFTS]
        right = true[: self.rng.choice([0, 0, 1, 2, 4, 8])]
        return [*right, *(self.rng.randrange(self.vocabulary) for _ in range(self.rng.choice([0, 1, 3])))]


def speculate(llm: LLM, truths: Sequence[Sequence[int]], rng: random.Random | None) -> Scripted:
    scripted = Scripted(truths, rng)
    llm._engine.speculator = scripted  # type: ignore[union-attr, assignment]
    return scripted


def outcomes(engine: Engine, requests: list[Submit]) -> list[tuple[list[int], str | None]]:
    """What the requests, numbered from 0, get and how they end; closes the engine."""
    tokens: list[list[int]] = [[] for _ in requests]
    ends: list[str | None] = [None] * len(requests)
    for request in requests:
        engine.submit(request)
    while engine.busy:
        for delta in engine.step():
            tokens[delta.rid] += delta.tokens
            ends[delta.rid] = delta.finish_reason
        engine.scheduler.check_integrity()
    engine.close()
    return list(zip(tokens, ends))


def alike(got: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in got] == [c.finish_reason for c in expected]
    for one, other in zip(got, expected):
        for kind in ("logprobs", "prompt_logprobs"):
            mine, theirs = getattr(one, kind), getattr(other, kind)
            assert [r.token for r in mine] == [r.token for r in theirs]
            assert [r.logprob for r in mine] == pytest.approx([r.logprob for r in theirs], abs=1e-4)
            assert [len(r.top) for r in mine] == [len(r.top) for r in theirs]


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, **CONFIG, draft="off") as llm:
        yield llm


PARAMS = {
    "greedy": [SamplingParams(temperature=0.0)],
    "hot": [SamplingParams(seed=s) for s in range(6)],
    "filters": [SamplingParams(seed=s, top_k=20 * (s % 2), top_p=0.9, min_p=0.01, temperature=0.8) for s in range(6)],
    "penalties": [
        SamplingParams(temperature=0.0, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.2),
        SamplingParams(seed=1, presence_penalty=2.0, frequency_penalty=1.0, top_p=0.9),
        SamplingParams(temperature=0.0, frequency_penalty=-2.0),
        SamplingParams(seed=3, repetition_penalty=0.5, temperature=0.7),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=4, frequency_penalty=-2.0, logit_bias={7: 5.0}, min_tokens=7, stop_token_ids=(7,)),
    ],
    "ends": [
        SamplingParams(seed=s, stop_token_ids=tuple(range(s, 512, 12)), min_tokens=3 * s, logprobs=s, prompt_logprobs=0)
        for s in range(6)
    ],
}
TIGHT: dict[str, Any] = dict(max_step_tokens=11, block_size=4, kv_blocks=32, max_num_seqs=5, max_model_len=128)


# ---- identity


def stays_the_same(llm: LLM, params: list[SamplingParams], expected: list[Completion]) -> Scripted:
    """The answers to PROMPTS with perfect drafts, which it returns, and with hostile ones."""
    truths = [c.token_ids for c in expected]
    perfect = speculate(llm, truths, None)
    alike(llm.generate(PROMPTS, params), expected)
    assert perfect.accepted > sum(map(len, truths)) // 2
    for seed in range(3):
        hostile = speculate(llm, truths, random.Random(seed))
        alike(llm.generate(PROMPTS, params), expected)
        assert 0 < hostile.accepted < hostile.drafted
    return perfect


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("setting", [{}, TIGHT], ids=["roomy", "tight"])
def test_every_parameter_with_hostile_and_perfect_drafts(
    tiny: Path, plain: LLM, kind: str, setting: dict[str, Any]
) -> None:
    given = PARAMS[kind]
    params = [replace(given[i % len(given)], max_tokens=40 + i) for i in range(len(PROMPTS))]
    expected = plain.generate(PROMPTS, params)
    with LLM(tiny, **(CONFIG | setting), draft="suffix", draft_tokens=4) as llm:
        perfect = stays_the_same(llm, params, expected)
        assert perfect.drafted < 1.2 * perfect.accepted  # an answer may end among its drafts
        if setting and kind != "ends":
            assert llm._engine.stats().preemptions > 2  # type: ignore[union-attr]


@pytest.mark.parametrize("draft_tokens", [1, 4, 8, None])
def test_the_engines_own_drafts(tiny: Path, plain: LLM, draft_tokens: int | None) -> None:
    params = [replace(p, max_tokens=60) for kind in PARAMS.values() for p in kind]
    prompts = [PROMPTS[i % len(PROMPTS)] * (1 + i % 3) for i in range(len(params))]
    expected = plain.generate(prompts, params)
    with LLM(tiny, **CONFIG, draft="suffix", draft_tokens=draft_tokens) as llm:
        alike(llm.generate(prompts, params), expected)
        again = llm.generate(prompts, params)  # now the store knows the answers
        alike(again, expected)
        if draft_tokens is not None:
            assert sum(c.accepted_tokens for c in again) > sum(len(c.token_ids) for c in again) / 3
            stats = llm._engine.stats()  # type: ignore[union-attr]
            assert stats.verified > 0 and {s for s, *_ in stats.drafts} == {"suffix"}
            assert max(position for _, position, _, _ in stats.drafts) == draft_tokens - 1
            assert all(0 <= accepted <= drafted for _, _, drafted, accepted in stats.drafts)


def test_tenants_get_neither_the_cache_nor_drafts_of_each_other(tiny: Path) -> None:
    """Both would answer a prompt sooner that another tenant has sent before."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompt = list(range(20, 60))
    with LLM(tiny, **CONFIG, draft="suffix", draft_tokens=4) as llm:
        (first,) = llm.generate(prompt, params, cache_keys=("key:a",))
        (other,) = llm.generate(prompt, params, cache_keys=("key:b",))
        (again,) = llm.generate(prompt, params, cache_keys=("key:a",))
    assert first.token_ids == other.token_ids == again.token_ids
    assert again.cached_tokens and again.accepted_tokens > first.accepted_tokens
    assert not other.cached_tokens and other.drafted_tokens == first.drafted_tokens


def test_n_and_best_of(tiny: Path, plain: LLM) -> None:
    params = SamplingParams(seed=11, max_tokens=20)
    expected = plain.generate(PROMPTS[0], params, n=2, best_of=4)
    with LLM(tiny, **CONFIG, draft="suffix", draft_tokens=3) as llm:
        alike(llm.generate(PROMPTS[0], params, n=2, best_of=4), expected)


def test_a_poisonous_draft_changes_no_answer(tiny: Path, tmp_path: Path) -> None:
    """A rejected draft's cache entries may hold anything: no row before it may see them."""
    path = poison(tiny, tmp_path / "poisoned")
    params = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={POISON: -100.0})

    class Poisoner(Scripted):
        def drafts_of(self, work: Work) -> Sequence[int]:
            true = list(super().drafts_of(work))
            return [*true[:2], POISON, *true[2:4]]

    with LLM(path, **CONFIG, draft="off") as llm:
        expected = llm.generate(PROMPTS, params)
        poisoner = Poisoner([c.token_ids for c in expected], random.Random(0))
        llm._engine.speculator = poisoner  # type: ignore[union-attr, assignment]
        alike(llm.generate(PROMPTS, params), expected)
        assert poisoner.drafted > poisoner.accepted > 0


def test_an_error_comes_after_the_tokens_before_it(tiny: Path, tmp_path: Path) -> None:
    """A request that says the poisonous token fails where plain decoding fails, drafts or not."""
    path = poison(tiny, tmp_path / "poisoned")
    params = [
        SamplingParams(seed=i, max_tokens=40, logit_bias={POISON: 4.0}).ending_with(()) for i in range(len(PROMPTS))
    ]

    def outcome(draft: Scripted | None) -> list[tuple[list[int], str | None]]:
        engine = Engine(path, build(EngineConfig, {**CONFIG, "draft": "off"}))
        engine.speculator = draft  # type: ignore[assignment]
        return outcomes(engine, [Submit(i, tuple(t), p) for i, (t, p) in enumerate(zip(PROMPTS, params))])

    expected = outcome(None)
    assert sum(end == "error" for _, end in expected) > 2
    for rng in (None, random.Random(3)):
        assert outcome(Scripted([tokens for tokens, _ in expected], rng)) == expected


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    engine = start(path, max_num_seqs=16, draft="off")
    yield engine
    engine.close()


# ---- constraints


def constrained(path: Path, nano: Tokenizer) -> list[Submit]:
    """Answers by schema and calls of tools, hot, with little room: forced ends and exchanged tokens among them."""
    found = []
    for i in range(6):
        params = hot(nano, i, 24 - i % 3, presence_penalty=0.5 * (i % 2), logprobs=0)
        found.append(Submit(i, ask(path, nano, "Tell me about somebody."), params, person(nano)))
    for i, schema in enumerate(SCHEMAS[:8], len(found)):
        tools = [function(schema)]
        constraint = constrain(
            nano, tools=parse_tools(tools), choice="required", thinking=i % 2 == 0, thinking_budget=i % 4 or None
        )
        assert constraint is not None
        prompt = ask(path, nano, "Please call your tool now.", tools, i % 2 == 0)[-200:]
        found.append(Submit(i, prompt, hot(nano, i, constraint.least + 6 + i), constraint))
    found += [replace(found[0], rid=len(found) + j, constraint=None) for j in range(2)]
    choice = constrain(nano, answer=AnswerFormat("choice", ["yes", "no"]))
    params = hot(nano, 0, 20, min_tokens=15)
    return [*found, Submit(len(found), ask(path, nano, "Well?"), params, choice)]  # fails: it must end too soon


def test_answers_under_constraints_stay_the_same(path: Path, nano: Tokenizer, engine: Engine) -> None:
    requests = constrained(path, nano)
    expected = run(engine, requests)
    assert Counter(reason for _, reason, _ in expected.values())["error"] == 1
    try:
        for rng in (None, random.Random(1), random.Random(2)):
            scripted = Scripted((), rng, nano.vocab_size)
            scripted.by_rid = {rid: tokens for rid, (tokens, _, _) in expected.items()}
            engine.speculator = scripted  # type: ignore[assignment]
            assert run(engine, requests) == expected
            assert scripted.accepted > 60
            if rng is None:
                assert scripted.steps < max(len(t) for t, _, _ in expected.values()) / 2
    finally:
        engine.speculator = None


def test_a_grammar_that_gives_up_on_a_draft_fails_where_it_would(
    path: Path, nano: Tokenizer, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = constrained(path, nano)[:2]
    advance = Enforcer.advance

    def fails(self: Enforcer, token: int) -> None:
        taken = getattr(self, "taken", 0)
        if taken == 5:
            raise GrammarError("too complex")
        advance(self, token)
        self.taken = taken + 1  # type: ignore[attr-defined]

    full = run(engine, requests)
    monkeypatch.setattr(Enforcer, "advance", fails)
    expected = run(engine, requests)
    assert all(error and "too complex" in error and len(ids) == 6 for ids, _, error in expected.values())
    try:
        engine.speculator = Scripted([full[0][0], full[1][0]], None)  # type: ignore[assignment]
        assert run(engine, requests) == expected
    finally:
        engine.speculator = None


# ---- acceptance


def test_against_reading_one_by_one() -> None:
    rng = random.Random(0)
    for _ in range(200):
        drafts = [rng.randrange(5) for _ in range(rng.randrange(1, 6))]
        drafts_given = [[rng.randrange(2) for _ in range(rng.randint(0, n))] for n in drafts]
        rows = [[rng.choice([0, 1, 0, 1, sampler.FAILED]) for _ in range(n + 1)] for n in drafts]
        got = accept(torch.tensor([token for row in rows for token in row]), drafts, drafts_given, sampler.on_device)
        lengths, spoilt, kept = [], [], []
        for row, draft in zip(rows, drafts_given):
            n = 0
            while n < len(draft) and row[n] == draft[n]:
                n += 1
            spoilt.append(row[n] == sampler.FAILED)
            n += row[n] != sampler.FAILED
            lengths.append(n)
            kept += [i < n for i in range(len(row))]
        assert (got.lengths.tolist(), got.spoilt.tolist()) == (lengths, spoilt)
        assert rows_kept(got.lengths, drafts, sampler.on_device).tolist() == kept


def test_sampled_tokens_keep_their_distribution() -> None:
    """Of pairs of tokens over a small vocabulary at temperature 1, whatever was drafted for them: the rule's own
    promise, apart from any comparison with plain decoding."""
    V, N = 5, 20_000
    torch.manual_seed(1)
    first, then = torch.randn(V), torch.randn(V, V)
    joint = (first.softmax(0)[:, None] * then.softmax(1)).flatten()
    params = SamplingParams(temperature=1.0)
    draft = int(first.argmax())
    works = tuple(
        Work(i, i, 0, (1, draft), (0,), True, 0, params, seed=sampler.uniform(3, i).hex().__hash__(), drafts=1)
        for i in range(N)
    )
    logits = torch.stack([first, then[draft]]).repeat(N, 1)
    drawn = sampler.sample_tokens(logits, samples(works))
    got = accept(drawn, [1] * N, [[draft]] * N, sampler.on_device)
    pairs = []
    for work, length, (one, two) in zip(works, got.lengths.tolist(), drawn.view(N, 2).tolist()):
        if length == 1:  # rejected: what is kept is the correction, and the next step draws after it
            later = replace(work, tokens=(one,), output_index=1, drafts=0)
            two = int(sampler.sample_tokens(then[one][None], (later,))[0])
        pairs.append(one * V + two)
    counts = np.bincount(pairs, minlength=V * V)
    chi = float(((counts - N * joint.numpy()) ** 2 / (N * joint.numpy())).sum())
    assert chi < 51.2  # 24 degrees of freedom: beyond that once in a thousand
    assert abs(float((got.lengths == 2).float().mean()) - float(first.softmax(0)[draft])) < 0.015


def test_a_row_alone_and_among_drafts_draws_the_same() -> None:
    """Row i of a work with drafts has the random number of output token number draw + i."""
    work = Work(0, 0, 4, (1, 5, 6), (0,), True, 7, SamplingParams(), seed=3, left=9, drafts=2)
    assert [(d.output_index, d.left, d.before) for d in samples((work,))] == [
        (7, 9, ()),
        (8, 8, (5,)),
        (9, 7, (5, 6)),
    ]
    logits = torch.randn(3, 50)
    numbers = torch.tensor([sampler.uniform(3, 7 + i) for i in range(3)], dtype=torch.float64)
    ones, zeros = torch.ones(3), torch.zeros(3)
    assert torch.equal(
        sampler.sample_tokens(logits, samples((work,))), sample(logits, ones, zeros.int(), ones, zeros, numbers)
    )


@pytest.mark.parametrize(
    "config, says",
    [
        (dict(draft="eagle3", drafter=None), "draft model"),
        (dict(draft="magic"), "draft"),
        (dict(draft_tokens=9), "at most 8"),
        (dict(draft_tokens=0), "at least 1"),
    ],
)
def test_bad_options_are_one_clear_error(tiny: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises((ConfigError, EngineError), match=says):
        LLM(tiny, **config)


DRAFTS = {
    "mha": (MHA, {"norm_before_residual": True, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}),
    "mla": (MLA, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}),
}


@pytest.fixture(scope="module", params=DRAFTS)
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of random weights for the tiny model."""
    base, change = DRAFTS[request.param]
    raw = base | {"hidden_size": 128, "vocab_size": 512, "draft_vocab_size": 512} | change
    tensors = tensors_of(Eagle3Config.from_dict(raw), 3)
    return written(tmp_path_factory.mktemp("drafter") / "model", raw, tensors)


class Recorder(Scripted):
    """Has chains drafted, verifies drafts of its own, and keeps the chains by the text they continue."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.texts: dict[int, list[int]] = {}
        self.chains: dict[tuple[int, ...], tuple[int, ...]] = {}

    def open(self, rid: int, prompt: Sequence[int], root: bytes = b"") -> None:
        super().open(rid, prompt, root)
        self.texts[rid] = list(prompt)

    def chain_length(self, plan: StepPlan) -> int:
        return 4

    def observe(self, deltas: Sequence[Delta], outputs: Sequence[Output]) -> None:
        super().observe(deltas, outputs)
        for delta in deltas:
            self.texts[delta.rid] += delta.tokens
        for output in outputs:
            if output.chain:
                assert all(0 < sure <= 1 for _, sure in output.chain)
                self.chains[tuple(self.texts[output.rid])] = tuple(token for token, _ in output.chain)


# ---- draft model


@pytest.mark.parametrize("draft, draft_tokens", [("eagle3", 3), ("hybrid", 5), ("hybrid", None), ("auto", None)])
def test_answers_stay_the_same(tiny: Path, plain: LLM, drafter: Path, draft: str, draft_tokens: int | None) -> None:
    params = [replace(p, max_tokens=30) for kind in ("hot", "penalties", "ends") for p in PARAMS[kind]]
    prompts = [PROMPTS[i % len(PROMPTS)] * (1 + i % 2) for i in range(len(params))]
    expected = plain.generate(prompts, params)
    for setting in (dict(draft_dtype="fp8"), TIGHT):
        config = CONFIG | setting | dict(draft=draft, draft_tokens=draft_tokens, drafter=str(drafter))
        with LLM(tiny, **config) as llm:
            assert llm.config.draft_dtype == ("fp8" if setting is not TIGHT else "dtype")
            alike(llm.generate(prompts, params), expected)
            stats = llm._engine.stats()  # type: ignore[union-attr]
            if draft_tokens is not None:
                assert "eagle3" in {source for source, *_ in stats.drafts}
                assert llm.config.draft == draft


def test_chains_depend_on_the_text_alone(tiny: Path, plain: LLM, drafter: Path) -> None:
    """Not on how it was computed: in chunks, among others, behind drafts that were right or wrong, preempted."""
    params = SamplingParams(temperature=0.0, max_tokens=20)
    truths = [c.token_ids for c in plain.generate(PROMPTS, params)]
    config = CONFIG | dict(draft="eagle3", draft_tokens=4, drafter=str(drafter))
    chains: list[dict[tuple[int, ...], tuple[int, ...]]] = []
    for setting in (dict(prefix_cache=False), TIGHT | dict(max_step_tokens=16, kv_blocks=48)):
        with LLM(tiny, **(config | setting)) as llm:
            recorder = Recorder(truths, random.Random(2))
            llm._engine.speculator = recorder  # type: ignore[union-attr, assignment]
            llm.generate(PROMPTS, params)
            assert recorder.accepted > 10
            chains.append(recorder.chains)
    with LLM(tiny, **config, prefix_cache=False) as llm:
        for found in chains:
            texts = random.Random(0).sample(sorted(found), 25)
            whole = Recorder([()] * len(texts), None)
            llm._engine.speculator = whole  # type: ignore[union-attr, assignment]
            llm.generate([list(t[:-1]) for t in texts], replace(params, max_tokens=2))
            assert len(set(found.values())) > 20
            same = sum(whole.chains[t] == found[t] for t in texts)
            assert same >= 24, f"{same} of 25"  # float32 in another order may turn a close choice


def test_chains_end_below_min_confidence(tiny: Path, plain: LLM, drafter: Path) -> None:
    """A shorter chain is the beginning of the longer one, and goes on while any request is above min_confidence."""
    params = SamplingParams(temperature=0.0, max_tokens=20)
    truths = [c.token_ids for c in plain.generate(PROMPTS, params)]
    with LLM(tiny, **CONFIG, draft="eagle3", draft_tokens=4, drafter=str(drafter), prefix_cache=False) as llm:
        found = []
        for confidence in (0.0, 0.01, 1.0):
            recorder = Recorder(truths, None)
            recorder.min_confidence = confidence
            llm._engine.speculator = recorder  # type: ignore[union-attr, assignment]
            llm.generate(PROMPTS, params)
            found.append(recorder.chains)
    whole, some, none = found
    assert {len(c) for c in whole.values()} == {4} and {len(c) for c in none.values()} == {1}
    assert all(whole[text][: len(chain)] == chain for text, chain in some.items() if text in whole)


def test_a_draft_model_may_be_left_out(tiny: Path, plain: LLM, drafter: Path) -> None:
    params = [replace(p, max_tokens=30) for kind in ("hot", "ends") for p in PARAMS[kind]]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    expected = plain.generate(prompts, params)

    class Moody(Recorder):
        def chain_length(self, plan: StepPlan) -> int:
            return random.Random(plan.step).choice([LEFT_OUT, LEFT_OUT, 0, 3])

    with LLM(tiny, **CONFIG, draft="eagle3", draft_tokens=4, drafter=str(drafter)) as llm:
        moody = Moody([c.token_ids for c in expected], random.Random(3))
        llm._engine.speculator = moody  # type: ignore[union-attr, assignment]
        alike(llm.generate(prompts, params), expected)
        assert moody.accepted > 10 and {len(c) for c in moody.chains.values()} == {3}


@pytest.fixture(scope="module")
def nano_engine(path: Path) -> Iterator[Engine]:
    config = dict(device="cpu", max_model_len=1024, max_num_seqs=8, threads=1, prefix_cache=False, draft_tokens=1)
    engine = Engine(path, build(EngineConfig, config))
    yield engine
    engine.close()


# ---- bundled model


def test_the_trace_is_answered_alike_by_every_source(
    path: Path, nano_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts_bench, "MOST_TOKENS", 64)
    asked = trace(path, 4, 600)
    assert asked == trace(path, 4, 600) and [a.kind for a in asked] == list(KINDS)
    nano_engine.use_drafts("off", None, shared=True)
    expected = play(nano_engine, asked, [1])
    assert expected.tokens > 100 and expected.drafted == 0
    settings: list[tuple[str, int | None]] = [("suffix", 3), ("suffix", None)]
    if nano_engine.config.draft == "hybrid":
        settings += [("eagle3", 3), ("hybrid", 8), ("hybrid", None)]
    for source, count in settings:
        nano_engine.use_drafts(source, count, shared=True)
        got = play(nano_engine, asked, [4])
        assert got.answers == expected.answers, (source, count)
        assert count is None or got.accepted > 10


def launches(engine: Engine, patch: pytest.MonkeyPatch) -> list[StepPlan]:
    """The plans that the engine launches until the test ends."""
    plans, launch = list[StepPlan](), engine.runner.launch
    patch.setattr(engine.runner, "launch", lambda plan: (plans.append(plan), launch(plan))[1])
    return plans


def test_planning_stays_ahead_where_drafts_do_not_pay(
    path: Path, nano_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Measured seconds of steps would replace the costs below, and on a busy machine say that drafts pay.
    monkeypatch.setattr(Speculator, "record_time", lambda *step: None)
    nano_engine.use_drafts("suffix", 1, shared=False)
    dear = Costs(Curve((1, 64), (1.0, 6400.0)), Curve((1,), (0.0,)))  # more than any match brings
    nano_engine.speculator = Speculator(suffix=True, costs=dear, shared=False)
    plans = launches(nano_engine, monkeypatch)
    play(nano_engine, trace(path, 4, 600), [4])
    # Without the token that a prompt's chunks may leave for the last one: their sizes follow the seconds of steps.
    decoding = [p for p in plans if all(w.count == 1 and w.output_index for w in p.work)]
    assert all(w.tokens == (PENDING,) for p in decoding for w in p.work) and len(decoding) > 50
    assert not any(w.drafts for p in plans for w in p.work)


def test_the_bench_compares_what_it_times(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts_bench, "MOST_TOKENS", 16)
    row = drafts_bench.measure(
        path, dict(device="cpu", threads=1, draft="suffix", max_model_len=1024), 2, [1], 1, lambda line: None
    )
    assert set(row["different_answers"].values()) == {0} and row["bench"] == "drafts"
    assert set(row["speed_over_off"]) == {"suffix 1", "suffix 2", "suffix 4", "suffix 8", "suffix adaptive"}
    assert row["by_table"]["oracle_over_best_fixed"]["1"] >= 1 and row["acceptance"] == "measured"
