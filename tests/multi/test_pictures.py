"""Pictures with several ranks: each encodes a share of them, and answers are those of one rank."""

from collections.abc import Iterator
from typing import Any

import pytest

from perilune import LLM, SamplingParams
from perilune.core.step import StepPlan
from tests import oracle, seeing
from tests.seeing import PAD, Seeing, picture

CONFIG: dict[str, Any] = dict(
    dtype="float32", device="cpu", max_model_len=256, max_num_seqs=4, max_step_tokens=48, threads=1, draft="off",
    vision_cache_gb=2e-5, kv_blocks=40, qk_norm_eps=1e-6,
)  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return seeing.make(tmp_path_factory.mktemp("seeing") / "model", patch_limit=72)


@pytest.fixture(scope="module", params=[2, 4])
def several(request: pytest.FixtureRequest, checkpoint: Seeing) -> Iterator[LLM]:
    with LLM(checkpoint.path, **CONFIG, tp=request.param) as llm:
        yield llm


def test_answers_are_those_of_one_rank(checkpoint: Seeing, several: LLM) -> None:
    pictures = [picture(2 * (1 + i % 4), 6, i) for i in range(9)]
    pictures[2], pictures[7] = (picture(4, 4, i, 4) for i in (2, 7))  # chunks
    texts = oracle.random_prompts(4, [3 + i for i in range(13)], vocab=PAD)
    prompts, shown = [], []
    for i in range(4):
        some = [pictures[(5 * i + j) % 9] for j in range(i)]
        prompts.append([*texts[i], *(t for p in some for t in (*[PAD] * p.tokens, 1, 2))])
        shown.append(some)
    with LLM(checkpoint.path, **CONFIG) as llm:
        expected = [c.token_ids for c in llm.generate(prompts, GREEDY, pictures=shown)]
    engine = several._engine
    assert engine is not None
    encoders = set[int]()
    run = engine.runner.run

    def seen(plan: StepPlan) -> Any:
        encoders.update(s.rank for s in plan.slices)
        return run(plan)

    engine.runner.run = seen  # type: ignore[method-assign]
    for _ in range(2):
        found = several.generate(prompts, GREEDY, pictures=shown)
        assert [c.token_ids for c in found] == expected
    assert encoders == set(range(several.info.tp))
    assert expected[1:3] == [tuple(checkpoint.greedy(prompts[i], shown[i], 6)) for i in (1, 2)]
