"""Many whole texts at a time: the same states as by the paged form, which serves."""

import pytest
import torch

from perilune.core.sampling import SamplingParams
from perilune.core.step import StepPlan, Work
from perilune.draft.capture import Capture
from perilune.engine.batch import build
from perilune.kv.pages import Pages
from perilune.loading.synthetic import random_weights
from perilune.model.config import KimiConfig
from perilune.model.kimi_k2 import KimiK2
from perilune.model.varlen import SLACK, SPREAD, grids
from tests.cpu.model.test_eagle3 import LAYERS, TARGET, V


@pytest.mark.parametrize("seed", range(3))
def test_states_are_those_of_the_paged_form(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = KimiConfig.from_dict(TARGET)
    model = KimiK2(config, random_weights(config, dtype=torch.float32, device="cpu"), max_positions=96)
    lengths = [int(n) for n in torch.randint(1, 90, (11,), generator=generator)]
    texts = [tuple(torch.randint(V, (n,), generator=generator).tolist()) for n in lengths]
    layers = (0, 3, LAYERS)
    found = Capture(model, layers, tokens=1024, block_size=16)(texts)
    pages = Pages.allocate(
        LAYERS, 99, 16, config.kv_lora_rank + config.qk_rope_head_dim, torch.float32, torch.device("cpu")
    )
    at, block = 0, 0
    for n, text in enumerate(texts):
        blocks = tuple(range(block, block := block - (-len(text) // 16)))
        work = Work(n, 0, 0, text, blocks, True, 0, SamplingParams(temperature=0.0), 0)
        batch = build(StepPlan(0, (work,)), torch.zeros(1, dtype=torch.int64), 16, 0)
        hidden, aux = model.hidden_with_aux(batch.step, pages.data, layers)
        own = slice(at, at := at + len(text))
        assert torch.allclose(found.hidden[own], hidden, atol=1e-4, rtol=1e-4)
        assert torch.allclose(found.aux[own], aux, atol=1e-4, rtol=1e-4)
    assert at == len(found.hidden)


def test_grids_hold_every_token_once_and_little_padding() -> None:
    lengths = [300, 3, 40, 41, 3, 45, 1, 299, 70]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    found = grids(lengths, starts, torch.device("cpu"))
    assert sorted(torch.cat([g.tokens for g in found]).tolist()) == list(range(sum(lengths)))
    assert sum(g.count for g in found) == len(lengths) and len(found) < len(lengths)
    for g in found:
        assert len(set(g.places.tolist())) == len(g.places) and int(g.places.max()) < g.count * g.longest
        shortest = min(lengths[i] for i in range(len(lengths)) if starts[i] in set(g.tokens.tolist()))
        assert g.longest <= SPREAD * shortest + SLACK
