"""Traces of requests to replay: files (their formats: trace_formats.py) and generated sessions of coding agents."""

import gzip
import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perilune.core.errors import ConfigError

HASH_TOKENS = 512  # tokens per hash id
MAX_LINES = 1_000_000
MAX_FILE_BYTES = 1 << 28  # size of a file that is one JSON value
MAX_LINE_BYTES = 32 << 20
MAX_TOKENS = 1 << 22  # tokens of one request


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of a prompt: `tokens` tokens made from the name, so that equal names give equal text; or `text` itself, the
    message of a `role`."""

    name: str
    tokens: int
    text: str | None = None
    role: str = "user"


@dataclass(frozen=True, slots=True)
class Turn:
    """The text that a turn adds to its session's prompt, `delay` seconds after the previous answer. `whole`: the pieces
    are the whole prompt, earlier turns included. `line`: index of the trace's line that it comes from."""

    pieces: tuple[Piece, ...]
    output_tokens: int
    delay: float = 0.0
    whole: bool = False
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Session:
    name: str
    start: float  # seconds
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Agents:
    """Sessions of coding agents, as published traces have them (medians): 33 turns, a context that grows from 12k to
    80k tokens, 131 tokens of input for each one of output, 5.2 s between turns with 81 s at the 99th percentile."""

    sessions: int = 8
    turns: int = 33
    seed: int = 0
    shared_tokens: int = 8_192  # system prompt and tools, the same in all sessions
    first_tokens: int = 12_288  # of the first prompt, shared ones included
    turn_tokens: int = 1_892  # new tokens of a later prompt; with the answer, a turn adds 2,242
    output_tokens: int = 350
    gap_seconds: float = 5.2
    gap_spread: float = 1.18  # standard deviation of the gap's logarithm
    start_seconds: float = 2.0  # between the starts of two sessions


def generate(agents: Agents) -> list[dict[str, Any]]:
    """The sessions as lines of a trace; the same arguments give the same lines."""
    rng = random.Random(agents.seed)
    shared = range(agents.shared_tokens // HASH_TOKENS)
    ids = iter(range(len(shared), 1 << 62))
    lines = []
    for session in range(agents.sessions):
        for turn in range(agents.turns):
            spread = rng.lognormvariate(-0.125, 0.5)  # its mean is 1
            new = agents.turn_tokens if turn else max(agents.first_tokens - len(shared) * HASH_TOKENS, 1)
            new = max(round(new * (spread if turn else 1.0)), 1)
            begun = [] if turn else list(shared)
            own = [next(ids) for _ in range(-(-new // HASH_TOKENS))]
            line: dict[str, Any] = {
                "session_id": f"agent-{session}",
                "input_length": len(begun) * HASH_TOKENS + new,
                "output_length": max(round(agents.output_tokens * rng.lognormvariate(-0.18, 0.6)), 2),
                "hash_ids": [*begun, *own],
            }
            if turn:
                line["delay"] = round(1e3 * agents.gap_seconds * rng.lognormvariate(0.0, agents.gap_spread))
            else:
                line["timestamp"] = round(1e3 * session * agents.start_seconds)
            lines.append(line)
    return lines


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a trace: those of a file of JSON lines, gzipped or not; the value, or each value of the list, in a
    .json file; or those of all .json files of a directory. ConfigError names a line that is no object."""
    lines: list[dict[str, Any]] = []
    try:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            for number, value in enumerate(_value(file), 1) if file.suffix == ".json" else _json_lines(file):
                if len(lines) == MAX_LINES:
                    raise ConfigError(f"{path} has more than {MAX_LINES:,} lines: cut it")
                if not isinstance(value, dict):
                    raise ConfigError(f"{file}, line {number} is no object: a trace has one request a line")
                lines.append(value)
    except (OSError, EOFError, zlib.error) as e:  # the last two: a .gz file that is cut or damaged
        raise ConfigError(f"cannot read the trace {path}: {getattr(e, 'strerror', None) or e}") from e
    if not lines:
        raise ConfigError(f"the trace {path} has no request")
    return lines


def _value(path: Path) -> list[Any]:
    with path.open("rb") as file:
        text = file.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB: write it as JSON lines")
    try:
        found = _parsed(text)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is no JSON: {e}; lines of JSON are read from a .jsonl file") from e
    return found if isinstance(found, list) else [found]


def _parsed(text: bytes) -> Any:
    """The value of a JSON text. ValueError, also for half of a surrogate pair, which no request can carry."""
    value = json.loads(text)
    if b"\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Values with their lines' numbers, from 1; empty lines count."""
    number = 0
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        while text := file.readline(MAX_LINE_BYTES):
            number += 1
            if text.strip():
                try:
                    yield number, _parsed(text)
                except (ValueError, RecursionError) as e:
                    raise ConfigError(f"{path}, line {number} is no JSON: {e}") from e


def begun(session: Session, turns: int) -> Session:
    """The session after `turns` turns. Its first prompt has their texts, with made-up answers, and asks for one token:
    this prompt can be computed before the clock starts."""
    if turns < 1 or turns >= len(session.turns):
        raise ConfigError(f"{session.name} has {len(session.turns)} turns: it cannot begin after {turns}")
    said: list[Piece] = []
    for index, turn in enumerate(session.turns[:turns]):
        if turn.whole:
            said.clear()
        said += [*turn.pieces, Piece(f"{session.name}, answer {index}", turn.output_tokens)]
    return Session(session.name, session.start, (Turn(tuple(said), 1), *session.turns[turns:]))
