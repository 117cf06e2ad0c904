"""Plans memory: bytes of weights per GPU, the rest for the KV cache, and how many tokens that holds.

Weights are split evenly over the GPUs of a group, except those that each GPU holds whole: the low-rank input
projections of attention, the router and norms. Each GPU holds the whole KV cache, because all heads read the same
latents, unless it is sharded along the sequence. GB are 10^9 bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

FP8_BLOCK = 128 * 128
# Taken by the CUDA context and NCCL: of an H200's 150.7 GB a process can allocate 147.0 GB.
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
    """Numbers of weights, by how they are stored on GPUs, and numbers in the KV cache per token."""

    routed: int  # of routed experts
    routed_rows: int  # outputs of all their matrices
    linear: int  # of other linear layers that are split
    embedding: int  # split, never FP8
    kv_b: int  # of kv_b_proj: split; if the rest is FP8, there is also an FP8 copy of its half for values
    whole_linear: int  # of linear layers that every GPU holds
    whole: int  # of anything else that every GPU holds
    kv_values: int  # in all layers


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of a model's weights in one format."""

    name: str
    split: float  # bytes that all GPUs share
    whole: float  # bytes on each GPU

    def per_gpu(self, count: int) -> float:
        return self.split / count + self.whole


@dataclass(frozen=True, slots=True)
class Fit:
    footprint: Footprint
    count: int
    weights: float  # bytes per GPU
    left: float  # bytes per GPU for the KV cache; below 0: bytes that are missing
    tokens: int  # of context that the KV cache holds; 0 if the weights do not fit

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
    return Fit(footprint, count, weights, left, max(int(left // kv_bytes), 0))


def table(
    formats: Sequence[Footprint], kv_bytes: int, gpus: Sequence[Gpu] = GPUS, counts: Sequence[int] = COUNTS
) -> list[tuple[Gpu, list[Fit]]]:
    """A row for every number of GPUs of each kind, with an entry for each format."""
    return [(gpu, [fit(f, n, gpu.usable_bytes, kv_bytes) for f in formats]) for gpu in gpus for n in counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Memory that an engine needs on each of its devices, in bytes."""

    weights: tuple[Footprint, ...]  # the first that leaves room for `enough` tokens is taken
    drafter: Footprint
    scratch: Footprint = Footprint("scratch", 0.0, 0.0)  # of the draft model
    graphs: float
    workspace: Callable[[int], float]  # number of devices -> bytes on each
    mailboxes: float  # memory for exchanges, if there are several ranks
    kv_bytes: int  # of a token on each device, where KV is not sharded
    kv_sharded: int = 0  # the part of kv_bytes that is sharded over the devices
    enough: int  # tokens of context that are wanted
    least: int  # the fewest tokens of context with which an engine starts
    fraction: float  # share of the memory left by weights that the engine may use
    vision: float = 0.0  # tower, embeddings of pictures, and workspace for encoding one

    def kv_on_each(self, ranks: int) -> int:
        """Bytes of a token's KV on each of `ranks` devices, on average."""
        return self.kv_bytes - self.kv_sharded + -(-self.kv_sharded // ranks)


@dataclass(frozen=True, slots=True)
class Plan:
    """The use of one of `ranks` devices with `free` bytes: bytes by purpose (`takes`), and the rest for KV (`left`)."""

    demand: Demand
    footprint: Footprint
    ranks: int
    free: float
    takes: Mapping[str, float]
    left: float  # for the KV cache; below 0: bytes that are missing

    @property
    def tokens(self) -> int:
        return max(int(self.left // self.demand.kv_on_each(self.ranks)), 0)

    @property
    def fits(self) -> bool:
        return self.tokens >= self.demand.least

    def lines(self) -> list[str]:
        """The table, for people."""
        rows = [(name, f"{size / 1e9:9.2f} GB") for name, size in self.takes.items()]
        rows.append(("left for KV", f"{max(self.left, 0) / 1e9:9.2f} GB = {self.tokens:,} tokens"))
        of = f"on each of {self.ranks} ranks" if self.ranks > 1 else "on the one device"
        return [f"memory {of}, {self.free / 1e9:.2f} GB free:", *(f"  {name:<12}{size}" for name, size in rows)]


def plan(demand: Demand, ranks: int, free: float) -> Plan:
    """The plan for `ranks` devices with `free` bytes on each: with the first footprint that leaves enough room, else
    with the one that leaves most."""
    found = [_filled(demand, footprint, ranks, free) for footprint in demand.weights]
    return next((p for p in found if p.tokens >= demand.enough), max(found, key=lambda p: p.left))


def fewest(demand: Demand, free: Sequence[float], counts: Sequence[int] = COUNTS) -> int | None:
    """The fewest devices, taken in order, that hold the model with enough room for its KV cache; else the fewest that
    hold it at all, or None.

    free    bytes of each device
    counts  numbers of ranks that can share the model
    """
    plans = [plan(demand, n, min(free[:n])) for n in counts if n <= len(free)]
    roomy = [p.ranks for p in plans if p.tokens >= demand.enough]
    return min(roomy or [p.ranks for p in plans if p.fits], default=None)


def _filled(demand: Demand, footprint: Footprint, ranks: int, free: float) -> Plan:
    takes = {"weights": footprint.per_gpu(ranks), "drafter": demand.drafter.per_gpu(ranks)}
    if demand.vision:
        takes["vision"] = demand.vision
    if ranks > 1:
        takes["mailboxes"] = demand.mailboxes
    rest = (free - sum(takes.values())) * (1 - demand.fraction)
    takes |= {"kept free": max(rest, 0.0), "graphs": demand.graphs, "workspace": demand.workspace(ranks)}
    takes["drafter"] += demand.scratch.per_gpu(ranks)  # part of `fraction`
    return Plan(demand, footprint, ranks, free, takes, free - sum(takes.values()))
