"""Kernels whose CTAs wait for each other: one engine on a GPU has them."""

import gc

import torch

from perilune.engine import exclusive_kernels
from perilune.ops.harness import registry


class Holder:
    pass


def test_one_engine_on_each_gpu_has_them_until_it_ends() -> None:
    gpu, other = torch.device("cuda", 6), torch.device("cuda", 7)
    first, second, third = Holder(), Holder(), Holder()
    assert exclusive_kernels.claim(gpu, first) == {} == exclusive_kernels.claim(gpu, first)
    instead = exclusive_kernels.claim(gpu, second)
    assert instead == registry.alone() and exclusive_kernels.claim(other, second) == {}
    exclusive_kernels.release(first)
    assert exclusive_kernels.claim(gpu, third) == {}
    del third
    gc.collect()  # closed or not, it is gone
    assert exclusive_kernels.claim(gpu, first) == {}
    exclusive_kernels.release(first)
    exclusive_kernels.release(second)


def test_a_cpu_has_nothing_of_the_kind() -> None:
    holder = Holder()
    assert (
        exclusive_kernels.claim(torch.device("cpu"), holder)
        == exclusive_kernels.claim(torch.device("cpu"), Holder())
        == {}
    )


def test_what_is_run_instead_exists() -> None:
    instead = registry.alone()
    assert {"mla_pre_attention", "mla_decode_output", "mla_decode_router"} <= set(instead)
    registry.check_overrides(instead)
    for name, wanted in instead.items():
        impls = registry.all_ops()[name].impls
        assert not impls[wanted].alone and any(impl.alone for impl in impls.values())
