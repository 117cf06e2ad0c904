"""Reads the constraints of a request on its answer: tool_choice, response_format and guided fields, thinking budget."""

import asyncio
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from perilune.core.constraint import Constraint
from perilune.core.errors import RequestError
from perilune.core.sampling import SamplingParams
from perilune.grammar.constrain import Allowed, AnswerFormat, Named, ToolChoice, constrain
from perilune.server.call import current
from perilune.server.conversation import wrong
from perilune.server.fields import MAX_NAME_CHARS
from perilune.text.beginning import Beginning
from perilune.text.tokenizer import Tokenizer
from perilune.text.tools import MAX_DEPTH, Tool, check_depth, check_text, show

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Token limit of a thought by `reasoning_effort`; None: no limit. "none" switches thinking off.
EFFORTS: Mapping[Effort, int | None] = {
    "none": 0, "minimal": 512, "low": 2048, "medium": 8192, "high": None, "xhigh": None, "max": None
}  # fmt: skip
PLAIN_TEXT = Beginning(given=False, thinks=False, opened=False)  # no thought; no part of the answer is in the prompt
_threads = ThreadPoolExecutor(128)  # so many, because most may wait to compile a grammar (matcher._compiling)
_GUIDED: Mapping[str, Kind] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


@dataclass(frozen=True, slots=True)
class Calls:
    """The tool calls that an answer may have. `first_index`: the number in the first call's id
    (functions.NAME:INDEX)."""

    tools: Sequence[Tool] = ()
    choice: ToolChoice = "auto"
    parallel: bool = True
    first_index: int = 0


NO_CALLS = Calls()


async def enforced(
    tokenizer: Tokenizer,
    params: SamplingParams,
    *,
    answer: AnswerFormat | None = None,
    calls: Calls = NO_CALLS,
    begun: Beginning = PLAIN_TEXT,
    budget: int | None = None,
) -> Constraint | None:
    """The grammar constraint of an answer; RequestError if `params` contradict it or max_tokens is too small.

    `begun`: the part of the answer that is in the prompt. `budget`: tokens that the thought may take; None: no bound.
    """
    make = functools.partial(
        constrain,
        tokenizer,
        tools=calls.tools,
        choice=calls.choice,
        parallel=calls.parallel,
        first_index=calls.first_index,
        thinking=begun.thinks,
        answer=answer,
        thinking_budget=budget,
        begun=begun.content,
        group="\n".join(current().account.cache_keys),
    )
    # On a thread: compiling a grammar takes 1 ms or more, and would stall all streams of the event loop.
    apart = calls.tools or answer is not None
    constraint = await asyncio.get_running_loop().run_in_executor(_threads, make) if apart else make()
    if constraint is None:
        return None
    if constraint.tools or constraint.answer is not None:
        asked_by = "tools" if answer is None else answer.param
        for name, value in (("min_tokens", params.min_tokens), ("ignore_eos", params.ignore_eos)):
            if value:
                raise wrong(name, f"does not go with {asked_by}: the answer ends where its form does")
    assert params.max_tokens is not None
    constraint.check_room(params.max_tokens - (begun.thinks and not begun.opened))
    return constraint


def tool_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """The body's tool_choice; RequestError if it demands a tool that is not declared."""
    if value in (None, "auto", "none"):
        return "none" if value == "none" else "auto"
    if value == "required":
        if not tools:
            raise RequestError("tool_choice 'required' needs tools, and none are declared", param="tool_choice")
        return "required"
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        return _allowed(value.get("allowed_tools"), tools)
    name = _named(value)
    if name is None:
        raise wrong(
            "tool_choice",
            "must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': ...}} or "
            f"{{'type': 'allowed_tools', 'allowed_tools': {{'mode': ..., 'tools': [...]}}}}, not {show(value)}",
        )
    _check_declared([name], tools)
    return Named(name)


def _allowed(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """The choice among the tools that `allowed_tools` lists. The prompt keeps all tools, so that it hits cached KV."""
    mode, listed = (value.get("mode"), value.get("tools")) if isinstance(value, Mapping) else (None, None)
    if mode not in ("auto", "required"):
        raise wrong("tool_choice", f"allowed_tools.mode must be 'auto' or 'required', not {show(mode)}")
    given = [_named(tool) for tool in listed] if isinstance(listed, Sequence) else []
    names = [name for name in given if name is not None]
    if not names or len(names) < len(given):
        raise wrong("tool_choice", "allowed_tools.tools must list {'type': 'function', 'function': {'name': ...}}")
    _check_declared(names, tools)
    return Allowed(frozenset(names), mode == "required")


def _named(value: Any) -> str | None:
    """The name of the function that {"type": "function", "function": {"name": ...}} names."""
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _check_declared(names: Sequence[str], tools: Sequence[Tool]) -> None:
    declared = {tool.name for tool in tools}
    for name in names:
        if name not in declared:
            raise wrong("tool_choice", f"names {show(name)}, which tools does not declare")


def check_strict(tools: Sequence[Tool]) -> None:
    """RequestError if `strict` is no bool. Its value has no effect: the schema of every tool is enforced."""
    for i, tool in enumerate(tools):
        strict = tool.raw["function"].get("strict")
        if not isinstance(strict, bool | None):
            raise wrong(f"tools[{i}].function.strict", f"must be true or false, not {show(strict)}")


def answer_format(
    response_format: Mapping[str, Any] | None,
    guided: Mapping[str, Any],
    structured_outputs: Mapping[str, Any] | None,
) -> AnswerFormat | None:
    """The form of the answer's text, None if it is free; RequestError if two fields ask for one.

    `guided`: the request fields guided_json, guided_regex, guided_choice and guided_grammar, without `guided_`.
    """
    found = [
        *_response_format(response_format),
        *(_guided(kind, guided.get(kind), f"guided_{kind}") for kind in _GUIDED if guided.get(kind) is not None),
        *_structured_outputs(structured_outputs),
    ]
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        raise RequestError(f"{first} and {second} both fix the answer's form: send one of them", param=second)
    return found[0] if found else None


def thinking_budget(limits: Mapping[str, int | None], effort: Effort | None) -> int | None:
    """How many tokens a thought may take; None: no bound. `limits`: the request fields that state tokens, by name."""
    given = {name: limit for name, limit in limits.items() if limit is not None}
    for name, limit in given.items():
        if limit < 0:
            raise wrong(name, f"must be at least 0, not {limit}")
    if len(set(given.values())) > 1:
        first, second = list(given)[:2]
        raise wrong(first, f"and {second} contradict each other: send one of them")
    if effort in (None, "none"):
        return next(iter(given.values()), None)
    assert effort is not None
    if given:
        raise wrong("reasoning_effort", f"and {next(iter(given))} both bound the thought: send one of them")
    return EFFORTS[effort]


def _response_format(given: Mapping[str, Any] | None) -> Iterator[AnswerFormat]:
    if given is None:
        return
    match given.get("type"):
        case "text":
            return
        case "json_object":
            yield AnswerFormat("json_object")
        case "json_schema":
            where = "response_format.json_schema"
            described = given.get("json_schema")
            if not isinstance(described, Mapping):
                raise wrong(where, "must be an object with a name and a schema")
            if not isinstance(described.get("strict"), bool | None):
                raise wrong(f"{where}.strict", f"must be true or false, not {show(described['strict'])}")
            yield AnswerFormat("json_schema", _schema(described.get("schema"), f"{where}.schema"))
        case kind:
            raise wrong("response_format.type", f"must be 'text', 'json_object' or 'json_schema', not {show(kind)}")


def _structured_outputs(given: Mapping[str, Any] | None) -> Iterator[AnswerFormat]:
    """vLLM's newer form of the guided_* fields: one object `structured_outputs`."""
    for name, value in (given or {}).items():
        where = f"structured_outputs.{name[:MAX_NAME_CHARS]}"
        if value is None or (name == "json_object" and value is False):
            continue
        if name == "json_object" and value is True:
            yield AnswerFormat("json_object", param=where)
        elif name in _GUIDED:
            yield _guided(name, value, where)
        elif name in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
            continue  # options of vLLM's own grammar backends
        else:
            known = ", ".join([*_GUIDED, "json_object"])
            raise wrong(where, f"is not supported: structured_outputs takes one of {known}")


def _guided(name: str, value: Any, where: str) -> AnswerFormat:
    kind = _GUIDED[name]
    if kind == "json_schema":
        return AnswerFormat(kind, _schema(value, where), where)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
            raise wrong(where, "must be a list of strings that are not empty")
        return AnswerFormat(kind, tuple(dict.fromkeys(value)), where)
    if not isinstance(value, str) or not value:
        raise wrong(where, f"must be a string that is not empty, not {show(value)}")
    return AnswerFormat(kind, value, where)


def _schema(value: Any, where: str) -> Any:
    """A JSON schema, which may come as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as e:
            raise wrong(where, f"is not valid JSON: {e}") from e
        except RecursionError as e:
            raise wrong(where, f"nests deeper than {MAX_DEPTH} levels") from e
    if not isinstance(value, Mapping | bool):
        raise wrong(where, "must be a JSON schema object")
    check_depth(value, where)
    check_text(value, where)
    return value
