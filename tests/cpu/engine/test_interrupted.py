"""Ctrl-C in `LLM.generate`: the call ends, and the next one has its right answer."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perilune import LLM, SamplingParams
from perilune.engine import interrupts
from perilune.engine.readout import Readout

SMALL: dict[str, Any] = dict(device="cpu", max_model_len=128, max_num_seqs=4, threads=1, draft="off", kv_blocks=32)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, **SMALL) as llm:
        yield llm


def interrupted_in_step(number: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on SIGINT comes while the result of this step is awaited, counted from 1; the steps awaited since."""
    wait, steps = Readout.wait, list[int]()

    def waits(self: Readout) -> Readout:
        if threading.current_thread() is threading.main_thread():
            steps.append(len(steps) + 1)
            if len(steps) == number:
                os.kill(os.getpid(), signal.SIGINT)
        return wait(self)

    monkeypatch.setattr(Readout, "wait", waits)
    return steps


@pytest.mark.parametrize("number", [1, 2, 9])
def test_a_call_ends_and_the_next_is_right(llm: LLM, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate([5, 6, 7], SHORT)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        steps = interrupted_in_step(number, patch)
        llm.generate([[5, 6, 7], [8, 9], [10] * 30], LONG)
    assert number <= len(steps) <= number + 3, "it ended soon"
    assert llm._engine is not None and not llm._engine.busy
    llm._engine.scheduler.check_integrity()
    assert llm.generate([5, 6, 7], SHORT)[0].token_ids == expected[0].token_ids
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_that_hangs_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt), interrupts.put_off():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second was put off too")


def test_sigterm_is_put_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a step it left a traceback of the scheduler behind."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before, passed = signal.signal(signal.SIGTERM, end), False
    try:
        with pytest.raises(SystemExit), interrupts.put_off():
            os.kill(os.getpid(), signal.SIGTERM)
            passed = True
        assert passed and signal.getsignal(signal.SIGTERM) is end
    finally:
        signal.signal(signal.SIGTERM, before)
