"""How products of some tens of rows are dealt out (the kernel itself: tests/gpu)."""

import pytest
import torch

from perilune.ops.linear import skinny_gemm


@pytest.mark.parametrize(
    ("o", "i", "cluster", "splits"),
    (
        (7168, 8192, 4, 2), (12288, 1536, 1, 1), (2112, 7168, 4, 4), (384, 7168, 8, 8), (163840, 7168, 1, 1),
        (7168, 2048, 1, 1), (7168, 18432, 4, 2),
    ),
)  # fmt: skip
def test_k_is_split_where_weights_have_few_rows_or_long_ones(o: int, i: int, cluster: int, splits: int) -> None:
    assert skinny_gemm.layout(o, i, i // 64) == (cluster, splits)
    assert skinny_gemm.layout(4096, 7168, 56, gated=True) == (2, 2)


@pytest.mark.parametrize("size", (1, 2))
def test_every_shape_has_a_layout(size: int) -> None:
    """What the kernel holds at once of w's rows, if k is split: 128 for every CTA that has rows of its own."""
    for stages in (*range(1, 40), 56, 64, 112, 128, 288):
        for o in (8, 64, 1024, 2880, 3840, 5752, 5760, 7680, 7688, 15360, 15368, 163840):
            cluster, splits = skinny_gemm.layout(o, stages * 128 // size, stages)
            assert stages % splits == cluster % splits == 0 and cluster <= 8
            assert splits == 1 or o <= 120 // splits * 128, (o, stages, splits)


def test_only_what_the_kernel_reads_is_taken() -> None:
    def taken(rows: int, i: int, o: int, x: torch.dtype, w: torch.dtype) -> bool:
        return all(met for met, _ in skinny_gemm.needs(torch.empty(rows, i, dtype=x), torch.empty(o, i, dtype=w)))

    bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
    assert taken(17, 192, 24, bf16, bf16) and taken(128, 256, 24, bf16, e4m3)
    assert not taken(0, 192, 24, bf16, bf16) and not taken(129, 192, 24, bf16, bf16)
    assert not taken(17, 96, 24, bf16, bf16) and not taken(17, 192, 24, bf16, e4m3)
    hidden = torch.empty(17, 512, dtype=bf16)  # of a shared expert: the second matrix has a width of its own
    assert not all(met for met, _ in skinny_gemm.needs(hidden, torch.empty(512, 64, dtype=e4m3)))
    assert not taken(17, 192, 20, bf16, bf16) and not taken(17, 192, 24, torch.float32, torch.float32)


def test_bfloat16_takes_it_for_large_weights_and_some_tens_of_rows() -> None:
    def wins(rows: int, i: int, o: int) -> bool:
        return all(met for met, _ in skinny_gemm.wins(torch.empty(rows, i), torch.empty(o, i, device="meta")))

    assert wins(17, 7168, 2112) and wins(64, 8192, 7168) and wins(32, 1536, 12288)
    assert wins(32, 7168, 4096) and not wins(33, 7168, 4096)
    assert not wins(65, 7168, 2112) and not wins(17, 384, 768) and not wins(64, 7168, 163840)
