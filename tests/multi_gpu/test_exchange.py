"""Ranks in processes of their own, each on a GPU of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perilune.bench.ranks import exchange
from tests.multi_gpu.exchange_rank import RANKS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"
)


def outputs(scratch: Path, mode: str, seconds: float) -> list[tuple[int, str]]:
    """(exit status, output) of every rank."""
    command = [sys.executable, "-m", "tests.multi_gpu.exchange_rank", str(scratch)]
    ranks = [
        subprocess.Popen(
            [*command, str(r), mode, str(seconds)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for r in range(RANKS)
    ]
    try:
        found = [p.communicate(timeout=seconds + 120)[0] for p in ranks]
    finally:
        for p in ranks:
            p.kill()
    return [(p.returncode, out) for p, out in zip(ranks, found)]


@pytest.mark.parametrize("mode", ["stress", "experts"])
def test_random_batch_sizes_for_a_while(tmp_path: Path, mode: str) -> None:
    for status, out in outputs(tmp_path, mode, 8):
        assert status == 0 and out.startswith("ok"), out


def test_a_killed_rank_is_reported_and_nothing_hangs(tmp_path: Path) -> None:
    (status, out), (killed, _), *_ = outputs(tmp_path, "killed", 0)
    assert killed == 9 and status == 0, out
    assert "rank 1 did not answer rank 0" in out, out
    assert float(out.split()[1]) < 3.0, out  # one time limit of 1 s, not one for each exchange


def test_the_bench_compares_with_nccl() -> None:
    rows = exchange.measure(RANKS, [1, 64], lambda line: None)
    took = {(row["tokens"], row["form"], row["parts"]): row["us"] for row in rows}
    assert took[1, "one-shot", 0] < took[1, "nccl", 0] and took[64, "one-shot", 0] < took[64, "nccl", 0]
