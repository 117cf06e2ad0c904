"""8-bit attention of prompts on the emulator: its error, and what it does to the bundled model's path."""

import shutil
from typing import Any

import pytest
import torch

from perilune.ops.attention import mla_prefill, mla_prefill_w8a8
from perilune.ops.harness.case import BFLOAT16, K2, Make
from perilune.ops.linear.quantize_tokens import GROUP, quantize_tokens, rows
from tests.cuda_emulator.session import MODES, emulated

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def inputs(counts: tuple[int, ...], contexts: tuple[int, ...], heads: int = 1, packed: bool = False) -> dict[str, Any]:
    sizes = (heads, K2.nope, K2.rope, K2.value, K2.latent)
    case = mla_prefill.Case(counts, contexts, *sizes, 64, packed=packed)
    return mla_prefill_w8a8.inputs(case, Make(BFLOAT16, CPU, len(contexts)))


def widened(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values.float() * scale[:, : len(values)].T.repeat_interleave(GROUP, 1)


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("packed", [False, True])
def test_it_errs_by_what_eight_bits_bring(mode: str, packed: bool) -> None:
    """Four tiles of keys and more stages than rings have; several requests, one of them without queries."""
    args = inputs((140, 0, 3), (520, 7, 130), packed=packed)
    want = mla_prefill.reference(**args).flatten(1).float()
    with emulated(sms=4, mode=mode, seed=1):
        values, scale = mla_prefill_w8a8.cuda(**args)
        rounded = widened(*quantize_tokens(mla_prefill.cuda(**args).flatten(1)))
    assert scale.shape == (1, rows(143)) and not scale[:, 143:].any()
    assert 0.024 < apart(rounded, want) < 0.028  # what is rounded for the product that follows
    assert 0.03 < apart(widened(values, scale), want) < 0.05


def test_keys_of_very_different_size_keep_their_share() -> None:
    """Tiles have scales of their own: values of the first 128 keys are 1,000 times those of the others."""
    args = inputs((200,), (256,))
    args["pages"].view(-1, 576)[:, :512] *= torch.where(torch.arange(len(args["pages"]) * 64) % 7 == 0, 1000.0, 1.0)[
        :, None
    ]
    args["q"] *= 1e-3
    want = mla_prefill.reference(**args).flatten(1).float()
    with emulated(sms=4):
        values, scale = mla_prefill_w8a8.cuda(**args)
    assert apart(widened(values, scale), want) < 0.05


@pytest.mark.parametrize("where", ["q", "pages"])
def test_nan_is_not_hidden(where: str) -> None:
    args = inputs((130, 129), (130, 129))
    span = args["span"]
    if where == "q":
        args["q"][40] = float("nan")
    else:
        slot = int(span.tables[0, 40 // 64]) * 64 + 40 % 64
        args["pages"].view(-1, 576)[slot] = float("nan")
    with emulated(sms=4):
        y = widened(*mla_prefill_w8a8.cuda(**args))
    assert y[40].isnan().all() and not y[130:].isnan().any()
    assert where == "pages" or not y[:40].isnan().any()


def test_it_runs_where_it_can() -> None:
    args = inputs((2,), (2,))
    narrow = {**args, "w_uv": torch.zeros(1, 512, 64, dtype=BFLOAT16)}
    with emulated():
        assert mla_prefill_w8a8.op.choice(*args.values()) is mla_prefill_w8a8.cuda
        assert mla_prefill_w8a8.op.choice(*narrow.values()) is mla_prefill_w8a8.composed
