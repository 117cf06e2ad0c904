"""A rank's weights are the whole model's, cut; and no byte of the rest is read."""

import dataclasses
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perilune.core.errors import CheckpointError, ConfigError
from perilune.dist.slicing import WHOLE, Slicing
from perilune.formats import int4_compact, nvfp4, nvfp4_packed
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.safetensors_file import SafetensorsFile
from perilune.formats.writer import write
from perilune.loading import jobs
from perilune.loading.fp8_dense import to_fp8
from perilune.loading.fp8_latents import to_fp8_latents
from perilune.loading.load import load
from perilune.loading.rounding import Rounding
from perilune.loading.survey import survey
from perilune.loading.synthetic import random_draft, random_weights
from perilune.model import names
from perilune.model.config import KimiConfig
from perilune.model.draft_config import config_for
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.weights import Attention, Int4CompactExperts, Int4Experts, Moe, Weights
from tests.cpu.loading.slices import columns, narrow, rows, same
from tests.cpu.loading.test_load import CONFIG, put, quantised

SIZES: dict[str, Any] = CONFIG | {
    "hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 128, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "intermediate_size": 256,
    "moe_intermediate_size": 256, "n_shared_experts": 1,
}  # fmt: skip
FORMS = ("bf16", "int4", "fp8-block", "nvfp4", "nvfp4-packed", "int4-compact")


def tensors(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = names.expected(KimiConfig.from_dict(config))
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top, given = tmp_path_factory.mktemp("slices"), tensors(SIZES)
    experts = [n.removesuffix(".weight") for n in given if names.ROUTED in n]
    found = {}
    for form in FORMS:
        found[form] = top / form
        if form in ("bf16", "int4", "fp8-block"):
            write(found[form], given.items(), config=SIZES, form=form, shard_bytes=400_000)  # type: ignore[arg-type]
            continue
        module = {"nvfp4": nvfp4, "nvfp4-packed": nvfp4_packed, "int4-compact": int4_compact}[form]
        block = {"quantization_config": module.quantization_config()}
        put(found[form], quantised(given, *experts, module=module), SIZES | block)
    return found


def read(path: Path, slicing: Slicing = WHOLE, **options: Any) -> Weights:
    return load(path, dtype=torch.float32, device="cpu", slicing=slicing, **options)[1]


def slicings(ranks: int, *, whole_experts: bool = False) -> list[Slicing]:
    return [Slicing(rank, ranks, whole_experts) for rank in range(ranks)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("ranks", "whole_experts"), [(2, False), (4, False), (2, True)])
def test_ranks_hold_their_slices_of_the_whole(
    checkpoints: dict[str, Path], form: str, ranks: int, whole_experts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "fp8-block" and ranks == 4:
        with pytest.raises(
            ConfigError, match=r"tensor model\.layers\.0\.self_attn\.o_proj\.weight_scale_inv.*groups of 128"
        ):
            read(checkpoints[form], Slicing(1, 4))
        return
    config = KimiConfig.from_dict(SIZES)
    whole = read(checkpoints[form])
    monkeypatch.setattr(jobs, "STAGE_BYTES", 1 << 14)  # several pieces of each tensor
    for slicing in slicings(ranks, whole_experts=whole_experts):
        same(narrow(whole, config, slicing), read(checkpoints[form], slicing))


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many bytes left the files, headers apart."""
    count: Counter[str] = Counter()
    lock, into, columns = threading.Lock(), SafetensorsFile.read_into, SafetensorsFile.read_columns

    def read_into(self: SafetensorsFile, offset: int, buffer: memoryview) -> None:
        with lock:
            count["n"] += len(buffer) if hasattr(self, "tensors") else 0
        into(self, offset, buffer)

    def read_columns(self: SafetensorsFile, offset: int, width: int, cut: slice, out: Any) -> None:
        with lock:
            count["n"] += out.nbytes
        columns(self, offset, width, cut, out)

    monkeypatch.setattr(SafetensorsFile, "read_into", read_into)
    monkeypatch.setattr(SafetensorsFile, "read_columns", read_columns)
    return count


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("whole_experts", [False, True])
def test_a_rank_reads_its_share_alone(
    checkpoints: dict[str, Path], form: str, whole_experts: bool, bytes_read: Counter[str]
) -> None:
    """What all ranks hold (norms, the router, two projections), and an equal part of everything else."""
    ranks, path = 2, checkpoints[form]
    config = KimiConfig.from_dict(SIZES)
    with Checkpoint.open(path) as checkpoint:
        found = survey(checkpoint, config)
    held = {t.name.removesuffix(".weight") for t in names.tensors(config) if t.entry.axis is None}
    all_hold = sum(i.nbytes for n, i in found.tensors.items() if any(n.startswith(h) for h in held))
    share = all_hold + (found.text_bytes - all_hold) / ranks
    for slicing in slicings(ranks, whole_experts=whole_experts):
        bytes_read.clear()
        reported: list[tuple[int, int]] = []
        read(path, slicing, progress=lambda done, total, to=reported: to.append((done, total)))
        assert 0.9 * share < bytes_read["n"] <= 1.05 * share
        assert reported[0][0] == 0 and reported[-1] == (reported[-1][1],) * 2
        assert (
            abs(reported[-1][1] - bytes_read["n"]) < 0.01 * share
        )  # a single number of a matrix is read with each piece


@pytest.mark.parametrize(("change", "ranks", "words"), [
    ({"moe_intermediate_size": 64}, 4, "tensor model.layers.1.mlp.experts.0.down_proj.weight_scale: a rank's part "
     "would cut one of its groups of 32 columns"),
    ({}, 3, "tp=3: model's 4 heads cannot be shared out evenly over 3 ranks: give 1, 2 or 4"),
    ({"vocab_size": 101}, 2, "model's 101 tokens of the vocabulary cannot be shared out evenly over 2 ranks: give 1"),
    ({"intermediate_size": 104}, 8, "model's 4 heads cannot be shared out evenly over 8 ranks: give 1, 2 or 4"),
])  # fmt: skip
def test_what_cannot_be_split_is_one_line(tmp_path: Path, change: dict[str, Any], ranks: int, words: str) -> None:
    config = SIZES | change
    write(tmp_path / "model", tensors(config).items(), config=config, form="int4")
    with pytest.raises(ConfigError) as e:
        read(tmp_path / "model", Slicing(1, ranks))
    assert words in str(e.value) and "\n" not in str(e.value)


def test_more_ranks_than_experts(checkpoints: dict[str, Path]) -> None:
    assert [Slicing(r, 3, True).experts(4) for r in range(3)] == [slice(0, 1), slice(1, 2), slice(2, 4)]
    with pytest.raises(ConfigError, match="4 experts cannot be shared out over 5 ranks"):
        Slicing(0, 5, True).experts(4)


def test_a_file_that_shrank_is_an_error(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((checkpoints["int4-compact"] / "model.safetensors").read_bytes())
    file = SafetensorsFile(path)
    info = file.tensors["model.layers.0.self_attn.o_proj.weight"]
    with path.open("r+b") as f:
        f.truncate(info.offset + 10)
    out = torch.empty(info.shape[0], 64, dtype=torch.uint8).numpy()
    with pytest.raises(Exception, match="truncated"):
        file.read_columns(info.offset, info.nbytes // info.shape[0], slice(0, 64), out)
    file.close()


def test_a_file_that_shrinks_while_it_is_copied_is_an_error(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By less than a page: the map reads zeros there. By more, the process ends: test_supervision.py."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((checkpoints["int4-compact"] / "model.safetensors").read_bytes())
    file = SafetensorsFile(path)
    info = file.tensors["model.layers.0.self_attn.o_proj.weight"]
    out = torch.empty(info.shape[0], 64, dtype=torch.uint8).numpy()
    copy = np.copyto

    def shrinking(*args: Any) -> None:
        os.truncate(path, info.offset + info.nbytes - 1)
        copy(*args)

    monkeypatch.setattr(np, "copyto", shrinking)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated: \d+ bytes expected"):
        file.read_columns(info.offset, info.nbytes // info.shape[0], slice(0, 64), out)
    file.close()


@pytest.mark.parametrize("slicing", [WHOLE, Slicing(1, 2), Slicing(1, 2, True)])
def test_compact_scales_are_made_at_load(checkpoints: dict[str, Path], slicing: Slicing) -> None:
    rounding = Rounding()
    stored, compact = read(checkpoints["int4"], slicing), read(checkpoints["int4"], slicing, rounding=rounding)
    assert rounding.matrices == (4 if not slicing.whole_experts else 2) * 3 and "SQNR" in str(rounding)
    for a, b in zip(stored.layers, compact.layers):
        if not isinstance(a.ffn, Moe):
            same(a, b)
            continue
        assert isinstance(b.ffn, Moe)
        old, new = a.ffn.experts, b.ffn.experts
        assert isinstance(old, Int4Experts) and isinstance(new, Int4CompactExperts)
        for part in ("gate_up", "down"):
            scale = getattr(old, f"{part}_scale").float()
            assert torch.equal(getattr(old, f"{part}_packed"), getattr(new, f"{part}_packed"))
            row = getattr(new, f"{part}_row")
            assert torch.equal(row.float(), scale.amax(-1))
            error = int4_compact.expand(getattr(new, f"{part}_scale"), row) - scale
            assert error.abs().max() <= scale.max() / 510 * 1.01
    assert 40 < float(str(rounding).split("SQNR ")[1].split()[0]) < 70


@pytest.mark.parametrize(("ranks", "whole_experts"), [(2, False), (4, False), (2, True)])
def test_random_weights_are_slices_of_the_same_model(ranks: int, whole_experts: bool) -> None:
    config = KimiConfig.from_dict(SIZES)
    whole = random_weights(config, dtype=torch.float32, device="cpu", seed=4)
    drafts = Eagle3Config.from_dict(config_for(dataclasses.replace(config, num_hidden_layers=3), aux_ids=(1, 2)))
    draft = random_draft(drafts, whole.embed, seed=4)
    for s in slicings(ranks, whole_experts=whole_experts):
        made = random_weights(config, dtype=torch.float32, device="cpu", seed=4, slicing=s)
        same(narrow(whole, config, s), made)
        own = random_draft(drafts, made.embed, seed=4, slicing=s)
        same(rows(draft.lm_head, s), own.lm_head)
        same(columns(draft.mlp.down, s), own.mlp.down)
        same(draft.fc, own.fc)
        assert isinstance(draft.attention, Attention) and isinstance(own.attention, Attention)
        same(rows(draft.attention.q_b, s), own.attention.q_b)
    with pytest.raises(ConfigError, match="3 ranks"):
        random_weights(config, dtype=torch.float32, device="cpu", slicing=Slicing(0, 3))


def test_fp8_of_slices_is_the_slices_of_fp8() -> None:
    """Scales belong to rows. Of rows that are split, ranks agree on the largest magnitude."""
    config, ranks = KimiConfig.from_dict(SIZES), slicings(2)
    whole = random_weights(config, dtype=torch.float32, device="cpu")
    to_fp8_latents(whole)
    parts = [random_weights(config, dtype=torch.float32, device="cpu", slicing=s) for s in ranks]
    meet, given = threading.Barrier(2, timeout=120), [torch.empty(0)] * 2

    def convert(rank: int) -> None:
        def agree(largest: torch.Tensor) -> torch.Tensor:
            given[rank] = largest
            meet.wait()
            most = torch.maximum(*given)
            meet.wait()
            return most

        to_fp8_latents(parts[rank])
        to_fp8(parts[rank], agree)

    threads = [threading.Thread(target=convert, args=(s.rank,)) for s in ranks]
    for thread in threads:
        thread.start()
    to_fp8(whole)
    for thread, s in zip(threads, ranks):
        thread.join()
        same(narrow(whole, config, s), parts[s.rank])
