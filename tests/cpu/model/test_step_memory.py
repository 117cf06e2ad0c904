"""What a step takes beside weights and KV: the formula against the tensors of the model's own code."""

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from perilune.bench.shapes import shape
from perilune.core.config import EngineConfig
from perilune.dist.group import Alone
from perilune.dist.slicing import Slicing
from perilune.loading import synthetic
from perilune.model.kimi_k2 import KimiK2, Span, Step
from perilune.model.step_memory import SLACK_BYTES, step_bytes, workspace_bytes
from perilune.ops.exchange.peers import Mailboxes, Peers
from perilune.ops.harness import build
from perilune.ops.layouts import latent_cache
from tests.cuda_emulator.session import emulated

META = torch.device("meta")
WIDTH = latent_cache.width(512, 64, latent_cache.PACKED)
CONFIG = EngineConfig(dtype="bfloat16", draft="off", max_num_seqs=66, max_model_len=20_000)


def tracked(tokens: int, context: int, ranks: int, features: int) -> int:
    """The most bytes that live at once in a step of one prompt: K2's first two layers on tensors without memory, all
    launchers, no kernels."""

    class Group(Alone):
        slicing = Slicing(0, ranks)

    Group.ranks = ranks
    if ranks > 1:
        Group.peers = Peers(0, ranks, lambda own: own, Mailboxes(0, [0] * ranks, META, 1.0))
    launched: dict[tuple[Any, str], Any] = {
        (build, "function"): lambda *names: lambda *arguments: 0,
        (build, "on_hopper"): lambda source, device, *needs: all(met for met, _ in needs) or "no",
        (torch.Tensor, "data_ptr"): lambda tensor: 0,
        (torch, "Generator"): lambda device: None,
        (synthetic._Values, "generator"): lambda values, name: None,
    }
    with emulated(sms=132), contextlib.ExitStack() as stack, torch.inference_mode():
        for (holder, name), value in launched.items():
            stack.enter_context(mock.patch.object(holder, name, value))
        c = replace(shape("kimi-k2.5", 2), n_routed_experts=64)
        w = synthetic.random_weights(c, dtype=torch.bfloat16, device=META, slicing=Slicing(0, ranks))
        model = KimiK2(c, w, max_positions=context, group=Group())
        tables = torch.zeros(1, -(-context // 64), dtype=torch.int32, device=META)
        pages = torch.empty(2, 1, 64, WIDTH, dtype=latent_cache.PACKED, device=META)
        ids = torch.zeros(tokens, dtype=torch.int64, device=META)
        starts, contexts = (torch.tensor(n, dtype=torch.int32) for n in ([0, tokens], [context]))
        step = Step(ids, ids, ids, None, Span(tables, starts, contexts, slice(0, tokens)))
        with MemTracker() as tracker:
            model.hidden_with_aux(step, pages, range(features))
        return int(tracker.get_tracker_snapshot("peak")[META]["Total"])


@pytest.mark.parametrize(
    ("tokens", "context", "ranks", "features"),
    [
        (10_240, 10_240, 4, 0),
        (10_240, 10_240, 4, 2),
        (4_096, 20_000, 2, 0),
        (8_192, 20_000, 1, 0),
        (512, 200_000, 4, 0),
    ],
)
def test_a_step_of_a_prompt_fits_the_workspace(tokens: int, context: int, ranks: int, features: int) -> None:
    """61 layers on four GPUs had left 1.07 GB for a step of 10,000 tokens. It takes 2.1."""
    config = replace(CONFIG, max_step_tokens=tokens, max_model_len=context)
    model = replace(shape("kimi-k2.5", 2), n_routed_experts=64)
    planned, real = step_bytes(model, config, WIDTH, features, ranks), tracked(tokens, context, ranks, features)
    assert real <= planned + SLACK_BYTES["cuda"] // 8, f"{real / 1e9:.3f} GB, planned {planned / 1e9:.3f}"
    assert real > 0.5 * planned


def test_more_tokens_in_a_step_leave_less_for_kv() -> None:
    model, cuda = shape("kimi-k2.5", 61), torch.device("cuda")
    sizes = [
        workspace_bytes(cuda, model, replace(CONFIG, max_step_tokens=n), WIDTH, 0, 4) for n in (4_096, 8_192, 16_384)
    ]
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[1] == workspace_bytes(cuda, model, CONFIG, WIDTH, 0, 4)  # as many as are computed by default
