"""A model directory's vocabulary, control tokens and chat template against its configuration, and each other."""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.core.errors import CheckpointError, quoted, shown
from perilune.core.files import exists, read_regular
from perilune.core.jsonfile import read_object
from perilune.doctor.finding import Finding
from perilune.text.family import Member, NotOfTheFamily, recognise
from perilune.text.tokenizer import CONFIG_FILE, VOCABULARY_FILE, Tokenizer

_TURN = ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>")
_TOOLS = (
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
_THOUGHT = ("<think>", "</think>")
_MEDIA = ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
_COPY = f"copy {VOCABULARY_FILE} and {CONFIG_FILE} from the model again"

# What three agreeing copies of the vendor's preprocessor_config.json say.
_PREPROCESSOR: Mapping[str, Any] = {
    "in_patch_limit": 16384,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 4096,
    "in_patch_limit_video": None,
    "sample_fps": 2.0,
    "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
}


@dataclass(frozen=True, slots=True)
class Text:
    findings: tuple[Finding, ...]
    answers: Mapping[str, str]  # what the family's documentation leaves open and these files show, by topic
    member: Member | None
    vocab_size: int | None


def examine(path: Path, *, vocab_size: int, ids: Mapping[str, Sequence[int]], vision: bool) -> Text:
    """Checks the tokenizer's and the template's files.

    vocab_size  as config.json has it
    ids         of config.json's keys that name tokens: eos_token_id, bos_token_id, pad_token_id and
                media_placeholder_token_id, each with none, one or several
    """
    findings: list[Finding] = []
    member = _member(path, findings)
    try:
        tokenizer = Tokenizer.from_directory(path)
    except CheckpointError as e:
        findings.append(Finding("wrong", str(e), _COPY))
        topics = _answers(path, member, None, findings, {})
        return Text(tuple(findings), topics, member, None)
    if tokenizer.vocab_size != vocab_size:
        text = f"the tokenizer has {tokenizer.vocab_size} tokens, config.json's vocab_size is {vocab_size}"
        findings.append(Finding("wrong", text, f"they are of different models: {_COPY}"))
    needed = [*_TURN, *_TOOLS]
    if member is not None and member.thinking != "never":
        needed += _THOUGHT
    if vision:
        needed += _MEDIA
    if lacking := [name for name in needed if tokenizer.special_id(name) is None]:
        text = f"{CONFIG_FILE} does not name the control tokens {', '.join(lacking)}"
        findings.append(Finding("wrong", text, _COPY))
    findings += _ids(path, tokenizer, ids)
    topics = _answers(path, member, tokenizer, findings, ids)
    return Text(tuple(findings), topics, member, tokenizer.vocab_size)


def _member(path: Path, findings: list[Finding]) -> Member | None:
    try:
        return recognise(path)
    except NotOfTheFamily as e:
        findings.append(Finding("warning", str(e), "chat is refused until then"))
    except CheckpointError as e:
        findings.append(Finding("wrong", str(e), "the chat template cannot be chosen without it"))
    return None


def _ids(path: Path, tokenizer: Tokenizer, ids: Mapping[str, Sequence[int]]) -> list[Finding]:
    findings = []
    if beyond := [f"{key} {id}" for key, values in ids.items() for id in values if not 0 <= id < tokenizer.vocab_size]:
        text = (
            f"config.json's {shown(', '.join(beyond), 160)} is outside the vocabulary of {tokenizer.vocab_size} tokens"
        )
        findings.append(Finding("wrong", text, "config.json and the vocabulary are of different models"))
    named = _json(path / CONFIG_FILE, findings)
    expected = {"bos_token_id": named.get("bos_token"), "pad_token_id": named.get("pad_token")}
    expected["media_placeholder_token_id"] = "<|media_pad|>"
    for key, entry in expected.items():
        name = entry.get("content") if isinstance(entry, dict) else entry
        for id in ids.get(key, ()):
            if isinstance(name, str) and 0 <= id < tokenizer.vocab_size and tokenizer.special_id(name) != id:
                text = f"config.json's {key} {id} is {quoted(tokenizer.token_text(id))}, not {quoted(name)}"
                findings.append(Finding("warning", text, "one of the two files is of another model; prompts use names"))
    ends = [id for id in ids.get("eos_token_id", ()) if 0 <= id < tokenizer.vocab_size]
    if odd := [id for id in ends if id not in tokenizer.stop_ids]:
        names = shown(", ".join(f"{id} {quoted(tokenizer.token_text(id))}" for id in odd), 160)
        stops = ", ".join(f"{id} {quoted(tokenizer.token_text(id))}" for id in sorted(tokenizer.stop_ids))
        text = f"config.json ends at {names}, which is no stop token of this vocabulary ({stops})"
        findings.append(Finding("warning", text, "config.json may be of another model; answers end at all of them"))
    return findings


def _answers(
    path: Path,
    member: Member | None,
    tokenizer: Tokenizer | None,
    findings: list[Finding],
    ids: Mapping[str, Sequence[int]],
) -> dict[str, str]:
    topics: dict[str, str] = {}
    template, where = _template(path)
    taken = f"taken for {member.name}" if member is not None else "not recognised"
    if template:
        digest = hashlib.sha256(template).hexdigest()
        topics["chat template"] = f"{where}, {len(template):,} bytes, sha256 {digest[:16]}; {taken}"
    else:
        topics["chat template"] = f"none brought; {taken}"
    if member is not None and member.tools == "typescript":
        topics["tool JSON"] = "not used: tools are declared in TypeScript"
    else:
        written = "', ' and ': '" if member is not None and member.tools == "tojson" else "compact ones"
        known = "the template sets" if b"separators" in template else "the files do not set"
        topics["tool JSON"] = f"{known} separators of JSON; {written} are written"
    generation = path / "generation_config.json"
    said = _json(generation, findings)
    said.pop("transformers_version", None)
    topics["generation_config"] = shown(json.dumps(said, sort_keys=True), 400) if exists(generation) else "absent"
    topics["preprocessor_config"] = _preprocessor(path, findings)
    if tokenizer is not None:
        ends = shown(", ".join(str(id) for id in ids.get("eos_token_id", ()))) or "nothing"
        stops = ", ".join(f"{id} {tokenizer.token_text(id)}" for id in sorted(tokenizer.stop_ids))
        topics["stop tokens"] = f"{stops} (config.json: {ends})"
    return topics


def _template(path: Path) -> tuple[bytes, str]:
    """The vendor's template and where it was; empty if there is none. `recognise` has reported an unreadable file."""
    file = path / "chat_template.jinja"
    if file.is_file():
        with contextlib.suppress(OSError):
            return read_regular(file), file.name
    held = _json(path / CONFIG_FILE, []).get("chat_template")
    return (held.encode("utf-8", "replace"), f"in {CONFIG_FILE}") if isinstance(held, str) else (b"", "")


def _preprocessor(path: Path, findings: list[Finding]) -> str:
    file = path / "preprocessor_config.json"
    if not exists(file):
        return "absent"
    held = _json(file, findings)
    inner = held.get("media_proc_cfg", held)
    if not isinstance(inner, dict):
        return f"media_proc_cfg is {quoted(inner)}"
    odd = [
        f"{k}={quoted(inner[k], 20)} (known: {v!r})" for k, v in _PREPROCESSOR.items() if k in inner and inner[k] != v
    ]
    odd += [f"{k} absent" for k in _PREPROCESSOR if k not in inner]
    return f"differs: {'; '.join(odd)}" if odd else "as known"


def _json(path: Path, findings: list[Finding]) -> dict[str, Any]:
    """The object in a file; empty, and a finding, if it cannot be read; empty if there is none."""
    try:
        return read_object(path) if exists(path) else {}
    except CheckpointError as e:
        findings.append(Finding("wrong", e.text, "copy it from the model again"))
        return {}
