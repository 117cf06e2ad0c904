"""KV tiers of several ranks: answers are those without tiers, whatever one of the ranks loses."""

import random
from pathlib import Path
from typing import Any

import pytest

from perilune import LLM, SamplingParams
from perilune.core.errors import ConfigError
from perilune.engine.kv_tiers.ranked import RankedTransfer
from tests.cpu.engine.test_kv_tiers import hits, wait_for_copies
from tests.multi.conftest import CONFIG

pytestmark = pytest.mark.usefixtures("worth_it")

SMALL: dict[str, Any] = {
    **CONFIG,
    "max_model_len": 160,
    "max_step_tokens": 128,
    "max_num_seqs": 2,
    "draft": "eagle3",
    "draft_tokens": 2,
    "tp": 2,
}
ROWS_GB = 0.0024  # eight rows or so of a shard
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LAYOUTS = {"replicated": dict(kv_blocks=16, block_size=16), "sequence": dict(kv_blocks=16, kv_shards=2, block_size=16)}


def play(llm: LLM, sessions: int = 4, turns: int = 2) -> list[tuple[int, ...]]:
    """Sessions that go on in turn, two at a time; some sampled."""
    rng = random.Random(0)
    texts = [[rng.randrange(8, 500) for _ in range(70)] for _ in range(sessions)]
    ways = [PARAMS, SamplingParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True)]
    answers = []
    for _ in range(turns):
        for first in range(0, sessions, 2):
            for i, found in zip(range(first, first + 2), llm.generate(texts[first : first + 2], ways)):
                answers.append(found.token_ids)
                texts[i] += [*found.token_ids, *(rng.randrange(8, 500) for _ in range(7))]
    return answers


@pytest.fixture(scope="module")
def expected(one: LLM) -> list[tuple[int, ...]]:
    return play(one, turns=3)


def files(root: Path) -> list[list[Path]]:
    """Of each rank."""
    return [sorted(folder.rglob("*.kv")) for folder in sorted(root.iterdir()) if folder.is_dir()]


def integrity(llm: LLM) -> None:
    assert llm._engine is not None
    llm._engine.scheduler.check_integrity()


def test_answers_are_those_without_tiers(
    expected: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, root = {**SMALL, **LAYOUTS["replicated"]}, tmp_path / "kv"
    with LLM("kimi-nano", **kept, kv_host_gb=0.3) as llm:
        assert play(llm, turns=3) == expected and hits(llm)["host"] > 0
        integrity(llm)
        size = llm._engine.scheduler.offload._tiers.row_limit  # type: ignore[union-attr]
    wait_for_copies(monkeypatch, RankedTransfer)
    thrashing = dict(kv_host_gb=0.3 * 8.5 / size, kv_disk=str(root), kv_disk_gb=0.5)
    with LLM("kimi-nano", **kept, **thrashing) as llm:  # eight rows
        assert play(llm, turns=3) == expected and hits(llm)["disk"] > 0
        integrity(llm)
    first, second = files(root)
    assert {p.name for p in first} == {p.name for p in second} and len(first) > 5
    first[0].unlink()  # on one rank only: the other's is of no use
    for path in second[1::2]:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with LLM("kimi-nano", **kept, **thrashing) as llm:
        assert not any(p.name == first[0].name for p in files(root)[1])
        assert play(llm, turns=3) == expected and hits(llm)["disk"] > 0
        assert llm._engine is not None and llm._engine.stats().blocks_damaged
        integrity(llm)


def test_sharded_kv_stores_each_ranks_part(
    expected: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_copies(monkeypatch, RankedTransfer)
    disk = dict(kv_host_gb=ROWS_GB, kv_disk=str(tmp_path / "kv"), kv_disk_gb=0.5)
    with LLM("kimi-nano", **{**SMALL, **LAYOUTS["sequence"]}, **disk) as llm:
        assert play(llm, turns=3) == expected and hits(llm)["disk"] > 0
        integrity(llm)


def test_a_bad_directory_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("not KV")
    with pytest.raises(ConfigError, match="holds other files") as e:
        LLM("kimi-nano", **{**SMALL, "draft": "off", "draft_tokens": None}, kv_blocks=16, kv_disk=str(tmp_path))
    assert "\n" not in str(e.value)
