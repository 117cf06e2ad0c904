"""Engines with KV tiers: answers are bit for bit those without, whatever happens to memory, files and directory."""

import errno
import logging
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from perilune import LLM, SamplingParams
from perilune.core.errors import ConfigError
from perilune.core.memory import available_bytes
from perilune.core.messages import Delta, EngineStats, Shutdown
from perilune.engine.engine import Engine
from perilune.engine.process import serve
from perilune.engine.wire import Channel
from perilune.kv import tiers
from perilune.kv.tiers import Name, Restored, Stored, Written
from perilune.kv.transfer import Transfer
from perilune.kv.worth import Worth
from tests import forked

pytestmark = pytest.mark.usefixtures("worth_it")

CONFIG: dict[str, Any] = dict(dtype="float32", device="cpu", max_model_len=128, max_num_seqs=2, threads=1)
SMALL = dict(kv_blocks=24, block_size=8, max_step_tokens=64)
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def wait_for_copies(patch: pytest.MonkeyPatch, mover: type[Any]) -> None:
    """Movers of this class wait until a block is stored, or written to its file, before they return. At the pace of
    the threads, a busy machine drops rows that are not written yet: nothing, or less, is found on disk later."""
    store, write, poll = mover.store, mover.write, mover.poll

    def early(self: Any) -> list[Any]:
        """Records that the scheduler has not asked for yet."""
        kept: list[Any] = vars(self).setdefault("early", [])
        return kept

    def wait(self: Any, records: set[Any]) -> None:
        while records:
            self.wait(1.0)
            found = poll(self)
            early(self).extend(found)
            records -= {d.row for d in found if isinstance(d, Stored)} | {
                d.name for d in found if isinstance(d, Written)
            }

    def stored(self: Any, stores: Any) -> None:
        store(self, stores)
        wait(self, {row for _, _, row in stores})

    def written(self: Any, name: Name, row: int) -> None:
        write(self, name, row)
        wait(self, {name})

    def polled(self: Any) -> list[Any]:
        return [*vars(self).pop("early", ()), *poll(self)]

    for function, name in ((stored, "store"), (written, "write"), (polled, "poll")):
        patch.setattr(mover, name, function)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_copies(monkeypatch, Transfer)


def play(llm: LLM, seed: int = 0, sessions: int = 5, turns: int = 3, vocab: int = 500) -> list[tuple[int, ...]]:
    """Sessions that go on in turn, two at a time, on a cache for about two."""
    rng = random.Random(seed)
    shared = [rng.randrange(8, vocab) for _ in range(16)]
    texts = [[*shared, *(rng.randrange(8, vocab) for _ in range(40))] for _ in range(sessions)]
    answers = []
    for _ in range(turns):
        for first in range(0, sessions, 2):
            group = range(first, min(first + 2, sessions))
            for i, found in zip(group, llm.generate([texts[i] for i in group], PARAMS)):
                answers.append(found.token_ids)
                texts[i] += [*found.token_ids, *(rng.randrange(8, vocab) for _ in range(7))]
    return answers


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[tuple[int, ...]]:
    with LLM(tiny, **CONFIG, **SMALL, draft="off") as llm:
        return play(llm)


def hits(llm: LLM) -> dict[str, int]:
    return {name: count for name, count, _, _ in llm._engine.stats().tiers}  # type: ignore[union-attr]


def gb(blocks: int) -> float:
    return blocks * 20_480 / 1e9  # of the tiny model


@pytest.mark.parametrize("draft", ["off", "suffix"])
def test_answers_are_those_without_tiers(
    tiny: Path,
    plain: list[tuple[int, ...]],
    tmp_path: Path,
    draft: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "perilune.kv")
    kept = dict(**CONFIG, **SMALL, draft=draft, draft_tokens=3 if draft != "off" else None)
    with LLM(tiny, **kept, kv_host_gb=0.1) as llm:
        assert play(llm) == plain
        assert hits(llm)["host"] > 400 and hits(llm)["disk"] == 0
        stats = llm._engine.stats()
        assert stats.saved_seconds > 0 and not stats.blocks_dropped and not stats.blocks_damaged
        llm._engine.scheduler.check_integrity()
    assert "from host memory" in caplog.records[-1].message
    wait_for_copies(monkeypatch, Transfer)
    disk = dict(kv_host_gb=gb(10), kv_disk=str(tmp_path / "kv"), kv_disk_gb=0.1)
    with LLM(tiny, **kept, **disk) as llm:  # thrashing: ten rows
        assert play(llm) == plain
        assert hits(llm)["disk"] > 50
        llm._engine.scheduler.check_integrity()
    with LLM(tiny, **kept, **disk) as llm:  # another engine, another day
        assert play(llm) == plain
        assert hits(llm)["disk"] > 200
        assert any(key == "kv_disk" and "blocks of this model" in why for key, _, why in llm.info.choices)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_other_types_of_cache(tiny: Path, kv_dtype: str) -> None:
    """Against a cache for all sessions, which finds the same blocks."""
    with LLM(tiny, **CONFIG, kv_dtype=kv_dtype, block_size=8, kv_blocks=400, draft="off") as llm:
        expected = play(llm)
    with LLM(tiny, **CONFIG, **SMALL, kv_dtype=kv_dtype, draft="off", kv_host_gb=0.1) as llm:
        assert play(llm) == expected and hits(llm)["host"] > 400


def test_kimi_nano_with_its_drafter() -> None:
    """The bundled model: its draft model's cache is stored and restored with the target's."""
    config: dict[str, Any] = dict(device="cpu", threads=1, max_num_seqs=2, max_model_len=192, draft_tokens=2)
    with LLM("kimi-nano", **config, kv_blocks=200) as llm:
        expected = play(llm, sessions=4, turns=2)
    with LLM("kimi-nano", **config, kv_blocks=12, kv_host_gb=0.1) as llm:
        assert play(llm, sessions=4, turns=2) == expected
        assert hits(llm)["host"] > 0  # how many depends on what restores cost at the moment: kv/worth.py
        stats = llm._engine.stats()
        assert stats.verified, "nothing was drafted"


def flip_all(root: Path) -> None:
    for path in root.rglob("*.kv"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def truncate_all(root: Path) -> None:
    for path in root.rglob("*.kv"):
        path.write_bytes(path.read_bytes()[:3000])


def exchange_all(root: Path) -> None:
    """Every file is whole, and holds another block than its name says."""
    paths = sorted(root.rglob("*.kv"))
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[1:] + contents[:1]):
        path.write_bytes(content)


FAULTS: dict[str, Callable[[Path], None]] = {
    "flipped bits": flip_all,
    "truncated files": truncate_all,
    "files of other blocks": exchange_all,
    "files removed": lambda root: [p.unlink() for p in root.rglob("*.kv")] and None,
    "directory removed": lambda root: shutil.rmtree(root),
}


@pytest.fixture(scope="module")
def written(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of blocks of an engine that has ended."""
    root = tmp_path_factory.mktemp("written") / "kv"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worth, "pays", lambda self, tier: True)
        wait_for_copies(patch, Transfer)
        with LLM(tiny, **CONFIG, **SMALL, kv_host_gb=gb(10), kv_disk=str(root), kv_disk_gb=0.1, draft="off") as llm:
            play(llm)
    return root


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_costs_time_and_one_warning(
    fault: str,
    tiny: Path,
    plain: list[tuple[int, ...]],
    written: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = tmp_path / "kv"
    shutil.copytree(written, root)
    disk = dict(kv_host_gb=gb(10), kv_disk=str(root), kv_disk_gb=0.1, draft="off")
    with LLM(tiny, **CONFIG, **SMALL, **disk) as llm:
        FAULTS[fault](root)
        caplog.clear()
        assert play(llm) == plain
        warned = [r for r in caplog.records if r.levelno >= logging.WARNING and "computed again" in r.message]
        assert len(warned) == 1 and "\n" not in warned[0].getMessage()
        assert llm._engine.stats().blocks_damaged
        llm._engine.scheduler.check_integrity()


@pytest.mark.usefixtures("waited")
def test_a_full_disk_costs_time_and_one_warning(
    tiny: Path,
    plain: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Full in the middle of a file."""
    write, room = os.write, 6 * 24_000
    left = [room]

    def full(handle: int, data: bytes) -> int:
        if not os.path.realpath(f"/proc/self/fd/{handle}").startswith(str(tmp_path)):
            return write(handle, data)
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(handle, data[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(os, "write", full)
    root = tmp_path / "kv"
    with LLM(tiny, **CONFIG, **SMALL, kv_host_gb=gb(10), kv_disk=str(root), kv_disk_gb=0.1, draft="off") as llm:
        assert play(llm) == plain
        warned = [r for r in caplog.records if r.levelno >= logging.WARNING and "not written to disk" in r.message]
        assert len(warned) == 1 and "No space left" in warned[0].getMessage()
        written = [path.stat().st_size for path in root.rglob("*.kv")]
        assert len(set(written)) == 1 and sum(written) <= room and not list(root.rglob("*.part"))
        llm._engine.scheduler.check_integrity()


def test_an_engine_killed_while_it_writes_is_followed_by_one_that_answers_alike(
    tiny: Path, plain: list[tuple[int, ...]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed where half a file is written, several times later each; what is left is read by the next engine."""
    root = tmp_path / "kv"
    disk = dict(kv_host_gb=gb(10), kv_disk=str(root), kv_disk_gb=0.1, draft="off")
    for after in (1, 30):
        assert forked.run(play_until_killed, tiny, {**CONFIG, **SMALL, **disk}, after) == -signal.SIGKILL
        assert list(root.rglob("*.part")), "it was not killed in a write"
    with LLM(tiny, **CONFIG, **SMALL, **disk) as llm:
        assert not list(root.rglob("*.part")), "what was half written is deleted"
        assert play(llm) == plain and hits(llm)["disk"] > 50
        assert not llm._engine.stats().blocks_damaged, "a file has its name only when it is whole"
        llm._engine.scheduler.check_integrity()


def play_until_killed(path: Path, config: dict[str, Any], after: int) -> None:
    """In a process of its own, which ends in the middle of a write."""
    patch, write, left = pytest.MonkeyPatch(), os.write, 2 * after

    def killed(handle: int, data: bytes) -> int:
        nonlocal left
        if not os.path.realpath(f"/proc/self/fd/{handle}").endswith(".part"):
            return write(handle, data)
        left -= 1
        if left <= 0:
            write(handle, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(handle, data)

    patch.setattr(Worth, "pays", lambda self, tier: True)
    wait_for_copies(patch, Transfer)
    patch.setattr(os, "write", killed)
    with LLM(path, **config) as llm:
        play(llm)


@pytest.mark.usefixtures("waited")
def test_other_weights_and_formats_do_not_read_the_files(tiny: Path, tmp_path: Path) -> None:
    disk = dict(kv_host_gb=gb(10), kv_disk=str(tmp_path / "kv"), kv_disk_gb=0.1, draft="off")

    def known(**more: Any) -> str:
        with LLM(tiny, **{**CONFIG, **SMALL, **disk, **more}) as llm:
            (found,) = [why for key, _, why in llm.info.choices if key == "kv_disk"]
            if not more:
                play(llm)
        return found

    assert known().startswith("0 blocks")
    assert not known().startswith("0 blocks")
    for other in (dict(block_size=16), dict(dtype="bfloat16"), dict(kv_dtype="fp8"), dict(qk_norm_eps=1e-3)):
        assert known(**other).startswith("0 blocks"), other
    other = tmp_path / "model"
    shutil.copytree(tiny, other)
    from safetensors.torch import load_file, save_file

    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][3] += 0.5
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with LLM(other, **CONFIG, **SMALL, **disk) as llm:
        assert any(key == "kv_disk" and why.startswith("0 blocks") for key, _, why in llm.info.choices)


def test_tiers_that_do_not_pay_go_off_by_themselves(
    tiny: Path, plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()  # measured, not taken for granted
    answer = Transfer._answer

    def slowly(self: Transfer, done: Any) -> None:
        answer(self, [replace(d, seconds=9e3) if isinstance(d, Restored) else d for d in done])

    monkeypatch.setattr(Transfer, "_answer", slowly)
    with LLM(tiny, **CONFIG, **SMALL, draft="off", kv_host_gb=0.1) as llm:
        assert play(llm) == plain
        restored = hits(llm)["host"]
        assert play(llm) == plain
        assert hits(llm)["host"] - restored <= 64, "it went on"
    assert sum("KV tiers are off" in r.message for r in caplog.records) == 1


@pytest.mark.usefixtures("waited")
def test_an_idle_engine_deletes_what_has_expired(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(tiny, **CONFIG, **SMALL, draft="off", kv_host_gb=0.1) as llm:
        play(llm, turns=1)
        engine = llm._engine
        assert engine is not None and engine.idle_seconds == tiers.EXPIRE_SECONDS and engine.stats().tiers[0][2] > 0
        now = time.monotonic()
        monkeypatch.setattr(engine.scheduler.offload._tiers, "_clock", lambda: now + 25 * 3600)
        engine.step()
        assert not engine.busy and engine.stats().tiers[0][2] == 0
    with LLM(tiny, **CONFIG, **SMALL, draft="off") as llm:
        assert llm._engine is not None and llm._engine.idle_seconds is None


def test_the_loop_steps_an_idle_engine_with_tiers() -> None:
    """Without messages: time to live passes at night."""
    here, there = socket.socketpair()
    stepped = threading.Event()

    class Idle:
        busy = starved = False
        idle_seconds = 0.001
        steps = 0

        def step(self) -> list[Delta]:
            self.steps += 1
            if self.steps == 3:
                stepped.set()
            return []

        wants = staticmethod(list)
        stats = staticmethod(EngineStats)

    loop = threading.Thread(target=serve, args=(Idle(), Channel(there)), daemon=True)
    loop.start()
    assert stepped.wait(60)
    Channel(here).send([Shutdown()])
    loop.join(60)
    assert not loop.is_alive()
    here.close()
    there.close()


def test_an_engine_that_does_not_start_leaves_the_directory_to_the_next(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while its traceback is kept, as a notebook keeps the last one."""
    config = CONFIG | dict(draft="off", kv_disk=str(tmp_path / "kv"), kv_disk_gb=0.1)
    with pytest.raises(ConfigError, match="vision_cache_gb") as refused:
        LLM(path, **config, vision_cache_gb=1e-6)

    part = MagicMock(**{"close.side_effect": OSError})

    def interrupt(engine: Any, *_: Any, **__: Any) -> None:
        engine._ranks = engine.runner._ranks = engine.runner.graphs = part
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as interrupted:
        patch.setattr(Engine, "use_drafts", interrupt)
        patch.setattr("perilune.engine.exclusive_kernels.release", part.release)
        LLM(path, **config)
    assert [c[0] for c in part.mock_calls] == ["ready", "close", "close", "release"]
    with LLM(path, **config) as llm:
        assert llm.generate([5, 6, 7], PARAMS)
    assert refused.tb and interrupted.tb


def test_tenants_share_nothing_through_a_tier(tiny: Path) -> None:
    rng = random.Random(5)
    prompt = [rng.randrange(8, 500) for _ in range(60)]
    with LLM(tiny, **CONFIG, **SMALL, draft="off", kv_host_gb=0.1) as llm:
        found = []
        for keys in (("salt:a",), ("salt:b",), ("salt:a", "image:1"), ("salt:a",), ("salt:b",)):
            found.append(llm.generate(prompt, PARAMS, cache_keys=keys)[0].cached_tokens)
            play(llm, seed=len(found), turns=1)  # the pages forget
        assert found == [0, 0, 0, 56, 56]


@pytest.mark.parametrize(
    "config, says",
    [
        (dict(kv_host_gb=1e6), "lower it"),
        (dict(kv_host_gb=1e-6), "holds no block"),
        (dict(kv_host_gb=-1.0), "above 0"),
        (dict(kv_disk_gb=1.0), "give kv_disk"),
        (dict(kv_host_gb=0.1, prefix_cache=False), "prefix_cache"),
        (dict(kv_disk="/proc/kv"), "cannot be used"),
        (dict(kv_ttl_hours=0.0), "above 0"),
    ],
)
def test_a_bad_size_is_one_clear_error(tiny: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as e:
        LLM(tiny, **CONFIG, **SMALL, **config)
    assert "\n" not in str(e.value)


# ---- available memory


def meminfo(tmp_path: Path, gigabytes: int) -> Path:
    (tmp_path / "meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable: {gigabytes * 1_000_000} kB\n")
    return tmp_path / "meminfo"


def test_a_control_groups_limit_counts_less_what_it_can_give_back(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("8000000000\n")
    (tmp_path / "memory.current").write_text("5000000000\n")
    (tmp_path / "memory.stat").write_text("anon 4000000000\ninactive_file 900000000\n")
    assert available_bytes(tmp_path, meminfo(tmp_path, 64)) == 3_900_000_000
    assert available_bytes(tmp_path, meminfo(tmp_path, 2)) == 2_000_000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path, meminfo(tmp_path, 64)) == 64_000_000 * 1024


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1000000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("600000\n")
    (tmp_path / "memory" / "memory.stat").write_text("total_inactive_file 100\n")
    assert available_bytes(tmp_path, meminfo(tmp_path, 64)) == 400_100
