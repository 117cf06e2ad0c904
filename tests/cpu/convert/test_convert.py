"""Conversions: what they lose, that nothing else changes, that they can be killed, and what they say when they fail."""

import contextlib
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from perilune import LLM, SamplingParams
from perilune.cli.main import cli
from perilune.convert import int4 as int4_again
from perilune.convert import nvfp4 as search
from perilune.convert import report, stream
from perilune.convert.journal import NAME as JOURNAL
from perilune.convert.stream import Conversion, decibels
from perilune.convert.target import Target
from perilune.core.errors import CheckpointError, ConfigError
from perilune.formats import int4, int4_compact, nvfp4, progress
from perilune.formats.checkpoint import Checkpoint
from perilune.loading.survey import read_linear, survey
from perilune.model.config import KimiConfig
from perilune.ops.quantize.nvfp4_from_int4 import TILT, nvfp4_from_int4
from perilune.ops.quantize.nvfp4_from_int4 import reference as exact_search
from tests import oracle

EXPERT = "model.layers.1.mlp.experts.0.gate_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small INT4 checkpoint with some of the files that come beside weights."""
    path = tmp_path_factory.mktemp("source") / "model"
    oracle.make(path, int4=True)
    (path / "tokenizer_config.json").write_text('{"made": "up"}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "leftover.bin").write_bytes(b"pickle")
    return path


def convert(path: Path, result: Path, /, *, shard_bytes: int = 300_000, threads: int = 1, **target: Any) -> stream.Loss:
    with Conversion(path, Target(**target), shard_bytes=shard_bytes) as conversion:
        return conversion.run(result, threads=threads)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    with Checkpoint.open(path) as checkpoint:
        return {name: checkpoint.read(name) for name in checkpoint.tensors}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def weights(path: Path) -> dict[str, torch.Tensor]:
    with Checkpoint.open(path) as checkpoint:
        found = survey(checkpoint, KimiConfig.from_directory(path))
        return {name: read_linear(checkpoint, found, name, torch.float32) for name in found.formats}


@contextlib.contextmanager
def room(nbytes: int) -> Iterator[None]:
    """Simulates a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def digest(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


# ---- the search --------------------------------------------------------------------------------------------------


def drawn(name: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(3)
    w = torch.randn(512, 2048, generator=g)
    if name == "lognormal":
        w *= torch.randn(512, 1, generator=g).mul(0.5).exp() * torch.randn(1, 2048, generator=g).mul(0.5).exp()
    if name == "student5":
        w /= (torch.randn(5, 512, 2048, generator=g).square().sum(0) / 5).sqrt()
    return w * 0.02


def searched(w: torch.Tensor) -> tuple[torch.Tensor, search.Encoded, torch.Tensor]:
    """INT4 weights, the NVFP4 found for them, its values."""
    packed, scale = int4.quantize(w)
    exponent = search.exponent_for([scale.amax()])
    got = search.from_int4(packed, scale, exponent)
    restored = nvfp4.dequantize(got.values, got.scale, torch.tensor(2.0**exponent), torch.float32)
    return int4.dequantize(packed, scale, torch.float32), got, restored


@pytest.mark.parametrize(("name", "least"), [("gaussian", 22.6), ("lognormal", 23.0), ("student5", 23.1)])
def test_the_search_reaches_its_marks(name: str, least: float) -> None:
    exact, got, restored = searched(drawn(name))
    db = decibels(search.energy(exact), search.energy(restored - exact))
    assert db >= least
    assert db == pytest.approx(decibels(got.signal, got.error), abs=0.005)  # it knows its own error
    usual = search.by_maximum(exact, exact.abs().amax() / (nvfp4.MAX * nvfp4.SCALE_MAX))
    assert db - decibels(usual.signal, usual.error) > 2.7


def test_no_e4m3_scale_is_better_than_the_one_found() -> None:
    packed, scale = int4.quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
    exponent = search.exponent_for([scale.amax()])
    got = search.from_int4(packed, scale, exponent)
    factor = 2.0**exponent
    exact = int4.dequantize(packed, scale, torch.float32).view(8, 4, 16)
    restored = nvfp4.dequantize(got.values, got.scale, torch.tensor(factor), torch.float32).view(8, 4, 16)

    def cost(restored: torch.Tensor) -> torch.Tensor:
        change = restored - exact
        return (change.square() - 2 * TILT * exact * change).sum(-1)

    mine = cost(restored)
    for byte in range(1, 127):
        step = torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * factor
        other = cost(nvfp4.values(nvfp4.round_e2m1(exact / step)) * step)
        # Table entries are rounded: what is chosen may miss the best by a hair.
        assert (mine <= other + 1e-3 * scale.float().amax() ** 2).all(), byte


def test_the_search_does_not_shrink_weights() -> None:
    exact, _, restored = searched(drawn("gaussian"))
    assert (restored.double() * exact).sum() / exact.double().square().sum() == pytest.approx(1, abs=1e-3)


def test_scales_of_many_sizes_zeros_among_them() -> None:
    g = torch.Generator().manual_seed(1)
    w = torch.randn(64, 128, generator=g) * torch.exp2(torch.arange(64) - 40.0)[:, None]
    w[5] = 0
    packed, scale = int4.quantize(w)
    exponent = search.exponent_for([scale.amax()])
    for got in (nvfp4_from_int4(packed, scale, exponent), exact_search(packed, scale, exponent, None)):
        restored = nvfp4.dequantize(got[0], got[1], torch.tensor(2.0**exponent), torch.float32)
        exact = int4.dequantize(packed, scale, torch.float32)
        assert restored.isfinite().all() and not restored[5].any() and not restored[0].any()
        large = slice(50, 64)
        assert decibels(search.energy(exact[large]), search.energy(restored[large] - exact[large])) > 22
        # Codes of what became zero are plain zeros.
        assert not got[0][0].any() and not got[1][0].view(torch.uint8).any()


def test_other_weights_are_searched_too() -> None:
    w = drawn("gaussian")[:64]
    got = search.from_weights(w, search.exponent_for([w.abs().amax() / 7]))
    usual = search.by_maximum(w, w.abs().amax() / (nvfp4.MAX * nvfp4.SCALE_MAX))
    assert decibels(got.signal, got.error) > decibels(usual.signal, usual.error) + 0.5
    exponent = search.exponent_for([w.abs().amax() / 7])
    restored = nvfp4.dequantize(got.values, got.scale, torch.tensor(2.0**exponent), torch.float32)
    assert search.energy(restored - w) == pytest.approx(got.error, rel=1e-3)


def test_int4_is_found_again_in_bfloat16() -> None:
    packed, scale = int4.quantize(drawn("gaussian"))
    again, scales = int4_again.quantize(int4.dequantize(packed, scale, torch.bfloat16))
    assert torch.equal(again, packed) and torch.equal(scales, scale)
    plain = drawn("gaussian").to(torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(int4_again.quantize(plain), int4.quantize(plain)))


def test_compact_scales_cannot_say_zero_so_levels_do() -> None:
    packed, scale = int4.quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))
    scale[1, 0] = 0
    made, steps, row, (signal, error, _) = int4_compact.compacted(packed, scale)
    restored = int4_compact.dequantize(made, steps, row, torch.float32)
    exact = int4.dequantize(packed, scale, torch.float32)
    assert not restored[1, :32].any()
    assert search.energy(restored - exact) == pytest.approx(error, rel=1e-3) and 45 < decibels(signal, error) < 60


# ---- whole checkpoints -------------------------------------------------------------------------------------------

TARGETS: dict[str, tuple[dict[str, Any], float]] = {  # and the least SQNR, in dB
    "nvfp4": ({"to": "nvfp4"}, 22.3),
    "nvfp4 in the other layout": ({"to": "nvfp4", "layout": "compressed-tensors"}, 22.3),
    "nvfp4 by maximum": ({"to": "nvfp4", "recipe": "max"}, 19.0),
    "int4-compact": ({"to": "int4-compact"}, 46),
    "bf16": ({"to": "bf16"}, 54),
    "fp8-dense by rows": ({"to": "fp8-dense"}, 30.5),
    "fp8-dense by blocks": ({"to": "fp8-dense", "scales": "block"}, 30.5),
}


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_is_a_checkpoint_that_runs(source: Path, tmp_path: Path, name: str) -> None:
    target, least = TARGETS[name]
    result = tmp_path / "result"
    loss = convert(source, result, **target)
    old, new = weights(source), weights(result)
    changed = [n for n in old if not torch.equal(old[n], new[n])]
    assert len(changed) == loss.layers
    measured = decibels(
        sum(search.energy(old[n]) for n in changed), sum(search.energy(new[n] - old[n]) for n in changed)
    )
    assert measured >= least and measured == pytest.approx(loss.sqnr_db, abs=0.02)
    worst, db = loss.worst[0]
    assert db == pytest.approx(decibels(search.energy(old[worst]), search.energy(new[worst] - old[worst])), abs=0.05)
    # Everything that is no linear layer is the same, byte for byte.
    before, after = tensors(source), tensors(result)
    others = [n for n in before if "norm" in n or "mlp.gate." in n or "embed" in n]
    assert others and all(same_bytes(before[n], after[n]) for n in others)
    # The directory is complete, and holds nothing that is not data.
    assert {"config.json", "conversion.json", "tokenizer_config.json", "chat_template.jinja"} <= set(os.listdir(result))
    assert not (result / "leftover.bin").exists() and not (result / JOURNAL).exists()
    with LLM(source) as a, LLM(result) as b:
        prompt = list(range(40, 72))
        gaps = [abs(x - y) for x, y in zip(a.score(prompt), b.score(prompt))]
        assert sum(gaps) / len(gaps) < (0.3 if least < 25 else 0.1)  # single tokens may change experts
        greedy = SamplingParams(temperature=0, max_tokens=8)
        if least > 40:
            assert b.generate([prompt], greedy)[0].token_ids == a.generate([prompt], greedy)[0].token_ids


def test_gate_and_up_share_a_power_of_two(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "a", to="nvfp4")
    convert(source, tmp_path / "b", to="nvfp4", layout="compressed-tensors")
    a, b = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    gates = [n for n in a if n.endswith("gate_proj.weight_scale_2")]
    assert gates
    for name in gates:
        factor = a[name]
        assert factor == a[name.replace("gate_proj", "up_proj")] and math.frexp(factor.item())[0] == 0.5
        stem = name.removesuffix(".weight_scale_2")
        assert b[f"{stem}.weight_global_scale"] == 1 / factor and a[f"{stem}.input_scale"] == 0.25
        assert torch.equal(a[f"{stem}.weight"], b[f"{stem}.weight_packed"])
    assert json.loads((tmp_path / "a/hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "NVFP4"
    convert(tmp_path / "a", tmp_path / "c", to="nvfp4", layout="compressed-tensors")
    assert all(same_bytes(t, b[n]) for n, t in tensors(tmp_path / "c").items())


@pytest.mark.parametrize("sidecar", [True, False])
def test_int4_through_bfloat16_and_back_is_bit_for_bit(source: Path, tmp_path: Path, sidecar: bool) -> None:
    convert(source, tmp_path / "wide", to="bf16", sidecar=sidecar)
    assert (tmp_path / "wide/int4_scales").is_dir() == sidecar
    loss = convert(tmp_path / "wide", tmp_path / "again", to="int4")
    before, after = tensors(source), tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    # Without the scales a group that has no largest level may get another scale; here none has.
    assert all(same_bytes(t, after[n]) for n, t in before.items()) and loss.sqnr_db == math.inf


def test_scales_of_another_model_are_refused(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "wide", to="bf16", shard_bytes=10**9)
    file = tmp_path / "wide/int4_scales/model.safetensors"
    scales = load_file(file)
    save_file({n: t * 1.25 for n, t in scales.items()}, file)
    with pytest.raises(CheckpointError, match=r"the scales of model.layers.1.mlp.experts.0.* do not belong"):
        convert(tmp_path / "wide", tmp_path / "again", to="int4")


def test_copied_nvfp4_keeps_its_input_scales(source: Path, tmp_path: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.shared_experts.up_proj"
        t |= dict(nvfp4.encode(name, t[f"{name}.weight"]))
        t[f"{EXPERT}.input_scale"] = torch.tensor(0.125)

    convert(source, tmp_path / "a", to="nvfp4", shard_bytes=10**9)
    convert(damaged(tmp_path / "a", tmp_path / "b", change), tmp_path / "c", to="nvfp4")
    after = tensors(tmp_path / "c")
    assert after.keys() == tensors(tmp_path / "a").keys() and after[f"{EXPERT}.input_scale"] == 0.125


# ---- stopping and going on ---------------------------------------------------------------------------------------


def test_a_conversion_that_failed_goes_on_and_ends_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "whole", to="nvfp4")
    real, written = stream._write_shard, 0

    def full(*args: Any) -> Any:
        nonlocal written
        written += 1
        with room(100_000) if written == 3 else contextlib.nullcontext():
            return real(*args)

    result = tmp_path / "result"
    monkeypatch.setattr(stream, "_write_shard", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*model-00003-of-.*safetensors: .*repeat the command"):
        convert(source, result, to="nvfp4")
    monkeypatch.setattr(stream, "_write_shard", real)
    assert not (result / "config.json").exists() and len(list(result.glob("*.safetensors"))) == 2
    assert not list(result.glob(".*.part"))
    with pytest.raises(CheckpointError):
        KimiConfig.from_directory(result)
    with pytest.raises(CheckpointError, match="unfinished conversion that differs in to"):
        convert(source, result, to="int4-compact")

    begun = (result / JOURNAL).read_text()
    (result / JOURNAL).write_text(begun.replace('"device": "cpu"', '"device": "cuda"'))
    with pytest.raises(CheckpointError, match="unfinished conversion that differs in device"):
        convert(source, result, to="nvfp4")
    (result / JOURNAL).write_text(begun)

    # A finished shard that was damaged meanwhile, and half a line in the journal.
    first = sorted(result.glob("*.safetensors"))[0]
    raw = bytearray(first.read_bytes())
    raw[-1] ^= 1
    first.write_bytes(raw)
    with (result / JOURNAL).open("ab") as f:
        f.write(b'{"file": "model-0')
    convert(source, result, to="nvfp4", threads=3)
    assert digest(result) == digest(tmp_path / "whole")
    convert(source, result, to="nvfp4")
    assert digest(result) == digest(tmp_path / "whole")


def test_files_of_others_stay(source: Path, tmp_path: Path) -> None:
    result = tmp_path / "result"
    (result / "downloads").mkdir(parents=True)
    others = [result / "film.part", result / "downloads/.archive.part"]
    own = result / ".model.safetensors.part"  # left by a run that was killed
    for file in (*others, own):
        file.write_bytes(b"half")
    convert(source, result, to="nvfp4", shard_bytes=10**9)
    assert [file.read_bytes() for file in others] == [b"half"] * 2 and not own.exists()


def test_killed_and_resumed(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "whole", to="nvfp4", shard_bytes=60_000)
    result = tmp_path / "result"
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom perilune.convert import stream\n"
        "from perilune.convert.target import Target\nwrite = stream._write_job\n"
        "def until_killed(*a):\n"
        "    if len(list(Path(sys.argv[2]).glob('*.safetensors'))) >= 3:\n        time.sleep(600)\n"
        "    return write(*a)\nstream._write_job = until_killed\n"
        "with stream.Conversion(Path(sys.argv[1]), Target(to='nvfp4'), shard_bytes=60_000) as c:\n"
        "    c.run(Path(sys.argv[2]), threads=1)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(source), str(result)])
    deadline = time.monotonic() + 120
    while len(list(result.glob("*.safetensors"))) < 3 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (result / "config.json").exists()
    convert(source, result, to="nvfp4", shard_bytes=60_000)
    assert digest(result) == digest(tmp_path / "whole")


def test_two_conversions_into_one_directory(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stream._write_shard

    def meanwhile(*args: Any) -> Any:
        with pytest.raises(CheckpointError, match="is being written by another conversion"):
            convert(source, tmp_path / "result", to="nvfp4")
        return real(*args)

    monkeypatch.setattr(stream, "_write_shard", meanwhile)
    convert(source, tmp_path / "result", to="nvfp4", shard_bytes=10**9)
    assert (tmp_path / "result/model.safetensors").is_file()


# ---- what is wrong -----------------------------------------------------------------------------------------------


def damaged(source: Path, path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(source, path)
    (file,) = path.glob("*.safetensors")
    stored = load_file(file)
    change(stored)
    save_file({n: t.contiguous() for n, t in stored.items()}, file, {"format": "pt"})
    return path


def test_damage_is_named(source: Path, tmp_path: Path) -> None:
    def nan(t: dict[str, torch.Tensor]) -> None:
        t[f"{EXPERT}.weight_scale"][3, 1] = math.nan

    def negative(t: dict[str, torch.Tensor]) -> None:
        t[f"{EXPERT}.weight_scale"][3, 1] *= -1

    def odd(t: dict[str, torch.Tensor]) -> None:
        t[f"{EXPERT}.weight_packed"] = t[f"{EXPERT}.weight_packed"][:, :-1]

    wrong = {"nan": nan, "negative": negative, "odd": odd}
    for name, change in wrong.items():
        path = damaged(source, tmp_path / name, change)
        for to in ("nvfp4", "int4-compact", *(["fp8-dense", "bf16"] if name != "negative" else [])):
            with pytest.raises(CheckpointError, match=EXPERT if to != "bf16" or name != "odd" else "shape") as e:
                convert(path, tmp_path / f"{name}-{to}", to=to)
            assert "\n" not in str(e.value)
            assert not (tmp_path / f"{name}-{to}/config.json").exists()
    raw = (source / "model.safetensors").read_bytes()
    garbage = (raw[:8] + bytes(64) + raw[72:], "damaged header|exceeds")
    for content, words in (garbage, (b"", "is truncated"), (raw[:-100], "is truncated")):
        path = Path(shutil.copytree(source, tmp_path / str(len(content) + len(words))))
        (path / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=f"model.safetensors.*({words})"):
            convert(path, tmp_path / "no", to="nvfp4")
        assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("to", ["nvfp4", "int4", "int4-compact", "fp8-dense"])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, to: str) -> None:
    oracle.make(tmp_path / "model")
    linear = "model.layers.1.self_attn.o_proj" if to == "fp8-dense" else EXPERT

    def spoil(t: dict[str, torch.Tensor]) -> None:
        t[f"{linear}.weight"][3, 1] = math.inf

    path = damaged(tmp_path / "model", tmp_path / "spoilt", spoil)
    with pytest.raises(CheckpointError, match=linear) as e:
        convert(path, tmp_path / "result", to=to)
    assert "\n" not in str(e.value) and not (tmp_path / "result/config.json").exists()


@pytest.mark.parametrize("left", [0, 3_000])
def test_a_disk_that_is_full_at_the_end(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """All shards are there, and then the index, the small files or config.json do not fit."""
    real = Conversion._complete

    def full(self: Conversion, *args: Any) -> Any:
        with room(left):
            return real(self, *args)

    monkeypatch.setattr(Conversion, "_complete", full)
    with pytest.raises(CheckpointError, match=r"cannot write .*repeat the command"):
        convert(source, tmp_path / "result", to="nvfp4")
    assert not (tmp_path / "result/config.json").exists() and (tmp_path / "result" / JOURNAL).exists()
    monkeypatch.setattr(Conversion, "_complete", real)
    convert(source, tmp_path / "result", to="nvfp4")
    convert(source, tmp_path / "whole", to="nvfp4")
    assert digest(tmp_path / "result") == digest(tmp_path / "whole")


def test_a_shard_that_shrinks_while_it_is_read(source: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(source, tmp_path / "model"))
    (file,) = path.glob("*.safetensors")
    with Conversion(path, Target(to="nvfp4"), shard_bytes=10**9) as conversion:
        os.truncate(file, 200_000)
        with pytest.raises(CheckpointError, match=f"{file.name} is truncated"):
            conversion.run(tmp_path / "result")
    assert not list((tmp_path / "result").glob("*.safetensors"))


def test_requests_that_cannot_be(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="is int4 already"):
        convert(source, tmp_path / "no", to="int4")
    with pytest.raises(ConfigError, match="is the source"):
        convert(source, source, to="nvfp4")
    with pytest.raises(ConfigError, match="choose from nvfp4, int4"):
        Target(to="int3")  # type: ignore[arg-type]
    convert(source, tmp_path / "fp4", to="nvfp4")
    with pytest.raises(ConfigError, match="convert to int4 first"):
        convert(tmp_path / "fp4", tmp_path / "no", to="fp8-dense")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(ConfigError, match=r"no needs 0.0 GB, 0.0 GB are free"):
        convert(source, tmp_path / "no", to="nvfp4")
    assert not list((tmp_path / "no").glob("*.safetensors"))


# ---- the command and the report ----------------------------------------------------------------------------------


def test_the_command_and_its_report(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, result = Path(shutil.copytree(source, tmp_path / "source")), tmp_path / "result"
    base = ["convert", str(source), str(result), "--to", "nvfp4", "--device", "cpu"]
    dry = CliRunner().invoke(cli, [*base, "--dry-run"], catch_exceptions=False)
    assert dry.exit_code == 0 and "routed experts" in dry.output and "free" in dry.output and not result.exists()
    result.mkdir()
    (taken := result / "config.json").touch()
    for to, said in (
        (source, "is the source"),
        (result, "already holds config"),
        (taken / "r", "r: Not a directory; "),
    ):
        dry = CliRunner().invoke(cli, [*base[:2], str(to), *base[3:], "--dry-run"])
        assert said in str(dry.exception), dry
    shutil.rmtree(result)
    (source / "tokenizer_config.json").unlink()  # of no real tokenizer
    reporting = ["--report", "--report-tokens", "600", "--problems", "0"]
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    done = CliRunner().invoke(cli, [*base, *reporting, "--max-kl", "5"], catch_exceptions=False)
    assert "GB/s" in done.stderr and "minutes left" in done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 0 and row == json.loads((result / "quality/report.json").read_text())
    assert 22 < row["worst_db"] <= row["sqnr_db"] < 24 and row["tokens"] >= 600 and len(row["worst"]) == 10
    assert 0 < row["kl_nats"] < row["kl_highest"] and 0.5 < row["top1_agreement"] <= 1
    # The first layer has no experts and nothing of it was changed; others lose about as much as their weights do.
    assert row["layers_db"][0] == 999.0 and all(15 < db < 30 for db in row["layers_db"][1:])
    assert (result / "quality/report.svg").read_text().startswith("<svg")
    header, first, second, *_ = (result / "quality/report.txt").read_text().splitlines()
    assert header.split()[0] == "checkpoint" and first.split()[0] == source.name and second.split()[0] == "result"
    assert f"{row['kl_nats']:.3e}" in second and f"{row['gb']:.3f}" in second
    other = CliRunner().invoke(cli, [*base, "--layout", "compressed-tensors", "--report"])
    assert isinstance(other.exception, ConfigError) and "other options" in str(other.exception)
    below = CliRunner().invoke(cli, [*base, *reporting, "--min-sqnr", "30"])
    assert isinstance(below.exception, ConfigError) and "the bound 30" in str(below.exception)


def test_a_report_of_another_model_is_refused(source: Path, tmp_path: Path) -> None:
    oracle.make(tmp_path / "other", int4=True, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match="are not of one model"):
        report.compare_weights(source, tmp_path / "other")
