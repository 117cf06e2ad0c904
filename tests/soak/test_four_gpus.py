"""The run on four GPUs, tried whole on a CPU: every part has its rows, and a run that is continued measures nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perilune.bench import ledger
from runs.four_gpus.setting import USUAL

pytestmark = pytest.mark.timeout(0)


def test_every_part_on_two_ranks_and_then_none(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runs.four_gpus", "--device", "cpu", "--tp", "2", "--ledger", str(tmp_path)]
    done = subprocess.run([*command, "--part", ",".join([*USUAL, "h"])], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for file in tmp_path.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert {row["part"] for row in rows} == {*USUAL, "h"}
    assert all(row["measured"] > 0 and row["tp"] == 2 and row["start_s"] > 0 for row in rows)
    declared = [row for row in rows if row["bench"] == "aa" and row.get("acceptance") == "declared"]
    assert declared and all(row["acceptance_length"] == 2.88 for row in declared)
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0 and "rows of this commit are there" in again.stdout
    assert ledger.circumstances()["commit"] is not None
