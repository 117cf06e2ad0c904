"""Other processes of an engine: what they import, and that they end with it, closed or not."""

import asyncio
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perilune import LLM, SamplingParams
from perilune.core.config import EngineConfig
from perilune.core.errors import EngineError
from perilune.engine import llm as llm_module
from perilune.engine import ranks
from perilune.engine.client import EngineClient
from perilune.media.decoder import Decoder
from perilune.media.limits import Limits
from tests.cpu.media.pictures import file, scene
from tests.multi.conftest import CONFIG
from tests.multi.test_lost_ranks import gone, processes

CONFIG_2: dict[str, Any] = {**CONFIG, "kv_blocks": 32, "draft": "off", "tp": 2}
PARAMS = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.fixture(autouse=True)
def ranks_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are processes of their own interpreter, as the product starts them."""
    monkeypatch.setattr(ranks, "subprocess", subprocess)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory is one with files that are named as modules which every process imports."""
    for name in ("perilune", "queue", "statistics", "struct"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_ranks_import_nothing_from_the_current_directory(elsewhere: Path, one: LLM) -> None:
    with LLM("kimi-nano", **CONFIG_2) as llm:
        assert llm.generate("a b", PARAMS) == one.generate("a b", PARAMS)


def test_an_engine_imports_nothing_from_the_current_directory(elsewhere: Path) -> None:
    with pytest.raises(EngineError, match="missing is not a directory"):  # it has read its orders
        asyncio.run(EngineClient.start(elsewhere / "missing", EngineConfig(device="cpu")))


def test_a_decoder_imports_nothing_from_the_current_directory(elsewhere: Path) -> None:
    with Decoder(Limits()) as decoder:
        assert decoder.decode(file(scene(28, 28))).tokens == 1


def test_ranks_end_with_an_engine_that_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a notebook does when a cell with `llm = LLM(...)` is run again."""
    monkeypatch.setattr(llm_module, "DROPPED_SECONDS", 120.0)  # however busy the machine is
    llm = LLM("kimi-nano", **CONFIG_2)
    pids = processes(llm)
    del llm
    gc.collect()
    assert gone(pids)


def test_ranks_end_at_once_with_a_program_that_does_not_close() -> None:
    program = f"from perilune import LLM; llm = LLM(**{CONFIG_2!r}); print(*llm._engine._ranks.pids)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0 and "has not answered" not in ended.stderr
    assert gone([int(pid) for pid in ended.stdout.split()])
