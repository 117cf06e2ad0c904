"""Answers of several ranks are those of one, token for token: every way to sample, to draft, to constrain, to cache."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from perilune import LLM, SamplingParams
from perilune.engine.llm import Completion
from perilune.grammar.constrain import AnswerFormat, constrain
from perilune.text.tools import parse_tools
from tests.cpu.engine.test_constraint_engine import function
from tests.multi.conftest import CONFIG

# The first is a question as a chat has it: within few tokens the bundled draft model is right about some of the answer.
QUESTION = "<|im_user|>user<|im_middle|>What is 347 + 589?<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
PROMPTS = [QUESTION, "Once upon a time", "def f(x):\n", "The days are Monday,", "1, 2, 3, 4,", "A"]
WAYS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.2, top_k=20, seed=1),
    SamplingParams(temperature=0.8, top_p=0.9, seed=2),
    SamplingParams(temperature=1.0, min_p=0.05, seed=3, logprobs=3),
    SamplingParams(temperature=1.0, top_k=300, seed=4, repetition_penalty=1.3, frequency_penalty=0.4, min_tokens=9),
    SamplingParams(temperature=0.9, seed=5, presence_penalty=0.8, logit_bias={300: 2.0, 17: -3.0}, prompt_logprobs=2),
]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
WAYS = [replace(p, max_tokens=8 + 2 * i, ignore_eos=True) for i, p in enumerate(WAYS)]


LAYOUTS = {"tp 2": dict(tp=2), "tp 4": dict(tp=4), "ep 2": dict(tp=2, ep=2)}


@pytest.fixture(scope="module", params=[*LAYOUTS.values()], ids=[*LAYOUTS])
def several(request: pytest.FixtureRequest) -> Iterator[LLM]:
    # So few blocks that requests preempt each other; a draft model that steps can do without.
    with LLM("kimi-nano", **CONFIG, kv_blocks=24, draft="hybrid", draft_tokens=3, **request.param) as llm:
        assert (llm.info.tp, llm.info.ep) == (request.param["tp"], request.param.get("ep", 1))
        yield llm


def drafting(llm: LLM, draft: str) -> None:
    assert llm._engine is not None
    llm._engine.use_drafts(draft, 3, shared=True)


_BY_ONE: dict[str, list[Completion]] = {}


def by_one(one: LLM, prompts: Sequence[str], ways: Sequence[SamplingParams], name: str = "", **more: Any) -> Any:
    """What one rank answers, computed once for all groups of ranks and sources of drafts; `name`: of what `more` is."""
    key = repr((name, prompts, ways))
    if key not in _BY_ONE:
        _BY_ONE[key] = one.generate(prompts, ways, **more)
    return _BY_ONE[key]


def alike(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.token_ids == b.token_ids and a.finish_reason == b.finish_reason
        for mine, right in zip((*a.logprobs, *a.prompt_logprobs), (*b.logprobs, *b.prompt_logprobs), strict=True):
            assert mine.token == right.token and mine.logprob == pytest.approx(right.logprob, abs=1e-3)
            assert [t for t, _ in mine.top] == [t for t, _ in right.top]


# The draft model first: it follows no prompt that is in the cache, and guesses badly then.
@pytest.mark.parametrize("draft", ["eagle3", "off", "suffix"])
def test_tokens_are_those_of_one_rank(one: LLM, several: LLM, draft: str) -> None:
    if draft == "suffix" and several.info.tp != 2:
        pytest.skip("whole steps of 2 ranks show it: suffix drafts are rank 0's alone")
    drafting(several, draft)
    expected = by_one(one, PROMPTS, WAYS)
    found = several.generate(PROMPTS, WAYS)
    alike(found, expected)
    if draft == "eagle3":
        assert sum(c.accepted_tokens for c in found) > 0


def test_greedy_steps_and_small_top_k_gather_no_logits(one: LLM, several: LLM) -> None:
    drafting(several, "off")
    ways = [replace(p, top_k=min(p.top_k, 30)) for p in WAYS[:2]] * 2
    alike(several.generate(PROMPTS[:4], ways), by_one(one, PROMPTS[:4], ways))


def test_long_prompts_come_in_chunks_and_from_the_cache(one: LLM, several: LLM) -> None:
    drafting(several, "suffix")
    text = "The quick brown fox jumps over the lazy dog, and then it runs home. " * 5
    prompts = [f"{text}{i}" for i in range(2)]
    expected = by_one(one, prompts, WAYS[:2])
    alike(several.generate(prompts, WAYS[:2]), expected)
    again = several.generate(prompts[:1], WAYS[:1])
    alike(again, expected[:1])
    assert again[0].cached_tokens > 0


def test_requests_that_preempt_each_other(one: LLM, several: LLM) -> None:
    if several.info.tp != 2:
        pytest.skip("which request waits is rank 0's business: 2 ranks show that tables reach others")
    drafting(several, "off")
    ways = [replace(p, max_tokens=70, logprobs=None, prompt_logprobs=None) for p in WAYS]
    assert several._engine is not None
    before = several._engine.stats().preemptions
    alike(several.generate(PROMPTS, ways), by_one(one, PROMPTS, ways))
    assert several._engine.stats().preemptions > before


def test_several_answers_per_prompt_and_scores(one: LLM, several: LLM) -> None:
    drafting(several, "eagle3")
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=6)
    alike(several.generate(PROMPTS[1], params, n=2), one.generate(PROMPTS[1], params, n=2))
    ids = list(range(300, 400))
    assert several.score(ids) == pytest.approx(one.score(ids), abs=1e-3)


@pytest.mark.parametrize("draft", ["off", "eagle3"])
def test_constraints_hold_on_all_ranks(one: LLM, several: LLM, draft: str) -> None:
    if draft == "off" and several.info.tp != 2:
        pytest.skip("with drafts the host takes part in more")
    drafting(several, draft)
    tools: Any = [function(PERSON)]
    constraint = constrain(one._need_tokenizer(), tools=parse_tools(tools), choice="required")
    form = constrain(one._need_tokenizer(), answer=AnswerFormat("json_schema", PERSON))
    ways = [SamplingParams(temperature=t, seed=4, max_tokens=24, bad_word_ids=((5, 6),)) for t in (0.0, 1.0)]
    rules = {"a call": constraint, "a form": form}
    for name in [*rules][: 1 + (several.info.tp == 2)]:
        expected = by_one(one, PROMPTS[:2], ways, name, constraint=rules[name])
        alike(several.generate(PROMPTS[:2], ways, constraint=rules[name]), expected)
