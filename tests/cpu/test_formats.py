"""Checkpoint files: INT4 against compressed-tensors, what is written is read back, and damage is named."""

import json
import math
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from perilune.core.errors import CheckpointError
from perilune.formats import fp8_block, int4, int4_compact, nvfp4, nvfp4_packed, scheme
from perilune.formats.checkpoint import INDEX, SINGLE, Checkpoint
from perilune.formats.registry import format_of, require_served
from perilune.formats.writer import Writer, with_quantization, write


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=generator(seed)).to(dtype)


# --- INT4 --------------------------------------------------------------------------------------------------------


def test_nibble_order():
    q = torch.tensor([[-8, -7, -1, 0, 1, 5, 6, 7]], dtype=torch.int8)
    assert (int4.pack(q).item() & 0xFFFFFFFF) == 0xFED98710
    assert torch.equal(int4.unpack(int4.pack(q)), q)


def test_every_level_in_every_place():
    q = torch.randint(-8, 8, (3, 5, 64), generator=generator(), dtype=torch.int8)
    packed = int4.pack(q)
    assert packed.shape == (3, 5, 8) and packed.dtype == torch.int32
    assert torch.equal(int4.unpack(packed), q)
    assert torch.equal(int4.unpack(packed.transpose(0, 1)), q.transpose(0, 1))


def test_pack_equals_compressed_tensors():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    q = torch.randint(-8, 8, (16, 96), generator=generator(), dtype=torch.int8)
    assert -8 in q
    assert torch.equal(int4.pack(q), helpers.pack_to_int32(q, 4))
    assert torch.equal(int4.unpack(int4.pack(q)), helpers.unpack_from_int32(int4.pack(q), 4, q.shape))


@pytest.mark.parametrize("divisor", [7.0, 7.5])
def test_dequantize_equals_compressed_tensors(divisor):
    """Both conventions: absmax / 7 (ours) and that library's absmax / 7.5, which uses level -8."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    theirs = QuantizationScheme(targets=["Linear"], weights=args)
    w = randn(48, 256, dtype=torch.bfloat16)
    scale = (w.float().view(48, 8, 32).abs().amax(-1) / divisor).bfloat16()
    state = PackedQuantizationCompressor.compress({"weight": w, "weight_scale": scale}, theirs)
    assert (int4.unpack(state["weight_packed"]).min() == -8) == (divisor == 7.5)
    back = PackedQuantizationCompressor.decompress(dict(state), theirs)["weight"]
    assert torch.equal(int4.dequantize(state["weight_packed"], scale, torch.bfloat16), back)
    exact = int4.unpack(state["weight_packed"]).float() * scale.float().repeat_interleave(32, -1)
    assert torch.equal(int4.dequantize(state["weight_packed"], scale, torch.float32), exact)


def test_quantize_equals_compressed_tensors():
    """The same levels for the same scale, in float32 (in bfloat16 that library divides in bfloat16)."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize

    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    w = randn(48, 256)
    packed, scale = int4.quantize(w)
    assert scale.equal((w.view(48, 8, 32).abs().amax(-1) / 7).bfloat16())
    theirs = quantize(x=w, scale=scale.float(), zero_point=None, args=args, dtype=torch.int8)
    assert torch.equal(int4.unpack(packed), theirs.clamp(-7, 7))


def test_quantize():
    w = randn(4, 6, 128)
    w[1, 2] = 0
    w[2, 3, :32] = 1e-45  # its scale underflows
    packed, scale = int4.quantize(w)
    assert scale.shape == (4, 6, 4) and scale.dtype == torch.bfloat16
    q = int4.unpack(packed)
    assert q.min() == -7 and q.max() == 7
    back = int4.dequantize(packed, scale, torch.float32)
    assert not back[1, 2].any() and not back[2, 3, :32].any() and back.isfinite().all()
    # Half a step, plus what rounding the scale to bfloat16 takes off the outermost level.
    step = scale.float().repeat_interleave(32, -1)
    assert ((back - w).abs() <= step * (0.5 + 7 * 2**-8) + 1e-44).all()
    again = int4.quantize(back)
    assert torch.equal(again[0], packed)
    for bad in (float("nan"), float("inf")):
        w[0, 0, 5] = bad
        with pytest.raises(ValueError, match="not finite"):
            int4.quantize(w)


def test_int4_widths():
    with pytest.raises(CheckpointError, match="multiples of 32, not 40"):
        int4.parts((8, 40))
    with pytest.raises(CheckpointError, match=r"x: INT4 needs .* not \[8, 40\]"):
        list(int4.encode("x", torch.zeros(8, 40)))
    with pytest.raises(CheckpointError, match="x: weights are not finite"):
        list(int4.encode("x", torch.full((8, 32), float("nan"))))


# --- FP8 and NVFP4, computed again from their definitions --------------------------------------------------------


def e4m3(byte):
    """The number of an e4m3fn byte: 1 sign bit, 4 exponent bits of bias 7, 3 mantissa bits, no infinity."""
    sign, exponent, mantissa = -1 if byte & 0x80 else 1, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([e4m3(b) for b in range(256)], dtype=np.float32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def bytes_of(t):
    return t.view(torch.uint8).numpy()


def fp8_by_hand(w, scale):
    o, i = w.shape
    rows, columns = np.arange(o)[:, None] // 128, np.arange(i)[None, :] // 128
    return E4M3[bytes_of(w)] * scale.numpy()[rows, columns]


def nvfp4_by_hand(packed, scale, factor):
    """factor: weight_scale_2."""
    o, half = packed.shape
    out = np.empty((o, 2 * half), dtype=np.float32)
    for r in range(o):
        for k in range(2 * half):
            byte = int(packed[r, k // 2])
            code = byte >> 4 if k % 2 else byte & 15
            step = E4M3[bytes_of(scale)[r, k // 16]] * np.float32(factor)
            out[r, k] = E2M1[code] * step
    return out


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (192, 96), (576, 200), (1, 1), (3, 129)])
def test_fp8_block(shape):
    w = randn(*shape, seed=3) * 0.1
    w[0] *= 100  # blocks differ
    weight, scale = fp8_block.quantize(w)
    assert weight.dtype == torch.float8_e4m3fn and weight.shape == shape
    assert scale.shape == (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128)) and scale.dtype == torch.float32
    back = fp8_block.dequantize(weight, scale, torch.float32)
    assert np.array_equal(back.numpy(), fp8_by_hand(weight, scale))
    assert torch.equal(fp8_block.dequantize(weight, scale, torch.bfloat16), back.bfloat16())
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            block = (slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128))
            assert scale[r, c] == w[block].abs().max() / 448
            # Three mantissa bits: half a step is 1/16 of the number, or of the smallest normal one.
            assert ((back - w)[block].abs() <= w[block].abs() / 16 + scale[r, c] * 2**-10).all()


def test_fp8_every_byte_and_degenerate_blocks():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    got = fp8_block.dequantize(every, torch.tensor([[0.37]]), torch.float32).numpy()
    want = E4M3[np.arange(256)].reshape(2, 128) * np.float32(0.37)
    assert np.array_equal(got, want, equal_nan=True) and np.isnan(got).sum() == 2
    w = torch.zeros(2, 130, 260)
    w[1, 0, 0] = 1e-45  # its scale underflows
    w[1, 129, 259] = 3e38
    weight, scale = fp8_block.quantize(w)
    back = fp8_block.dequantize(weight, scale, torch.float32)
    assert scale.shape == (2, 2, 3) and not back[0].any() and back.isfinite().all() and (back != 0).sum() == 1
    assert back[1, 129, 259] == pytest.approx(3e38)
    w[0, 0, 0] = float("nan")
    with pytest.raises(CheckpointError, match="x: weights are not finite"):
        list(fp8_block.encode("x", w[0]))


def test_e2m1_rounds_to_nearest_and_ties_to_even():
    x = torch.cat(
        [torch.linspace(-8, 8, 4097), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5, 100.0])]
    )
    codes = nvfp4.round_e2m1(x)
    got = nvfp4.values(codes)
    assert np.array_equal(got.numpy(), E2M1[codes.numpy()])
    for value, code in zip(x.abs().tolist(), (codes & 7).tolist()):
        distance = [abs(float(number) - value) for number in E2M1[:8]]
        nearest = [c for c in range(8) if distance[c] == min(distance)]
        assert code == (nearest[0] if len(nearest) == 1 else 7 if value > 6 else next(c for c in nearest if c % 2 == 0))
    assert ((codes >> 3).bool() == x.signbit()).all()
    ties = nvfp4.values(nvfp4.round_e2m1(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])))
    assert ties.tolist() == [0, 1, 1, 2, 2, 4, 4]


def test_nvfp4():
    w = randn(5, 96, seed=4) * 0.02
    w[1, 16:32] = 0
    w[2, :16] = 1e-9  # its scale underflows
    packed, scale, factor = nvfp4.quantize(w)
    assert (packed.shape, packed.dtype, scale.shape, scale.dtype) == ((5, 48), torch.uint8, (5, 6), torch.float8_e4m3fn)
    assert factor.shape == () and factor == w.abs().max() / (6 * 448) and scale.float().max() == 448
    assert torch.equal(nvfp4.pack(nvfp4.unpack(packed)), packed)
    back = nvfp4.dequantize(packed, scale, factor, torch.float32)
    assert np.array_equal(back.numpy(), nvfp4_by_hand(packed, scale, factor))
    assert not back[1, 16:32].any() and not back[2, :16].any()
    # e4m3 scales are off by up to 1/16, which may cut the largest value; between 4 and 6 half a step is 1.
    step = (scale.float() * factor).repeat_interleave(16, -1)
    assert ((back - w).abs() <= step * (1 + 6 / 16) + 2e-9).all()
    best = nvfp4.round_e2m1(torch.where(step == 0, 0.0, w / torch.where(step == 0, 1.0, step)))
    assert torch.equal(nvfp4.unpack(packed), best)
    # A factor from outside (gate and up made alike) and several matrices at once.
    both = nvfp4.quantize(torch.stack([w, 3 * w]), torch.stack([factor, factor * 4]))
    assert torch.equal(both[0][0], packed) and both[1].shape == (2, 5, 6)
    assert torch.equal(nvfp4.dequantize(*both, torch.float32)[0], back)
    assert not nvfp4.dequantize(*nvfp4.quantize(torch.zeros(2, 16)), torch.float32).any()
    with pytest.raises(CheckpointError, match="x: weights are not finite"):
        list(nvfp4.encode("x", w * float("inf")))
    with pytest.raises(CheckpointError, match="multiples of 16, not 24"):
        nvfp4.parts((4, 24))
    with pytest.raises(CheckpointError, match=r"x: NVFP4 needs .* not \[4, 24\]"):
        list(nvfp4_packed.encode("x", torch.zeros(4, 24)))


def compressed_tensors_nvfp4():
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)
    return NVFP4PackedCompressor, QuantizationScheme(targets=["Linear"], weights=args)


def test_nvfp4_packed_equals_compressed_tensors():
    """What that library packs is read as it reads it, and it reads what we write."""
    compressor, theirs = compressed_tensors_nvfp4()
    w = randn(16, 64, seed=5, dtype=torch.bfloat16)
    ours = {k.removeprefix("x."): v for k, v in nvfp4_packed.encode("x", w)}
    scale, global_scale = ours["weight_scale"], ours["weight_global_scale"]
    given = {"weight": w, "weight_scale": scale.float(), "weight_global_scale": global_scale}
    state = compressor.compress(given, theirs)
    assert state["weight_scale"].view(torch.uint8).equal(scale.view(torch.uint8))
    for stored in (state, ours):
        back = compressor.decompress(dict(stored), theirs)["weight"]
        parts = {f".{k}": v for k, v in stored.items()}
        assert torch.equal(nvfp4_packed.decode(parts, back.dtype), back)
        exact = nvfp4_packed.decode(parts, torch.float32)
        by_hand = nvfp4_by_hand(stored["weight_packed"], scale, 1 / global_scale.item())
        assert torch.allclose(exact, torch.from_numpy(by_hand), rtol=3e-7, atol=0)
    # Away from ties, where only rounding noise decides, the codes are the same.
    assert (state["weight_packed"] == ours["weight_packed"]).float().mean() > 0.99


def test_int4_compact():
    w = randn(3, 8, 128, seed=6)
    w[0, 1] = 0
    w[0, 2, :32] *= 1e-4
    packed, scale, row = int4_compact.quantize(w)
    assert (scale.shape, scale.dtype, row.shape, row.dtype) == ((3, 8, 4), torch.uint8, (3, 8), torch.bfloat16)
    assert scale.min() >= 1 and scale[1].amax(-1).eq(255).all()
    plain = int4.quantize(w)
    assert torch.equal(row, plain[1].amax(-1))
    unit, full = row.float().unsqueeze(-1) / 255, plain[1].float()
    small = full < unit / 2
    assert small.nonzero().tolist() == [[0, 2, 0]] and (scale[small] == 1).all() and (scale[0, 1] == 1).all()
    assert ((int4_compact.expand(scale, row) - full).abs() <= unit * 0.501)[~small].all()
    q = int4.unpack(packed).numpy().astype(np.float32)
    steps = scale.numpy().astype(np.float32) * (row.float().numpy() / np.float32(255))[..., None]
    want = q * np.repeat(steps, 32, axis=-1)
    back = int4_compact.dequantize(packed, scale, row, torch.float32)
    assert np.array_equal(back.numpy(), want) and not back[0, 1].any()
    assert torch.equal(int4_compact.dequantize(packed, scale, row, torch.bfloat16), torch.from_numpy(want).bfloat16())
    # Conversion keeps an INT4 checkpoint's levels: on ordinary weights 45 dB or more against them.
    ordinary = randn(64, 512, seed=7)
    levels, scales = int4.quantize(ordinary)
    exact = int4.dequantize(levels, scales, torch.float32)
    error = int4_compact.dequantize(levels, *int4_compact.compact(scales), torch.float32) - exact
    assert 20 * (exact.norm() / error.norm()).log10() > 45
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="negative or not finite"):
            int4_compact.compact(torch.tensor([[1.0, bad]]).bfloat16())


# --- writing and reading -----------------------------------------------------------------------------------------


def tensors():
    yield "model.embed_tokens.weight", randn(50, 32, seed=1)
    for e in range(3):
        yield f"model.layers.1.mlp.experts.{e}.up_proj.weight", randn(8, 64, seed=2 + e)
    yield "model.layers.1.mlp.shared_experts.up_proj.weight", randn(8, 64, seed=6)
    yield "model.layers.1.mlp.gate.e_score_correction_bias", randn(3, seed=7)


@pytest.mark.parametrize("shard_bytes", [1, 2000, 10**9])
@pytest.mark.parametrize("form", ["bf16", "int4"])
def test_round_trip(tmp_path, form, shard_bytes):
    write(tmp_path, tensors(), config={"model_type": "kimi_k2"}, form=form, shard_bytes=shard_bytes)
    given = dict(tensors())
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.nbytes == sum(t.nbytes for t in checkpoint.tensors.values())
        stored = {name: checkpoint.read(name) for name in checkpoint.tensors}
    assert stored["model.embed_tokens.weight"].equal(given["model.embed_tokens.weight"].bfloat16())
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert stored[bias].equal(given[bias])
    shared = "model.layers.1.mlp.shared_experts.up_proj.weight"
    assert stored[shared].equal(given[shared].bfloat16())
    for e in range(3):
        name = f"model.layers.1.mlp.experts.{e}.up_proj"
        w = given[f"{name}.weight"]
        if form == "bf16":
            assert stored[f"{name}.weight"].equal(w.bfloat16())
        else:
            packed, scale = int4.quantize(w)
            assert f"{name}.weight" not in stored and stored[f"{name}.weight_shape"].tolist() == [8, 64]
            assert stored[f"{name}.weight_packed"].equal(packed) and stored[f"{name}.weight_scale"].equal(scale)
    config = json.loads((tmp_path / "config.json").read_text())
    assert scheme.declared(config, config, None, where="") == {"bf16": scheme.DENSE, "int4": scheme.INT4}[form]

    files = sorted(p.name for p in tmp_path.iterdir())
    if shard_bytes == 10**9:
        assert files == ["config.json", SINGLE]
    else:
        count = len(files) - 2
        assert count == (len(stored) if shard_bytes == 1 else count) and count > 1
        assert files == [
            "config.json",
            *(f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)),
            INDEX,
        ]
        if shard_bytes == 2000:
            by_file = json.loads((tmp_path / INDEX).read_text())["weight_map"]
            sizes = [
                [stored[n].nbytes for n, f in by_file.items() if f == file] for file in sorted(set(by_file.values()))
            ]
            assert all(sum(s) <= 2000 or len(s) == 1 for s in sizes)
    # The reference library reads the same values, from files without a reserve in the header.
    for file in tmp_path.glob("*.safetensors"):
        theirs = load_file(file)
        assert all(stored[name].equal(t) for name, t in theirs.items())
        assert file.stat().st_size < sum(t.nbytes for t in theirs.values()) + 4096


FORMS = {
    "int4-compact": (int4_compact, scheme.INT4_COMPACT),
    "fp8-block": (fp8_block, scheme.FP8_BLOCK),
    "nvfp4": (nvfp4, scheme.NVFP4),
    "nvfp4-pack-quantized": (nvfp4_packed, scheme.NVFP4_PACKED),
}


@pytest.mark.parametrize("form", FORMS)
def test_round_trip_of_other_forms(tmp_path, form):
    """Names, types and shapes are those the format's reader asks for; values decode to the quantiser's."""
    module, name = FORMS[form]
    config = {"text_config": {"a": 1, "quantization_config": {"quant_method": "fp8"}}}
    write(tmp_path, tensors(), config=config, form=form)
    given = dict(tensors())
    expert, shared = "model.layers.1.mlp.experts.1.up_proj", "model.layers.1.mlp.shared_experts.up_proj"
    with Checkpoint.open(tmp_path) as checkpoint:
        for linear in (expert, shared) if form == "fp8-block" else (expert,):
            assert format_of(checkpoint.tensors, linear) == name
            wanted = {s: p for s, p in module.parts((8, 64)).items() if not p.unread}
            stored = {n.removeprefix(linear): n for n in checkpoint.tensors if n.startswith(f"{linear}.")}
            assert stored.keys() == wanted.keys()
            for suffix, part in wanted.items():
                info = checkpoint.info(linear + suffix)
                assert part.fits(info.shape) and info.dtype in part.dtypes
                assert part.fault is None or part.fault(checkpoint.read(info.name)) is None
            parts = {suffix: checkpoint.read(full) for suffix, full in stored.items()}
            again = {k.removeprefix("x"): v for k, v in module.encode("x", given[f"{linear}.weight"])}
            assert torch.equal(module.decode(parts, torch.float32), module.decode(again, torch.float32))
            w = given[f"{linear}.weight"]
            assert (module.decode(parts, torch.float32) - w).norm() < 0.15 * w.norm()
        assert (format_of(checkpoint.tensors, shared) == scheme.DENSE) == (form != "fp8-block")
        assert format_of(checkpoint.tensors, "model.embed_tokens") == scheme.DENSE
    written = json.loads((tmp_path / "config.json").read_text())
    assert scheme.declared(written, written["text_config"], None, where="") == name
    assert ("quantization_config" in written) == (form == "nvfp4")


@pytest.mark.parametrize(
    ("block", "name"),
    [
        ({"quant_method": "fp8"}, "fp8 without blocks"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, "fp8 with weight_block_size=[64, 128]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "fp8 with fmt=e5m2"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "modelopt NVFP4_AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "modelopt NVFP4 with group_size=32"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
            "modelopt NVFP4 with num_bits=8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}},
            },
            "nvfp4-pack-quantized with group_size=32",
        ),
        ({"quant_method": "compressed-tensors", "format": "mixed-precision"}, "compressed-tensors mixed-precision"),
    ],
)
def test_unlike_declarations_are_named(block, name):
    assert scheme.declared({"quantization_config": block}, {}, None, where="") == name
    with pytest.raises(CheckpointError, match="is not served; served: plain bfloat16, FP8"):
        require_served(name, "here")


def test_modelopt_declarations():
    """As NVIDIA's exports spell them, in either file."""
    number = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    block = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": {"weights": number, "input_activations": number, "targets": ["Linear"]}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        "ignore": ["lm_head"],
    }
    assert scheme.declared({"quantization_config": block}, {}, None, where="") == scheme.NVFP4
    hf = {
        "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": []}
    }
    stale = {"quantization_config": int4.quantization_config()}
    assert scheme.declared({}, stale, hf, where="") == scheme.NVFP4
    hf["quantization"]["quant_algo"] = None
    assert scheme.declared({}, stale, hf, where="") == scheme.INT4
    hf["quantization"] |= {"quant_algo": "NVFP4", "group_size": 32}
    assert scheme.declared({}, stale, hf, where="") == "modelopt NVFP4 with group_size=32"


def test_large_shards_keep_their_reserve(tmp_path, monkeypatch):
    """Where the reserve for the header is little beside the data, the header is padded instead of moving the data."""
    monkeypatch.setattr("perilune.formats.writer._ROOM", 4096)
    big = torch.arange(1 << 19, dtype=torch.int16).view(1 << 10, -1)
    with Writer(tmp_path) as out:
        out.add("a", torch.tensor(3.5))
        out.add("big", big)
        out.add("none", torch.zeros(0, 4))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.read("big").equal(big)
        assert checkpoint.read("a").item() == 3.5 and checkpoint.read("a").shape == ()
        assert checkpoint.read("none").shape == (0, 4)
        assert checkpoint.tensors["a"].offset == 8 + 4096


def test_many_names_end_a_shard(tmp_path, monkeypatch):
    monkeypatch.setattr("perilune.formats.writer._ROOM", 4096)
    with Writer(tmp_path) as out:
        for i in range(40):
            out.add(f"{i:03d}", torch.tensor([i]))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert [checkpoint.read(f"{i:03d}").item() for i in range(40)] == list(range(40))
        assert len({t.file for t in checkpoint.tensors.values()}) == 3


def test_writer_refuses_and_cleans_up(tmp_path):
    def failing():
        yield "a", torch.zeros(4)
        raise KeyError("source")

    with pytest.raises(KeyError, match="source"):
        write(tmp_path, failing(), config={})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="'a' is written twice"), Writer(tmp_path) as out:
        out.add("a", torch.zeros(1))
        out.add("a", torch.zeros(1))
    with pytest.raises(CheckpointError, match="complex64"), Writer(tmp_path) as out:
        out.add("a", torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(CheckpointError, match="without tensors"), Writer(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    write(tmp_path, tensors(), config={})
    with pytest.raises(CheckpointError, match=r"already holds model\.safetensors"):
        Writer(tmp_path)
    with pytest.raises(CheckpointError, match="cannot make directory"):
        Writer(tmp_path / SINGLE / "x")


def test_quantisation_block_goes_to_the_text_level():
    block = int4.quantization_config()
    source = {"quantization_config": {"quant_method": "fp8"}, "text_config": {"a": 1, "quantization_config": {}}}
    assert with_quantization(source, block) == {"text_config": {"a": 1, "quantization_config": block}}
    assert with_quantization(source, None) == {"text_config": {"a": 1}}
    assert "quantization_config" in source and "quantization_config" in source["text_config"]
    assert with_quantization({"a": 1}, block) == {"a": 1, "quantization_config": block}


def test_official_quantization_config(kimi_k26):
    text = json.loads((kimi_k26 / "config.json").read_text())["text_config"]
    assert int4.quantization_config() == text["quantization_config"]


def test_format_of(tmp_path):
    save_file(
        {
            "d.weight": torch.zeros(2, 32),
            "i.weight_packed": torch.zeros(2, 4, dtype=torch.int32),
            "i.weight_scale": torch.zeros(2, 1, dtype=torch.bfloat16),
            "c.weight_packed": torch.zeros(2, 4, dtype=torch.int32),
            "c.weight_scale": torch.zeros(2, 1, dtype=torch.uint8),
            "p.weight_packed": torch.zeros(2, 16, dtype=torch.uint8),
            "n.weight": torch.zeros(2, 16, dtype=torch.uint8),
            "f.weight": torch.zeros(2, 32).to(torch.float8_e4m3fn),
        },
        tmp_path / SINGLE,
    )
    with Checkpoint.open(tmp_path) as checkpoint:
        names = {x: format_of(checkpoint.tensors, x) for x in "dicpnfx"}
    assert names == {
        "d": scheme.DENSE,
        "i": scheme.INT4,
        "c": scheme.INT4_COMPACT,
        "p": scheme.NVFP4_PACKED,
        "n": scheme.NVFP4,
        "f": scheme.FP8_BLOCK,
        "x": None,
    }


# --- damage ------------------------------------------------------------------------------------------------------


def refused(path, *words):
    with pytest.raises(CheckpointError) as e:
        Checkpoint.open(path)
    for word in words:
        assert word in str(e.value), str(e.value)
    assert "\n" not in str(e.value)


def with_header(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / SINGLE).write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def entry(dtype="F32", shape=(1,), span=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"{nonsense", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"[" * 200_000, "not valid JSON"),
        ({"a": 1}, "'a' has no description"),
        ({"a": entry("F31")}, "unknown dtype 'F31'"),
        ({"a": entry(shape=(-1,))}, "has shape [-1]"),
        ({"a": {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]}}, "has shape 3"),
        ({"a": entry(span=(4, 0))}, "data_offsets [4, 0]"),
        ({"a": entry(span=(0, 4, 8))}, "data_offsets"),
        ({"a": entry(shape=(2,))}, "needs 8 bytes, its data_offsets give 4"),
        ({"a": entry(shape=(10**30,))}, "needs 4"),
        ({"a": entry(), "b": entry(span=(2, 6))}, "'a' and 'b' overlap"),
        ({"a": entry(), "b": entry(span=(8, 12))}, "'a' and 'b' leave a hole"),
        ({"a": entry(shape=(3,), span=(0, 12))}, "bytes expected"),
        ({}, "bytes expected"),
    ],
)
def test_damaged_headers(tmp_path, header, words):
    with_header(tmp_path, header, bytes(8))
    refused(tmp_path, SINGLE, words)


def test_damaged_files(tmp_path):
    refused(tmp_path / "absent", "absent is not a directory")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, "only safetensors")
    file = tmp_path / SINGLE
    save_file({"a": randn(100)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    refused(tmp_path, SINGLE, "truncated", f"{len(whole)} bytes expected, {len(whole) - 10} found")
    file.write_bytes(whole + b"x")
    refused(tmp_path, "damaged", f"{len(whole) + 1} found")
    file.write_bytes(whole[:20])
    refused(tmp_path, "truncated", "20 found")
    file.write_bytes(whole[:5])
    refused(tmp_path, "truncated", "5 bytes")
    file.write_bytes(b"\xff" * 64)
    refused(tmp_path, "exceeds 100000000")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(tmp_path, "Git LFS pointer")


def test_truncated_after_opening(tmp_path):
    save_file({"a": randn(100), "b": randn(100)}, tmp_path / SINGLE)
    with Checkpoint.open(tmp_path) as checkpoint:
        size = (tmp_path / SINGLE).stat().st_size
        with (tmp_path / SINGLE).open("r+b") as f:
            f.truncate(size - 100)
        assert checkpoint.read("a").shape == (100,)
        with pytest.raises(CheckpointError, match=r"truncated: 400 bytes expected at byte \d+, 300 found"):
            checkpoint.read("b")
        with pytest.raises(CheckpointError, match="'c' is missing"):
            checkpoint.read("c")


@pytest.fixture
def sharded(tmp_path):
    write(tmp_path, tensors(), config={}, shard_bytes=2100)
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 1
    return tmp_path, index


def test_missing_shard(sharded):
    path, index = sharded
    shard = sorted(set(index.values()))[0]
    (path / shard).unlink()
    refused(path, f"lacks 1 shard ({shard})", "download is incomplete")


def test_index_disagrees(sharded):
    path, index = sharded

    def put(weight_map):
        (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    first, last = index[name], sorted(set(index.values()))[-1]
    assert sum(f == first for f in index.values()) > 1 and first != last
    put(index | {name: last})
    refused(path, f"places tensor '{name}' in {last}, but it is in {first}")
    put(index | {"extra": last})
    refused(path, f"places tensor 'extra' in {last}, but none of the listed shards has it")
    put({n: f for n, f in index.items() if n != name})
    refused(path, f"1 tensor ({name})", "does not place there")
    for bad in ("../x.safetensors", "/etc/passwd", "model.bin", 3, None):
        put(index | {"extra": bad})
        refused(path, "weight_map['extra']", "not a .safetensors file name")
    put([])
    refused(path, "weight_map must be a non-empty object")
    (path / INDEX).write_text("{")
    refused(path, INDEX, "not valid JSON")


def test_stray_tensor_in_a_shard(sharded):
    path, index = sharded
    shard = index["model.embed_tokens.weight"]
    tensors_there = load_file(path / shard)
    save_file(tensors_there | {"stray": torch.zeros(1)}, path / shard)
    refused(path, "the shards hold 1 tensor (stray)")
