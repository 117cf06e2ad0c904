"""Kernels whose CTAs wait for each other: one engine on a GPU has them."""

import gc

import torch

from perilune.engine import alone
from perilune.ops import registry


class Holder:
    pass


def test_one_engine_on_each_gpu_has_them_until_it_ends() -> None:
    gpu, other = torch.device("cuda", 6), torch.device("cuda", 7)
    first, second, third = Holder(), Holder(), Holder()
    assert alone.claim(gpu, first) == {} == alone.claim(gpu, first)
    instead = alone.claim(gpu, second)
    assert instead == registry.alone() and alone.claim(other, second) == {}
    alone.release(first)
    assert alone.claim(gpu, third) == {}
    del third
    gc.collect()  # closed or not, it is gone
    assert alone.claim(gpu, first) == {}
    alone.release(first)
    alone.release(second)


def test_a_cpu_has_nothing_of_the_kind() -> None:
    holder = Holder()
    assert alone.claim(torch.device("cpu"), holder) == alone.claim(torch.device("cpu"), Holder()) == {}


def test_what_is_run_instead_exists() -> None:
    instead = registry.alone()
    assert {"mla_input", "mla_output", "mla_router"} <= set(instead)
    registry.check_overrides(instead)
    for name, wanted in instead.items():
        impls = registry.all_ops()[name].impls
        assert not impls[wanted].alone and any(impl.alone for impl in impls.values())
