"""What takes longest of tests/multi/test_sharded_kv.py: preemption, and packed KV."""

from dataclasses import replace

from perilune import LLM
from tests.cpu.conftest import steps_have_a_price as steps_have_a_price
from tests.multi.conftest import CONFIG
from tests.multi.conftest import one as one
from tests.multi.test_answers import PROMPTS, WAYS, alike, drafting
from tests.multi.test_sharded_kv import LONG
from tests.multi.test_sharded_kv import two as two


def test_requests_that_preempt_each_other(one: LLM, two: LLM) -> None:
    drafting(two, "off")
    ways = [replace(p, max_tokens=60, logprobs=None, prompt_logprobs=None) for p in WAYS]
    assert two._engine is not None
    before = two._engine.stats().preemptions
    alike(two.generate(PROMPTS, ways), one.generate(PROMPTS, ways))
    assert two._engine.stats().preemptions > before


def test_packed_kv_gives_the_tokens_of_one_rank_with_packed_kv() -> None:
    prompts, ways = [PROMPTS[0], PROMPTS[2], LONG], WAYS[:3]
    with LLM("kimi-nano", **CONFIG, draft="off", kv_dtype="fp8") as llm:
        expected = llm.generate(prompts, ways)
    with LLM("kimi-nano", **CONFIG, draft="eagle3", draft_tokens=2, kv_dtype="fp8", tp=2, kv_shards=2) as llm:
        alike(llm.generate(prompts, ways), expected)
