"""One problem: a conversation up to the assistant's turn, the tools declared, and the turn that is expected.

Which split a problem may belong to is decided by a hash of its key, never by its wording: one key in twenty is kept
from training, half of them for `heldout` (plain wordings) and half for `structural` (drawn from what training never
shows: unseen length pairs, wordings, tools, keys). Training has wider wordings besides the plain ones; `wide` has them
with the keys of `heldout`. Samplers draw until `belongs(key, split)`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Any, Final, TypeVar

SEED: Final = 20261121  # published: it decides which keys are held out, and is the default of every sampler
SPLITS: Final = ("train", "heldout", "structural", "wide")
HELD_OUT_SHARE: Final = 20  # one key in twenty

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The assistant's turn; `reasoning` is the text between `<think>` and `</think>`."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """`messages` are OpenAI messages; the history may hold reasoning_content, tool_calls and tool results.

    Message and tool dictionaries may be shared between problems: do not change them.
    """

    family: str
    split: str
    key: tuple[Any, ...]
    messages: tuple[dict[str, Any], ...]
    reply: Reply
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got: the content, and (name, raw JSON text of the arguments) of each tool call."""

    content: str
    tool_calls: tuple[tuple[str, str], ...] = ()


def partition(key: tuple[Any, ...]) -> str:
    """The split in which a problem with this key may occur; `heldout` keys may also occur in `wide`."""
    digest = blake2b(f"{SEED}:{key!r}".encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "big") % (2 * HELD_OUT_SHARE)
    return "heldout" if place == 0 else "structural" if place == 1 else "train"


def belongs(key: tuple[Any, ...], split: str) -> bool:
    """Whether a problem with this key may occur in the split."""
    return partition(key) == ("heldout" if split == "wide" else split)


def widely(split: str) -> bool:
    """Whether the split's problems are worded widely (wordings.py, stories.py, records.py, catalog.py)."""
    return split in ("train", "wide")


def pick(rng: Random, choices: Sequence[T]) -> T:
    """`rng.choice`, twice as fast: samplers spend most of their time here."""
    return choices[int(rng.random() * len(choices))]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(reply: Reply, first_call: int = 0) -> dict[str, Any]:
    """The reply as an OpenAI message; its calls get native ids, numbered from `first_call` on."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "reasoning_content": reply.reasoning}
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"functions.{call.name}:{first_call + i}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for i, call in enumerate(reply.tool_calls)
        ]
    return message


def plain(text: str) -> str:
    """An answer without line breaks, full stop and quotes around it."""
    return " ".join(text.split()).strip(" .\"'`")


def answer_of(reply: Reply) -> Answer:
    """What a client would get if the model replied exactly so."""
    calls = tuple((c.name, json.dumps(c.arguments, ensure_ascii=False)) for c in reply.tool_calls)
    return Answer(reply.content, calls)
