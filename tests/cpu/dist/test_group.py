"""A group of GPUs, with stand-ins for NCCL and for memory of GPUs: what is added over peer memory, and how it ends."""

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.dist import group as dist_group
from perilune.dist import peer_memory
from perilune.dist.group import TIMEOUT, Gloo, Nccl, join
from perilune.dist.peer_memory import ExchangeError, PeerMemory
from perilune.dist.slicing import Slicing
from perilune.model.kimi_k2 import add_parts
from perilune.ops.exchange.peers import Peers

GPU = torch.device("cuda", 3)


class Processes:
    """Of NCCL: what was called, in order."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def abort(self) -> None:
        self._calls.append("abort")


def group(monkeypatch: pytest.MonkeyPatch, found: Any, rank: int = 0, refusal: str = "") -> tuple[Nccl, list[str]]:
    calls: list[str] = []

    def connect(*args: Any, refusal: str) -> Any:
        assert args[:3] == (rank, 2, GPU) and args[4] == TIMEOUT.total_seconds()
        return refusal or found

    monkeypatch.setattr(peer_memory, "connect", connect)
    made = Nccl(Slicing(rank, 2), Processes(calls))
    made.connect(GPU, lambda own: [own, own], refusal)
    return made, calls


def test_a_group_with_peer_memory_adds_over_it_and_ends_its_waits_first(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PeerMemory(0, [64, 128], torch.device("cpu"), 1.0)
    made, calls = group(monkeypatch, memory)
    end = memory.end

    def ended() -> None:
        calls.append("end")
        end()

    monkeypatch.setattr(memory, "end", ended)
    monkeypatch.setattr(memory, "close", lambda swap: calls.append(f"close {swap(b'') == [b'']}"))
    assert made.name == "peer" and made.peers is not None and made.peers.mailboxes is memory.mailboxes
    assert (made.peers.rank, made.peers.ranks) == (0, 2)
    made.check()
    made.abort()
    with pytest.raises(ExchangeError):
        made.check()
    made.close()
    assert calls == ["end", "abort", "close True"], "NCCL is not aborted twice"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_without_peer_memory_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    made, calls = group(monkeypatch, None, rank, "GPU 0 cannot read GPU 1's memory")
    assert made.name == "nccl" and made.peers is None
    made.check()
    made.close()
    assert calls == ["abort"], "an orderly end would wait for ranks that have ended"
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    why = "2 ranks add partial outputs through NCCL, not over peer memory: GPU 0 cannot read GPU 1's memory"
    assert said == ([why] if rank == 0 else [])


@pytest.mark.parametrize("aborted", [False, True], ids=["closed", "closed after a rank was lost"])
@pytest.mark.parametrize("where", ["abort", "__del__"])
def test_connections_that_do_not_end_do_not_keep_an_engine_from_closing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str, aborted: bool
) -> None:
    def wait(processes: object) -> None:
        assert ended.wait(100)
        after.set()

    class Endless:
        def abort(self) -> None: ...

    ended, after = threading.Event(), threading.Event()
    waits = where == "__del__" or not aborted
    monkeypatch.setattr(dist_group, "END_SECONDS", 0.2 if waits else 100.0)
    made = Nccl(Slicing(0, 2), Endless())
    if aborted:
        made.abort()
    monkeypatch.setattr(Endless, where, wait, raising=False)
    made.close()
    assert ("did not end" in caplog.text) == waits and not after.is_set()
    ended.set()
    assert after.wait(60 if waits else 0) == waits


def test_layers_of_long_steps_are_the_progress_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Nccl(Slicing(0, 2), Processes([]))
    made._device = torch.device("cpu")
    assert made.progress() == 0
    found = []
    for _ in range(3):
        made.mark()
        found.append(made.progress())
    assert found == [1, 2, 3]


def test_torch_looks_for_nothing_in_the_store_once_ranks_have_joined(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file of the meeting is removed then, and a look at it waits for the file."""
    seen: dict[str, str | None] = {}

    class Started(Exception):
        pass

    def started(*args: Any) -> None:
        for name in ("DUMP_ON_TIMEOUT", "ASYNC_ERROR_HANDLING"):
            seen[name] = os.environ.get(f"TORCH_NCCL_{name}")
        raise Started

    for name in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    started.Options = type("Options", (), {})  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", started, raising=False)
    with pytest.raises(Started):
        join(Slicing(0, 2), tmp_path / "meeting", GPU)
    assert seen == {"DUMP_ON_TIMEOUT": "0", "ASYNC_ERROR_HANDLING": "0"}


def test_the_model_and_the_draft_model_add_over_the_groups_peers() -> None:
    seen: list[Tensor] = []

    def gather(own: Tensor) -> Tensor:
        seen.append(own)
        return torch.stack([own, 2 * own])

    h, x, norm = torch.zeros(3, 8), torch.randn(3, 8), torch.ones(8)
    found = add_parts(h, x, norm, 1e-5, None, Peers(0, 2, gather))  # type: ignore[arg-type]  # peers are enough
    assert len(seen) == 1 and torch.allclose(h, 3 * x)
    assert torch.allclose(found, torch.nn.functional.rms_norm(3 * x, (8,), norm, 1e-5), atol=1e-5)


def test_a_rank_of_a_cpu_that_only_reports_makes_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    used = 7.0  # of CPU time
    monkeypatch.setattr(dist_group.time, "process_time", lambda: used)
    made = Gloo(Slicing(0, 2), Processes([]))
    made.progress()
    found = []
    for busy in (0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.15, 0.15, 0.02):
        used += busy
        found.append(made.progress())
    assert len(set(found[:6])) == 1 and found[5] < found[6] < found[7] == found[8]
