"""docs/speed.md, README.md: the whole model on several GPUs, predicted from rows of a few layers, and measured."""

from collections.abc import Mapping
from typing import Any

from runs.docs.ledger import RESULTS, Row
from runs.four_gpus.predictions import predictions, read
from runs.four_gpus.setting import ACCEPTED, DECODING, WANTED, Setting, Sizes

BENCHES = ("decode", "prefill", "aa", "arrivals")
LAYERS = 61
SIZES = Sizes()

# Figures in the order of the table: name, words, unit, digits behind the point.
FIGURES = [
    ("step ms", f"step, 1 request at {SIZES.prompt:,} tokens, no drafts", "ms", 2),
    ("tokens_per_s", "the same", "tokens/s", 0),
    ("verify ms at 1024", "step that verifies 3 drafts of 1 request, at 1,024 tokens", "ms", 2),
    ("verify ms at 10000", "the same at 10,000 tokens", "ms", 2),
    ("tokens_per_s of 16", "16 requests at 1,024 tokens, together", "tokens/s", 0),
    ("tokens_per_s of 64", "64 requests at 1,024 tokens, together", "tokens/s", 0),
    ("p99 over median of 16", "16 requests while prompts come, p99 of intervals between tokens", "medians", 2),
    ("p99 over median of 64", "64 requests while prompts come, p99 of intervals between tokens", "medians", 2),
    ("prefill ms a layer", f"prompt of {SIZES.prompt:,} tokens, a layer", "ms", 2),
    ("ttft_s cold", "first token of such a prompt", "s", 3),
    ("ttft_s cached", "the same, 90 % of it cached", "s", 3),
    (f"ttft_s beside {DECODING}", f"first token of 1,024 tokens beside {DECODING} users that decode", "s", 3),
    ("output_tokens_per_s", f"Artificial Analysis, 3 drafts, {ACCEPTED} tokens a cycle declared", "tokens/s", 0),
    ("output_tokens_per_s plain", "the same without drafts", "tokens/s", 0),
    ("ttft_s of the longest", f"first token of {SIZES.context:,} tokens, KV sharded", "s", 1),
]


def whole() -> str:
    """Four and eight GPUs: predicted, wanted, measured."""
    settings = (Setting(4), Setting(8))
    found = [(with_steps(_predicted(s)), with_steps(_measured(s.tp, LAYERS))) for s in settings]
    rounded = {figure: row["measured"] for figure, row in _rows(4, LAYERS, rounded=True).items()}
    lines = [
        "| Kimi K2.5, 61 layers, FP8 rest, compact scales, FP8 cache | 4 GPUs: predicted | wanted | measured "
        "| with FP8 activations | 8 GPUs: predicted | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    wanted = {figure: value for (_, figure), (value, _) in WANTED.items()}
    for name, words, unit, digits in FIGURES:
        (of_4, real_4), (of_8, real_8) = found
        four = of_4.get(name), wanted.get(name), real_4.get(name), rounded.get(name)
        cells = (*four, of_8.get(name), real_8.get(name))
        if any(isinstance(c, float | int) for c in cells):
            shown = " | ".join(_shown(c, digits) for c in cells)
            lines.append(f"| {words}, {unit} | {shown} |")
    missing = sorted({value for of, _ in found for value in of.values() if isinstance(value, str)})
    return "\n".join([*lines, *([""] if missing else []), *(f"Not predicted: {words}." for words in missing)])


def four() -> str:
    """Speed of the whole model on four GPUs, for one user and for many, for README's first screen."""
    of = _measured(4, LAYERS)
    served = _rows(4, LAYERS, rounded=True) or _rows(4, LAYERS)
    row = served["output_tokens_per_s"]
    lines = [
        f"All {LAYERS} layers of Kimi K2.5 on four {row['gpu']}s (random weights, INT4 experts, FP8 rest and cache):",
        "",
        f"- one user, {SIZES.prompt:,} tokens in and {SIZES.answer:,} out, over HTTP, with FP8 activations: "
        f"{row['measured']:,.0f} tokens/s with 3 drafts ({ACCEPTED} tokens a cycle, declared); "
        f"{of['tokens_per_s']:,.0f} without, in the engine",
        f"- 64 users with {SIZES.short:,} tokens each, in the engine: {of['tokens_per_s of 64']:,.0f} tokens/s "
        "together",
        f"- first token of {SIZES.prompt:,} tokens over HTTP, with FP8 activations: after "
        f"{served['ttft_s cold']['measured']:.2f} s, {served['ttft_s cached']['measured']:.2f} s where 90 % are "
        f"cached; of {SIZES.context:,} tokens, in the engine: {of['ttft_s of the longest']:.0f} s",
    ]
    return "\n".join(lines)


def two() -> str:
    """The figures measured with 27 layers on two GPUs."""
    measured = with_steps(_measured(2, 27))
    lines = ["| Kimi K2.5, 27 of 61 layers, two GPUs, FP8 rest, compact scales | measured |", "|---|---|"]
    for name, words, unit, digits in FIGURES:
        if name in measured:
            lines.append(f"| {words}, {unit} | {_shown(measured[name], digits)} |")
    return "\n".join(lines) if len(lines) > 2 else "No rows yet."


def with_steps(figures: Mapping[str, Any]) -> dict[str, Any]:
    """`figures` with the time of one request's step, in ms, added."""
    plain = figures.get("tokens_per_s")
    return {**figures, "step ms": 1e3 / plain} if isinstance(plain, float | int) else dict(figures)


def _predicted(setting: Setting) -> dict[str, Any]:
    """Predictions by figure; for a measured figure, the prediction that was made before and that its row keeps."""
    before = {f: r["predicted"] for f, r in _rows(setting.tp, LAYERS).items() if r.get("predicted") is not None}
    return {**predictions(setting, RESULTS), **before}


def _measured(gpus: int, layers: int) -> dict[str, Any]:
    return {figure: row["measured"] for figure, row in _rows(gpus, layers).items()}


def _rows(gpus: int, layers: int, *, rounded: bool = False) -> dict[str, Row]:
    """The newest row of each figure, with activations in bfloat16 or, if `rounded`, prompts' activations in FP8."""
    rows: list[Row] = [row for bench in BENCHES for row in read(RESULTS, bench)]
    wanted = {"run": "four-gpus", "gpus": gpus, "layers": layers, "shape": "kimi-k2.5"}
    found = [row for row in rows if wanted.items() <= row.items() and row.get("fp8_activations", False) == rounded]
    return {row["figure"]: row for row in found}


def _shown(value: Any, digits: int) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, float | int) else "-"
