"""Training drafters in processes: one that is killed and taken up again, and two that learn as one."""

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from perilune.draft import ranks
from perilune.draft.collect import _ahead
from perilune.draft.corpus import Corpus
from perilune.draft.optimizer import Optimizer
from perilune.draft.train import LOG, STATE, Options, train
from perilune.model.kimi_k2 import KimiK2
from tests import forked
from tests.cpu.draft.test_draft import corpus_of, some_rows
from tests.cpu.draft.test_draft_train import FORMS, a_target, drafts_config

JOB = Options(steps=40, unroll=2, chains=60, rate=5e-3, loss="hybrid", save_every=0.0)


def a_run(directory: Path, form: str, stop_after: int = 0) -> dict[str, Tensor]:
    """In `directory`, trains on its corpus; the draft's tensors."""
    target = a_target()
    _, config = drafts_config(target[0], **FORMS[form])
    trainee = train(
        KimiK2(*target, max_positions=64), config, [Corpus(directory / "corpus")], directory / "run", JOB,
        capture_tokens=128, stop_after=stop_after,
    )  # fmt: skip
    return trainee.checkpoint(torch.float32)


def logged(directory: Path, kind: str) -> list[dict[str, Any]]:
    return [r for r in map(json.loads, (directory / "run" / LOG).open()) if r["kind"] == kind]


def a_killed_run(directory: Path) -> None:
    """`a_run` in a process that is killed seven steps after it has saved."""
    step, steps = Optimizer.step, itertools.count(1)

    def killing(self: Optimizer, rate: float) -> None:
        step(self, rate)
        if next(steps) == 27:
            os.kill(os.getpid(), signal.SIGKILL)

    Optimizer.step = killing  # type: ignore[method-assign]
    a_run(directory, "mla-cut")


def test_a_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    for name in ("whole", "killed"):
        corpus_of(tmp_path / name / "corpus", some_rows(24))
    path = tmp_path / "killed"
    assert forked.run(a_killed_run, path) == -signal.SIGKILL
    killed, whole = a_run(path, "mla-cut"), a_run(tmp_path / "whole", "mla-cut")
    assert [r["step"] for r in logged(path, "start")] == [0, 20]
    assert killed.keys() == whole.keys() and all(torch.equal(t, killed[name]) for name, t in whole.items())


def two_runs(directory: Path, form: str) -> None:
    """What each of two processes does: two runs, one of which is left and taken up again."""
    torch.set_num_threads(1)
    tensors = a_run(directory / "two", form)
    a_run(directory / "again", form, stop_after=20)
    again = a_run(directory / "again", form)
    if ranks.rank() == 0:
        save_file(tensors, directory / "two" / "draft.safetensors")
        save_file(again, directory / "again" / "draft.safetensors")


def learn_as_one(directory: Path, form: str) -> None:
    """Two processes, beside one that does the same."""
    two, again, one = (directory / name for name in ("two", "again", "one"))
    for path in (two, again, one):
        corpus_of(path / "corpus", some_rows(24))
    ranks.spawn(2, two_runs, directory, form)
    a_run(one, form)
    steps = [logged(path, "step") for path in (one, two)]
    assert [len(s) for s in steps] == [JOB.steps // 20] * 2 and logged(two, "start")[0]["processes"] == 2
    # Sums in another order are orthogonalised in bfloat16: alike, not equal.
    for a, b in zip(*steps):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-3) and a["rate"] == b["rate"]
        assert a["agreement"] == pytest.approx(b["agreement"], abs=0.02)
    assert steps[0][-1]["loss"] < steps[0][0]["loss"] - 0.05
    # Taken up again, two end with the bits of two; what they save is whole.
    assert [r["step"] for r in logged(again, "start")] == [0, 20]
    drafts = [load_file(path / "draft.safetensors") for path in (two, again)]
    assert all(torch.equal(t, drafts[1][name]) for name, t in drafts[0].items())
    states = [load_file(path / "run" / STATE) for path in (two, one)]
    assert {k: v.shape for k, v in states[0].items()} == {k: v.shape for k, v in states[1].items()}
    # One process goes on with what two have saved.
    assert a_run(two, form).keys() == drafts[0].keys() and logged(two, "stop")[-1]["step"] == JOB.steps


def test_two_processes_learn_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other form is in tests/soak."""
    start = ranks.start

    def late(member: Any, given: tuple[Any, ...], nprocs: int) -> None:
        """While they import torch, another process takes every port that they have been given."""
        with contextlib.ExitStack() as taken:
            for port in [x for x in given if isinstance(x, int) and x > nprocs]:
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            start(member, given, nprocs=nprocs)

    monkeypatch.setattr(ranks, "start", late)
    learn_as_one(tmp_path, "mha-cut")


class Listening:
    server: socket.socket

    def prompts(self, at: int, count: int) -> list[Any]:
        Listening.server = socket.create_server(("127.0.0.1", 0))
        return [Listening.server.getsockname()[1]]


def a_killed_collection(file: Path) -> None:
    prompts = _ahead(Listening(), [(0, 1)], 1)  # type: ignore[arg-type]
    file.write_text(str(next(prompts)[0]))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_workers_end_with_a_killed_collection(tmp_path: Path) -> None:
    assert forked.run(a_killed_collection, tmp_path / "port") == -signal.SIGKILL
    with pytest.raises(ConnectionRefusedError):
        for _ in range(600):
            socket.create_connection(("127.0.0.1", int((tmp_path / "port").read_text()))).close()
            time.sleep(0.1)
