"""How far a converted checkpoint is from its source: weights, outputs of layers, logits, answers, size and speed.

Weights are compared as both checkpoints store them, so the report also proves that what was written reads back. Both
models then see the same text, problems of the bundled task families with their answers: each layer's experts get the
source's activations in both, and the logits are compared token by token. Answers are greedy.
"""

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.convert.nvfp4 import energy
from perilune.convert.stream import decibels
from perilune.core.errors import CheckpointError
from perilune.core.sampling import SamplingParams
from perilune.engine.llm import LLM
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.jsonfile import write_object
from perilune.kv.pages import Pages
from perilune.model.config import KimiConfig
from perilune.model.kimi_k2 import KimiK2, Span, Step
from perilune.model.load import load, row_step
from perilune.model.survey import read_linear, survey
from perilune.model.weights import Mlp, Moe, Weights
from perilune.tasks.families import FAMILIES, check, problems
from perilune.tasks.problem import Answer, Problem, assistant
from perilune.text.chat import next_tool_index, template_for
from perilune.text.stream import ChatStream, Content, ToolArguments, ToolStart
from perilune.text.tokenizer import Tokenizer

FOLDER = "quality"
LONGEST = 512  # tokens of one sequence
BLOCK = 64
WORST = 10
ANSWER_TOKENS = 256
SPLIT = "heldout"


@dataclass(slots=True)
class Outputs:
    """Sums over all tokens compared."""

    tokens: int
    agreed: int
    divergence: float
    highest: float
    layers: list[tuple[float, float]]  # energies of the source's output and of the difference


class Twin(KimiK2):
    """The source, which also runs the other model's experts on its own activations."""

    def __init__(self, config: KimiConfig, weights: Weights, other: Weights, max_positions: int) -> None:
        super().__init__(config, weights, max_positions=max_positions)
        self._counterpart = {id(a.ffn): (i, b.ffn) for i, (a, b) in enumerate(zip(weights.layers, other.layers))}
        self.layers = [(0.0, 0.0) for _ in weights.layers]

    def _ffn(self, w: Mlp | Moe, x: Tensor) -> Tensor:
        out = super()._ffn(w, x)
        i, other = self._counterpart[id(w)]
        mine, theirs = _whole(out), _whole(super()._ffn(other, x))
        signal, error = self.layers[i]
        self.layers[i] = signal + energy(mine), error + energy(theirs - mine)
        return out


def measure(source: Path, result: Path, *, tokens: int, problems: int, say: Any = lambda line: None) -> dict[str, Any]:
    """One flat row but for the lists `worst`, `tensors_db`, `layers_db` and the table `scores`.

    tokens    at least so many are compared
    problems  of each task family; 0 leaves the answers out
    say       is told what is being done
    """
    say("comparing weights")
    losses, sizes = _weights(source, result)
    row: dict[str, Any] = {
        "source": source.name,
        "result": result.name,
        "format": KimiConfig.from_directory(result).quantization,
        "source_gb": round(sizes[0] / 1e9, 4),
        "gb": round(sizes[1] / 1e9, 4),
        "layers_changed": len(losses),
    }
    if not losses:
        raise CheckpointError(f"{result} stores every layer as {source} does: there is nothing to compare")
    each = sorted((_finite(decibels(s, e)), name) for name, s, e in losses)
    row |= {
        "sqnr_db": _finite(decibels(sum(s for _, s, _ in losses), sum(e for *_, e in losses))),
        "worst_db": each[0][0],
        "worst": [[name, db] for db, name in each[:WORST]],
        "tensors_db": [db for db, _ in each],
    }
    say("comparing logits")
    texts, kind = _texts(source, tokens)
    seen = _outputs(source, result, texts)
    row |= {
        "tokens": seen.tokens,
        "text": kind,
        "kl_nats": seen.divergence / seen.tokens,
        "kl_highest": seen.highest,
        "top1_agreement": seen.agreed / seen.tokens,
        "layers_db": [_finite(decibels(s, e)) for s, e in seen.layers],
    }
    if problems and (source / "tiktoken.model").is_file():
        for key, path in (("source_", source), ("", result)):
            say(f"answering problems with {path.name}")
            scores, speed = _scores(path, problems)
            row |= {f"{key}scores": scores, f"{key}tokens_per_s": round(speed, 1)}
            row[f"{key}score"] = round(sum(scores.values()) / len(scores), 4)
    return row


def faults(row: dict[str, Any], *, min_sqnr: float | None, max_kl: float | None) -> list[str]:
    """What is worse than the bounds allow."""
    found = []
    if min_sqnr is not None and row["worst_db"] < min_sqnr:
        found.append(f"SQNR of {row['worst'][0][0]} is {row['worst_db']:.2f} dB, the bound {min_sqnr:g}")
    if max_kl is not None and not row["kl_nats"] <= max_kl:
        found.append(f"mean KL is {row['kl_nats']:.3g} nats, the bound {max_kl:g}")
    return found


def table(row: dict[str, Any]) -> list[str]:
    lines = [
        f"{row['result']} ({row['format']}) against {row['source']}",
        f"size               {row['gb']:.3f} GB, source {row['source_gb']:.3f} GB",
        f"weights            SQNR {row['sqnr_db']:.2f} dB over {row['layers_changed']:,} layers, worst:",
        *(f"  {db:8.2f} dB  {name}" for name, db in row["worst"]),
        f"outputs of layers  SQNR {' '.join(f'{db:.1f}' for db in row['layers_db'])} dB",
        f"logits             KL {row['kl_nats']:.3e} nats per token (highest {row['kl_highest']:.2e}), top-1 agrees in "
        f"{100 * row['top1_agreement']:.2f} % of {row['tokens']:,} tokens ({row['text']})",
    ]
    if "scores" in row:
        lines.append(f"answers            {'':<16}{'source':>8}{'result':>8}")
        for name, score in row["scores"].items():
            lines.append(f"  {name:<33}{100 * row['source_scores'][name]:7.1f}%{100 * score:7.1f}%")
        lines.append(f"  {'tokens per second':<33}{row['source_tokens_per_s']:8,.0f}{row['tokens_per_s']:8,.0f}")
    return lines


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
    """An SVG: SQNR of every changed layer's weights, worst first, and of every layer's output."""
    left = _panel(30, "weights, worst first", [min(db, 100.0) for db in row["tensors_db"]])
    right = _panel(430, "outputs of layers, first to last", [min(db, 100.0) for db in row["layers_db"]])
    title = f"{row['result']}: SQNR in dB"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="820" height="300" font-family="sans-serif" font-size="12">'
        f'<rect width="820" height="300" fill="white"/><text x="30" y="22" font-size="15">{_escape(title)}</text>'
        f"{left}{right}</svg>\n"
    )


def _panel(x: int, title: str, values: Sequence[float], width: int = 350, height: int = 200) -> str:
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
        f'<rect x="{x + i * step:.2f}" y="{y(v):.1f}" width="{max(step * 0.9, 0.5):.2f}" '
        f'height="{bottom - y(v):.1f}" fill="#3b6fb6"/>'
        for i, v in enumerate(values)
    )
    return f'{ticks}{bars}<text x="{x}" y="282">{_escape(title)}</text>'


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _finite(db: float) -> float:
    """For JSON, which has no infinity: 999 dB stands for no error at all."""
    return round(db, 4) if math.isfinite(db) else math.copysign(999.0, db)


# ---- weights -----------------------------------------------------------------------------------------------------


def _weights(source: Path, result: Path) -> tuple[list[tuple[str, float, float]], tuple[int, int]]:
    """(layer, energy, energy of the difference) of layers stored in another way, and both checkpoints' bytes."""
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
            return list(pool.map(loss, changed)), (a.nbytes, b.nbytes)


# ---- outputs -----------------------------------------------------------------------------------------------------


def _texts(source: Path, tokens: int) -> tuple[list[list[int]], str]:
    """Sequences of at least `tokens` tokens in all, and what they are."""
    config = KimiConfig.from_directory(source)
    longest = min(LONGEST, config.max_position_embeddings)
    found: list[list[int]] = []
    if not (source / "tiktoken.model").is_file():
        generator = torch.Generator().manual_seed(0)
        while sum(map(len, found)) < tokens:
            found.append(torch.randint(config.vocab_size, (longest,), generator=generator).tolist())
        return found, "random ids: the source has no tokenizer"
    tokenizer, template = Tokenizer.from_directory(source), template_for(source)
    for problem in _stream():
        messages = [*problem.messages, assistant(problem.reply)]
        ids = template.render_ids(
            tokenizer, messages, tools=problem.tools or None, thinking=problem.thinking, preserve_thinking=True
        )
        found.append(ids[-longest:])
        if sum(map(len, found)) >= tokens:
            break
    return found, "held-out problems with their answers"


def _stream() -> Iterator[Problem]:
    """Problems of all families in turn, half of them with thoughts, always the same ones."""
    seed = 0
    while True:
        for name in FAMILIES:
            yield from problems(name, SPLIT, 2, seed=seed, thinking=seed % 2 == 0)
        seed += 1


def _outputs(source: Path, result: Path, texts: Sequence[Sequence[int]]) -> Outputs:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config, weights = load(source, dtype=dtype, device=device)
    _, other = load(result, dtype=dtype, device=device)
    longest = max(map(len, texts))
    one = Twin(config, weights, other, longest)
    two = KimiK2(config, other, max_positions=longest)
    blocks = -(-longest // BLOCK)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    pages = Pages.allocate(config.num_hidden_layers, blocks, BLOCK, width, dtype, device)
    seen = Outputs(0, 0, 0.0, 0.0, one.layers)
    with torch.inference_mode():
        for ids in texts:
            step = _step(ids, blocks, device)
            p = one.logits(one.hidden(step, pages.data)).log_softmax(-1)
            q = two.logits(two.hidden(step, pages.data)).log_softmax(-1)
            divergence = (p.exp() * (p - q)).sum(-1, dtype=torch.float64)
            seen.tokens += len(ids)
            seen.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
            seen.divergence += float(divergence.sum())
            seen.highest = max(seen.highest, float(divergence.max()))
    return seen


def _step(ids: Sequence[int], blocks: int, device: torch.device) -> Step:
    """One request, computed at once."""
    count = len(ids)
    positions = torch.arange(count, device=device)
    span = Span(
        slice(0, count),
        torch.arange(blocks, dtype=torch.int32, device=device).unsqueeze(0),
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
    )
    return Step(torch.tensor(list(ids), device=device), positions, positions, None, span)


def _whole(out: Tensor) -> Tensor:
    return out.sum(1) if out.ndim == 3 else out.float()


# ---- answers -----------------------------------------------------------------------------------------------------


def _scores(path: Path, count: int) -> tuple[dict[str, float], float]:
    """The share of right greedy answers by family, without thoughts, and tokens generated per second."""
    names = [f.name for f in FAMILIES.values() if f.evaluated]
    asked = [p for name in names for p in problems(name, SPLIT, count, thinking=False)]
    with LLM(path) as llm:
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
