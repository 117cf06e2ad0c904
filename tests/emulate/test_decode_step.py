"""A whole decode step through the CUDA kernels on the emulator: `make emulate`.

Layers of Kimi K2.5's widths, a slice of eight (8 heads, expert width 256) and 16 experts. All launches of a
step are in the stream before the first one runs, and overlap as programmatic dependent launch allows, with CTAs, copies
and products in random order: what kernels hand over to the next ones by mailboxes must arrive in every order.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from perilune.bench.microscope import slice_of
from perilune.bench.shapes import shape
from perilune.dist.group import Group
from perilune.dist.slicing import WHOLE, Slicing
from perilune.loading.fp8_dense import to_fp8
from perilune.loading.synthetic import random_weights
from perilune.model.config import KimiConfig
from perilune.model.kimi_k2 import KimiK2, Span, Step
from perilune.model.sharded_kv import ShardedKv
from perilune.model.weights import Moe, Weights
from perilune.ops.exchange.peers import HALF_BYTES, Mailboxes, Peers
from perilune.ops.harness import registry, workspace
from tests.cuda_emulator import library
from tests.cuda_emulator.session import emulated, stream, together

pytestmark = library.needed

CPU = torch.device("cpu")
LAYERS, CONTEXT, BLOCK, BLOCKS = 3, 200, 64, 4  # one dense layer, then two with experts
PROCESSORS = 132  # what the fused kernels of decoding ask for
REFERENCE = dict.fromkeys(registry.all_ops(), "reference")
CUDA = {"linear": "cuda", "router": "cuda"}  # on a CPU their C++ would be preferred
# bf16 results of both are rounded after sums in other orders, in each of some twenty ops.
MAX_DISTANCE = 0.02


def config_of(ranks: int) -> KimiConfig:
    """A model that `ranks` ranks share, so that each has a slice of eight of Kimi K2.5's heads and widths."""
    small = dataclasses.replace(shape("kimi-k2.5", LAYERS), vocab_size=1024 * ranks, n_routed_experts=16)
    whole = slice_of(small, 8 // ranks)
    return dataclasses.replace(whole, vocab_size=1024)


def weights_of(config: KimiConfig, slicing: Slicing = WHOLE) -> Weights:
    weights = random_weights(config, dtype=torch.bfloat16, device=CPU, slicing=slicing)
    for layer in weights.layers:
        if isinstance(layer.ffn, Moe):
            layer.ffn.gate = layer.ffn.gate.bfloat16()
    return weights


def hidden(model: KimiK2, requests: int) -> Tensor:
    """[requests, D] after a decode step at CONTEXT, over random latents. The launches may still have to run."""
    rng = torch.Generator().manual_seed(requests)
    tokens = torch.randint(0, 1024, (requests,), generator=rng)
    tables = torch.arange(requests * BLOCKS, dtype=torch.int32).view(requests, BLOCKS)
    pages = torch.randn(LAYERS, requests * BLOCKS, BLOCK, 576, generator=rng).bfloat16()
    if model.sharded_kv is not None:
        shards = model.sharded_kv.shards
        pages = pages.unflatten(2, (shards.ranks, shards.tokens))[:, :, shards.rank].contiguous()
    last = CONTEXT - 1
    slots = tables[:, last // BLOCK].long() * BLOCK + last % BLOCK
    starts, contexts = (
        torch.arange(requests + 1, dtype=torch.int32),
        torch.full((requests,), CONTEXT, dtype=torch.int32),
    )
    step = Step(tokens, torch.full((requests,), last), slots, Span(tables, starts, contexts, slice(0, requests)), None)
    return model.hidden_with_aux(step, pages, ())[0]


def model_of(config: KimiConfig, weights: Weights) -> KimiK2:
    return KimiK2(config, weights, max_positions=CONTEXT)


def expected(model: KimiK2, requests: int) -> Tensor:
    with registry.using(REFERENCE), workspace.owned():
        return hidden(model, requests)


@contextlib.contextmanager
def overlapping(seed: int) -> Iterator[None]:
    with emulated(PROCESSORS, "random", seed, overlap=True, eager=PROCESSORS), registry.using(CUDA), together():
        yield


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize(("requests", "rest"), [(1, "bf16"), (1, "fp8"), (4, "bf16")])
def test_a_step_in_any_order_has_the_reference_results(requests: int, rest: str) -> None:
    config = config_of(1)
    weights = weights_of(config)
    if rest == "fp8":
        to_fp8(weights)
    model = model_of(config, weights)
    wanted, before = expected(model, requests), None
    for seed in (1, 2):
        with overlapping(seed):
            found = hidden(model, requests)
        assert distance(found, wanted) < MAX_DISTANCE
        assert before is None or torch.equal(found, before), "a step's bits depend on the order of CTAs"
        before = found.clone()


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_exchange_in_any_order(sharded: bool) -> None:
    """Each rank is a stream with half of the heads and widths; partial outputs cross through the ranks' mailboxes, and
    queries and attention's outputs where KV is sharded."""
    config, ranks = config_of(2), 2
    whole = weights_of(config)
    wanted = expected(model_of(config, whole), 1)
    mailboxes = [torch.zeros(2 * ranks * HALF_BYTES, dtype=torch.uint8) for _ in range(ranks)]
    addresses = [box.data_ptr() for box in mailboxes]
    models = []
    for rank in range(ranks):
        own = dataclasses.replace(weights_of(config, Slicing(rank, ranks)), embed=whole.embed)
        model = model_of(dataclasses.replace(slice_of(config, ranks), vocab_size=config.vocab_size), own)
        model.peers = Peers(rank, ranks, torch.clone, Mailboxes(rank, addresses, CPU, 3600.0, owner=mailboxes))
        if sharded:
            group = SimpleNamespace(slicing=Slicing(rank, ranks), ranks=ranks, peers=model.peers)
            model.sharded_kv = ShardedKv(cast(Group, group), BLOCK // ranks)
        models.append(model)
    found = []
    with overlapping(3):
        for rank, model in enumerate(models):
            with stream(rank), workspace.owned():
                found.append(hidden(model, 1))
    assert torch.equal(found[0], found[1]) and distance(found[0], wanted) < MAX_DISTANCE
