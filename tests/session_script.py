"""Scripts of agent sessions for tests/scripted_engine.py: what a model of the Kimi K2 family answers turn by turn.

A turn is found by what the prompt holds, not by its number: programs send requests of their own in between (titles,
summaries), and a turn may come twice. The first turn of a session needs the task, every later one the result of the
last call before it, by its id: "## Return of functions.read:0". A program that changes ids gets no further.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.text.tokenizer import Tokenizer

Call = tuple[str, dict[str, Any] | str]  # name; arguments, or their JSON text as the model writes it


@dataclass(frozen=True, slots=True)
class Step:
    """One answer: a thought (written only where the prompt opens one), a text, calls."""

    thought: str
    text: str = ""
    calls: tuple[Call, ...] = ()
    called_in_thought: bool = False  # the calls begin without the end of the thought


def write(path: Path, found: Sequence[dict[str, Any]]) -> None:
    """A script of these lines, of one session or several."""
    path.write_text("".join(json.dumps(line) + "\n" for line in found))


def lines(tokenizer: Tokenizer, task: str, steps: Sequence[Step], *, tools: bool = True) -> list[dict[str, Any]]:
    """The lines of a session, last step first, because a prompt holds the results of all steps before it.

    `task`: words inside the user's message. `tools`: only for prompts that declare some.
    """
    asked = [tokenizer.encode(" " + task)] + ([tokenizer.encode("tool_declare")] if tools else [])
    found: list[dict[str, Any]] = []
    first = 0  # counter of the step's first call
    for step in steps:
        returned = [tokenizer.encode(f"## Return of {_id(steps, first - 1)}")] if first else []
        for thinking in (True, False):
            after = [tokenizer.special("<think>" if thinking else "</think>")]
            tokens = answer(tokenizer, step, first, thinking=thinking)
            found.append({"tokens": tokens, "after": after, "holds": asked + returned})
        first += len(step.calls)
    return found[::-1]


def answer(tokenizer: Tokenizer, step: Step, first: int, *, thinking: bool) -> list[int]:
    """The ids of a step with the end token; `first`: counter of its first call."""
    ids: list[int] = []
    if thinking:
        ids += tokenizer.encode(step.thought)
        ids += [] if step.called_in_thought else [tokenizer.special("</think>")]
    ids += tokenizer.encode(step.text)
    if step.calls:
        ids.append(tokenizer.special("<|tool_calls_section_begin|>"))
        for number, (name, arguments) in enumerate(step.calls, first):
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            ids.append(tokenizer.special("<|tool_call_begin|>"))
            ids += tokenizer.encode(f"functions.{name}:{number}")
            ids.append(tokenizer.special("<|tool_call_argument_begin|>"))
            ids += tokenizer.encode(text)
            ids.append(tokenizer.special("<|tool_call_end|>"))
        ids.append(tokenizer.special("<|tool_calls_section_end|>"))
    return [*ids, tokenizer.special("<|im_end|>")]


def _id(steps: Sequence[Step], number: int) -> str:
    calls = [name for step in steps for name, _ in step.calls]
    return f"functions.{calls[number]}:{number}"
