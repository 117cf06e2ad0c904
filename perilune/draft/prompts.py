"""Prompts for the target: generated problems of the training split, generated topics, or chats from a JSONL file. No
torch here: worker processes make prompts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from perilune.core.errors import ConfigError, RequestError
from perilune.draft.topics import DOMAINS, ask
from perilune.tasks.families import FAMILIES, training_mix
from perilune.tasks.problem import Problem, assistant
from perilune.text.chat import ChatTemplate, Special, next_tool_index, template_for
from perilune.text.tokenizer import Tokenizer

GENERATED = "generated"
_THOUGHT = Special("</think>")
MAX_LINE = 16 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """`family` is an index into the source's `families`. `expected` is the answer that the generator knows, with its
    end token; empty where none is known."""

    ids: tuple[int, ...]
    family: int
    expected: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Problems:
    """Problems as kimi-nano was trained on: the training split only, thinking on and off, tools declared.

    `weights`: (family, relative share of the tokens), for families with another share than in that training.
    """

    model: Path
    seed: int
    weights: tuple[tuple[str, float], ...] = ()

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(FAMILIES)

    def about(self) -> dict[str, Any]:
        return {"source": GENERATED, "seed": self.seed, **({"weights": self.weights} if self.weights else {})}

    def limit(self) -> int | None:
        return None

    def prompts(self, first: int, count: int) -> list[Prompt]:
        """Numbers first .. first + count - 1; each is a function of its number and the seed."""
        tokenizer, template = _reader(self.model)
        mix = FAMILIES | {name: replace(FAMILIES[name], weight=weight) for name, weight in self.weights}
        made = []
        for number in range(first, first + count):
            p = training_mix(Random(f"{self.seed}:draft:{number}"), mix)
            ids = template.render_ids(tokenizer, p.messages, tools=p.tools or None, thinking=p.thinking)
            made.append(Prompt(tuple(ids), self.families.index(p.family), _expected(tokenizer, template, p)))
        return made


@dataclass(frozen=True, slots=True)
class Chats:
    """Lines of a JSONL file: {"messages": [...], "tools": [...], "thinking": true, "family": "code"}, all but the first
    optional. The conversation before every assistant turn is a prompt; so is the whole chat, unless its last message is
    the assistant's."""

    model: Path
    file: Path

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(turn.family for turn in _turns(self.file)))

    def about(self) -> dict[str, Any]:
        return {"source": self.file.name, "bytes": self.file.stat().st_size}

    def limit(self) -> int | None:
        return len(_turns(self.file))

    def prompts(self, first: int, count: int) -> list[Prompt]:
        tokenizer, template = _reader(self.model)
        families = self.families
        made = []
        for t in _turns(self.file)[first : first + count]:
            try:
                ids = template.render_ids(
                    tokenizer,
                    t.messages,
                    tools=t.tools or None,
                    thinking=template.thinks(t.thinking),
                    continue_final_message=False,
                )
            except RequestError as e:
                raise ConfigError(f"{self.file} line {t.line}: {e}") from e
            made.append(Prompt(tuple(ids), families.index(t.family)))
        return made


@dataclass(frozen=True, slots=True)
class Topics:
    """Prompts of `domains` in turn, for models with general knowledge (draft.topics)."""

    model: Path
    seed: int
    domains: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.domains or not set(self.domains) <= DOMAINS.keys():
            raise ConfigError(f"unknown domains in {','.join(self.domains)!r}: choose from {', '.join(DOMAINS)}")

    @property
    def families(self) -> tuple[str, ...]:
        return self.domains

    def about(self) -> dict[str, Any]:
        return {"source": "topics", "seed": self.seed}

    def limit(self) -> int | None:
        return None

    def prompts(self, first: int, count: int) -> list[Prompt]:
        """Numbers first .. first + count - 1; each is a function of its number, the seed and its domain."""
        tokenizer, template = _reader(self.model)
        made = []
        for number in range(first, first + count):
            # Even numbers are answered greedily, odd ones at temperature 1: every domain gets both.
            family = number // 2 % len(self.domains)
            domain = self.domains[family]
            messages, tools, thinking = ask(domain, Random(f"{self.seed}:{domain}:{number}"))
            ids = template.render_ids(tokenizer, messages, tools=tools or None, thinking=template.thinks(thinking))
            made.append(Prompt(tuple(ids), family))
        return made


Source = Problems | Topics | Chats


@dataclass(frozen=True, slots=True)
class _Turn:
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    thinking: bool | None
    family: str
    line: int  # of the file, from 1


@lru_cache(maxsize=1)
def _reader(model: Path) -> tuple[Tokenizer, ChatTemplate]:
    return Tokenizer.from_directory(model), template_for(model)


def _expected(tokenizer: Tokenizer, template: ChatTemplate, problem: Problem) -> tuple[int, ...]:
    """The answer with which the model should continue the prompt: its thought, if it thinks, then the rendered turn.

    The template drops the thought of a final answer, so it is put in front here.
    """
    turn = assistant(problem.reply, next_tool_index(problem.messages))
    pieces = template.pieces([turn], thinking=False, add_generation_prompt=False)
    ids: list[int] = []
    if problem.thinking:
        ids += [*tokenizer.encode(problem.reply.reasoning), tokenizer.special(_THOUGHT.name)]
    for piece in pieces[pieces.index(_THOUGHT) + 1 :]:
        ids += [tokenizer.special(piece.name)] if isinstance(piece, Special) else tokenizer.encode(piece)
    return tuple(ids)


@lru_cache(maxsize=1)
def _turns(file: Path) -> Sequence[_Turn]:
    found = list(_read(file))
    if not found:
        raise ConfigError(f"{file} holds no chat")
    return found


def _read(file: Path) -> Iterator[_Turn]:
    try:
        lines = file.open("rb")  # json.loads names bytes that are no text
    except OSError as e:
        raise ConfigError(f"cannot read {file}: {e.strerror}") from e
    with lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE + 1), b""), 1):
            if not line.strip():
                continue
            at = f"{file} line {number}"
            try:
                chat = json.loads(line) if len(line) <= MAX_LINE else None
            except (ValueError, RecursionError) as e:
                raise ConfigError(f"{at} is not JSON: {e}") from e
            if not isinstance(chat, dict) or not isinstance(messages := chat.get("messages"), list) or not messages:
                raise ConfigError(f'{at} must be an object with a non-empty list "messages"')
            if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
                raise ConfigError(f'{at}: every message must be an object with a "role"')
            tools, thinking, family = chat.get("tools") or [], chat.get("thinking"), chat.get("family", file.stem)
            if not isinstance(tools, list) or not isinstance(thinking, bool | None) or not isinstance(family, str):
                raise ConfigError(f"{at}: tools must be a list, thinking true or false, family a text")
            ends = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i]
            if messages[-1]["role"] != "assistant":
                ends.append(len(messages))
            for end in ends:
                yield _Turn(tuple(messages[:end]), tuple(tools), thinking, family, number)
