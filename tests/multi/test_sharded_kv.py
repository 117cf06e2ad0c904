"""KV sharded along the sequence: ranks with a part of every request's KV give the tokens of one rank with all of it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from perilune import LLM, SamplingParams
from perilune.engine import build, ranks
from perilune.grammar.constrain import constrain
from perilune.text.tools import parse_tools
from tests.cpu.engine.test_constraint_engine import function
from tests.multi.conftest import CONFIG
from tests.multi.graphed_rank import graphed, joined
from tests.multi.test_answers import PERSON, PROMPTS, WAYS, alike, drafting

LONG = "The quick brown fox jumps over the lazy dog, and then it runs home. " * 5  # several chunks, and blocks


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    # As few tokens of KV as preempt requests in test_answers, in blocks of 16 on each rank.
    with LLM("kimi-nano", **CONFIG, tp=2, kv_shards=2, kv_blocks=10, draft="hybrid", draft_tokens=3) as llm:
        assert (llm.info.tp, llm.info.kv_shards, llm.info.block_size) == (2, 2, 32)
        yield llm


def test_tokens_are_those_of_one_rank(one: LLM, two: LLM) -> None:
    drafting(two, "eagle3")
    found = two.generate(PROMPTS, WAYS)
    alike(found, one.generate(PROMPTS, WAYS))
    assert sum(c.accepted_tokens for c in found) > 0


def test_long_prompts_come_in_chunks_and_from_the_cache(one: LLM, two: LLM) -> None:
    drafting(two, "suffix")
    prompts = [f"{LONG}{i}" for i in range(2)]
    expected = one.generate(prompts, WAYS[:2])
    alike(two.generate(prompts, WAYS[:2]), expected)
    again = two.generate(prompts[:1], WAYS[:1])
    alike(again, expected[:1])
    assert again[0].cached_tokens > 64


def test_tool_calls_are_those_of_one_rank(one: LLM, two: LLM) -> None:
    drafting(two, "eagle3")
    rule = constrain(one._need_tokenizer(), tools=parse_tools([function(PERSON)]), choice="required")
    ways = [SamplingParams(temperature=t, seed=4, max_tokens=24) for t in (0.0, 1.0)]
    prompts = [LONG, PROMPTS[0]]
    alike(two.generate(prompts, ways, constraint=rule), one.generate(prompts, ways, constraint=rule))


def test_each_of_four_ranks_has_a_quarter(one: LLM) -> None:
    with LLM(
        "kimi-nano", **CONFIG, kv_blocks=10, block_size=32, draft="eagle3", draft_tokens=3, tp=4, kv_shards=4
    ) as llm:
        assert llm._engine is not None
        pages = llm._engine.runner.pages
        assert pages.block_size == 32 and pages.data.shape[1:3] == (10, 8)
        prompts = [PROMPTS[0], PROMPTS[1], LONG[:150]]
        ways = [replace(p, max_tokens=8) for p in WAYS[:3]]
        alike(llm.generate(prompts, ways), one.generate(prompts, ways))


def test_graphs_of_two_ranks_read_their_parts(monkeypatch: pytest.MonkeyPatch, one: LLM) -> None:
    """Steps of fixed shapes, with padding rows and drafts; a step planned before the one before is read, too."""
    monkeypatch.setattr(ranks, "RANK_MODULE", "tests.multi.graphed_rank")
    monkeypatch.setattr(build, "join", joined)
    ways, prompts = [replace(p, max_tokens=9) for p in WAYS[:3]], ["What is 347 + 589?", LONG[:90], PROMPTS[2]]
    with LLM("kimi-nano", **CONFIG, kv_blocks=32, draft="eagle3", draft_tokens=2, tp=2, kv_shards=2) as llm:
        assert llm._engine is not None
        graphs = graphed(llm._engine.runner, 320)
        found = [llm.generate(prompts, ways)]
        drafting(llm, "off")
        found.append(llm.generate(prompts, ways))
        assert {(key.requests, key.each) for key in graphs.keys} >= {(3, 1), (3, 3)}
    expected = one.generate(prompts, ways)
    for answers in found:
        alike(answers, expected)
