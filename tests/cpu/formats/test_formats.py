"""Formats of weights: INT4 and NVFP4 against compressed-tensors, all against their definitions."""

import math

import numpy as np
import pytest
import torch

from perilune.core.errors import CheckpointError
from perilune.formats import fp8_block, int4, int4_compact, nvfp4, nvfp4_packed


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
