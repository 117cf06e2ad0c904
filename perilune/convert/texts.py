"""Texts for a model: problems of the bundled task families with their answers, or the user's JSONL.

A line of JSONL is {"messages": [...], "tools": [...]}, a chat in OpenAI's form of which "tools" may be missing, or
{"text": "..."}. Chats are rendered as the model's own prompts are, thoughts included. Sequences are cut to LONGEST
tokens, problems to LONGEST_PROBLEM.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from perilune.core.errors import ConfigError, RequestError
from perilune.model.config import KimiConfig
from perilune.tasks.families import FAMILIES, problems
from perilune.tasks.problem import Problem, assistant
from perilune.text.chat import ChatTemplate, template_for
from perilune.text.tokenizer import Tokenizer

LONGEST, LONGEST_PROBLEM = 2048, 512
MAX_LINE = 64_000_000  # bytes


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids of each sequence, and a description (`kind`) for people."""

    sequences: tuple[tuple[int, ...], ...]
    kind: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.sequences).encode()).hexdigest()


def gather(source: Path, tokens: int, file: Path | None = None, split: str = "heldout") -> Texts:
    """At least `tokens` tokens for the model in `source`, or all that `file` has.

    split  of the bundled problems: calibration takes "train"; reports take "heldout", which training never saw

    Deterministic. ConfigError names the line of `file` that cannot be used.
    """
    config = KimiConfig.from_directory(source)
    longest = min(LONGEST, config.max_position_embeddings)
    has_tokenizer = (source / "tiktoken.model").is_file()
    if file is None and not has_tokenizer:
        length = min(LONGEST_PROBLEM, longest)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(config.vocab_size, (-(-tokens // length), length), generator=generator)
        return Texts(tuple(map(tuple, drawn.tolist())), "random ids: the source has no tokenizer")
    if not has_tokenizer:
        raise ConfigError(f"{source} has no tiktoken.model: text cannot be read without it")
    tokenizer = Tokenizer.from_directory(source)
    tokenizer.require_size(config.vocab_size, source)
    prompts = _Prompts(tokenizer, template_for(source))
    if file is None:
        kind = f"{split.replace('heldout', 'held-out')} problems with their answers"
        each = (prompts.problem(p)[-min(LONGEST_PROBLEM, longest) :] for p in _problems(split))
    else:
        kind = file.name
        each = (ids[:longest] for ids in _lines(file, prompts))
    found: list[tuple[int, ...]] = []
    count = 0
    for ids in each:
        if ids:
            found.append(tuple(ids))
            count += len(ids)
        if count >= tokens:
            break
    if not found:
        raise ConfigError(f"{file} holds no text")
    return Texts(tuple(found), kind)


def _problems(split: str) -> Iterator[Problem]:
    """An endless sequence of problems of all families in turn, half of them with thoughts."""
    for seed in itertools.count():
        for name in FAMILIES:
            yield from problems(name, split, 2, seed=seed, thinking=seed % 2 == 0)


@dataclass(frozen=True, slots=True)
class _Prompts:
    tokenizer: Tokenizer
    template: ChatTemplate

    def problem(self, problem: Problem) -> list[int]:
        return self._chat([*problem.messages, assistant(problem.reply)], problem.tools, problem.thinking)

    def line(self, line: Any) -> list[int]:
        if isinstance(line, Mapping) and isinstance(line.get("text"), str):
            return self.tokenizer.encode(line["text"])
        if isinstance(line, Mapping) and isinstance(line.get("messages"), list) and line["messages"]:
            return self._chat(line["messages"], line.get("tools"), None)
        raise RequestError('neither {"messages": [...]} nor {"text": "..."}')

    def _chat(self, messages: Sequence[Mapping[str, Any]], tools: Any, thinking: bool | None) -> list[int]:
        # If a model's thinking cannot be switched, it gets its usual prompt.
        asked = thinking if self.template.member.thinking == "optional" else None
        keep = True if self.template.member.preserve != "never" else None
        return self.template.render_ids(
            self.tokenizer,
            messages,
            tools=tools or None,
            thinking=asked,
            preserve_thinking=keep,
            add_generation_prompt=False,
        )


def _lines(file: Path, prompts: _Prompts) -> Iterator[list[int]]:
    try:
        with file.open("rb") as f:
            for number, raw in enumerate(iter(lambda: f.readline(MAX_LINE), b""), 1):
                if not raw.strip():
                    continue
                try:
                    yield prompts.line(json.loads(raw))
                except (ValueError, RecursionError) as e:
                    raise ConfigError(f"{file}:{number}: not JSON: {e}") from e
                except RequestError as e:
                    raise ConfigError(f"{file}:{number}: {e}") from e
    except OSError as e:
        raise ConfigError(f"cannot read {file}: {e.strerror}") from e
