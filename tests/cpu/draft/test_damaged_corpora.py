"""Corpora that another program wrote, that were damaged, or that two processes write."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from perilune.cli.draft.group import command
from perilune.core.errors import CheckpointError, ConfigError
from perilune.draft import shards
from perilune.draft.corpus import Corpus, Row
from perilune.draft.prompts import Chats
from perilune.draft.states import States
from perilune.draft.storage import load_file, save_file
from perilune.formats.hub import resolve_model

Tensors = dict[str, torch.Tensor]


def corpus(directory: Path) -> Path:
    Corpus(directory, {"families": ["a"]}).add([Row((1, 2, 3, 4), 1, 0, True), Row((5, 6, 7), 2, 0, False)])
    return directory


def test_one_process_at_a_time_writes_a_corpus(tmp_path: Path) -> None:
    with shards.alone(tmp_path):
        run = CliRunner().invoke(command, ["collect", "--out", str(tmp_path), "--rows", "1", "--workers", "0"])
        assert isinstance(run.exception, ConfigError) and "is being written by another process" in str(run.exception)
    assert not list(tmp_path.iterdir())
    with shards.alone(tmp_path):
        pass


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\n",
        b"[" * 100_000 + b"\n",
        b'[5, "", 2, 7, 4]\n',
        b'["../rows", "", 2, 7, 4]\n',
        b'["rows", "", "2", 7, 4]\n',
    ],
)
def test_a_list_of_shards_that_is_none_is_one_line(tmp_path: Path, line: bytes) -> None:
    (corpus(tmp_path) / shards.SHARDS).write_bytes(line)
    with pytest.raises(CheckpointError, match=r"shards.jsonl is damaged: remove .* and collect again$"):
        Corpus(tmp_path)


@pytest.mark.parametrize("about", [{}, {"families": 5}, {"families": [5]}])
def test_a_corpus_lists_families(tmp_path: Path, about: object) -> None:
    (corpus(tmp_path) / "corpus.json").write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="does not list families"):
        Corpus(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("ends"),
        lambda t: t["ids"].neg_(),
        lambda t: t.update(ids=t["ids"].float()),
        lambda t: t.update(ids=t["ids"][None]),
        lambda t: t.update(ids=t["ids"][:-1].clone()),
        lambda t: t.update(ends=t["ends"].flip(0)),
        lambda t: t.update(greedy=t["greedy"][:1].clone()),
        lambda t: t["given"].neg_(),
        lambda t: t["given"].add_(9),
        lambda t: t["family"].add_(1),
        lambda t: t.update(weight=torch.tensor([1.0, float("nan")])),
    ],
)
def test_rows_that_are_none_are_one_line(tmp_path: Path, change: Callable[[Tensors], object]) -> None:
    found = Corpus(corpus(tmp_path))
    (shard,) = found.shards
    tensors = load_file(tmp_path / shard.file)
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / shard.file)
    listed = [shard.file, shards.sha256(tmp_path / shard.file), shard.rows, shard.tokens, shard.answers]
    (tmp_path / shards.SHARDS).write_text(json.dumps(listed) + "\n")
    with pytest.raises(CheckpointError, match=r"holds no rows of a corpus: remove .* and collect again"):
        Corpus(tmp_path).rows()


def test_a_chat_that_cannot_be_rendered_is_named_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    good, bad = ({"messages": [{"role": "user", "content": content}]} for content in ("hi", 5))
    file.write_text("".join(json.dumps(chat) + "\n" for chat in (good, good, bad)))
    with pytest.raises(ConfigError, match=r"chats\.jsonl line 3: messages\[0\]\.content must be"):
        Chats(resolve_model("kimi-nano"), file).prompts(0, 3)


def states(directory: Path, rows: int, tensors: Tensors) -> States:
    """States of one row of 3 tokens, 2 of them an answer; the list claims so many rows."""
    found = States(directory, {})
    save_file(tensors, directory / "states")
    listed = {"file": "states", "sha256": shards.sha256(directory / "states"), "rows": rows, "bytes": 1}
    shards.append(directory, listed)
    return States(found.directory)


SOUND = {"tokens": torch.tensor([3]), "answers": torch.tensor([2]), "aux": torch.ones(3, 8), "hidden": torch.ones(2, 8)}


def test_the_number_of_rows_in_a_list_takes_no_memory(tmp_path: Path) -> None:
    found = states(tmp_path, 10**6, SOUND)
    row = Row((1, 2, 3), 1, 0, True)
    tracemalloc.start()
    try:
        assert found.serve([row], torch.empty(0)) == [row]
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
    assert found.taught([row]).aux.shape == (3, 8)


@pytest.mark.parametrize("changed", [{"aux": torch.ones(2, 8)}, {"hidden": None}, {"answers": torch.tensor([5])}])
def test_states_that_are_none_are_one_line(tmp_path: Path, changed: dict[str, torch.Tensor | None]) -> None:
    found = states(tmp_path, 1, {name: t for name, t in (SOUND | changed).items() if t is not None})
    row = Row((1, 2, 3), 1, 0, True)
    found.serve([row], torch.empty(0))
    with pytest.raises(CheckpointError, match=r"holds no states of rows: remove .* and capture again"):
        found.taught([row])
