"""`perilune doctor`: is this checkpoint whole and consistent, what do its files say, and what runs it."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch

from perilune.core.errors import CheckpointError, shown
from perilune.core.files import exists
from perilune.core.jsonfile import read_object
from perilune.doctor import headers as shards_examine
from perilune.doctor import tensors as weights_examine
from perilune.doctor import vocabulary as text_examine
from perilune.doctor.finding import Finding
from perilune.engine.fit import expert_bytes, model_of
from perilune.engine.resolve import free_bytes
from perilune.engine.vision.open import require_alike
from perilune.formats import checksums as sums
from perilune.formats import hub
from perilune.formats.progress import progress
from perilune.formats.served import require_served
from perilune.loading.eagle3 import require_draft
from perilune.loading.survey import Survey
from perilune.media.limits import Limits
from perilune.model import names
from perilune.model.config import KimiConfig
from perilune.model.eagle3_config import DRAFTER
from perilune.model.moonvit_config import MoonVitConfig
from perilune.model.step_memory import SLACK_BYTES
from perilune.plan import memory
from perilune.server.service import read_generation_config

GB = 1e9
KV_BYTES = 2  # per KV value, in bfloat16
DRAFT_KEYS = 20  # keys of eagle_config that are shown; published drafts have up to 6
_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id", "media_placeholder_token_id")


@dataclass(slots=True)
class Report:
    model: str
    title: str = ""
    findings: list[Finding] = field(default_factory=list)
    sound: str = ""  # what was looked at and found right
    answers: dict[str, str] = field(default_factory=dict)
    rows: list[tuple[memory.Gpu, list[memory.Fit]]] = field(default_factory=list)  # per kind of GPU, by format
    machine: list[tuple[str, list[memory.Fit]]] = field(default_factory=list)  # the same for devices of this machine

    @property
    def wrong(self) -> bool:
        return any(f.severity == "wrong" for f in self.findings)


@click.command("doctor")
@click.argument("model", default=hub.BUNDLED)
@click.option("--revision", help="Branch, tag or commit of a hub repository.  [default: its main branch]")
@click.option(
    "--checksums/--no-checksums",
    default=True,
    help="Read all bytes of the files and compare the SHA-256s in conversion.json.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a page.")
def command(model: str, revision: str | None, checksums: bool, as_json: bool) -> None:
    """Check MODEL without loading it, answer what its files say, and show which GPUs hold it.

    Reads headers, a few megabytes of values, and the tokenizer's files: seconds. A converted checkpoint keeps SHA-256s,
    and all its bytes are read to compare them, as fast as the disk is. Of a hub repository only headers and small files
    are fetched: give the directory to check a download. Exit code 1 if something is wrong.
    """
    with _opened(model, revision) as (path, local):
        report = diagnose(path, model, values=local, checksums=checksums, show=True)
    if as_json:
        click.echo(json.dumps(_document(report)))
    else:
        for line in page(report):
            click.echo(line)
    if report.wrong:
        raise click.exceptions.Exit(1)


@contextlib.contextmanager
def _opened(model: str, revision: str | None) -> Iterator[tuple[Path, bool]]:
    """The directory, and whether the values are in it too."""
    if hub.is_repository(model):
        with hub.headers(model, revision=revision) as path:
            yield path, False
    else:
        yield hub.resolve_model(model, revision=revision), True


def diagnose(path: Path, model: str, *, values: bool = True, checksums: bool = True, show: bool = False) -> Report:
    """The report on a model directory.

    values     whether its shards hold more than headers
    checksums  compare the SHA-256s that a conversion kept, which reads all bytes of its files
    show       show the progress of this comparison on stderr
    """
    report = Report(model)
    shards = shards_examine.examine(path)
    report.findings += shards.findings
    compared = _checksums(report, path, checksums, show) if values else ""
    try:
        raw = read_object(path / "config.json")
        if (draft := _draft(raw)) is not None:
            report.title, report.answers = f"{model}: an EAGLE-3 draft", draft
            what = f"{model} is a draft model, which speeds up another one and cannot be served by itself"
            report.findings.append(Finding("wrong", what, "check and serve the model that it was trained for"))
            return report
        config = KimiConfig.from_directory(path)
        require_served(config.quantization, "config.json")
    except CheckpointError as e:
        report.title = model
        report.findings.append(Finding("wrong", str(e), "nothing further can be checked without it"))
        return report
    has_vision = any(name.startswith(names.VISION) for name in (*shards.tensors, *shards.unread))
    text = text_examine.examine(
        path, vocab_size=config.vocab_size, ids=_ids(raw), vision=config.has_vision and has_vision
    )
    report.title = _title(model, config, text, shards)
    if shards.shards:
        _weights(report, shards, config, values)
        report.answers = weights_examine.answers(shards, config)
        report.answers["vision"], findings = weights_examine.tower(shards, raw)
        report.findings += findings
    report.findings += text.findings
    if not any("generation_config.json" in f.text for f in text.findings):
        try:
            read_generation_config(path)
        except CheckpointError as e:
            report.findings.append(Finding("wrong", str(e), "copy it from the model again"))
    if not any("preprocessor_config.json" in f.text for f in text.findings):
        try:
            _pictures(path, raw, config, sees=has_vision and not shards.unread)
        except CheckpointError as e:
            report.findings.append(Finding("wrong", str(e), "copy it and config.json from the model again"))
    report.answers |= text.answers
    report.answers["draft"] = _drafter(report, path, config, values)
    report.sound += f"; vocabulary of {text.vocab_size:,}" if text.vocab_size else ""
    report.sound += compared
    return report


def _pictures(path: Path, raw: Mapping[str, Any], config: KimiConfig, *, sees: bool) -> None:
    """CheckpointError if the server would refuse the preprocessor's file, alone or together with the tower's config."""
    limits = Limits.from_directory(path)
    try:
        moonvit = MoonVitConfig.from_dict(raw) if sees and config.has_vision else None
    except CheckpointError:  # reported as a warning already: text is served without the tower
        return
    if moonvit is not None:
        require_alike(path, moonvit, limits, config.vocab_size)


def _checksums(report: Report, path: Path, compare: bool, show: bool) -> str:
    """Adds findings for files that differ from the checkpoint's SHA-256s. Returns words for Report.sound."""
    try:
        kept = sums.kept(path)
    except CheckpointError as e:
        report.findings.append(Finding("warning", str(e), "checksums cannot be compared; the model is served without"))
        return ""
    if not kept:
        return ""
    size = sums.nbytes(path, kept)
    if not compare:
        return f"; SHA-256 of {len(kept)} files ({size / GB:.2f} GB) not compared"
    with progress("comparing SHA-256", size, show) as advance:
        faults = sums.damage(path, kept, advance)
    weights = {name: fault for name, fault in faults.items() if name.endswith(".safetensors")}
    if weights:
        report.findings.append(Finding("wrong", sums.described(weights), "copy it again, or convert again"))
    if others := {name: fault for name, fault in faults.items() if name not in weights}:
        remedy = "if the file was not edited on purpose, copy it again, or convert again"
        report.findings.append(Finding("warning", sums.described(others), remedy))
    return f"; SHA-256 of all {len(kept)} files ({size / GB:.2f} GB) as kept"


def _drafter(report: Report, path: Path, config: KimiConfig, values: bool) -> str:
    """The answer about the draft model in the directory; adds findings if it is damaged."""
    folder = path / DRAFTER
    if not values:
        return "not looked at in a repository; give the directory of a download"
    if not exists(folder):
        return f"no {DRAFTER}/: drafts come from earlier text (--drafter DIR names a draft model)"
    if not exists(folder / "config.json"):
        text = f"{folder} has no config.json: no draft model is used"
        report.findings.append(Finding("warning", text, "copy the draft model again, or remove the folder"))
        return f"{DRAFTER}/ holds none"
    try:
        draft = require_draft(folder, config)
    except CheckpointError as e:
        report.findings.append(Finding("wrong", e.text, f"copy the draft model again, or remove {folder}"))
        return f"{DRAFTER}/ cannot be used"
    layers = ", ".join(map(str, draft.aux_layers(config.num_hidden_layers)))
    return f"{DRAFTER}/: EAGLE-3 ({draft.form}) on the inputs of layers {layers}, used unless --draft says otherwise"


def _weights(report: Report, shards: shards_examine.Shards, config: KimiConfig, values: bool) -> None:
    found, findings = weights_examine.examine(shards, config)
    report.findings += findings
    report.sound = f"{len(shards.tensors):,} tensors by name, shape and type"
    if values:
        sample, findings = weights_examine.sample(found)
        report.findings += findings
        part = "all" if sample.tensors == sample.of else f"{sample.tensors:,} of {sample.of:,}"
        report.sound += f"; values of {part} tensors with scales or floats looked at ({sample.nbytes / 1e6:.0f} MB)"
    if not shards.unread:  # else the weights' size is not known
        _plan(report, config, found)


def _title(model: str, config: KimiConfig, text: text_examine.Text, shards: shards_examine.Shards) -> str:
    kind = text.member.name if text.member is not None else config.model_type
    return (
        f"{model}: {kind}, {config.quantization}, {config.num_hidden_layers} layers, "
        f"{_count(config.parameters().total)} parameters, {shards.nbytes / GB:.2f} GB in {shards.shards} "
        f"file{'s' * (shards.shards != 1)}"
    )


def _ids(raw: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The token ids that config.json names, which KimiConfig has checked."""
    inner = raw.get("text_config")
    levels = (raw, inner if isinstance(inner, dict) else {})
    ids: dict[str, tuple[int, ...]] = {}
    for key in _TOKENS:
        values = [v for level in levels for v in (level[key] if isinstance(level.get(key), list) else [level.get(key)])]
        ids[key] = tuple(dict.fromkeys(v for v in values if type(v) is int))
    return ids


def _draft(raw: Mapping[str, Any]) -> dict[str, str] | None:
    """The fields of a draft model's config.json; None if it is another model's."""
    eagle = raw.get("eagle_config")
    names = raw.get("architectures")
    if not isinstance(eagle, dict) and "eagle3" not in str(names).lower():
        return None
    keys = (
        "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "draft_vocab_size",
        "rms_norm_eps", "rope_theta", "rope_scaling", "norm_before_residual", "norm_output", "fc_norm",
    )  # fmt: skip
    fields = {"architectures": shown(names)} | {k: shown(raw[k]) for k in keys if k in raw}
    inner = list(eagle.items()) if isinstance(eagle, dict) else []
    fields |= {f"eagle_config.{shown(k)}": shown(v) for k, v in inner[:DRAFT_KEYS]}
    if (more := len(inner) - DRAFT_KEYS) > 0:
        fields["eagle_config"] = f"and {more:,} more keys"
    return fields


def _plan(report: Report, config: KimiConfig, found: Survey) -> None:
    model = model_of(config, found.vision_bytes // 2)
    stored, wide_stored = (expert_bytes(found, config, size)[0] for size in (2, 4))  # bfloat16, float32
    formats = memory.footprints(model, stored)
    kv_bytes = model.kv_values * KV_BYTES
    report.rows = memory.table(formats, kv_bytes)
    free = free_bytes(torch.device("cpu"))
    wide = memory.footprints(model, wide_stored, width=4.0)
    on_cpu = [memory.fit(f, 1, free, 2 * kv_bytes, SLACK_BYTES["cpu"]) for f in wide]
    report.machine.append((f"CPU, float32, {free / GB:.1f} GB free", on_cpu))
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        least = min(torch.cuda.mem_get_info(i)[0] for i in range(count))
        name = f"{count} x {torch.cuda.get_device_name()}, {least / GB:.1f} GB free"
        report.machine.append((name, [memory.fit(f, count, least, kv_bytes) for f in formats]))


def page(report: Report) -> list[str]:
    """The report for people: what is wrong first."""
    lines = [report.title or report.model]
    lines += [str(f) for f in sorted(report.findings, key=lambda f: f.severity != "wrong")]
    if not report.wrong:
        lines.append(f"sound: {report.sound}")
    if report.answers:
        lines += ["", "What its files say"]
        width = max(map(len, report.answers))
        lines += [f"  {topic:<{width}}  {text}" for topic, text in report.answers.items()]
    if report.rows:
        lines += ["", *_grid(report)]
    return lines


def _grid(report: Report) -> Iterator[str]:
    """Devices down, formats across. A cell: GB of weights per device, GB left there, tokens of context in all."""
    rows = [(f"{fits[0].count} x {gpu.name}", fits) for gpu, fits in report.rows]
    fits = report.rows[0][1]
    width = max(len(name) for name, _ in [*rows, *report.machine])
    yield "What holds it: GB of weights per GPU + GB left there = tokens of context (bfloat16 KV on each GPU)"
    yield " ".join([f"  {'':<{width}}", *(f"{f.footprint.name:>24}" for f in fits)])
    for name, cells in rows:
        yield " ".join([f"  {name:<{width}}", *(f"{_cell(c):>24}" for c in cells)])
    yield "This machine"
    for name, cells in report.machine:
        yield " ".join([f"  {name:<{width}}", *(f"{_cell(c):>24}" for c in cells)])


def _cell(fit: memory.Fit) -> str:
    if fit.fits:
        return f"{fit.weights / GB:.1f} + {fit.left / GB:.1f} = {_count(fit.tokens)}"
    return f"{fit.weights / GB:.1f}, {-fit.left / GB:.1f} short"


def _count(number: float) -> str:
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= scale:
            return f"{number / scale:.4g} {letter}"
    return str(int(number))


def _document(report: Report) -> dict[str, Any]:
    def entry(fit: memory.Fit) -> dict[str, Any]:
        return {
            "format": fit.footprint.name,
            "devices": fit.count,
            "weights_gb": round(fit.weights / GB, 3),
            "left_gb": round(fit.left / GB, 3),
            "tokens": fit.tokens,
            "fits": fit.fits,
        }

    return {
        "model": report.model,
        "title": report.title,
        "wrong": report.wrong,
        "findings": [asdict(f) for f in report.findings],
        "answers": report.answers,
        "plan": [{"gpu": gpu.name, **entry(f)} for gpu, fits in report.rows for f in fits],
        "machine": [{"device": name, **entry(f)} for name, fits in report.machine for f in fits],
    }
