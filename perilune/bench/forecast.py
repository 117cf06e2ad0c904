"""Predicts the time of a whole model's steps on several GPUs from rows of a few layers, before the model is measured.

A row is one line of bench/results. `bench decode --slice N` times the slice of one of N ranks on one GPU, with local
copies as exchanges. The prediction for N ranks is that row plus a correction: the difference between real ranks and a
slice, at the largest number of ranks with rows. If a row is missing, ConfigError names the command that makes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from perilune.bench.prefill import layer_flops
from perilune.bench.shapes import SHAPES, shape
from perilune.core.errors import ConfigError

Row = Mapping[str, Any]

READ_TB_S = 4.3  # read rate of one H200, for KV beyond the rows' context


@dataclass(frozen=True, slots=True)
class Step:
    """The time of one decode step, if every rank holds the whole KV.

    us_per_layer  of an MoE layer, exchanges included
    outside_us    dense layers, head and all else of the step's graph
    between_ms    from one graph to the next
    """

    us_per_layer: float
    outside_us: float
    between_ms: float
    layers: int

    @property
    def graph_ms(self) -> float:
        return (self.us_per_layer * (self.layers - 1) + self.outside_us) / 1e3

    @property
    def ms(self) -> float:
        return self.graph_ms + self.between_ms


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predictions for `layers` layers on `ranks` GPUs. Formats of weights are spelled as in the rows.

    decode, prefill  rows of these benches
    """

    decode: Sequence[Row]
    prefill: Sequence[Row]
    ranks: int
    layers: int = 61
    shape: str = "kimi-k2.5"
    rest_dtype: str = "fp8"
    expert_format: str = "int4-compact"

    def step(self, tokens: int, context: int, kv_bytes: float) -> Step:
        """The step of `tokens` requests with one token each at `context`; verifying `tokens` tokens of one request
        takes as long. `kv_bytes`: KV of one token in a layer, to correct rows of another context. From a row of as
        many real ranks; else of fewer, corrected by the difference between slices of both numbers of ranks."""
        ranks = self._real_ranks(tokens)
        if ranks == self.ranks:
            own = pair = real = self._decode_row(ranks, False, tokens, context)
        else:
            own = self._decode_row(self.ranks, True, tokens, context)
            pair, real = (self._decode_row(ranks, sliced, tokens, own["context"]) for sliced in (True, False))
        outside = real.get("outside_us", pair.get("outside_us", 0.0))
        us = real.get("us_per_layer") or (1e3 * real["graph_ms"] - outside) / (real["layers"] - 1)
        more = tokens * kv_bytes * (context - own["context"]) / READ_TB_S / 1e6
        if own is not pair:
            us += own["us_per_layer"] - pair["us_per_layer"]
            outside += own["outside_us"] - pair["outside_us"]
        between = max(real["step_ms"] - real["graph_ms"], 0.0)
        return Step(us_per_layer=us + more, outside_us=outside, between_ms=between, layers=self.layers)

    def _real_ranks(self, tokens: int) -> int:
        """The most real ranks, up to `self.ranks`, with a row of `tokens` tokens; 2 if there is none."""
        found = [r for r in self._with(tokens) if "slice" not in r and r.get("graph_ms") is not None]
        return max((r["tp"] for r in found if 2 <= r.get("tp", 1) <= self.ranks), default=2)

    def prompt_ms(self, tokens: int, cached: int = 0) -> float:
        """Milliseconds of a prompt of `tokens` after `cached` tokens. Rows of one rank and of two show which part of
        the time ranks split; both parts are interpolated between lengths. Beyond the longest, and for cached tokens,
        time grows as FLOPs."""
        lengths, one, two = self._prefill_rows()
        shared = [2 * (a - b) for a, b in zip(one, two)]
        per_layer = [s / self.ranks + a - s for a, s in zip(one, shared)]
        config = shape(self.shape, SHAPES[self.shape]["num_hidden_layers"])
        longest, flops = lengths[-1], layer_flops(config, lengths[-1])
        if tokens > longest:
            return float(self.layers * per_layer[-1] * layer_flops(config, tokens, cached) / flops)
        more = layer_flops(config, tokens, cached) - layer_flops(config, tokens)
        return float(self.layers * (numpy.interp(tokens, lengths, per_layer) + shared[-1] / self.ranks * more / flops))

    def draft_ms(self, drafts: int) -> float:
        """Milliseconds of a chain of an FP8 draft model; rows of one rank and of two show which part ranks split.
        Without a row of two ranks: as on one rank."""
        found = [r for r in self._of_shape(self.decode) if r.get("draft") == drafts and r.get("draft_ms")]
        one = [r for r in found if r.get("tp", 1) == 1 and r.get("drafter", "").endswith("fp8")]
        two = [r for r in found if r.get("tp") == 2]
        if not one:
            raise ConfigError(f"no row of: bench decode --shape {self.shape} --draft {drafts} --accepted X")
        alone = float(newest(one)["draft_ms"])
        shared = 2 * (alone - float(newest(two)["draft_ms"])) if two else 0.0
        return alone - shared + shared / self.ranks

    def _of_shape(self, rows: Sequence[Row]) -> list[Row]:
        """Rows of this shape with fewer layers than `layers`: the whole model's measurement must not predict itself."""
        return [
            r
            for r in rows
            if r.get("shape") == self.shape and r.get("balanced", True) and r.get("layers", 0) < self.layers
        ]

    def _with(self, tokens: int) -> list[Row]:
        """Rows of steps with `tokens` tokens, the whole KV on every rank."""
        return [
            r
            for r in self._of_shape(self.decode)
            if r["batch"] * (1 + r.get("draft", 0)) == tokens
            and r.get("kv_layout", "replicated") == "replicated"
            and r["rest_dtype"] == self.rest_dtype
        ]

    def _decode_row(self, ranks: int, sliced: bool, tokens: int, context: int) -> Row:
        """The newest row of `tokens` tokens at the nearest context."""
        found = [r for r in self._with(tokens) if r.get("tp") == ranks and ("slice" in r) == sliced]
        found = [r for r in found if sliced or r.get("graph_ms") is not None]
        found = [r for r in found if r["expert_format"] == self.expert_format] or found  # others differ by up to 3 %
        if not found:
            options = f"--{'slice' if sliced else 'tp'} {ranks} --batch {tokens} --rest-dtype {self.rest_dtype}"
            options += f" --expert-format {self.expert_format}"
            raise ConfigError(f"no row of: bench decode --shape {self.shape} {options}")
        two_depths = [r for r in found if "us_per_layer" in r]
        found = two_depths or found
        nearest = min({r["context"] for r in found}, key=lambda c: (abs(c - context), c))
        return newest([r for r in found if r["context"] == nearest])

    def _prefill_rows(self) -> tuple[list[int], list[float], list[float]]:
        """Lengths of prompts with rows of one rank, and ms a layer of one rank and of two. If two ranks have no row of
        a length, the ratio at the nearest length is used. Formats of weights outside experts, in order of preference:
        `rest_dtype` on both, bfloat16 on both, bfloat16 on one rank only. They are comparable, because prompts widen
        FP8 weights to bfloat16, which takes only 1 to 2 % of a layer."""
        rows = [r for r in self._of_shape(self.prefill) if not r.get("cached")]
        for formats in (self.rest_dtype, self.rest_dtype), ("bf16", "bf16"), ("bf16", self.rest_dtype):
            one, two = (
                _by_length([r for r in rows if (r.get("tp", 1), _rest(r)) == (n, rest)])
                for n, rest in enumerate(formats, 1)
            )
            if both := sorted(one.keys() & two.keys()):
                break
        else:
            raise ConfigError(f"no rows of one length of: bench prefill --shape {self.shape}, with --tp 2 and without")
        lengths = sorted(one)
        ms = [float(one[n]["ms_per_layer"]) for n in lengths]
        near = [min(both, key=lambda m: abs(m - n)) for n in lengths]
        of_two = [t * two[m]["ms_per_layer"] / one[m]["ms_per_layer"] for t, m in zip(ms, near)]
        return lengths, ms, of_two


def _rest(row: Row) -> str:
    """The format of all weights except routed experts."""
    return "bf16" if row["rest_dtype"] == "bfloat16" else str(row["rest_dtype"])


def _by_length(rows: Sequence[Row]) -> dict[int, Row]:
    return {n: newest([r for r in rows if r["tokens"] == n]) for n in {r["tokens"] for r in rows}}


def newest(rows: Sequence[Row]) -> Row:
    """The median row, by step_ms, of those with the last row's commit and number of layers."""
    last = [r for r in rows if (r["commit"], r["layers"]) == (rows[-1]["commit"], rows[-1]["layers"])]
    return sorted(last, key=lambda r: float(r["step_ms"]))[(len(last) - 1) // 2]
