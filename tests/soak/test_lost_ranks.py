"""Every rank killed, stopped and wrong, under load, with 2 and 4 ranks: one error in time, and nothing is left."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import Tensor

from perilune.engine import ranks
from perilune.engine.order_ring import OrderWriter
from tests.cpu.conftest import steps_have_a_price as steps_have_a_price
from tests.e2e.server import Server, needs_nano
from tests.multi.test_lost_ranks import STILL_SECONDS, fails, gone, processes, start, wait_until_still

pytestmark = [needs_nano, pytest.mark.timeout(0)]
OTHERS = [(tp, rank) for tp in (2, 4) for rank in range(1, tp)]


@pytest.mark.parametrize("tp, rank", OTHERS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank(number: signal.Signals, tp: int, rank: int) -> None:
    llm = start(tp=tp)
    pids = processes(llm)
    error, seconds = fails(llm, lambda: os.kill(pids[rank - 1], number))
    print(f"tp {tp}, rank {rank}, {number.name}: {seconds:.2f} s: {error}")
    assert error.startswith(f"the engine stopped: rank {rank} of {tp} (process {pids[rank - 1]}) ") and seconds < 10
    llm.close()
    assert gone(pids)


def only(monkeypatch: pytest.MonkeyPatch, rank: int, module: str) -> None:
    """This rank runs tests.multi.`module`, the others what they always run."""
    spawn = ranks._spawn

    def one_other(place: ranks.Start, ring: OrderWriter) -> ranks._Rank:
        other = f"tests.multi.{module}" if place.place.rank == rank else "perilune.engine.rank"
        monkeypatch.setattr(ranks, "RANK_MODULE", other)
        return spawn(place, ring)

    monkeypatch.setattr(ranks, "_spawn", one_other)


@pytest.mark.parametrize("tp, rank", OTHERS)
@pytest.mark.parametrize("module", ["hanging_rank", "late_rank"])
def test_a_step_that_never_ends(monkeypatch: pytest.MonkeyPatch, module: str, tp: int, rank: int) -> None:
    only(monkeypatch, rank, module)
    llm = start(tp=tp)
    pids = processes(llm)
    error, seconds = fails(llm, lambda: wait_until_still(llm))
    print(f"tp {tp}, rank {rank}, {module}: {STILL_SECONDS + seconds:.2f} s: {error}")
    assert error.startswith(f"the engine stopped: rank {rank} of {tp} (process {pids[rank - 1]}) has not ")
    assert STILL_SECONDS + seconds < 10
    llm.close()
    assert gone(pids)


@pytest.mark.parametrize("tp, rank", OTHERS)
def test_a_wrong_token(monkeypatch: pytest.MonkeyPatch, tp: int, rank: int) -> None:
    only(monkeypatch, rank, "wrong_rank")
    llm = start(tp=tp)
    pids = processes(llm)
    error, _ = fails(llm, lambda: None)
    assert f"rank {rank} of {tp} (process {pids[rank - 1]}) chose other tokens than rank 0" in error
    llm.close()
    assert gone(pids)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_wrong_token_of_rank_0(tp: int) -> None:
    llm = start(tp=tp)
    pids = processes(llm)
    assert llm._engine is not None
    vocabulary: Any = llm._engine.runner._vocabulary
    real, calls = vocabulary.argmax, 0

    def argmax(logits: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        found: Tensor = real(logits)
        return found + 1 if calls == 20 else found

    vocabulary.argmax = argmax
    error, _ = fails(llm, lambda: None)
    assert "chose other tokens than rank 0" in error
    llm.close()
    assert gone(pids)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_rank_0_is_lost_and_the_server_starts_it_again(number: signal.Signals, tp: int) -> None:
    server = Server("--tp", str(tp), "--draft", "off", "--max-model-len", "1024")
    try:
        engine = server.engine_pid()
        pids = [int(pid) for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text().split()]
        assert len(pids) == tp - 1
        body = {"model": "kimi-nano", "prompt": "A", "max_tokens": 900, "ignore_eos": True, "stream": True}
        ended: list[float] = []

        def ask() -> None:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
                text = "".join(answer.iter_text())
            ended.append(time.monotonic())
            assert "error" in text

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(2.0)
        begin = time.monotonic()
        os.kill(engine, number)
        for thread in threads:
            thread.join(30)
        print(f"tp {tp}, rank 0, {number.name}: errors after {max(ended) - begin:.2f} s")
        assert len(ended) == 3 and max(ended) - begin < 10
        while any(
            Path(f"/proc/{pid}/exe").exists() for pid in pids
        ):  # ended: nothing waits for them, they stay zombies
            assert time.monotonic() - begin < 10
            time.sleep(0.1)
        while httpx.get(f"{server.url}/health/ready").status_code != 200:
            assert time.monotonic() - begin < 60
            time.sleep(0.2)
    finally:
        server.stop(signal.SIGTERM)
