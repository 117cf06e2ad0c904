"""`bench decode` says what bounds a step: the device's own time beside the host's, where a step is a CUDA graph."""

from pathlib import Path
from typing import Any

import pytest

from perilune.bench import decode
from perilune.core.config import EngineConfig, build
from perilune.engine.engine import Engine
from tests.cpu.engine.test_graphs import ungraphed

CONFIG = dict(device="cpu", dtype="float32", threads=1, draft="off", max_num_seqs=2, max_model_len=64, kv_blocks=32)


def measured(tiny: Path) -> tuple[dict[str, Any], str]:
    lines: list[str] = []
    (row,) = decode.measure(tiny, build(EngineConfig, CONFIG), [2], [16], 8, lines.append)
    return row, lines[-1]


@pytest.mark.parametrize("device, bound", [(1e-9, "host"), (60.0, "device")])
def test_steps_of_graphs(tiny: Path, monkeypatch: pytest.MonkeyPatch, device: float, bound: str) -> None:
    def on_graphs(*args: Any) -> Engine:
        engine = Engine(*args)
        ungraphed(engine)
        return engine

    monkeypatch.setattr(decode, "Engine", on_graphs)
    monkeypatch.setattr(decode, "_replay_seconds", lambda graph: device * (len(graph.step.tokens) == 2))
    row, line = measured(tiny)
    assert row["device_ms"] == round(device * 1e3, 4) and 0 < row["host_ms"] <= 2 * row["step_ms"]
    assert row["self_test_ms"] > 0
    assert f"{bound}-bound (device {row['device_ms']} ms, host {row['host_ms']} ms)" in line


ALWAYS = {"layers", "gpus", "tp", "ep", "kv_layout", "kv_dtype", "expert_format", "rest_dtype", "exchange"}
DECODE = {"distinct_experts", "batch", "context", "draft", "draft_ms", "step_ms", "tokens_per_s"}


def test_steps_without_graphs(tiny: Path) -> None:
    row, line = measured(tiny)
    assert row.keys() >= ALWAYS | DECODE | {"kv_capacity_tokens", "weights_gb_per_gpu", "p99_over_median"}
    assert row["kv_capacity_tokens"] == 32 * 16 and row["p99_over_median"] >= 1 and "slice" not in row
    assert not {"device_ms", "host_ms", "self_test_ms"} & row.keys() and "bound" not in line and row["step_ms"] > 0


def test_a_row_says_how_many_steps_were_timed(tiny: Path) -> None:
    """The second prompt ends two steps after the first: until then one request decodes alone."""
    config = build(EngineConfig, CONFIG | {"max_step_tokens": 16})
    rows = decode.measure(tiny, config, [1, 2], [16], 8, lambda line: None)
    assert [row["method"].split(",")[0] for row in rows] == ["median of 8 engine steps", "median of 6 engine steps"]
