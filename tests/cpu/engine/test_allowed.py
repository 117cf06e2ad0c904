"""allowed_token_ids and bad words: what may come next, in the engine, with drafts, forms and preemptions."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from perilune import LLM, SamplingParams
from perilune.core.config import EngineConfig, build
from perilune.core.errors import EngineError, RequestError
from perilune.core.messages import Submit
from perilune.core.sampling import MAX_BAD_TOKENS, MAX_BAD_WORDS
from perilune.engine.allowed import TokenRules
from perilune.engine.engine import Engine
from perilune.grammar.constrain import AnswerFormat, constrain
from perilune.grammar.matcher import Words
from perilune.text.bad_words import resolved, sequences
from perilune.text.tokenizer import Tokenizer
from tests.cpu.engine.test_constraint_engine import ask, batch, check_person, person, run, start
from tests.cpu.speculation.test_speculation import CONFIG, PROMPTS, TIGHT, Scripted, stays_the_same

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, **CONFIG, draft="off") as llm:
        yield llm


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    engine = start(path, max_num_seqs=16, draft="off")
    yield engine
    engine.close()


def holds(tokens: Sequence[int], sequence: Sequence[int]) -> bool:
    return any(tuple(tokens[i : i + len(sequence)]) == tuple(sequence) for i in range(len(tokens)))


def pairs(tokens: Sequence[int], length: int = 2) -> tuple[tuple[int, ...], ...]:
    """The sequences of `length` that these tokens hold."""
    return tuple(tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1))


# ---- params


@pytest.mark.parametrize(
    "field, value",
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1, -1]),
        ("allowed_token_ids", ["a"]),
        ("allowed_token_ids", [True]),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", "57"),
        ("bad_words", ["a", ""]),
        ("bad_words", "ab"),
        ("bad_words", [1]),
        ("bad_words", ["x"] * (MAX_BAD_WORDS + 1)),
        ("bad_words", ["x" * 257]),
        ("allowed_token_ids", [1 << 20]),
        ("bad_word_ids", [[i] for i in range(4 * MAX_BAD_WORDS + 1)]),
    ],
)
def test_a_bad_value_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as raised:
        SamplingParams(**{field: value})
    assert raised.value.param == field and "\n" not in str(raised.value)


def test_bad_word_ids_are_bounded() -> None:
    for ids in ([[]], [[1] * (MAX_BAD_TOKENS + 1)], [["a"]], 5, [5]):
        with pytest.raises(RequestError, match="bad_word"):
            SamplingParams(bad_word_ids=ids)  # type: ignore[arg-type]


def test_they_travel_to_the_engine_process() -> None:
    params = SamplingParams(allowed_token_ids=[9, 3, 9], bad_words=["a"], bad_word_ids=[[1, 2], [1, 2]])
    assert params.allowed_token_ids == bytes([8, 2]) and params.bad_word_ids == ((1, 2),)
    sent = msgspec.msgpack.encode(Submit(1, (1,), params))
    assert msgspec.msgpack.decode(sent, type=Submit).params == params


def test_min_tokens_and_nothing_but_ends() -> None:
    params = SamplingParams(allowed_token_ids=[7], min_tokens=2)
    with pytest.raises(RequestError, match="min_tokens"):
        params.ending_with([7, 8])
    assert params.ending_with([8]).stop_token_ids == (8,)


# ---- words


def test_with_and_without_a_space(nano: Tokenizer) -> None:
    found = sequences(nano, ["river", " river", "\nriver"])
    assert {*found} == {tuple(nano.encode(text)) for text in ("river", " river", "\nriver")}
    assert [nano.decode(s) for s in sequences(nano, ["  "])] == ["  "]


def test_control_tokens_are_text(nano: Tokenizer) -> None:
    (found,) = {len(s) for s in sequences(nano, ["<|im_end|>"])} - {1} or {1}
    assert found > 1


def test_a_word_of_too_many_tokens_is_refused(nano: Tokenizer) -> None:
    with pytest.raises(RequestError, match="64 tokens") as raised:
        resolved(SamplingParams(bad_words=["#1x" * 80]), nano)
    assert raised.value.param == "bad_words"


# ---- rules


def test_against_reading_the_whole_output() -> None:
    """By definition: `t` may follow `out` if it is allowed and [*out, t] ends with no bad sequence."""
    rng, V = random.Random(0), 40
    for _ in range(200):
        bad = tuple(tuple(rng.choices(range(4), k=rng.randint(1, 4))) for _ in range(rng.randint(1, 5)))
        some = rng.choice([None, tuple(rng.sample(range(V), 20))])
        rules = TokenRules(SamplingParams(allowed_token_ids=some, bad_word_ids=bad), 2)
        out: list[int] = []
        for _ in range(12):
            mask: Words = np.full(2, 0xFFFFFFFF, np.uint32)
            tail = tuple(out[-rules.reach :]) if rules.reach else ()
            rules.apply(mask, tail)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:V]
            for t in range(V):
                ends = any(len(b) <= len(out) + 1 and tuple([*out, t][-len(b) :]) == b for b in bad)
                want = (some is None or t in some) and not ends
                assert bool(bits[t]) == want == rules.permits(t, tail)
            out.append(rng.randrange(4))


# ---- engine


def test_only_allowed_tokens_come(llm: LLM) -> None:
    some = tuple(range(100, 140))
    for temperature in (0.0, 1.0, 3.0):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=30, allowed_token_ids=some, logprobs=2)
        for prompt, got in zip(PROMPTS, llm.generate(PROMPTS, params)):
            assert {*got.token_ids} <= {*some} and len(got.token_ids) == 30
            # The model's own log-probabilities: of all tokens, not of those that are left.
            scores = llm.score([*prompt, *got.token_ids])[len(prompt) - 1 :]
            assert [r.logprob for r in got.logprobs] == pytest.approx(scores, abs=1e-4)


def test_greedy_takes_the_likeliest_that_is_left(llm: LLM) -> None:
    free = llm.generate(PROMPTS, GREEDY)
    for prompt, one in zip(PROMPTS, free):
        bad = (*pairs(one.token_ids)[::5], *pairs(one.token_ids, 3)[2::5], (one.token_ids[7],))
        (got,) = llm.generate(prompt, replace(GREEDY, bad_word_ids=bad, logprobs=20))
        changed = 0
        for i, record in enumerate(got.logprobs):
            out = got.token_ids[:i]
            left = [t for t, _ in record.top if not any((*out, t)[-len(b) :] == b for b in bad)]
            assert left[0] == got.token_ids[i]
            changed += record.top[0][0] != left[0]
        assert changed and not any(holds(got.token_ids, b) for b in bad)


def test_a_prompts_tokens_do_not_count(llm: LLM) -> None:
    (free,) = llm.generate(PROMPTS[0], GREEDY)
    across = (PROMPTS[0][-1], free.token_ids[0])
    assert llm.generate(PROMPTS[0], replace(GREEDY, bad_word_ids=(across,)))[0].token_ids == free.token_ids


def test_an_end_that_is_not_allowed_does_not_come(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=30, stop_token_ids=(7,), logit_bias={7: 100})
    assert len(llm.generate(PROMPTS[0], params)[0].token_ids) == 1
    for rule in ({"bad_word_ids": ((7,),)}, {"allowed_token_ids": range(8, 90)}):
        (got,) = llm.generate(PROMPTS[0], replace(params, **rule))
        assert got.finish_reason == "length" and 7 not in got.token_ids


def test_nothing_left_fails_alone_and_says_why(tiny: Path) -> None:
    engine = Engine(tiny, build(EngineConfig, dict(CONFIG, draft="off")))
    try:
        free = replace(GREEDY, seed=1)
        dead = replace(free, allowed_token_ids=(5, 6), bad_word_ids=((5,), (6, 6)))
        ends = run(engine, [Submit(0, tuple(PROMPTS[0]), dead), Submit(1, tuple(PROMPTS[1]), free)])
        tokens, reason, error = ends[0]
        assert tokens == (6,) and reason == "error"
        assert error == "allowed_token_ids and bad_words leave no token"
        assert ends[1] == run(engine, [Submit(1, tuple(PROMPTS[1]), free)])[1]
        early = replace(free, allowed_token_ids=(5, 6), bad_word_ids=((6,),), stop_token_ids=(5,), min_tokens=3)
        ((_, reason, error),) = run(engine, [Submit(0, tuple(PROMPTS[0]), early)]).values()
        assert reason == "error" and error == "min_tokens is 3, but only its end is allowed"
    finally:
        engine.close()


def test_ids_beyond_the_vocabulary_are_refused(llm: LLM) -> None:
    for rule in ({"allowed_token_ids": (5, 512)}, {"bad_word_ids": ((5, 512),)}):
        with pytest.raises(RequestError, match="names token 512; this model's ids end at 511"):
            llm.generate(PROMPTS[0], replace(GREEDY, **rule))


def test_words_need_a_tokenizer(llm: LLM) -> None:
    with pytest.raises(RequestError, match="bad words as token ids"):
        llm.generate(PROMPTS[0], replace(GREEDY, bad_words=("a",)))


RULED = [
    SamplingParams(temperature=0.0, bad_word_ids=tuple(itertools.product(range(0, 512, 3), range(1, 512, 150)))),
    SamplingParams(seed=1, bad_word_ids=tuple((t,) for t in range(0, 512, 2)), temperature=0.7),
    SamplingParams(seed=2, allowed_token_ids=range(40, 60), bad_word_ids=tuple(itertools.product(range(40, 50), [41]))),
    SamplingParams(temperature=0.0, allowed_token_ids=range(3, 90), presence_penalty=0.7, logprobs=2),
    SamplingParams(temperature=0.0),
    SamplingParams(seed=4, stop_token_ids=range(40), min_tokens=5, allowed_token_ids=range(100), top_p=0.9),
]


@pytest.mark.parametrize("setting", [{}, TIGHT], ids=["roomy", "tight"])
def test_drafts_change_nothing(tiny: Path, llm: LLM, setting: dict[str, Any]) -> None:
    params = [replace(p, max_tokens=40 + i) for i, p in enumerate(RULED)]
    expected = llm.generate(PROMPTS, params)
    with LLM(tiny, **(CONFIG | setting), draft="suffix", draft_tokens=4) as drafting:
        stays_the_same(drafting, params, expected)
        if setting:
            assert drafting._engine.stats().preemptions > 2  # type: ignore[union-attr]


# ---- words and forms together


def test_a_schema_and_bad_words_both_hold(path: Path, nano: Tokenizer, engine: Engine) -> None:
    capitals = [t for t in range(nano.vocab_size) if {*nano.token_text(t)} & {*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"}]
    prompt = ask(path, nano, "Her name is Anna Miller.")  # capitals to copy, whatever the weights

    def asked(**other: Any) -> list[Submit]:
        return [replace(one, prompt=prompt) for one in batch(path, nano, person(nano), 8, **other)]

    plain = run(engine, asked())
    assert any({*ids} & {*capitals} for ids, _, _ in plain.values())
    bad = tuple((t,) for t in capitals if not nano.is_special(t))
    requests = asked(bad_word_ids=bad)
    ends = run(engine, requests)
    for ids, _, _ in ends.values():
        check_person(nano, ids)
        assert not {*ids[:-1]} & {*capitals}
    scripted = Scripted((), None, nano.vocab_size)
    scripted.by_rid = {rid: end[0] for rid, end in ends.items()}
    try:
        engine.speculator = scripted  # type: ignore[assignment]
        assert run(engine, requests) == ends
    finally:
        engine.speculator = None


def test_a_choice_that_is_a_bad_word_is_not_made(path: Path, nano: Tokenizer, engine: Engine) -> None:
    constraint = constrain(nano, answer=AnswerFormat("choice", ["yes", "no", "maybe"]))
    prompt = ask(path, nano, "Well?")

    def starts(*words: str) -> tuple[tuple[int, ...], ...]:
        texts = {w[:n] for w in words for n in range(1, len(w) + 1)}
        return tuple((t,) for t in range(nano.vocab_size) if nano.token_text(t) in texts)

    params = SamplingParams(max_tokens=20, bad_word_ids=starts("no", "maybe")).ending_with(nano.stop_ids)
    ends = run(engine, [Submit(i, prompt, replace(params, seed=i), constraint) for i in range(8)])
    assert {nano.decode(ids[:-1]) for ids, _, _ in ends.values()} == {"yes"}
    none = replace(params, bad_word_ids=starts("no", "maybe", "yes"))
    ((ids, reason, error),) = run(engine, [Submit(0, prompt, none, constraint)]).values()
    assert (ids, reason) == ((), "error")
    assert error == "allowed_token_ids and bad_words leave no token that the answer's form allows"


def test_an_end_in_time_that_is_forbidden_is_an_error_that_says_so(path: Path, nano: Tokenizer, engine: Engine) -> None:
    prompt = ask(path, nano, "Hello")
    brace = tuple((t,) for t in range(nano.vocab_size) if "}" in nano.token_text(t))
    params = SamplingParams(seed=1, temperature=1.5, max_tokens=40, bad_word_ids=brace).ending_with(nano.stop_ids)
    ((_, reason, error),) = run(engine, [Submit(0, prompt, params, person(nano))]).values()
    assert reason == "error" and "bad_words" in (error or "")


def test_the_python_api_takes_words(path: Path, nano: Tokenizer) -> None:
    with LLM(path, device="cpu", max_model_len=256, threads=1) as llm:
        prompt = list(ask(path, nano, "Say something about rivers."))
        (free,) = llm.generate(prompt, replace(GREEDY, max_tokens=30))
        word = max((free.text or "").split(), key=len)
        (got,) = llm.generate(prompt, replace(GREEDY, max_tokens=30, bad_words=(word,)))
        assert word in (free.text or "") and word not in (got.text or "")
        with pytest.raises(EngineError, match="bad_words"):
            llm.chat(
                [{"role": "user", "content": "Well?"}],
                replace(GREEDY, bad_words=("yes",), allowed_token_ids=nano.encode("yes")),
                answer=AnswerFormat("choice", ["yes"]),
                thinking=False,
            )
