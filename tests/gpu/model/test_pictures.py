"""The vision tower on a GPU, and pictures through an engine with CUDA graphs, against transformers on the CPU."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune import LLM, SamplingParams
from perilune.core.step import Slice, StepPlan
from perilune.dist.group import ALONE
from perilune.engine.vision.cells import Cells
from perilune.engine.vision.open import open_tower
from perilune.engine.vision.tower import sizes_of
from perilune.model import moonvit
from tests import oracle, seeing
from tests.seeing import PAD, Seeing, picture

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TOL = 1e-4  # float32 without TF32; sums in another order than the CPU's
PICTURES = [picture(8, 8, 1), picture(4, 10, 2), picture(16, 6, 3), picture(2, 2, 4)]
CONFIG: dict[str, Any] = dict(
    device="cuda", dtype="float32", qk_norm_eps=1e-6, max_model_len=256, max_num_seqs=8, kv_blocks=40,
    vision_cache_gb=0.001, draft="off",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return seeing.make(tmp_path_factory.mktemp("seeing") / "model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [12, 1024])
def test_rows_equal_transformers(
    checkpoint: Seeing, dtype: torch.dtype, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moonvit, "PADDED_ROWS", group)
    with torch.inference_mode():
        tower = open_tower(checkpoint.path, dtype, torch.device("cuda"), ALONE)
        for p in PICTURES:
            total = Cells(sizes_of(tower.model), len(p.patches)).total
            for start in range(0, total, 3):
                patches = memoryview(p.patches).cast("B") if start == 0 else None
                tower.run([Slice(0, p.digest, p.grid, start, min(start + 3, total), patches)], [])
            got, want = tower._rows[p.digest].float().cpu(), checkpoint.rows(p)
            if dtype == torch.float32:
                torch.testing.assert_close(got, want, rtol=0, atol=TOL)
            else:
                assert (got - want).norm() / want.norm() < 0.02
        torch.cuda.synchronize()
        costs = tower.measured()
        assert len(costs) > 5 and all(0 < cost.seconds < 1 for cost in costs)


@pytest.mark.parametrize("how", [{}, {"max_step_tokens": 9}, {"draft": "suffix", "draft_tokens": 3}])
def test_answers_equal_transformers_while_others_decode(checkpoint: Seeing, how: dict[str, Any]) -> None:
    rng = random.Random(5)
    texts = oracle.random_prompts(6, [rng.randint(1, 30) for _ in range(40)], vocab=PAD)
    prompts, shown = [], []
    for i in range(8):
        some = [rng.choice(PICTURES) for _ in range(i % 4)]
        prompts.append([*texts.pop(), *(t for p in some for t in [*[PAD] * p.tokens, *texts.pop()])])
        shown.append(some)
    expected = [checkpoint.greedy(ids, some, 12) for ids, some in zip(prompts, shown)]
    with LLM(checkpoint.path, **CONFIG | how) as llm:
        engine = llm._engine
        assert engine is not None
        both = 0
        run = engine.runner.run

        def seen(plan: StepPlan) -> Any:
            nonlocal both
            both += bool(plan.slices and plan.work)
            return run(plan)

        engine.runner.run = seen  # type: ignore[method-assign]
        for _ in range(2):
            found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12), pictures=shown)
            assert [list(c.token_ids) for c in found] == expected
        assert both, "no picture was encoded beside a step"


def test_closing_frees_the_tower(checkpoint: Seeing) -> None:
    before = torch.cuda.memory_allocated()
    with LLM(checkpoint.path, **CONFIG) as llm:
        llm.generate([1, *[PAD] * 16, 2], SamplingParams(max_tokens=2), pictures=PICTURES[:1])
    assert torch.cuda.memory_allocated() <= before


def test_a_tower_of_full_size_runs(tmp_path: Path) -> None:
    """Two layers of Kimi K2.5's widths, 1,792 x 1,792 pixels, in cells and whole."""
    import dataclasses

    from perilune.bench.vision import K25, random_weights
    from perilune.model.moonvit import MoonVit

    config = dataclasses.replace(K25, num_hidden_layers=2)
    with torch.inference_mode():
        tower = MoonVit(config, random_weights(config, torch.device("cuda")))
        pixels = torch.randn(128 * 128, 3, 14, 14, device="cuda", dtype=torch.bfloat16)
        whole = tower(pixels, [(1, 128, 128)])
        state = tower.begin(pixels, [(1, 128, 128)])
        for i in range(2):
            for step in (tower.project, tower.mix):
                for first in range(0, 128 * 128, 1024):
                    step(state, i, slice(first, first + 1024))
        cut = tower.finish(state)
    assert whole.shape == (4096, 7168) and whole.isfinite().all()
    assert (cut.float() - whole.float()).norm() / whole.float().norm() < 0.01
