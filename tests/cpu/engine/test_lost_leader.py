"""What is left where rank 0 is killed, and how a lost rank is said."""

import socket
from pathlib import Path
from typing import Any

import pytest

from perilune.core.config import EngineConfig
from perilune.core.errors import CheckpointError
from perilune.engine import process, rank, ranks
from perilune.engine.order_ring import OrderWriter


def test_ranks_of_a_killed_rank_0_leave_no_file(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    place = ranks.Place(1, 2, meeting=str(tmp_path / "ranks" / "meeting"))
    ring = OrderWriter(lambda: None)
    other = ranks._spawn(ranks.Start(str(tmp_path), EngineConfig(device="cpu", tp=2), place, 0), ring)
    other.orders.close()  # as the kernel does where rank 0 is killed while this one still imports torch
    other.pulse.close()
    ring.close()
    assert other.process.wait(100) in (0, 1)
    assert not (tmp_path / "ranks").exists()


class Exited(Exception):
    pass


def test_a_rank_that_fails_where_rank_0_is_gone_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the heartbeats removes the file too, but the loading may fail before that thread notices."""

    def exited(code: int) -> None:
        raise Exited

    monkeypatch.setattr(rank.Leader, "_beat", lambda leader: None)
    monkeypatch.setattr(rank.os, "_exit", exited)
    for gone in (False, True):
        folder = tmp_path / str(gone)
        folder.mkdir()
        own, other = socket.socketpair()
        place = ranks.Place(1, 2, meeting=str(folder / "meeting"))
        leader = rank.Leader(own, ranks.Start(str(tmp_path), EngineConfig(device="cpu", tp=2), place, 0))
        if gone:
            other.close()
        with pytest.raises(Exited):
            rank.fail(leader, CheckpointError("no such file"))
        assert folder.exists() is not gone  # rank 0 removes it where it is there
        own.close()
        other.close()


@pytest.mark.parametrize("there", [True, False])
def test_a_lost_rank_is_said_once(
    there: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    class Channel:
        def send(self, messages: list[Any]) -> None:
            if not there:
                raise BrokenPipeError
            sent.extend(messages)

    def exited(code: int) -> None:
        raise Exited

    monkeypatch.setattr(process.os, "_exit", exited)
    with pytest.raises(Exited):
        process._end(Channel(), "rank 1 is lost")  # type: ignore[arg-type]
    assert [failed.error for failed in sent] == ["rank 1 is lost"] * there
    assert capfd.readouterr().err == ("" if there else "perilune: rank 1 is lost\n")
