"""Drafts beside pictures: a draft model reads prompts with pictures, and steps are chained while others are encoded."""

import random
from pathlib import Path
from typing import Any

import pytest

from perilune import LLM, SamplingParams
from perilune.core.step import StepPlan
from perilune.engine.vision import encoder as encoder_module
from tests import oracle, seeing
from tests.cpu.engine.test_graphs import ungraphed
from tests.cpu.speculation.test_chained_steps import Chaining
from tests.cpu.speculation.test_speculation import CONFIG, drafter  # noqa: F401
from tests.seeing import PAD, picture

SMALL: dict[str, Any] = CONFIG | dict(vision_cache_gb=0.001, draft_tokens=4, max_step_tokens=40)


def test_answers_stay_the_same(
    tmp_path: Path,
    drafter: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("IDLE_SECONDS", "FIRST_STEP_SECONDS", "STEP_SHARE"):
        monkeypatch.setattr(encoder_module, name, 0.0)  # a cell a step: the encoding lasts for many steps
    checkpoint = seeing.make(tmp_path / "model", patch_limit=72)
    rng, texts = random.Random(3), oracle.random_prompts(2, [4, 9, 3, 5, 6, 7, 8, 2], vocab=PAD)
    shown = [[], [], [picture(6, 4, 1)], [picture(4, 4, 2), picture(8, 2, 3)]]
    prompts = [[*texts.pop(), *(t for p in some for t in [*[PAD] * p.tokens, *texts.pop()])] for some in shown]
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (60, 50, 12, 12)]
    with LLM(checkpoint.path, **SMALL | dict(draft="off")) as llm:
        expected = llm.generate(prompts, params, pictures=shown)
    with LLM(checkpoint.path, **SMALL | dict(draft="eagle3", drafter=str(drafter))) as llm:
        assert [c.token_ids for c in llm.generate(prompts, params, pictures=shown)] == [c.token_ids for c in expected]
        engine = llm._engine
        assert engine is not None
        ungraphed(engine)
        for seed in (None, 1, 2):
            chaining = Chaining([c.token_ids for c in expected], None if seed is None else rng)
            chaining.attach(engine)
            both, run = [], engine.runner.run

            def seen(plan: StepPlan, both: list[bool] = both, run: Any = run) -> Any:
                both.append(bool(plan.slices and any(w.chained for w in plan.work)))
                return run(plan)

            engine.runner.run = seen  # type: ignore[method-assign]
            # Other pixels with the same answers would be no test, so the rows are forgotten: they are encoded again.
            assert engine.scheduler.encoder is not None
            engine.scheduler.encoder._cached.clear()
            engine.scheduler.encoder._room = engine.scheduler.encoder._cache_bytes
            found = llm.generate(prompts, params, pictures=shown, cache_keys=(f"salt:{seed}",))
            assert [c.token_ids for c in found] == [c.token_ids for c in expected]
            engine.scheduler.check_integrity()
            assert chaining.chained_steps > 3 and any(both), "no step was chained while a picture was encoded"
