"""Tables of the pages, in Markdown."""

import dataclasses
import json
import typing
from dataclasses import dataclass
from pathlib import Path

from perilune.core import config
from perilune.core.config import EngineConfig, ServerConfig
from runs.docs.ledger import PEER, PEER_DECODE, PEER_PREFILL, Row, latest, plain, rows

ROOT = Path(__file__).parents[2]

# The rows of README's table and its chart: (bench, requests at once, context) or (bench, tokens).
FIRST_SCREEN = (
    ("decode", 1, 1024), ("decode", 4, 1024), ("decode", 16, 1024), ("decode", 64, 1024), ("decode", 1, 102400),
    ("prefill", 10000),
)  # fmt: skip

# The files to read first, in the order of a request.
FILES = {
    "perilune/engine/engine.py": "the loop: plan step N+1 while step N runs; **start here**",
    "perilune/engine/scheduler.py": "which request advances by how many tokens (pure Python)",
    "perilune/engine/requests/queue.py": "the requests that wait, and which is admitted next (pure Python)",
    "perilune/engine/batch.py": "a plan becomes tensors",
    "perilune/engine/graphs/decode.py": "a decode step as one CUDA graph",
    "perilune/model/kimi_k2.py": "the model, as in the paper",
    "perilune/ops/attention/mla_absorbed.py": "one op, one file: contract, cases, reference, implementations",
    "perilune/ops/moe/cpu/experts.cpp": "the routed experts on CPU, straight from packed INT4",
    "perilune/ops/linear/sm90/linear.cu": "reads weights at the memory's rate: the shortest CUDA kernel",
    "perilune/ops/moe/sm90/moe_int4_mma_tma.cu": "the MoE block of a decode step on INT4 experts",
    "perilune/kv/prefix.py": "prefix tree over KV blocks",
    "perilune/loading/load.py": "loads checkpoints: checked, in parallel, in bounded memory",
    "perilune/formats/int4.py": "the INT4 format of checkpoints (pack-quantized)",
    "perilune/text/chat.py": "messages to prompt, the family's templates",
    "perilune/grammar/enforcer.py": "tool calls and structured answers, enforced token by token",
    "perilune/text/stream.py": "tokens to reasoning, content and tool calls",
    "perilune/server/turn.py": "from a request body to an assistant turn, for every API",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of README's table: one layer, in `unit`."""

    what: str
    ours: float
    floor: float
    peer: float
    unit: str
    row: Row


def first_screen() -> list[Measured]:
    made = []
    for bench, *sizes in FIRST_SCREEN:
        keys = ("batch", "context") if bench == "decode" else ("tokens",)
        row = next(r for r in latest(bench, shapes=True) if plain(r) and [r[k] for k in keys] == sizes)
        if bench == "decode":
            batch, context = sizes
            what = f"decode, {batch} {'user' if batch == 1 else 'users'}, context {context:,}"
            ours, floor = row["us_per_layer"], row["floor_us_per_layer"]
            made.append(Measured(what, ours, floor, PEER_DECODE[batch, context], "us", row))
        else:
            (tokens,) = sizes
            ours, floor = row["ms_per_layer"], row["floor_ms_per_layer"]
            made.append(Measured(f"prefill, {tokens:,} tokens", ours, floor, PEER_PREFILL[tokens], "ms", row))
    return made


def speed() -> str:
    """README's only table."""
    shown = first_screen()
    (gpu,), commits = {m.row["gpu"] for m in shown}, sorted({m.row["commit"] for m in shown})
    lines = [
        f"| one MoE layer of Kimi K2.5, one {gpu} | Perilune | floor | floor / Perilune | {PEER} | {PEER} / Perilune |",
        "|---|---|---|---|---|---|",
    ]
    for m in shown:
        lines.append(
            f"| {m.what} | {m.ours:g} {m.unit} | {m.floor:g} {m.unit} | {100 * m.floor / m.ours:.0f} % "
            f"| {m.peer:g} {m.unit} | {m.peer / m.ours:.2f} |"
        )
    return "\n".join([*lines, "", f"Measured at {', '.join(commits)}; INT4 experts, everything else in bf16."])


def layers() -> str:
    """Times of one MoE layer of full shapes on one GPU, with the peer's."""
    lines = [
        f"| one MoE layer, Kimi K2.5 shapes | Perilune | floor | of floor | {PEER} | ratio | on | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def line(what: str, r: Row, ours: float, floor: float, peer: float | None, unit: str) -> str:
        beside = f"{peer:g} {unit} | {peer / ours:.2f}" if peer else "- | -"
        return (
            f"| {what}, {r['rest_dtype']} rest | {ours:g} {unit} | {floor:g} {unit} | {100 * r['fraction']:.0f} % | "
            f"{beside} | {r['gpu']} | {r['commit']} |"
        )

    shapes = latest("decode", shapes=True)
    for r in sorted(shapes, key=lambda r: (r["rest_dtype"], r["kv_dtype"], r["draft"], r["batch"], r["context"])):
        peer = PEER_DECODE.get((r["batch"], r["context"])) if plain(r) else None
        what = f"decode, {r['batch']} at once, context {r['context']:,}"
        what += ", compact scales" if r["expert_format"] == "int4-compact" else ""
        what += f", verifying {r['draft']} drafts" if r["draft"] else ""
        what += ", FP8 cache" if r["kv_dtype"] == "fp8" else ""
        lines.append(line(what, r, r["us_per_layer"], r["floor_us_per_layer"], peer, "us"))
    prompts = latest("prefill", shapes=True)
    for r in sorted(prompts, key=lambda r: (r.get("cached") or 0, r["expert_format"] != "int4-g32", r["tokens"])):
        cached, compact = r.get("cached") or 0, r["expert_format"] == "int4-compact"
        peer = PEER_PREFILL.get(r["tokens"]) if plain(r) else None
        what = f"prefill, {r['tokens']:,} tokens"
        what += f" after {cached:,} cached" if cached else ""
        what += ", compact scales" if compact else ""
        lines.append(line(what, r, r["ms_per_layer"], r["floor_ms_per_layer"], peer, "ms"))
    return "\n".join(lines)


def power() -> str:
    """Energy of a prompt's layer, and the least time at the power limit."""
    lines = [
        "| prefill, one layer | Perilune | energy | least time at the limit | of least | "
        "J per 10^12 FLOPs, bf16 / e4m3 | J per GB | commit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = [r for r in latest("prefill", shapes=True) if "joules_per_layer" in r]
    for r in sorted(found, key=lambda r: (r["rest_dtype"], r["cached"], r["tokens"])):
        behind = f" after {r['cached']:,} cached" if r["cached"] else ""
        lines.append(
            f"| {r['tokens']:,} tokens{behind}, {r['rest_dtype']} rest | {r['ms_per_layer']:.2f} ms "
            f"| {r['joules_per_layer']:.2f} J | {r['least_ms_at_limit']:.2f} ms | {100 * r['fraction_at_limit']:.0f} % "
            f"| {r['joules_per_tera_flop']:.2f} / {r['joules_per_tera_flop8']:.2f} | {r['joules_per_gigabyte']:.3f} "
            f"| {r['commit']} |"
        )
    return "\n".join(lines)


def cycles() -> str:
    """Whole cycles of speculation at full shapes, the newest of each kind of draft model."""
    newest: dict[tuple[object, ...], Row] = {}
    for row in rows("decode"):
        if "whole_over_plain" in row and row["balanced"]:
            newest[row["batch"], row["context"], row["rest_dtype"], row["draft"], row["drafter"]] = row
    lines = [
        "| Kimi K2.5 shapes, 61 layers, one user | draft model | plain step | cycle | drafting | tokens a cycle "
        "| over plain | on | commit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key in sorted(newest):
        r = newest[key]
        lines.append(
            f"| {r['draft']} drafts a cycle, context {r['context']:,}, {r['rest_dtype']} rest | EAGLE-3 in "
            f"{r['drafter'].rsplit(', ', 1)[1]} | {r['whole_plain_ms']:.2f} ms | {r['whole_step_ms']:.2f} ms | "
            f"{100 * r['draft_share']:.1f} % | {r['acceptance_length']:g} ({r['acceptance']}) | "
            f"{r['whole_over_plain']:.2f} | {r['gpu']} | {r['commit']} |"
        )
    return "\n".join(lines)


def pictures() -> str:
    """The tower, and decoding while pictures come: the newest rows of each size of pictures and batch."""
    lines = ["| Kimi K2.5's tower, random weights | served | on | commit |", "|---|---|---|---|"]
    for r in {r["pixels"]: r for r in rows("vision")}.values():
        share = f"{100 * r['served_fraction']:.0f} % of {r['ceiling_tflops']:g} TFLOP/s"
        lines.append(f"| {r['pixels']} pixels | {r['served_ms']:.1f} ms, {share} | {r['gpu']} | {r['commit']} |")
    for n, r in {r["decoding"]: r for r in rows("arrivals") if "picture" in r}.items():
        what = f"{n} requests, {r['layers']} layers, a picture of {r['picture']} pixels every {r['every_s']:g} s"
        busy = r["busy_p99_ms"] / r["quiet_median_ms"]
        p99 = f"p99 between tokens {r['p99_over_median']:.2f} medians, {busy:.1f} while a picture's prompt waits"
        lines.append(f"| {what} | {p99} | {r['gpu']} | {r['commit']} |")
    return "\n".join(lines)


KERNELS = {"cuda_tall": "tall tiles", "cuda_cluster": "clusters", "cuda_prefill": "grouped", "cuda": "mma"}


def experts() -> str:
    """Routed experts of one layer: every implementation that was timed in a run, and the peer's in the same run."""
    newest = {(r["width"], r["expert_format"], r["tokens"]): r for r in rows("experts")}
    lines = [
        f"| routed experts of a K2.5 layer, us | {' | '.join(KERNELS.values())} | humming-kernels | "
        "humming-kernels / our fastest | SM MHz | commit |",
        "|---" * (len(KERNELS) + 5) + "|",
    ]
    for key in sorted(newest, key=lambda k: (-k[0], k[1] != "int4-g32", k[2])):
        (width, form, tokens), r = key, newest[key]
        found = {r["impl"]: r["us"]} | {
            name: min(us, r["us"] if name == r["impl"] else us) for name, us in r["impls_us"].items()
        }
        best, peer = min(found.values()), r["peer_us"]
        what = f"{tokens:,} token{'s' if tokens > 1 else ''}" + (f", width {width}" if width != 2048 else "")
        what += ", compact scales" if form == "int4-compact" else ""
        cells = [f"{found[name]:,.0f}" if name in found else "-" for name in KERNELS]
        cells += [f"{peer:,.0f}", f"{peer / best:.2f}"] if peer else ["-", "-"]
        lines.append(f"| {what} | {' | '.join(cells)} | {r['sm_mhz']:,} | {r['commit']} |")
    return "\n".join(lines)


def nano_speed() -> str:
    """Whole engine steps of kimi-nano."""
    lines = [
        "| decode, whole engine step | tok/s per user | tok/s together | step | of ceiling | measured on | commit |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in sorted(latest("decode"), key=lambda r: (r["model"], str(r["gpu"]), r["batch"], r["context"])):
        where = r["gpu"] or f"{r['cpu']}, torch {r['torch']}"
        lines.append(
            f"| {r['model']} ({r['expert_format']} experts, {r['rest_dtype']} rest), {r['batch']} at once, "
            f"context {r['context']} | {r['tokens_per_s'] / r['batch']:,.0f} | {r['tokens_per_s']:,.0f} | "
            f"{r['step_ms']:.2f} ms | {100 * r['fraction']:.0f} % | {where} | {r['commit']} |"
        )
    return "\n".join(lines)


def nano() -> str:
    """A description of the bundled model, from the record of its training."""
    trained = json.loads((ROOT / "perilune/bundled/kimi-nano/training.json").read_text())
    minutes, stage = 0.0, trained
    while stage:
        eyes = stage.get("eyes", {})
        minutes += stage["minutes"] * stage.get("gpus", 1) + eyes.get("minutes", 0) + eyes.get("earlier_minutes", 0)
        stage = stage.get("before")
    return (
        f"kimi-nano is a demonstration of checked skills, not a chat model: {trained['parameters'] / 1e6:.0f} million "
        f"parameters, trained from nothing\nin {minutes:.0f} minutes of one {trained['device']} by "
        "[runs/kimi-nano.sh](runs/kimi-nano.sh). Its [card](perilune/bundled/kimi-nano/README.md) has its scores."
    )


def files() -> str:
    return "\n".join(["| file | what |", "|---|---|", *(f"| `{name}` | {what} |" for name, what in FILES.items())])


def engine_keys() -> str:
    return _keys(EngineConfig)


def server_keys() -> str:
    return _keys(ServerConfig)


def _keys(kind: type[EngineConfig] | type[ServerConfig]) -> str:
    lines, hints = ["| key | value | default | meaning |", "|---|---|---|---|"], typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        default = "" if field.default in (None, (), dataclasses.MISSING) else f"`{json.dumps(field.default)}`"
        lines.append(f"| `{field.name}` | {config.spelled(hints[field.name])} | {default} | {field.metadata['help']} |")
    return "\n".join(lines)
