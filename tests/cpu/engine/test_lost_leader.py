"""What is left where rank 0 is killed, and how a lost rank is said."""

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perilune.core.config import EngineConfig
from perilune.core.errors import CheckpointError, EngineError
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


def test_a_folder_in_which_a_thread_makes_the_file_again_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread joins the group while that of the heartbeats finds that rank 0 is gone."""
    meeting = tmp_path / "ranks" / "meeting"
    meeting.parent.mkdir()
    rmdir, made = os.rmdir, iter([True])

    def joining(path: Any, **more: Any) -> None:
        if next(made, False):
            meeting.touch()
        rmdir(path, **more)

    def exited(code: int) -> None:
        raise Exited

    monkeypatch.setattr(rank.Leader, "_beat", lambda leader: None)
    monkeypatch.setattr(os, "rmdir", joining)
    monkeypatch.setattr(os, "_exit", exited)
    own, other = socket.socketpair()
    place = ranks.Place(1, 2, meeting=str(meeting))
    with own, other, pytest.raises(Exited):
        rank.Leader(own, ranks.Start(str(tmp_path), EngineConfig(device="cpu", tp=2), place, 0)).end(0)
    assert not meeting.parent.exists()


@pytest.fixture
def two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ranks.Ranks, list[socket.socket]]]:
    """Two processes that sleep, and the ends of the sockets on which the test speaks for them."""
    ends: list[socket.socket] = []

    def spawn(start: ranks.Start, ring: OrderWriter) -> ranks._Rank:
        (orders, wake), (pulse, theirs) = socket.socketpair(), socket.socketpair()
        ends.extend((wake, theirs))
        ring.add(orders)
        return ranks._Rank(start.place, subprocess.Popen(["sleep", "200"]), orders, pulse)

    monkeypatch.setattr(ranks, "_spawn", spawn)
    monkeypatch.setattr(ranks, "CLOSE_SECONDS", 0.0)
    places = [ranks.Place(r, 3) for r in range(3)]
    group = ranks.Ranks(tmp_path, EngineConfig(device="cpu", tp=3), places, owns_process=False)
    yield group, ends[1::2]
    group.close()
    for end in ends:
        end.close()


def test_a_killed_rank_is_the_reason_also_where_another_first_says_what_came_of_it(
    two_ranks: tuple[ranks.Ranks, list[socket.socket]],
) -> None:
    group, ends = two_ranks
    killed = group._ranks[1].process
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # it has ended; its socket is open here
    ends[0].sendall(ranks.report("failed", text="RuntimeError: Connection closed by peer"))
    assert group._over.wait(100)
    with pytest.raises(EngineError, match=rf"rank 2 of 3 \(process {killed.pid}\) ended by SIGKILL"):
        group.check()


def test_a_rank_that_takes_seconds_to_end_is_named_with_its_signal(
    two_ranks: tuple[ranks.Ranks, list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the kernel closes the sockets of a killed process before it frees the memory of a GPU."""
    group, ends = two_ranks
    monkeypatch.setattr(ranks, "ENDING_SECONDS", 100.0)
    threading.Timer(1.3, group._ranks[0].process.kill).start()
    ends[0].close()
    assert group._over.wait(100)
    with pytest.raises(EngineError, match=r"rank 1 of 3 \(process \d+\) ended by SIGKILL"):
        group.check()


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
