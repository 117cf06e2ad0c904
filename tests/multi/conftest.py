"""Engines of several ranks on this CPU. Shared by a module, because each start costs seconds of imports per rank."""

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from perilune import LLM
from perilune.engine import ranks
from tests import forked
from tests.cpu.conftest import steps_have_a_price as steps_have_a_price
from tests.cpu.conftest import worth_it as worth_it

CONFIG: dict[str, Any] = dict(
    dtype="float32", device="cpu", max_model_len=320, max_num_seqs=6, max_step_tokens=48, threads=1, seed=1
)


@pytest.fixture(scope="package", autouse=True)
def ranks_are_forked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ranks, "subprocess", SimpleNamespace(Popen=forked.Module, TimeoutExpired=subprocess.TimeoutExpired)
        )
        yield


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    """kimi-nano on one rank: the judge."""
    with LLM("kimi-nano", **CONFIG, draft="off") as llm:
        yield llm
