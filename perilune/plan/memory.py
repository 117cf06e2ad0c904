"""What fits where: bytes of weights per GPU, what they leave for the KV cache, and how many tokens that holds.

Weights are split evenly over the GPUs of a group, except what each of them needs whole: the low-rank input projections
of attention, the router, norms, and the vision tower. The KV cache is split along the sequence. GB are 10^9 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

FP8_BLOCK = 128 * 128
# What a GPU's total loses to the CUDA context and to NCCL: an H200 of 150.7 GB lets a process take 147.0.
OVERHEAD_BYTES = 3.7e9
# Activations, logits, graphs and the allocator's slack.
WORKSPACE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    total_bytes: float  # as the driver reports them

    @property
    def usable_bytes(self) -> float:
        return self.total_bytes - OVERHEAD_BYTES


GPUS = (Gpu("H100 80 GB", 85.52e9), Gpu("H200 141 GB", 150.75e9), Gpu("B200 180 GB", 192.27e9))
COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Numbers of weights by how they are held, and the KV cache's width."""

    routed: int  # of routed experts
    routed_rows: int  # outputs of all their matrices
    linear: int  # of other linear layers that are split
    embedding: int  # split, never FP8
    kv_b: int  # of kv_b_proj: split; where the rest is FP8, there is a copy of its half for values in FP8
    whole_linear: int  # of linear layers that every GPU holds
    whole: int  # of anything else that every GPU holds
    kv_values: int  # of one token, all layers


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of a model's weights in one format."""

    name: str
    split: float  # over the GPUs
    whole: float  # on each of them

    def per_gpu(self, count: int) -> float:
        return self.split / count + self.whole


@dataclass(frozen=True, slots=True)
class Fit:
    footprint: Footprint
    count: int
    weights: float  # bytes per GPU
    left: float  # bytes per GPU for the KV cache; below 0: so many are short
    tokens: int  # whose KV cache fits, all GPUs together; 0 if the weights do not

    @property
    def fits(self) -> bool:
        return self.tokens > 0


def footprints(model: Model, stored: float, width: float = 2.0) -> tuple[Footprint, ...]:
    """The model as stored, its routed experts in `stored` bytes, and as it may be converted.

    width  bytes of every other weight that is not FP8
    """
    rest, whole = width * (model.linear + model.embedding + model.kv_b), width * (model.whole_linear + model.whole)
    fp8 = 1 + 4 / FP8_BLOCK
    narrow_rest = fp8 * model.linear + width * model.embedding + (width + 0.5) * model.kv_b
    narrow_whole = fp8 * model.whole_linear + width * model.whole
    compact = (0.5 + 1 / 32) * model.routed + 2.0 * model.routed_rows
    return (
        Footprint("as stored", stored + rest, whole),
        Footprint("int4-compact", compact + rest, whole),
        Footprint("int4-compact, rest FP8", compact + narrow_rest, narrow_whole),
        Footprint("nvfp4", (0.5 + 1 / 16) * model.routed + rest, whole),
    )


def fit(footprint: Footprint, count: int, usable: float, kv_bytes: int, workspace: float = WORKSPACE_BYTES) -> Fit:
    """`count` devices of `usable` bytes each; `kv_bytes` of cache per token."""
    weights = footprint.per_gpu(count)
    left = usable - workspace - weights
    return Fit(footprint, count, weights, left, max(int(count * left // kv_bytes), 0))


def table(
    formats: Sequence[Footprint], kv_bytes: int, gpus: Sequence[Gpu] = GPUS, counts: Sequence[int] = COUNTS
) -> list[tuple[Gpu, list[Fit]]]:
    """A row for every number of GPUs of each kind, with an entry for each format."""
    return [(gpu, [fit(f, n, gpu.usable_bytes, kv_bytes) for f in formats]) for gpu in gpus for n in counts]
