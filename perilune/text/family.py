"""The members of the family, where their prompts differ, and how a checkpoint is recognised as one of them.

The name of a model directory is not reliable, but its files are: `model_type`, the vendor's own chat template (never
executed, only searched for what distinguishes members), names that converters leave behind, and whether the vocabulary
has think tokens.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from perilune.core.errors import CheckpointError, ConfigError, quoted
from perilune.core.files import read_regular
from perilune.text.tools import DeclarationForm

_FIRST_SYSTEM = "You are a helpful assistant"
_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
_TYPES = ("kimi_k2", "kimi_k25", "deepseek_v3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What distinguishes a member's prompts. Samplings are (temperature, top_p), as the vendor recommends."""

    name: str
    default_system: str | None  # added when a conversation does not begin with a system message; None: nothing
    after_default_system: str  # text between the end token of that message and the next message
    tools: DeclarationForm
    thinking: Literal["never", "always", "optional"]
    opens_thought: bool  # the prompt ends in <think>; False: a model that thinks writes it itself
    preserve: Literal["never", "always", "optional"]  # reasoning of earlier turns; "never": only the tool loop's
    sampling: tuple[float, float]
    instant_sampling: tuple[float, float]  # when it does not think


K2_INSTRUCT = Member(
    name="kimi-k2-instruct",
    default_system=_SYSTEM,
    after_default_system="\n",
    tools="json",
    thinking="never",
    opens_thought=False,
    preserve="never",
    sampling=(0.6, 1.0),
    instant_sampling=(0.6, 1.0),
)
K2_INSTRUCT_FIRST = replace(
    K2_INSTRUCT,
    name="kimi-k2-instruct-first",
    default_system=_FIRST_SYSTEM,
    after_default_system="",
    tools="tojson",
)
K2_INSTRUCT_0905 = replace(K2_INSTRUCT, name="kimi-k2-instruct-0905")
K2_THINKING = replace(
    K2_INSTRUCT, name="kimi-k2-thinking", after_default_system="", thinking="always", sampling=(1.0, 1.0)
)
K25 = Member(
    name="kimi-k2.5",
    default_system=None,
    after_default_system="",
    tools="typescript",
    thinking="optional",
    opens_thought=True,
    preserve="never",
    sampling=(1.0, 0.95),
    instant_sampling=(0.6, 0.95),
)
K26 = replace(K25, name="kimi-k2.6", preserve="optional")
K27_CODE = replace(K26, name="kimi-k2.7-code", thinking="always", preserve="always")

MEMBERS: Mapping[str, Member] = {
    m.name: m for m in (K2_INSTRUCT_FIRST, K2_INSTRUCT, K2_INSTRUCT_0905, K2_THINKING, K25, K26, K27_CODE)
}


class NotOfTheFamily(CheckpointError):
    """The checkpoint's type has no chat template here. It may still be served without chat."""


def member_named(name: str) -> Member:
    """The member of this name; ConfigError that lists the names if there is none."""
    member = MEMBERS.get(name)
    if member is None:
        raise ConfigError(f"unknown chat template {name!r}; known: {', '.join(MEMBERS)}")
    return member


def recognise(model_dir: Path) -> Member:
    """The member of the family that a directory's checkpoint belongs to, by its files.

    Checkpoints of K2.5 and K2.6 differ only in their templates; one without a template is taken for K2.6, which has
    the same prompts unless a request preserves thinking. Raises NotOfTheFamily for another model_type, and
    CheckpointError if config.json is not there or one of the files cannot be read.
    """
    path = model_dir / "config.json"
    if (config := _object(path)) is None:
        raise CheckpointError(f"cannot read {path}: no such file; MODEL must be a complete model directory")
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"{path} is not a model's config: no readable 'model_type'")
    if kind not in _TYPES:
        raise NotOfTheFamily(
            f"chat is not supported for model_type {quoted(kind)} of {model_dir}, which is not of the Kimi K2 family: "
            "use plain completions, or name a template with --chat-template"
        )
    tokenizer = _object(model_dir / "tokenizer_config.json") or {}
    template = _template(model_dir, tokenizer)
    if kind == "kimi_k25" or "tools_ts_str" in template:
        return _later(template, " ".join(_names(config, tokenizer)))
    if template:
        thinks = "<think>" in template
    else:
        added = tokenizer.get("added_tokens_decoder")
        tokens = added.values() if isinstance(added, dict) else ()
        thinks = any(isinstance(token, dict) and token.get("content") == "<think>" for token in tokens)
    first = _FIRST_SYSTEM in template and _SYSTEM not in template
    if thinks:
        return replace(K2_THINKING, default_system=_FIRST_SYSTEM) if first else K2_THINKING
    return K2_INSTRUCT_FIRST if first else K2_INSTRUCT


_CODE = re.compile(r"{[{%].*?[}%]}", re.DOTALL)
_READS_THINKING = re.compile(r"\bthinking\b(?!\s*=[^=])")  # not inside preserve_thinking: "_" is no word boundary
_FORCES = re.compile(r"\bset\s+(?:preserve_)?thinking\s*=\s*true\b|raise_exception\([^)]*\bthinking\b", re.IGNORECASE)
_K27_NAME = re.compile(r"kimi[-_]k2[._-]?7\b", re.IGNORECASE)


def _later(template: str, names: str) -> Member:
    """Which of K2.5 and its successors it is, by the vendor's template and by names left in the configs."""
    if _K27_NAME.search(names):
        return K27_CODE
    if "tools_ts_str" not in template:  # none, or not the vendor's: it says nothing about the model
        return K26
    code = " ".join(_CODE.findall(template))
    if _FORCES.search(code) or not _READS_THINKING.search(code):
        return K27_CODE
    return K26 if "preserve_thinking" in code else K25


def _template(model_dir: Path, tokenizer: Mapping[str, Any]) -> str:
    """The checkpoint's own Jinja templates as one text; empty if it brings none."""
    path = model_dir / "chat_template.jinja"
    try:
        return read_regular(path).decode("utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        raise CheckpointError(f"cannot read {path}: {reason}; copy it from the model again or leave it out") from e
    held = tokenizer.get("chat_template")
    entries = held if isinstance(held, list) else [held]
    texts = [entry.get("template") if isinstance(entry, dict) else entry for entry in entries]
    return "\n".join(text for text in texts if isinstance(text, str))


def _names(*configs: Mapping[str, Any]) -> Iterator[str]:
    for config in configs:
        text = config.get("text_config")
        for level in (config, text if isinstance(text, dict) else {}):
            for key in ("_name_or_path", "name_or_path", "base_model_name_or_path"):
                if isinstance(name := level.get(key), str):
                    yield name


def _object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is no such file."""
    try:
        data = json.loads(read_regular(path))
    except FileNotFoundError:
        return None
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not JSON ({type(e).__name__}: {e}); copy it from the model again") from e
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object; copy it from the model again")
    return data
