"""How far a converted checkpoint is from its source: weights, outputs of layers, logits, answers, size and speed.

Weights are compared as both checkpoints store them, so the report also shows that the result can be read. Both models
then compute the same text layer by layer: each layer's experts get the source's activations in both, and the logits are
compared token by token. So neither model has to fit the machine, except to answer problems. Answers are
greedy.
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.convert.nvfp4 import energy
from perilune.convert.stream import decibels
from perilune.convert.texts import Texts
from perilune.convert.walk import Walk
from perilune.core.errors import CheckpointError
from perilune.core.jsonfile import write_object
from perilune.core.sampling import SamplingParams
from perilune.engine.llm import LLM
from perilune.formats.checkpoint import Checkpoint
from perilune.loading.survey import read_linear, survey
from perilune.loading.weights_plan import row_step
from perilune.model.config import KimiConfig
from perilune.model.names import NESTED, ffn
from perilune.ops.linear.linear import linear
from perilune.tasks.families import FAMILIES, check, problems
from perilune.tasks.problem import Answer, Problem
from perilune.text.chat import next_tool_index, template_for
from perilune.text.stream import ChatStream, Content, ToolArguments, ToolStart
from perilune.text.tokenizer import Tokenizer

FOLDER = "quality"
WORST = 10
ANSWER_TOKENS = 256
SPLIT = "heldout"
COLOURS = ("#bbbbbb", "#3b6fb6")
ROWS, VOCAB = 1024, 16384  # of logits that are compared at once; VOCAB is a multiple of 128

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Weights:
    """losses: (layer, sum of squares, sum of squares of the difference) of layers in different formats; bytes of both
    checkpoints."""

    losses: tuple[tuple[str, float, float], ...]
    source_bytes: int
    bytes: int

    @property
    def sqnr_db(self) -> float:
        return decibels(sum(s for _, s, _ in self.losses), sum(e for *_, e in self.losses))


@dataclass(frozen=True, slots=True)
class Outputs:
    """For T tokens: divergence [T] float64, KL in nats of the result's next-token distribution from the source's;
    agreed [T] bool, whether both have the same most likely token. layers, for each layer's experts or MLP: sum of
    squares of the source's output, and of the difference of the result's output for the same input.
    """

    divergence: Tensor
    agreed: Tensor
    layers: tuple[tuple[float, float], ...]


def measure(
    source: Path, result: Path, *, texts: Texts, problems: int, device: torch.device, say: Say = lambda line: None
) -> dict[str, Any]:
    """A row of plain values, the lists `worst`, `tensors_db` and `layers_db`, and the tables of scores.

    texts     what logits and outputs are compared on
    problems  number of problems of each task family; 0 leaves the answers out
    say       called with a line for each stage
    """
    say("comparing weights")
    weights = compare_weights(source, result)
    if not weights.losses:
        raise CheckpointError(f"{result} stores every layer as {source} does: there is nothing to compare")
    each = sorted((_finite(decibels(s, e)), name) for name, s, e in weights.losses)
    row: dict[str, Any] = {
        "source": source.name,
        "result": result.name,
        "format": KimiConfig.from_directory(result).quantization,
        "source_gb": round(weights.source_bytes / 1e9, 4),
        "gb": round(weights.bytes / 1e9, 4),
        "layers_changed": len(weights.losses),
        "sqnr_db": _finite(weights.sqnr_db),
        "worst_db": each[0][0],
        "worst": [[name, db] for db, name in each[:WORST]],
        "tensors_db": [db for db, _ in each],
    }
    say(f"comparing outputs over {texts.tokens:,} tokens ({texts.kind})")
    seen = compare_outputs(source, result, texts, device, {name for name, *_ in weights.losses})
    row |= {
        "tokens": texts.tokens,
        "text": texts.kind,
        "kl_nats": seen.divergence.mean().item(),
        "kl_highest": seen.divergence.max().item(),
        "top1_agreement": seen.agreed.double().mean().item(),
        "layers_db": [_finite(decibels(s, e)) for s, e in seen.layers],
    }
    if problems and (source / "tiktoken.model").is_file():
        for key, path in (("source_", source), ("", result)):
            say(f"answering problems with {path.name}")
            scores, speed = _scores(path, problems, device)
            row |= {f"{key}scores": scores, f"{key}tokens_per_s": round(speed, 1)}
            row[f"{key}score"] = round(sum(scores.values()) / len(scores), 4)
    return row


def faults(row: dict[str, Any], *, min_sqnr: float | None, max_kl: float | None) -> list[str]:
    """The figures that exceed the bounds."""
    found = []
    if min_sqnr is not None and row["worst_db"] < min_sqnr:
        found.append(f"SQNR of {row['worst'][0][0]} is {row['worst_db']:.2f} dB, the bound {min_sqnr:g}")
    if max_kl is not None and not row["kl_nats"] <= max_kl:
        found.append(f"mean KL is {row['kl_nats']:.3g} nats, the bound {max_kl:g}")
    return found


def table(row: dict[str, Any]) -> list[str]:
    """A row for each checkpoint: size, errors, scores in per cent, tokens per second; then details."""
    columns: dict[str, tuple[str, str]] = {
        "checkpoint": (row["source"], row["result"]),
        "GB": (f"{row['source_gb']:.3f}", f"{row['gb']:.3f}"),
        "weights dB": ("", f"{row['sqnr_db']:.2f}"),
        "worst dB": ("", f"{row['worst_db']:.2f}"),
        "outputs dB": ("", f"{min(row['layers_db']):.1f}"),
        "KL nats": ("", f"{row['kl_nats']:.3e}"),
        "top-1 %": ("", f"{100 * row['top1_agreement']:.2f}"),
    }
    for name, score in row.get("scores", {}).items():
        columns[name] = (f"{100 * row['source_scores'][name]:.1f}", f"{100 * score:.1f}")
    for name, value in row.get("lm_eval", {}).items():
        columns[name] = (f"{row['source_lm_eval'].get(name, math.nan):.4g}", f"{value:.4g}")
    if "tokens_per_s" in row:
        columns["tok/s"] = (f"{row['source_tokens_per_s']:,.0f}", f"{row['tokens_per_s']:,.0f}")
    widths = [max(map(len, (name, *values))) for name, values in columns.items()]
    rows = [list(columns), *([values[k] for values in columns.values()] for k in (0, 1))]
    return [
        *("  ".join(cell.rjust(width) for cell, width in zip(cells, widths)) for cells in rows),
        f"weights: SQNR over {row['layers_changed']:,} layers now {row['format']}; worst:",
        *(f"  {db:8.2f} dB  {name}" for name, db in row["worst"]),
        f"outputs: of each layer's experts, on the source's inputs: {' '.join(f'{db:.1f}' for db in row['layers_db'])}",
        f"logits: {row['tokens']:,} tokens ({row['text']}), highest KL of one {row['kl_highest']:.2e}",
    ]


def write(row: dict[str, Any], directory: Path) -> None:
    """report.json, report.txt and report.svg below the result's directory."""
    folder = directory / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        write_object(folder / "report.json", row)
        (folder / "report.txt").write_text("\n".join(table(row)) + "\n")
        (folder / "report.svg").write_text(plot(row))
    except OSError as e:
        raise CheckpointError(f"cannot write the report in {folder}: {e.strerror}") from e


def plot(row: dict[str, Any]) -> str:
    """An SVG with three panels: SQNR of changed layers' weights; of every layer's output; scores (source in grey)."""
    panels = [
        ("weights, worst first", [[min(db, 100.0) for db in row["tensors_db"]]]),
        ("outputs of layers, first to last", [[min(db, 100.0) for db in row["layers_db"]]]),
    ]
    if names := list(row.get("scores", {})):
        sides = [[100 * row[key][name] for name in names] for key in ("source_scores", "scores")]
        panels.append((f"scores in %: {', '.join(names)}", sides))
    drawn = "".join(_panel(30 + 400 * k, title, series) for k, (title, series) in enumerate(panels))
    width = 30 + 400 * len(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="300" font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="300" fill="white"/>'
        f'<text x="30" y="22" font-size="15">{_escape(row["result"])}: SQNR in dB</text>{drawn}</svg>\n'
    )


def _panel(x: int, title: str, series: Sequence[Sequence[float]], width: int = 350, height: int = 200) -> str:
    """Bars, those of the series side by side."""
    values = [v for some in series for v in some]
    low, high = min(0.0, *values), max(1.0, *values)
    bottom, step = 260, width / len(values)

    def y(value: float) -> float:
        return bottom - height * (value - low) / (high - low)

    ticks = "".join(
        f'<line x1="{x}" x2="{x + width}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="#ddd"/>'
        f'<text x="{x - 4}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.0f}</text>'
        for v in (low, (low + high) / 2, high)
    )
    bars = "".join(
        f'<rect x="{x + (i * len(series) + k) * step:.2f}" y="{y(v):.1f}" width="{max(step * 0.9, 0.5):.2f}" '
        f'height="{bottom - y(v):.1f}" fill="{COLOURS[k - len(series)]}"/>'
        for k, some in enumerate(series)
        for i, v in enumerate(some)
    )
    return f'{ticks}{bars}<text x="{x}" y="282">{_escape(title)}</text>'


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _finite(db: float) -> float:
    """For JSON, which has no infinity: 999 dB means no error at all."""
    return round(db, 4) if math.isfinite(db) else math.copysign(999.0, db)


# ---- weights and outputs ------------------------------------------------------------------------------------------


def compare_weights(source: Path, result: Path) -> Weights:
    with Checkpoint.open(source) as a, Checkpoint.open(result) as b:
        old, new = survey(a, KimiConfig.from_directory(source)), survey(b, KimiConfig.from_directory(result))
        if old.shapes != new.shapes:
            raise CheckpointError(f"{result} and {source} are not of one model: their layers differ")

        def loss(name: str) -> tuple[str, float, float]:
            rows, inputs = old.shapes[name]
            signal = error = 0.0
            for begin in range(0, rows, row_step(inputs)):
                part = slice(begin, min(begin + row_step(inputs), rows))
                exact = read_linear(a, old, name, torch.float32, rows=part)
                signal += energy(exact)
                error += energy(read_linear(b, new, name, torch.float32, rows=part) - exact)
            return old.prefix + name, signal, error

        changed = [name for name in old.formats if old.formats[name] != new.formats[name]]
        with ThreadPoolExecutor(2, thread_name_prefix="compare") as pool:
            return Weights(tuple(pool.map(loss, changed)), a.nbytes, b.nbytes)


def compare_outputs(
    source: Path, result: Path, texts: Texts, device: torch.device, changed: set[str], dtype: torch.dtype | None = None
) -> Outputs:
    """`changed` names the linear layers that differ; `dtype`: default bfloat16 on a GPU, float32 on a CPU."""
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    changed, layers = {name.removeprefix(NESTED) for name in changed}, []
    with Checkpoint.open(source) as one, Checkpoint.open(result) as other, torch.inference_mode():
        a, b = (Walk(c, texts.sequences, dtype=dtype, device=device) for c in (one, other))
        for i in a.layers:
            a.attend(i)
            b.attend(i)
            mine = a.ffn(i, a.x)
            if any(name.startswith(ffn(i)) for name in changed):
                both = b.ffn(i, torch.cat([a.x, b.x]))  # in one call, so that each expert is read once
                theirs, own = torch.split(both, len(a.x))
                layers.append((energy(mine), energy(theirs - mine)))
            else:
                own = b.ffn(i, b.x)
                layers.append((energy(mine), 0.0))
            a.add(i, mine)
            b.add(i, own)
        return Outputs(*divergence(a, b), tuple(layers))


def divergence(a: Walk, b: Walk) -> tuple[Tensor, Tensor]:
    """KL(a || b) of every token's successor in nats, [T] float64, and whether both have the same most likely token.

    Goes through the vocabulary in pieces with running sums: whole rows of logits are never stored.
    """
    count, device, wide = len(a.x), a.x.device, torch.float64
    highest = torch.full((2, count), -math.inf, dtype=wide, device=device)
    likeliest = torch.zeros(2, count, dtype=torch.int64, device=device)
    total, cross = torch.zeros(2, count, dtype=wide, device=device), torch.zeros(count, dtype=wide, device=device)
    for begin in range(0, a.vocab, VOCAB):
        heads = [walk.head(slice(begin, min(begin + VOCAB, a.vocab))) for walk in (a, b)]
        for first in range(0, count, ROWS):
            rows = slice(first, first + ROWS)
            p, q = (linear(walk.x[rows], head, True) for walk, head in zip((a, b), heads))
            for k, logits in enumerate((p, q)):
                top, where = logits.max(-1)
                likeliest[k, rows] = torch.where(top > highest[k, rows], where + begin, likeliest[k, rows])
                higher = torch.maximum(highest[k, rows], top.double())
                fade = (highest[k, rows] - higher).exp()
                terms = (logits - higher.float()[:, None]).exp()
                total[k, rows] = total[k, rows] * fade + terms.sum(-1, dtype=wide)
                if k == 0:
                    cross[rows] = cross[rows] * fade + (terms * (p - q)).sum(-1, dtype=wide)
                highest[k, rows] = higher
    normaliser = highest + total.log()
    return (cross / total[0] - normaliser[0] + normaliser[1]).cpu(), (likeliest[0] == likeliest[1]).cpu()


# ---- answers -----------------------------------------------------------------------------------------------------


def _scores(path: Path, count: int, device: torch.device) -> tuple[dict[str, float], float]:
    """The share of right greedy answers by family, without thoughts, and tokens generated per second."""
    names = [f.name for f in FAMILIES.values() if f.evaluated]
    asked = [p for name in names for p in problems(name, SPLIT, count, thinking=False)]
    with LLM(path, device=device.type) as llm:
        tokenizer, template = Tokenizer.from_directory(path), template_for(path)
        prompts = [template.render_ids(tokenizer, p.messages, tools=p.tools or None, thinking=False) for p in asked]
        begin = time.perf_counter()
        done = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS))
        seconds = time.perf_counter() - begin
        ends = frozenset(llm.info.stop_token_ids)
    right = dict.fromkeys(names, 0)
    for problem, completion in zip(asked, done):
        right[problem.family] += check(problem, _answer(tokenizer, problem, completion.token_ids, ends))
    speed = sum(len(c.token_ids) for c in done) / seconds
    return {name: n / count for name, n in right.items()}, speed


def _answer(tokenizer: Tokenizer, problem: Problem, ids: Sequence[int], ends: frozenset[int]) -> Answer:
    stream = ChatStream(
        tokenizer,
        thinking=False,
        tools=problem.tools or None,
        first_tool_index=next_tool_index(problem.messages),
        end_ids=ends,
    )
    events = [*stream.feed(ids), *stream.finish()]
    content = "".join(e.text for e in events if isinstance(e, Content))
    calls: dict[int, tuple[str, str]] = {}
    for e in events:
        if isinstance(e, ToolStart):
            calls[e.index] = (e.name, "")
        elif isinstance(e, ToolArguments):
            calls[e.index] = (calls[e.index][0], calls[e.index][1] + e.text)
    return Answer(content, tuple(calls.values()))
