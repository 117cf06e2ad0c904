"""Kernels whose CTAs wait for each other: one engine on a GPU has them, and each engine its own mailboxes."""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from perilune.core.sampling import SamplingParams
from perilune.engine import exclusive_kernels
from perilune.engine.llm import LLM
from perilune.ops.harness import registry, workspace


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


def test_ops_of_a_step_keep_their_memory_with_the_engine_until_its_graphs_are_gone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    with LLM(tiny, device="cpu", max_model_len=64, threads=1, draft="off") as llm:
        assert llm._engine is not None
        runner = llm._engine.runner
        found: set[workspace.Workspace] = set()
        logits = runner.model.logits

        def noting(hidden: torch.Tensor) -> torch.Tensor:
            found.add(workspace.current(cpu))
            return logits(hidden)

        monkeypatch.setattr(runner.model, "logits", noting)
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3))
        assert found == {runner.workspaces.of(cpu)}
        mailbox = weakref.ref(runner.workspaces.of(cpu).zeros("mailbox", 8))
        there: list[bool] = []
        closing = SimpleNamespace(close=lambda: there.append(mailbox() is not None))
        monkeypatch.setattr(runner, "graphs", closing)
    assert there == [True] and mailbox() is None and len(runner.workspaces) == 0
