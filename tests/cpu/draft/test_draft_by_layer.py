"""Hidden states of a target that is read layer by layer: those of the whole target, with one layer there at a time."""

import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from perilune.cli.draft.group import command
from perilune.core.errors import ConfigError
from perilune.draft import by_layer
from perilune.draft.by_layer import ByLayer
from perilune.draft.capture import Capture
from perilune.draft.corpus import Corpus, Row
from perilune.draft.states import States, about, capture, load_ends, token_bytes
from perilune.formats.hub import resolve_model
from perilune.loading.load import layers, load
from perilune.model.kimi_k2 import KimiK2
from perilune.model.weights import Layer

AUX = (0, 2, 6)  # as the stream enters the first layer, a middle one, and as it leaves the last
CPU: Any = {"dtype": torch.float32, "device": torch.device("cpu")}


def some_rows(count: int) -> list[Row]:
    rng = Random(3)
    sizes = [(rng.randrange(1, 20), rng.randrange(3, 40)) for _ in range(count)]
    return [Row(tuple(rng.randrange(4000) for _ in range(p + n)), p, 0, True) for p, n in sizes]


@pytest.fixture(scope="module")
def nano() -> Path:
    return resolve_model("kimi-nano")


@pytest.fixture(scope="module")
def resident(nano: Path) -> Capture:
    config, weights = load(nano, **CPU)
    return Capture(KimiK2(config, weights, max_positions=64), AUX, tokens=96, block_size=16)


@pytest.fixture(scope="module")
def streamed(nano: Path) -> ByLayer:
    config, ends = load_ends(nano, **CPU)
    return ByLayer(KimiK2(config, ends, max_positions=64), nano, AUX, tokens=96, block_size=16)


def test_states_are_those_of_the_whole_target(
    resident: Capture, streamed: ByLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def watched(*given: Any, **more: Any) -> Iterator[Layer]:
        for layer in layers(*given, **more):
            # Its own tensors are what takes the memory.
            assert not any(ref() is not None for ref in alive), "the layer before is still there"
            alive.append(weakref.ref(layer.attention.w_uk))
            yield layer
            del layer

    monkeypatch.setattr(by_layer, "layers", watched)
    rows = some_rows(9)
    shards = [rows[:4], rows[4:5], rows[5:]]
    found = list(streamed.each(shards))
    assert len(alive) == 6, "each layer was read once for all"
    whole = resident.taught(rows)  # in the same steps, so the same bits are expected
    for part in ("aux", "hidden"):
        assert torch.equal(torch.cat([getattr(own, part) for own in found]), getattr(whole, part))
    assert [len(own.aux) for own in found] == [sum(len(row.ids) for row in shard) for shard in shards]
    assert [len(own.hidden) for own in found] == [sum(len(r.ids) - r.given for r in shard) for shard in shards]
    assert not list(streamed.each([]))
    alone, wanted = streamed.taught(rows[:2]), resident.taught(rows[:2])
    assert torch.equal(alone.aux, wanted.aux) and torch.equal(alone.hidden, wanted.hidden)


def test_a_bounded_capture_asks_for_several_shards_at_a_time(tmp_path: Path, resident: Capture) -> None:
    rows = some_rows(20)
    asked: list[int] = []

    class Watched(Capture):
        def each(self, shards: Any) -> Any:
            asked.append(len(shards))
            return super().each(shards)

    target: Any = Watched(resident.model, AUX, tokens=96, block_size=16)
    corpus = Corpus(tmp_path / "corpus", {"families": ["a"]})
    corpus.add(rows)
    whole, pieces = (States(tmp_path / name, about([corpus], AUX, "it")) for name in ("whole", "pieces"))
    capture(rows, target, whole, most_bytes=1e9, shard_tokens=60)
    assert set(asked) == {1} and len(asked) == len(whole.shards) > 5
    asked.clear()
    most = token_bytes(rows, len(AUX), 384) * 0.6
    capture(rows, target, pieces, most_bytes=most, shard_tokens=60, at_once=4)
    assert asked[0] == 4 and 0 < pieces.rows < 20 and pieces.nbytes <= most
    capture(rows, target, pieces, most_bytes=1e9, shard_tokens=60, at_once=4)
    assert [s.rows for s in pieces.shards] == [s.rows for s in whole.shards] and pieces.rows == 20
    for a, b in zip(pieces.shards, whole.shards):
        assert a.sha256 == b.sha256


def test_the_command_writes_the_same_states_either_way(tmp_path: Path, nano: Path) -> None:
    corpus = Corpus(tmp_path / "corpus", {"families": ["a"]})
    corpus.add(some_rows(5))

    def run(out: str, *given: str) -> dict[str, Any]:
        args = ["capture", "--corpus", str(corpus.directory), "--out", str(tmp_path / out), "--device", "cpu", *given]
        result = CliRunner().invoke(command, args, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return found

    assert run("whole")["rows"] == run("layers", "--by-layer")["rows"] == 5
    own, wanted = (States(tmp_path / name) for name in ("layers", "whole"))
    assert own.about == wanted.about
    for states in (own, wanted):
        states.serve(corpus.rows(), torch.empty(0))
    a, b = (states.taught(corpus.rows()) for states in (own, wanted))
    torch.testing.assert_close(a.aux, b.aux, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(a.hidden, b.hidden, rtol=2**-7, atol=1e-5)


def test_what_does_not_fit_is_said_with_its_layer(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **more: Any) -> torch.Tensor:
        raise RuntimeError("no room\nand more")

    monkeypatch.setattr("perilune.loading.weights_plan.WeightsPlan._empty", full)
    with pytest.raises(ConfigError, match=r"cannot allocate layer 0 as float32 on cpu: no room$"):
        next(layers(nano, **CPU))
