"""Reads published traces as sessions. A line (or a file) is of the first format here that it has the field of:

requests   a Weka trace, as AgentX has them: a coding agent's calls, `in` and `out` tokens, `hash_ids` for each
           `block_size` tokens, which mean equal tokens within the trace; seconds. A subagent is a session of its own
turns      AIPerf's multi_turn: `text`, `delay` and `timestamp` in milliseconds, `output_length` of each
chat_id    Bailian: a whole prompt, a hash id for each 16 tokens, `timestamp` in seconds, `parent_chat_id`
text       AIPerf's single_turn: a whole prompt
else       Mooncake, and AIPerf's mooncake_trace: `input_length` with a hash id for each 512 tokens, `text_input`,
           `messages` or `payload`; milliseconds. With a `session_id` it adds to what its session has said so far,
           except for messages, which are the whole conversation unless `message_mode` is "delta"

Without `delay`, a turn begins after the answer before it by the difference of the two turns' timestamps.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from perilune.bench.traces import HASH_TOKENS, MAX_TOKENS, Piece, Session, Turn
from perilune.core.errors import ConfigError

BAILIAN_TOKENS = 16  # tokens per hash id in Bailian traces
DEFAULT_OUTPUT_TOKENS = 128
FIELDS = ("text_input", "messages", "payload", "text", "turns", "chat_id", "requests")

Timed = tuple[float, float | None, Turn]  # (timestamp, delay or None: by the timestamps), seconds


def sessions_of(lines: Sequence[dict[str, Any]], *, scale: float = 1.0) -> list[Session]:
    """Sessions in order of their starts. `scale` (for small models) multiplies the lengths of answers and of texts that
    are made from a name. ConfigError names a line without a known format."""
    grouped: dict[str, list[tuple[int, Timed]]] = {}
    roots: dict[Any, str] = {}  # Bailian's session of a chat
    for number, line in enumerate(lines):
        for name, timed in _sessions(_Line(line, number, scale), roots):
            grouped.setdefault(name, []).extend((number, one) for one in timed)
    found = []
    for name, turns in grouped.items():
        before = [turns[0], *turns]
        delayed = [
            Turn(t.pieces, t.output_tokens, max(at - last, 0.0) if delay is None else delay, t.whole, number)
            for (number, (at, delay, t)), (_, (last, _, _)) in zip(turns, before)
        ]
        found.append(Session(name, turns[0][1][0], tuple(delayed)))
    if not found:
        raise ConfigError("the trace has no request with input")
    first = min(session.start for session in found)
    return sorted((Session(s.name, s.start - first, s.turns) for s in found), key=lambda s: s.start)


class _Line:
    """A line's fields, checked."""

    def __init__(self, line: dict[str, Any], number: int, scale: float) -> None:
        self.line, self.number, self.scale = line, number, scale

    def __contains__(self, name: str) -> bool:
        return self.line.get(name) is not None

    def inner(self, line: Any) -> "_Line":
        if not isinstance(line, dict):
            raise self.wrong(f"has {line!r} where an object belongs")
        return _Line(line, self.number, self.scale)

    def wrong(self, why: str) -> ConfigError:
        return ConfigError(f"line {self.number + 1} of the trace: {why}")

    def count(self, name: str, default: float | None, most: float) -> float:
        value = self.line.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
            raise self.wrong(f"{name} must be between 0 and {most:g}, not {value!r}")
        return float(value)

    def items(self, name: str) -> list[Any]:
        found = self.line.get(name)
        if not isinstance(found, list) or not found:
            raise self.wrong(f"{name} must be a list, and not empty")
        return found

    def output(self, name: str = "output_length") -> int:
        return max(round(self.count(name, DEFAULT_OUTPUT_TOKENS, MAX_TOKENS) * self.scale), 1)

    def hashed(self, length: int, block: int, scope: str) -> tuple[Piece, ...]:
        """The prompt of `length` tokens: each of `hash_ids` names `block` of them, the last one the rest. Tokens beyond
        all ids occur in no other line."""
        ids = self.line.get("hash_ids") or []
        if not isinstance(ids, list) or len(ids) * block > MAX_TOKENS:
            raise self.wrong(f"hash_ids must be a list of at most {MAX_TOKENS // block}")
        pieces, left = list[Piece](), length
        for one in ids:
            tokens, left = min(block, left), max(left - block, 0)
            if tokens:
                pieces.append(Piece(f"{scope}{one}", max(round(tokens * self.scale), 1)))
        if left:
            pieces.append(Piece(f"line {self.number}", max(round(left * self.scale), 1)))
        if not pieces:
            raise self.wrong("has no input")
        return tuple(pieces)

    def texts(self) -> tuple[Piece, ...]:
        """The piece of `text` or `texts`."""
        given = self.items("texts") if "texts" in self else [self.line.get("text")]
        found = [one.get("contents") if isinstance(one, dict) else one for one in given]
        if any(one is not None and not isinstance(one, str | list) for one in found):
            raise self.wrong("text must be a string, or a list of some")
        text = "\n".join("\n".join(map(str, one)) if isinstance(one, list) else str(one or "") for one in found)
        if not text.strip():
            raise self.wrong("has no text: only text can be replayed")
        return (Piece(text, 0, text),)

    def messages(self, given: Any) -> tuple[Piece, ...]:
        pieces = []
        for message in given if isinstance(given, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list):
                content = "\n".join(
                    p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str)
                )
            role = message.get("role") if isinstance(message, dict) else None
            calls = message.get("tool_calls") if isinstance(message, dict) else None
            text = f"{content or ''}{json.dumps(calls) if calls else ''}"
            if text:
                pieces.append(Piece(f"{role}: {text}", 0, text, role if role in ("system", "assistant") else "user"))
        if not pieces:
            raise self.wrong("messages must be a list of messages with text")
        return tuple(pieces)


def _sessions(line: _Line, roots: dict[Any, str]) -> Iterator[tuple[str, list[Timed]]]:
    if "requests" in line:
        yield from _weka(line, f"trace {line.line.get('id', line.number)}", 0.0)
    elif "turns" in line:
        yield _name(line), list(_turns(line))
    elif "chat_id" in line:
        chat, parent = line.line["chat_id"], line.line.get("parent_chat_id", -1)
        if isinstance(chat, dict | list) or isinstance(parent, dict | list):
            raise line.wrong("chat_id and parent_chat_id must be numbers or names")
        name = roots[chat] = roots.get(parent, f"chat {chat}")
        pieces = line.hashed(int(line.count("input_length", None, MAX_TOKENS)), BAILIAN_TOKENS, "")
        yield name, [(line.count("timestamp", 0, 1e12), None, Turn(pieces, line.output(), whole=True))]
    elif "text" in line or "texts" in line:
        yield _name(line), [_timed(line, Turn(line.texts(), line.output(), whole=True))]
    else:
        yield _name(line), [_timed(line, _mooncake(line))]


def _name(line: _Line) -> str:
    name = line.line.get("session_id")
    return f"request {line.number}" if name is None else f"session {name}"


def _timed(line: _Line, turn: Turn) -> Timed:
    delay = line.count("delay", 0, 1e12) / 1e3 if "delay" in line or "timestamp" not in line else None
    return line.count("timestamp", 0, 1e15) / 1e3, delay, turn


def _mooncake(line: _Line) -> Turn:
    payload = line.line.get("payload")
    if isinstance(payload, dict):
        body = line.inner({"output_length": payload.get("max_tokens"), "text": payload.get("prompt")})
        said = payload.get("messages")
        return Turn(line.messages(said) if said is not None else body.texts(), body.output(), whole=True)
    if "messages" in line:
        whole = line.line.get("message_mode", "history") != "delta"
        return Turn(line.messages(line.line["messages"]), line.output(), whole=whole)
    text = line.line.get("text_input")
    if isinstance(text, str):
        return Turn((Piece(text, 0, text),), line.output())
    if "input_length" not in line:
        raise line.wrong(f"input_length must be there, or one of {', '.join(FIELDS)}, which say what to send")
    length = int(line.count("input_length", None, MAX_TOKENS))
    return Turn(line.hashed(length, HASH_TOKENS, ""), line.output())


def _turns(line: _Line) -> Iterator[Timed]:
    begun: tuple[Piece, ...] = ()
    at = 0.0
    for index, given in enumerate(line.items("turns")):
        turn = line.inner(given)
        if not index and turn.line.get("role") == "system" and len(line.items("turns")) > 1:
            begun = tuple(Piece(p.name, p.tokens, p.text, "system") for p in turn.texts())
            continue
        timestamp, delay, made = _timed(turn, Turn((*begun, *turn.texts()), turn.output()))
        at, begun = max(at, timestamp), ()  # keeps the order of turns, whatever their timestamps
        yield at, delay, made


def _weka(line: _Line, name: str, start: float) -> Iterator[tuple[str, list[Timed]]]:
    """`start`: of the session, in seconds. Times of a subagent's calls count from the trace's start; if its first call
    has an earlier time than the subagent's own start, from the latter."""
    times = [call.get("t") for call in line.items("requests") if isinstance(call, dict)]
    own = start if times and isinstance(times[0], int | float) and times[0] < start else 0.0
    block = int(line.count("block_size", None, MAX_TOKENS)) or HASH_TOKENS
    calls, ended = list[Timed](), None
    for given in line.items("requests"):
        call = line.inner(given)
        at = own + call.count("t", 0, 1e12)
        if call.line.get("type") == "subagent":
            if call.line.get("requests"):
                agent = line.inner({**call.line, "block_size": block})
                yield from _weka(agent, f"{name}, agent {call.line.get('agent_id', at)}", at)
            continue
        length = int(call.count("in", None, MAX_TOKENS))
        scope = f"{name.split(',')[0]} "
        turn = Turn(call.hashed(length, block, scope) if length else (), call.output("out"), whole=True)
        think = call.count("think_time", 0, 1e12) if "think_time" in call else None
        if think is None and ended is not None:
            think = max(at - ended, 0.0)
        ended = at + call.count("api_time", 0, 1e12)
        if turn.pieces:
            calls.append((at, think, turn))
    if calls:
        yield name, calls
