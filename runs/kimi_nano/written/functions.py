"""Function calls of the Berkeley Function Calling Leaderboard (ShishirPatil/gorilla, Apache 2.0): requests that people
and models wrote, the functions declared with each, and the calls that are right.

A request is read if each of its values can be copied from the text, chosen from a list or answered with a boolean, and
if no parameter of its functions is an object. Requests that no function fits are left out: for many of them a declared
function looks right. Descriptions end after their first sentence, and at most two other functions are declared, so that
prompts are short.

Records: {"family", "source", "text", "tools": [tool, ...], "calls": [[name, {parameter: value}], ...]}; a tool is
[name, description, {parameter: [JSON type, description, choices]}].
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

from perilune.tasks.fields import written
from perilune.tasks.problem import Problem, Reply, ToolCall, user
from perilune.tasks.tools import opening
from perilune.tasks.words import made_up

FUNCTIONS: Final = "gorilla"
FOLDER: Final = "berkeley-function-call-leaderboard/bfcl_eval/data"
CALLS: Final = (
    "simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple", "live_parallel",
    "live_parallel_multiple",
)  # fmt: skip
LONGEST: Final = 400  # characters of a request
REPLACED: Final = 0.5  # share of numbers and names that are replaced
_TYPES: Final = {"string": "string", "integer": "integer", "float": "number", "number": "number", "boolean": "boolean",
    "array": "array"}  # fmt: skip
_SENTENCE: Final = re.compile(r"(?<=[a-z)]{2}[.;]) ")

Tool = list[Any]  # name, description, {parameter: [type, description, choices]}


def read(root: Path) -> Iterator[dict[str, Any]]:
    """The records, if the repository is there."""
    folder = root / FUNCTIONS / FOLDER
    for name in CALLS:
        right = {r["id"]: r["ground_truth"] for r in _rows(folder / "possible_answer" / f"BFCL_v4_{name}.json")}
        for row in _rows(folder / f"BFCL_v4_{name}.json"):
            if made := _record(row, right.get(row["id"], [])):
                yield made


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.is_file() else []


def _record(row: Mapping[str, Any], right: list[dict[str, Any]]) -> dict[str, Any] | None:
    said = [m for m in row["question"][0] if m["role"] == "user"]
    if len(row["question"]) != 1 or len(said) != 1 or not 8 <= len(said[0]["content"]) <= LONGEST:
        return None
    text = said[0]["content"].strip()
    declared = row["function"] if isinstance(row["function"], list) else [row["function"]]
    called = [name for call in right for name in call]
    others = [f for f in declared if f["name"] not in called][:2]
    tools = [_tool(f) for f in [*(f for f in declared if f["name"] in called), *others]]
    kept = {t[0]: t for t in tools if t}
    calls = []
    for call in right:
        ((name, given),) = call.items()
        short = _name(name)
        if short not in kept or (values := _values(text, kept[short], given)) is None:
            return None
        calls.append([short, values])
    if not 1 <= len(calls) <= 4 or len({json.dumps(c) for c in calls}) != len(calls):
        return None
    family = "tool_call" if len(calls) == 1 else "tools_multi"
    return {"family": family, "source": FUNCTIONS, "text": text, "tools": list(kept.values()), "calls": calls}


def _name(name: str) -> str:
    return name.replace(".", "_")


def _short(text: str) -> str:
    return _SENTENCE.split(text.strip())[0][:160]


def _tool(function: Mapping[str, Any]) -> Tool | None:
    found = {}
    for name, about in function["parameters"]["properties"].items():
        kind = _TYPES.get(about.get("type", ""))
        if kind is None or (kind == "array" and about.get("items", {}).get("type") not in ("string", "integer")):
            return None
        choices = about.get("enum") or []
        if choices and not all(isinstance(c, str) for c in choices):
            return None
        found[name] = [kind, _short(about.get("description", "")), choices if kind == "string" else []]
    return [_name(function["name"]), _short(function.get("description", "")), found] if found else None


def _values(text: str, tool: Tool, given: Mapping[str, list[Any]]) -> dict[str, Any] | None:
    """The arguments in declared order; None if one that is needed is not in the text."""
    found = {}
    for name, (kind, _, choices) in tool[2].items():
        allowed = given.get(name, [""])
        fitting = [v for v in allowed if v != "" and _fits(text, v, kind, choices)]
        unnamed = kind == "boolean" or (choices and fitting and fitting[0].lower() not in text.lower())
        if fitting and not ("" in allowed and unnamed):  # a default that the text does not name is left out
            found[name] = fitting[0]
        elif "" not in allowed:
            return None
    return found


def _fits(text: str, value: Any, kind: str, choices: list[str]) -> bool:
    if kind == "array":
        return isinstance(value, list) and bool(value) and all(_fits(text, v, "", []) for v in value)
    if kind == "boolean":
        return isinstance(value, bool)
    if choices:
        return value in choices
    if isinstance(value, str):
        return value in text
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return re.search(rf"(?<![\w.,]){re.escape(str(value))}(?![\w]|[.,]\d)", text) is not None


def problem(record: dict[str, Any], rng: Random, tables: Mapping[str, Any]) -> Problem:
    """A training problem, some of its numbers and names replaced."""
    text, calls = record["text"], json.loads(json.dumps(record["calls"]))
    tools = {t[0]: t for t in record["tools"]}
    for called, arguments in calls:
        for name, value in arguments.items():
            if (
                not tools[called][2][name][2]
                and rng.random() < REPLACED
                and (other := _other(rng, text, value, calls)) is not None
            ):
                text = text.replace(str(value), str(other))
                arguments[name] = other
    shuffled = list(tools.values())
    rng.shuffle(shuffled)
    key = ("written", text)
    made = tuple(ToolCall(name, arguments) for name, arguments in calls)
    lines = [line for i, call in enumerate(made) for line in _thought(text, call, tools[call.name], i)]
    reply = Reply("\n".join(lines), "", made)
    return Problem(record["family"], "train", key, (user(text),), reply, tuple(_spec(t) for t in shuffled))


def _other(rng: Random, text: str, value: Any, calls: list[Any]) -> Any:
    """Another value in the place of one that the text has once, as a word of its own; None if it stays."""
    if isinstance(value, bool | list) or len(re.findall(rf"(?<!\w){re.escape(str(value))}(?!\w)", text)) != 1:
        return None
    if text.count(str(value)) != 1 or json.dumps(calls).count(json.dumps(value)) != 1:
        return None
    if type(value) is int and 3 <= value < 10_000 and not 1900 < value < 2100:
        size = 10 ** (len(str(value)) - 1)
        made: Any = size + int(rng.random() * 9 * size)
    elif type(value) is str and re.fullmatch(r"[A-Z][a-z]{3,}", value) and not text.startswith(value):
        made = made_up(rng).capitalize()
    else:
        return None
    return made if str(made) not in text else None


def _thought(text: str, call: ToolCall, tool: Tool, number: int) -> list[str]:
    """As Request.trace (perilune.tasks.tools). A call after the first begins with the words from its own values on."""
    places = [at for v in call.arguments.values() if (at := text.find(str(v))) >= 0]
    begin = opening(text[min(places) :] if number and places else text)
    lines = [begin, call.name]
    for name, (kind, _, choices) in tool[2].items():
        shown = "choice" if choices else {"integer": "number", "array": "list"}.get(kind, kind)
        given = name in call.arguments
        lines.append(f"{name}: {shown} {written(call.arguments[name])}" if given else f"{name}: -")
    return lines


def _spec(tool: Tool) -> dict[str, Any]:
    name, about, parameters = tool
    properties = {
        p: {"type": kind, "description": said, **({"enum": choices} if choices else {}),
            **({"items": {"type": "string"}} if kind == "array" else {})}
        for p, (kind, said, choices) in parameters.items()
    }  # fmt: skip
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}
