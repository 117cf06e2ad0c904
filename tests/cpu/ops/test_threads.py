"""Threads of the CPU kernels: what torch is told, and what two callers of the pool get."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from perilune.ops.harness import threads
from perilune.ops.linear.linear import linear


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_torch_alone_leaves_the_kernels_their_threads():
    with threads.torch_alone():
        assert (torch.get_num_threads(), threads.count()) == (1, 2)
        with threads.torch_alone():
            assert (torch.get_num_threads(), threads.count()) == (1, 2)
        assert (torch.get_num_threads(), threads.count()) == (1, 2)
    assert (torch.get_num_threads(), threads.count()) == (2, 2)


def test_torch_alone_ends_with_an_error():
    with pytest.raises(ZeroDivisionError), threads.torch_alone():
        raise ZeroDivisionError
    assert (torch.get_num_threads(), threads.count()) == (2, 2)


def test_callers_at_once_get_what_each_gets_alone():
    g = torch.Generator().manual_seed(5)
    pairs = [(torch.randn(t, 64, generator=g), torch.randn(3000, 64, generator=g)) for t in (1, 3, 6, 7, 16, 40)]
    alone = [linear(x, w) for x, w in pairs]

    def all_of_them(_: int) -> list[torch.Tensor]:
        torch.set_num_threads(2)
        return [linear(x, w) for _ in range(20) for x, w in pairs]

    with ThreadPoolExecutor(3) as callers:
        for results in callers.map(all_of_them, range(3)):
            for i, y in enumerate(results):
                assert torch.equal(y, alone[i % len(pairs)])
