"""A rank that is killed, stopped or wrong ends all: one clear error, soon, and no process is left.

On an idle machine the error comes within 10 s: make soak says after how many. What it would have to wait for otherwise
takes far longer here, so that no busy machine fails a test.
"""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perilune import LLM, SamplingParams
from perilune.core.errors import ConfigError, EngineError
from perilune.dist.group import Gloo
from perilune.engine import ranks
from perilune.engine.step_times import lateness
from perilune.loading.progress import Bar
from tests.multi.conftest import CONFIG

STILL_SECONDS = 2.0
SOON_SECONDS = 100.0  # Below LONG_SECONDS.
LONG_SECONDS = 200.0  # The limit of a step, and the abort of a killed rank's exchange, here.
LONG = SamplingParams(temperature=0.0, max_tokens=250, ignore_eos=True)


@pytest.fixture(autouse=True)
def steps_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lateness, "STEP_SECONDS", LONG_SECONDS)


def start(**more: Any) -> LLM:
    return LLM("kimi-nano", **CONFIG, kv_blocks=64, draft="off", **more)


def processes(llm: LLM) -> list[int]:
    assert llm._engine is not None and llm._engine._ranks is not None
    return [rank.process.pid for rank in llm._engine._ranks._ranks]


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def fails(llm: LLM, harm: Callable[[], None]) -> tuple[str, float]:
    """The error of requests in flight, and the seconds after `harm` at which it came."""
    at: list[float] = []

    def later() -> None:
        time.sleep(1.0)
        harm()
        at.append(time.monotonic())

    thread = threading.Thread(target=later)
    thread.start()
    with pytest.raises(EngineError) as found:
        llm.generate(["a", "b", "c"] * 40, LONG)
    seconds = time.monotonic() - at[0] if at else 0.0
    thread.join()
    return str(found.value), seconds


def wait_until_still(llm: LLM) -> None:
    """Until rank 0 has sent no step for STILL_SECONDS."""
    assert llm._engine is not None and llm._engine._ranks is not None
    group, sent = llm._engine._ranks, -1
    while sent != group._sent:
        sent = group._sent
        time.sleep(STILL_SECONDS)


@pytest.mark.parametrize("number, rank", [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)], ids=["killed", "stopped"])
def test_a_lost_rank_is_one_error_in_time(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, rank: int) -> None:
    monkeypatch.setattr(Gloo, "abort", lambda group: time.sleep(LONG_SECONDS))  # as NCCL's takes long
    llm = start(tp=4 if rank else 2)
    pids = processes(llm)
    error, seconds = fails(llm, lambda: os.kill(pids[rank], number))
    why = "ended by SIGKILL" if number == signal.SIGKILL else "has not answered for 5 s"
    assert re.fullmatch(rf"the engine stopped: rank {rank + 1} of \d \(process {pids[rank]}\) {why}; .*", error)
    assert "\n" not in error and seconds < SOON_SECONDS
    with pytest.raises(EngineError, match=why):
        llm.generate("a", LONG)
    llm.close()
    assert gone(pids)


def test_a_rank_that_chooses_another_token_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "RANK_MODULE", "tests.multi.wrong_rank")
    llm = start(tp=2)
    pids = processes(llm)
    error, _ = fails(llm, lambda: None)
    assert error.startswith(f"the engine stopped: rank 1 of 2 (process {pids[0]}) chose other tokens than rank 0")
    assert error.endswith(": start it again")
    llm.close()
    assert gone(pids)


@pytest.mark.parametrize(
    "module, why",
    [
        ("hanging", r"rank 1 of 2 \(process \d+\) has not begun an exchange in which others wait for \d+ s, .*"),
        ("late", r"rank 1 of 2 \(process \d+\) has not ended a step that rank 0 ended \d+ s ago"),
    ],
    ids=["by no rank", "by one rank"],
)
def test_a_step_that_never_ends_is_an_error_though_its_rank_says_that_it_is_there(
    monkeypatch: pytest.MonkeyPatch, module: str, why: str
) -> None:
    monkeypatch.setattr(ranks, "RANK_MODULE", f"tests.multi.{module}_rank")
    llm = start(tp=2)
    pids = processes(llm)
    error, seconds = fails(llm, lambda: wait_until_still(llm))
    assert re.fullmatch(rf"the engine stopped: {why}; its other ranks .*", error), error
    assert STILL_SECONDS + seconds < SOON_SECONDS
    llm.close()
    assert gone(pids)


def test_a_step_that_takes_long_because_a_rank_computes_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "RANK_MODULE", "tests.multi.slow_rank")
    monkeypatch.setattr(lateness, "STILL_SECONDS", 2.0)
    with start(tp=2) as llm:
        begin = time.monotonic()
        assert len(llm.generate("a", replace(LONG, max_tokens=40))[0].token_ids) == 40
        assert time.monotonic() - begin > 4
        monkeypatch.setattr(lateness, "STEP_SECONDS", 1.0)  # but not for ever
        monkeypatch.setattr(lateness, "SECONDS_PER_TOKEN", 0.0)
        with pytest.raises(EngineError, match=r"a step has not ended on rank 1 of 2 \(process \d+\) for 1 s; "):
            llm.generate("a", replace(LONG, max_tokens=80))


def test_closing_leaves_no_process_and_no_file_and_one_bar_shows_what_all_ranks_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "subprocess", subprocess)  # here as where no test is
    reports: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    stopped: list[int] = []
    monkeypatch.setattr(Bar, "report", lambda bar, rank, done, total: reports[rank].append((done, total)))
    monkeypatch.setattr(Bar, "__exit__", lambda *args: stopped.append(len(reports[1])))
    llm = start(tp=2, progress=True)
    assert llm._engine is not None and llm._engine._ranks is not None
    pids, meeting = processes(llm), Path(llm._engine._ranks.place.meeting)
    assert llm.info.tp == 2 and not gone(pids) and not meeting.parent.exists()
    assert all(found[-1][0] == found[-1][1] > 1e6 for found in reports.values())
    assert stopped == [len(reports[1])], "the bar ends when all ranks have their weights"
    llm.close()
    assert gone(pids)


@pytest.mark.parametrize(
    "config, why",
    [
        (dict(tp=3), "kimi-nano's 4 heads cannot be shared out evenly over 3 ranks: give 1, 2 or 4$"),
        (dict(ep=3), "ep=3: kimi-nano's 4 heads cannot be shared out evenly over 3 ranks"),
        (dict(ep=8), "ep=8: kimi-nano's 4 heads"),
        (dict(tp=4, ep=2), "ep=2 with tp=4"),
        (dict(tp=0), "tp must be at least 1"),
        (dict(tp=2, gpus="0,1"), "gpus=0,1 names GPUs, but this engine runs on the CPU: leave it out"),
    ],
)
def test_what_cannot_be_split_is_one_line(config: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as found:
        start(**config)
    assert "\n" not in str(found.value)
