"""A model whose partial outputs are added over ranks."""

import torch
from torch import Tensor

from perilune.core.sampling import SamplingParams
from perilune.core.step import StepPlan, Work
from perilune.engine.batch import build
from perilune.kv.pages import Pages
from perilune.loading.synthetic import random_weights
from perilune.model.config import KimiConfig
from perilune.model.kimi_k2 import KimiK2
from perilune.ops.exchange.peers import Peers
from tests.cpu.model.test_eagle3 import LAYERS, TARGET, V


def test_a_layer_exchanges_twice_and_a_peer_without_weights_adds_nothing() -> None:
    config = KimiConfig.from_dict(TARGET)
    model = KimiK2(config, random_weights(config, dtype=torch.float32, device="cpu"), max_positions=96)
    width, exchanged = config.kv_lora_rank + config.qk_rope_head_dim, []

    def gather(own: Tensor) -> Tensor:
        exchanged.append(own.shape)
        return torch.stack([own, torch.zeros_like(own)])

    def states(tokens: int) -> tuple[Tensor, Tensor]:
        pages = Pages.allocate(LAYERS, 9, 16, width, torch.float32, torch.device("cpu"))
        text = tuple(torch.randint(V, (tokens,), generator=torch.Generator().manual_seed(1)).tolist())
        work = Work(1, 0, 0, text, (0, 1, 2), True, 0, SamplingParams(temperature=0.0), 0)
        batch = build(StepPlan(0, (work,)), torch.zeros(1, dtype=torch.int64), 16, 0)
        return model.hidden_with_aux(batch.step, pages.data, (0, LAYERS))

    for tokens in (1, 40):  # the absorbed form of attention, and the plain one
        model.peers = None
        want = states(tokens)
        model.peers = Peers(0, 2, gather)
        exchanged.clear()
        for found, expected in zip(states(tokens), want):
            assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
        assert exchanged == [(tokens, config.hidden_size)] * (2 * LAYERS)
