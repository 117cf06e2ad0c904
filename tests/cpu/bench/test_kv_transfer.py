"""Rows of runs/kv_transfer.py: each with its part, its setting and the share of what the machine can do."""

import json
from pathlib import Path

import pytest

from runs import kv_transfer


def test_every_row_reaches_the_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kv_transfer.main(["--parts", "copies,disk", "--layers", "2", "--disk", str(tmp_path), "--ledger", str(tmp_path)])
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = [json.loads(line) for line in (tmp_path / "kv.jsonl").read_text().splitlines()]
    assert [(r["part"], r.get("what")) for r in rows] == [(r["part"], r.get("what")) for r in printed]
    always = {"layers", "gpus", "tp", "ep", "exchange", "kv_layout", "kv_dtype", "commit", "date", "gb_s"}
    for row in rows:
        assert row["bench"] == "kv" and always <= row.keys() and row["gb_s"] > 0
        for most in {"link_gb_s", "disk_gb_s"} & row.keys():
            assert row["fraction"] == pytest.approx(row["gb_s"] / row[most], rel=0.01, abs=1e-3)
    moved = {r["what"]: r for r in rows if r["part"] == "transfer"}
    assert {w for w, r in moved.items() if "link_gb_s" in r} == {"store", "restore"}
    assert {w for w, r in moved.items() if "disk_gb_s" in r} == {"write", "read", "read from the page cache"}
    assert {r["kv_dtype"] for r in rows if r["part"] == "copies"} == {"fp8", "bfloat16"}


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kv_transfer.main(["--parts", "copies,drives"])
    assert "--parts has drives: name some of copies, disk, session, slowdown" in capsys.readouterr().err
