"""Traces of requests to replay: Mooncake's and AIPerf's JSON lines, and generated sessions of coding agents.

A line of a trace is a request: `input_length` and `hash_ids` (one for each 512 tokens: equal ids mean equal tokens), or
`text_input`, or `messages`; `output_length`; `timestamp` in milliseconds. With a `session_id` it is a turn: it adds to
what its session has said so far, `delay` milliseconds after the answer before. Without one it is a whole prompt.
"""

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.core.errors import ConfigError

HASH_TOKENS = 512  # that a hash id is for
MAX_LINES = 1_000_000
MAX_LINE_BYTES = 32 << 20
MAX_TOKENS = 1 << 22  # of one request
DEFAULT_OUTPUT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of a prompt: `tokens` tokens made from the name, or `text` itself."""

    name: str
    tokens: int
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn adds to its session's prompt, and how long after the answer before (seconds)."""

    pieces: tuple[Piece, ...]
    output_tokens: int
    delay: float = 0.0


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
    first_tokens: int = 12_288  # of the first prompt, with those
    turn_tokens: int = 1_892  # new ones of a later prompt: with the answer 2,242 a turn
    output_tokens: int = 350
    gap_seconds: float = 5.2
    gap_spread: float = 1.18  # of its logarithm
    start_seconds: float = 2.0  # between the starts of two sessions


def generate(agents: Agents) -> list[dict[str, Any]]:
    """The sessions as lines of a trace; the same arguments give the same lines."""
    rng = random.Random(agents.seed)
    shared = range(agents.shared_tokens // HASH_TOKENS)
    ids = iter(range(len(shared), 1 << 62))
    lines = []
    for session in range(agents.sessions):
        for turn in range(agents.turns):
            spread = rng.lognormvariate(-0.125, 0.5)  # of mean 1
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
    """The lines of a trace file, gzipped or not. ConfigError names the line that is none."""
    lines: list[dict[str, Any]] = []
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            while text := file.readline(MAX_LINE_BYTES):
                if not text.strip():
                    continue
                if len(lines) == MAX_LINES:
                    raise ConfigError(f"{path} has more than {MAX_LINES:,} lines: cut it")
                try:
                    line = json.loads(text)
                except ValueError as e:
                    raise ConfigError(f"{path}, line {len(lines) + 1} is no JSON: {e}") from e
                if not isinstance(line, dict):
                    raise ConfigError(f"{path}, line {len(lines) + 1} is no object: a trace has one request a line")
                lines.append(line)
    except OSError as e:
        raise ConfigError(f"cannot read the trace {path}: {e.strerror or e}") from e
    if not lines:
        raise ConfigError(f"the trace {path} has no request")
    return lines


def sessions_of(lines: Sequence[dict[str, Any]], *, scale: float = 1.0) -> list[Session]:
    """Sessions by start. `scale` shortens every text that is made from a name, and every answer: for small models."""
    grouped: dict[str, list[tuple[float, Turn]]] = {}
    for number, line in enumerate(lines):
        name = line.get("session_id")
        key = f"request {number}" if name is None else f"session {name}"
        grouped.setdefault(key, []).append(_turn(line, number, scale))
    found = [Session(key, turns[0][0], tuple(turn for _, turn in turns)) for key, turns in grouped.items()]
    first = min(session.start for session in found)
    return sorted((Session(s.name, s.start - first, s.turns) for s in found), key=lambda s: s.start)


def begun(session: Session, turns: int, *, warm_up: bool) -> Session:
    """The session after so many turns: what was said in them, answers made from a name, is part of its first prompt.
    `warm_up`: it is a prompt of its own, with an answer of one token, so that it can be computed beforehand."""
    if turns < 1 or turns >= len(session.turns):
        raise ConfigError(f"{session.name} has {len(session.turns)} turns: it cannot begin after {turns}")
    said: list[Piece] = []
    for index, turn in enumerate(session.turns[:turns]):
        said += [*turn.pieces, Piece(f"{session.name}, answer {index}", turn.output_tokens)]
    first, *later = session.turns[turns:]
    if warm_up:
        return Session(session.name, session.start, (Turn(tuple(said), 1), first, *later))
    whole = Turn((*said, *first.pieces), first.output_tokens)
    return Session(session.name, session.start, (whole, *later))


def _turn(line: dict[str, Any], number: int, scale: float) -> tuple[float, Turn]:
    """(timestamp in seconds, the turn)"""

    def field(name: str, default: float | None, most: float) -> float:
        value = line.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise ConfigError(f"line {number + 1} of the trace: {name} must be between 0 and {most:g}, not {value!r}")
        return float(value)

    timestamp, delay = field("timestamp", 0, 1e15) / 1e3, field("delay", 0, 1e12) / 1e3
    output = max(round(field("output_length", DEFAULT_OUTPUT_TOKENS, MAX_TOKENS) * scale), 1)
    text = line.get("text_input")
    if text is None and isinstance(line.get("messages"), list):
        text = "\n".join(_content(message) for message in line["messages"])
    if isinstance(text, str):
        return timestamp, Turn((Piece(text, 0, text),), output, delay)
    length = int(field("input_length", None, MAX_TOKENS))
    ids = line.get("hash_ids") or [f"line {number}"]
    if not isinstance(ids, list) or len(ids) * HASH_TOKENS > MAX_TOKENS:
        raise ConfigError(
            f"line {number + 1} of the trace: hash_ids must be a list of at most {MAX_TOKENS // HASH_TOKENS}"
        )
    pieces, left = [], length
    for index, one in enumerate(ids):
        count = left if index == len(ids) - 1 else min(HASH_TOKENS, left)
        left -= count
        if count:
            pieces.append(Piece(str(one), max(round(count * scale), 1)))
    if not pieces:
        raise ConfigError(f"line {number + 1} of the trace has no input")
    return timestamp, Turn(tuple(pieces), output, delay)


def _content(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        content = "\n".join(p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str))
    return content if isinstance(content, str) else ""
