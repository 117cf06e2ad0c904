"""The log of rejected drafts: what is in it is what happened, and no more than was asked for."""

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from perilune.core.config import EngineConfig, build
from perilune.core.errors import CheckpointError, ConfigError
from perilune.core.messages import Delta, Submit
from perilune.core.sampling import SamplingParams
from perilune.core.step import StepPlan, Work
from perilune.engine.build import _rejected_log
from perilune.engine.engine import Engine
from perilune.engine.resolve import Choices
from perilune.speculation import rejection_log
from perilune.speculation.rejection_log import (
    AFTER,
    ANSWER_TOKENS,
    CONTEXT_TOKENS,
    Record,
    RejectedLog,
    Rejection,
    files,
    records,
)
from tests import oracle
from tests.cpu.speculation.test_speculation import CONFIG, PROMPTS, Scripted


def step(rid: int, drafts: tuple[int, ...], came: tuple[int, ...], ends: bool = False) -> tuple[StepPlan, list[Delta]]:
    """A step in which a request's drafts met the tokens that came."""
    accepted = next((i for i, (d, t) in enumerate(zip(drafts, came)) if d != t), min(len(drafts), len(came)))
    work = Work(rid, 0, 0, (0, *drafts), (0,), True, 0, SamplingParams(), 0, drafts=len(drafts))
    end = "stop" if ends else None
    return StepPlan(0, (work,)), [Delta(rid, came, finish_reason=end, drafted=len(drafts), accepted=accepted)]


def log_of(path: Path, **changes: Any) -> RejectedLog:
    return RejectedLog(path, **({"share": 1.0, "limit_bytes": 1 << 20, "seed": 0} | changes))


def test_an_engine_logs_what_happened(tmp_path: Path) -> None:
    path, directory = oracle.make(tmp_path / "model").path, tmp_path / "log"
    params = [
        SamplingParams(temperature=float(i % 2), seed=i, max_tokens=20, ignore_eos=True) for i in range(len(PROMPTS))
    ]
    truths: list[list[int]] = []
    for logged in (False, True):
        extra = {"log_rejected": str(directory), "log_rejected_share": 1.0} if logged else {}
        engine = Engine(path, build(EngineConfig, {**CONFIG, "draft": "off", **extra}))
        if logged:
            engine.speculator = Scripted(truths, random.Random(3))  # type: ignore[assignment]
            assert ("log_rejected", str(directory), "100% of requests, at most 64 MB") in engine.info.choices
        tokens: list[list[int]] = [[] for _ in PROMPTS]
        for i, (prompt, p) in enumerate(zip(PROMPTS, params)):
            engine.submit(Submit(i, tuple(prompt), p))
        while engine.busy:
            for delta in engine.step():
                tokens[delta.rid] += delta.tokens
        engine.close()
        if logged:
            assert tokens == truths
        else:
            truths = tokens
            assert not directory.exists(), "nothing was to be written"
    found = list(records(directory))
    assert {r.ids for r in found} <= {(*p, *t) for p, t in zip(PROMPTS, truths)} and len(found) >= 4
    for record in found:
        request = next(i for i, p in enumerate(PROMPTS) if record.ids[: record.given] == tuple(p))
        assert record.greedy == (params[request].temperature == 0)
        for r in record.rejected:
            came = record.ids[r.at : r.at + len(r.drafts)]
            assert came[: r.accepted] == r.drafts[: r.accepted] and came[r.accepted] != r.drafts[r.accepted]


def test_long_answers_are_parted_and_nothing_is_lost_or_told_twice(tmp_path: Path) -> None:
    log, rng = log_of(tmp_path), random.Random(1)
    prompt = [rng.randrange(100, 200) for _ in range(CONTEXT_TOKENS + 500)]
    log.open(7, prompt)
    text, expected = list(prompt), []
    for i in range(2000):
        came = tuple(rng.randrange(100) for _ in range(rng.randrange(1, 4)))
        wrong = rng.random() < 0.1
        drafts = (*came[:-1], came[-1] + 1000) if wrong else came
        if wrong:
            expected.append((len(text), drafts, len(came) - 1))
        text += came
        log.observe(*step(7, drafts, came, ends=i == 1999))
    log.close()
    found, seen, reached = list(records(tmp_path)), [], len(prompt)
    for record in found:
        assert record.given <= CONTEXT_TOKENS and len(record.ids) - record.given <= ANSWER_TOKENS + AFTER + 8
        cut = next(
            i for i in range(reached - record.given, len(text)) if tuple(text[i : i + len(record.ids)]) == record.ids
        )
        assert cut + record.given == reached
        reached += len(record.ids) - record.given
        seen += [(cut + r.at, r.drafts, r.accepted) for r in record.rejected]
    assert seen == expected and len(found) > 3 and reached == len(text)


def test_the_log_is_bounded_private_and_whole(tmp_path: Path) -> None:
    directory, limit = tmp_path / "log", 40_000
    for life in range(2):
        log = log_of(directory, limit_bytes=limit)
        assert not list(directory.glob(".*")), "what a killed engine left is gone"
        for rid in range(300):
            log.open(rid, [life, rid, *range(100)])
            log.observe(*step(rid, (1, 2), (1, 3), ends=True))
            log.maintain()
        if life == 0:
            (directory / ".rejected-00000009.jsonl").write_text("half")
            (directory / "rejected-².jsonl").touch()  # not the log's: ² is a digit, but no number
        else:
            log.close()
    kept = files(directory)
    assert 0.8 * limit < sum(f.stat().st_size for f in kept) <= limit
    assert directory.stat().st_mode & 0o777 == 0o700 and {f.stat().st_mode & 0o777 for f in kept} == {0o600}
    found = [r.ids[:2] for r in records(directory)]
    assert found[-1] == (1, 299) and found == sorted(found) and len(found) == len(set(found))


def test_a_share_is_drawn_by_lot_and_answers_without_a_wrong_draft_are_not_kept(tmp_path: Path) -> None:
    log = log_of(tmp_path, share=0.1)
    for rid in range(1000):
        log.open(rid, [1, 2, rid])
        log.observe(*step(rid, (4, 5), (4, 5, 6) if rid % 2 else (4, 9), ends=True))
    log.close()
    found = [r.ids[2] for r in records(tmp_path)]
    assert 25 <= len(found) <= 75 and not any(rid % 2 for rid in found)


def test_a_full_disk_costs_the_log_and_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = log_of(tmp_path)
    log.open(0, [1])
    log.observe(*step(0, (4,), (5,), ends=True))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    log.close()
    assert "No space left" in caplog.text and not list(tmp_path.iterdir())


def test_what_is_not_such_a_log_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot log rejected drafts"):
        log_of(tmp_path / "file")
    with pytest.raises(ConfigError, match="log_rejected='~no-user': there is no such user"):
        _rejected_log(EngineConfig(log_rejected="~no-user"), Choices([]))
    with pytest.raises(CheckpointError, match="serve with --log-rejected"):
        list(records(tmp_path))
    good: dict[str, Any] = {"ids": [1, 2, 3, 4], "given": 2, "greedy": True, "rejected": [[3, [9], 0]]}
    assert Record.of(json.dumps(good)) == Record((1, 2, 3, 4), 2, True, (Rejection(3, (9,), 0),))
    changes: tuple[dict[str, Any], ...] = (
        {"ids": []}, {"ids": [1, -2, 3, 4]}, {"ids": "1234"}, {"ids": [True, 2, 3, 4]}, {"given": 0}, {"given": 4},
        {"given": True}, {"greedy": 1}, {"rejected": None}, {"rejected": [[3, [9]]]}, {"rejected": [[1, [9], 0]]},
        {"rejected": [[4, [9], 0]]}, {"rejected": [[3, [], 0]]}, {"rejected": [[3, [9], 1]]}, {"rejected": [[3, 9, 0]]},
        {"rejected": [["3", [9], 0]]}, {"ids": [1, 2, 3, 2**31]},
    )  # fmt: skip
    for change in changes:
        (tmp_path / "rejected-00000001.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
        with pytest.raises(CheckpointError, match="line 2 is no record"):
            list(records(tmp_path))
    monkeypatch.setattr(rejection_log, "MAX_LINE_BYTES", 200_000)
    (tmp_path / "rejected-00000001.jsonl").write_bytes(b"[" * 4_000_000)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="line 1 is no record"):
        list(records(tmp_path))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1e6
    for data in (b"[" * 100_000, b"\xff" + json.dumps(good).encode()):
        (tmp_path / "rejected-00000001.jsonl").write_bytes(data)
        with pytest.raises(CheckpointError, match="line 1 is no record"):
            list(records(tmp_path))
