"""Makes the `Constraint`, which the engine enforces, from the fields of a request about its answer's form."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from perilune.core.constraint import Constraint
from perilune.core.errors import RequestError
from perilune.grammar.enforcer import Enforcer
from perilune.grammar.expressions import length
from perilune.grammar.json_schema import enforceable
from perilune.grammar.matcher import GrammarError, Matcher, json_grammar, lark_grammar, regex_grammar, vocabulary
from perilune.grammar.references import DEFINITIONS, SchemaError, items, mapping, nodes, resolved
from perilune.grammar.sizes import (
    MAX_BYTES,
    MAX_PATTERN_COMPARISONS,
    MAX_PATTERN_NAMES,
    MAX_PROPERTIES_OF_OBJECT,
    MAX_REMAINDERS,
    bounded,
    is_number,
    multiple,
    pattern_comparisons,
    pattern_names,
    remainders,
    remainders_of,
)
from perilune.text.beginning import compact
from perilune.text.tokenizer import Tokenizer
from perilune.text.tools import Tool, check_depth, depth, show

MAX_CHOICES = 1024
# Limit of a grammar, an expression, all choices, or all expressions of a schema. 1,000,000 took a minute to compile.
MAX_GRAMMAR_CHARS = 65_536
# Limit of one expression of a schema. The search for its shortest match holds the GIL: "x?" repeated 4,000 times
# stopped the event loop for 0.25 s, 30,000 times for 35 s.
MAX_PATTERN_CHARS = 8_192
# Limit of nesting depths, summed over a schema and its definitions: the compiler may recurse so deep, 6 KiB per level.
MAX_LEVELS = 8_192
# Limit of schemas that may apply to one value, by references and alternatives. llguidance keeps an item for each in
# every parser state and fails beyond 2,000, even in the middle of an answer.
MAX_SCHEMAS_OF_VALUE = 1_500
_MAX_VISITED = 2_000_000  # references followed to count them: about a second
_PLAIN_TYPES = ("string", "number", "integer", "boolean", "null")
_FORMS: Mapping[str, Literal["grammar", "regex"]] = {"lark": "grammar", "regex": "regex"}
# Values of Constraint.leap. JSON: enough to close the brackets and quotes that one token opens, and for two numbers.
_JSON_LEAP = 96
_FREE_LEAP = 256
_OVERLAP = (
    "oneOf has alternatives that one value could satisfy together: use anyOf, or distinguish them by type or a const"
)


@dataclass(frozen=True, slots=True)
class Named:
    """The tool_choice of one declared tool, which must be called."""

    name: str


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tool_choice of some of the declared tools; `required`: one of them must be called."""

    names: frozenset[str]
    required: bool = False


Compile = Callable[[str], Matcher]
ToolChoice = Literal["auto", "none", "required"] | Named | Allowed


def forces(choice: ToolChoice) -> bool:
    """Whether the answer must be a tool call."""
    return choice.required if isinstance(choice, Allowed) else choice not in ("auto", "none")


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The form of the answer's text.

    kind and value: "json_object" (None), "json_schema" (the schema), "regex" (the expression, which the whole answer
    matches), "choice" (the strings, one of which is the answer), "grammar" (Lark text). `param` is the request field
    it came from, for error messages.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    value: Any = None
    param: str = "response_format"


def constrain(
    tokenizer: Tokenizer,
    *,
    tools: Sequence[Tool] = (),
    choice: ToolChoice = "auto",
    parallel: bool = True,
    first_index: int = 0,
    thinking: bool = False,
    answer: AnswerFormat | None = None,
    thinking_budget: int | None = None,
    begun: str = "",
    group: str = "",
) -> Constraint | None:
    """The constraint of a chat answer; None when nothing has to be enforced.

    Raises RequestError with `param` = the field, naming the keyword, for anything the engine cannot enforce. Give
    the result to `EngineClient.generate(prompt, params, constraint)`; call `result.check_room(max_tokens)` before the
    response has begun. Takes about a millisecond for each schema not seen before, and some seconds on the first call
    with a large vocabulary (`warm_up` does that ahead): call it on a thread.

    `group`: only requests of one group share compiled grammars.
    `begun`: the beginning of the answer, if the prompt holds it; `answer` applies to the whole. JSON may have any white
    space in `begun`; the rest is compact.
    """
    declared = {tool.name: tool for tool in tools}
    if isinstance(choice, Named):
        if choice.name not in declared:
            raise RequestError(f"tool_choice names {choice.name!r}, which is not among the tools", param="tool_choice")
        declared, parallel = {choice.name: declared[choice.name]}, False
    elif isinstance(choice, Allowed):
        if unknown := sorted(choice.names - declared.keys()):
            raise RequestError(f"tool_choice allows {unknown[0]!r}, which is not among the tools", param="tool_choice")
        declared = {name: tool for name, tool in declared.items() if name in choice.names}
    elif choice == "required" and not declared:
        raise RequestError("tool_choice is 'required', but there are no tools: declare some", param="tool_choice")
    elif choice == "none":
        declared = {}
    forced = forces(choice)
    m = tokenizer.markers
    if declared and None in (m.section_begin, m.section_end, m.call_begin, m.argument_begin, m.call_end):
        raise RequestError("this model cannot call tools: its vocabulary has no markers for calls", param="tools")
    thinking = thinking and not begun and m.think_begin is not None and m.think_end is not None
    if not thinking:
        thinking_budget = None
    if not tools and answer is None and thinking_budget is None:
        return None
    if not declared and answer is None:  # text with markers masked: no grammar is needed
        return Constraint(thinking=thinking, thinking_budget=thinking_budget)
    known = vocabulary(tokenizer)
    compile = functools.partial(known.compile, group=group)
    leaps = [0]
    grammars = []
    steps = 0  # remainders of multipleOf in all tools: an Enforcer holds the grammars of all
    for position, tool in enumerate(tools):
        if tool.name in declared:
            if tool.form is not None:
                answer_form = AnswerFormat(_FORMS[tool.form.syntax], tool.form.definition, f"tools[{position}].format")
                grammar, leap = _answer(compile, answer_form)
                grammars.append((tool.name, grammar))
                leaps.append(leap)
                continue
            where, schema = f"tools[{position}].function.parameters", json.dumps(tool.parameters)
            steps += remainders_of(tool.parameters) if '"multipleOf"' in schema else 0
            if steps > MAX_REMAINDERS:
                why = f"multipleOf cannot be enforced: those of all tools together are at most {MAX_REMAINDERS}"
                raise RequestError(why, param=where, code="unsupported_schema")
            grammar, leap = known.written(schema, group, functools.partial(_of_tool, compile, tool, where))
            grammars.append((tool.name, grammar))
            leaps.append(leap)
    structured = None
    if answer is not None and not forced:
        structured, leap = _answer(compile, answer)
        leaps.append(leap)
        begun = _begun(compile, structured, answer, begun)
    made = Constraint(
        thinking=thinking,
        thinking_budget=thinking_budget,
        text=not forced and structured is None,
        tools=tuple(grammars),
        parallel=parallel,
        first_index=first_index,
        answer=structured,
        begun=begun if structured is not None else "",
        leap=max(leaps),
        param="tools" if forced else answer.param if answer is not None else None,
        group=group,
    )
    # Assumes that the prompt ends inside <think>; if it does not, the answer has one token more.
    return dataclasses.replace(made, least=len(Enforcer(known, made, opened=True).shortest()))


def warm_up(tokenizer: Tokenizer) -> None:
    """Builds the tokenizer's Vocabulary before the first `constrain` needs it. Blocks for up to some seconds."""
    vocabulary(tokenizer)


def _answer(compile: Compile, answer: AnswerFormat) -> tuple[str, int]:
    """The grammar of an answer, and its `leap`."""
    value, where = answer.value, answer.param
    match answer.kind:
        case "json_object":
            return _compiled(compile, json_grammar, {"type": "object"}, where, "a JSON object"), _JSON_LEAP
        case "json_schema":
            if not isinstance(value, Mapping | bool):
                raise RequestError(f"the schema must be a JSON schema object, not {show(value)}", param=where)
            if isinstance(value, Mapping):
                check_depth(value, where)
                _check_schema(value, where)
            value, leap = _ready(value, where, "the schema")
            return _compiled(compile, json_grammar, value, where, "the schema"), leap
        case "regex":
            if not isinstance(value, str) or not value:
                raise RequestError(f"the expression must be a non-empty string, not {show(value)}", param=where)
            _check_chars(len(value), where, "the expression")
            if (least := length(value)) > MAX_BYTES:
                raise RequestError(
                    f"the expression cannot be enforced: its shortest match has {least} characters, at most {MAX_BYTES}"
                    " can be",
                    param=where,
                    code="unsupported_schema",
                )
            return _compiled(compile, regex_grammar, value, where, "the expression"), _FREE_LEAP + len(value)
        case "choice":
            fine = isinstance(value, Sequence) and not isinstance(value, str) and 0 < len(value) <= MAX_CHOICES
            if not fine or not all(isinstance(v, str) and v for v in value):
                raise RequestError(f"choices must be 1 to {MAX_CHOICES} non-empty strings", param=where)
            _check_chars(sum(map(len, value)), where, "the list of choices")
            text = "|".join("".join(f"\\x{{{ord(c):x}}}" for c in choice) for choice in value)
            return _compiled(compile, regex_grammar, text, where, "the choices"), max(len(v) for v in value) * 4
        case "grammar":
            if not isinstance(value, str) or not value.strip():
                raise RequestError(f"the grammar must be a non-empty string, not {show(value)}", param=where)
            _check_chars(len(value), where, "the grammar")
            return _compiled(compile, lark_grammar, value, where, "the grammar"), _FREE_LEAP + len(value)


def _check_chars(count: int, where: str, what: str, most: int = MAX_GRAMMAR_CHARS) -> None:
    if count > most:
        raise RequestError(
            f"{what} has {count} characters, at most {most} can be enforced: make it shorter",
            param=where,
            code="unsupported_schema",
        )


def _begun(compile: Compile, grammar: str, answer: AnswerFormat, text: str) -> str:
    """An answer's beginning as the grammar matches it (JSON: compact); RequestError if it does not."""
    if answer.kind in ("json_object", "json_schema"):
        text = compact(text)
    try:
        rest = compile(grammar).begin(text) if text else ""
    except GrammarError as e:
        raise RequestError(
            f"the last message cannot be continued as {answer.param} asks: {e}", param=answer.param
        ) from e
    if rest:
        raise RequestError(
            f"the last message cannot begin an answer that keeps to {answer.param}: {show(rest)} does not fit",
            param=answer.param,
            code="invalid_value",
        )
    return text


def _compiled(compile: Compile, write: Callable[[Any], str], value: Any, where: str, what: str) -> str:
    """The grammar that `write` makes of `value`; compiles it, so that RequestError names what cannot be enforced."""
    try:
        grammar = write(value)
        compile(grammar)
    except GrammarError as e:
        why = _OVERLAP if "coerce_one_of" in str(e) else str(e)
        raise RequestError(f"{what} cannot be enforced: {why}", param=where, code="unsupported_schema") from e
    return grammar


# ---- schemas


def _of_tool(compile: Compile, tool: Tool, where: str) -> tuple[str, int]:
    """The grammar of a call's arguments, and its leap."""
    schema, leap = _of_object(tool, where)
    return _compiled(compile, json_grammar, schema, where, f"tool {tool.name!r}"), leap


def _of_object(tool: Tool, where: str) -> tuple[Any, int]:
    """(The schema of a call's arguments, with type object; its leap)."""
    parameters = tool.parameters
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise RequestError(f"{where}.type must be 'object', not {show(kind)}", param=where)
    _check_schema(parameters, where)
    return _ready({**parameters, "type": "object"}, where, f"tool {tool.name!r}")


def _ready(schema: Any, where: str, what: str) -> tuple[Any, int]:
    """The schema as the compiler takes it, and its leap: bytes that a token can add to the shortest completion.

    One token may open several values: the leap has room for two keys and minimal values of the largest size. Larger:
    more searches near the end of the token budget; smaller: an answer could be cut off.
    """
    try:
        plain = resolved(schema)
        _check_levels(plain)
        rewritten = enforceable(plain)
        count = max((len(mapping(node.get("properties"))) for node in nodes(rewritten)), default=0)
        if count > MAX_PROPERTIES_OF_OBJECT:
            raise SchemaError(
                f"an object has {count} properties, at most {MAX_PROPERTIES_OF_OBJECT} in an object can be enforced"
            )
        made, heaviest = bounded(rewritten)
        _check_schemas_of_values(made)
    except (SchemaError, RecursionError) as e:
        why = "rewriting it by its references does not end" if isinstance(e, RecursionError) else e
        raise RequestError(f"{what} cannot be enforced: {why}", param=where, code="unsupported_schema") from e
    longest_key = max((len(k) for node in nodes(made) for k in node), default=0)
    return made, _JSON_LEAP + 2 * (heaviest + longest_key)


def _check_levels(schema: Any) -> None:
    definitions = (part for word in DEFINITIONS for part in mapping(mapping(schema).get(word)).values())
    if sum(1 + depth(part) for part in (schema, *definitions)) > MAX_LEVELS:
        raise SchemaError(f"it and its definitions have more than {MAX_LEVELS} levels together")


def _check_schemas_of_values(schema: Any) -> None:
    _check_remainders(remainders_of(schema))
    if pattern_comparisons(schema) > MAX_PATTERN_COMPARISONS:
        raise SchemaError("patternProperties of too many schemas hold together for one value, by references and allOf")
    known = {"#": _alternatives(schema)}
    for word in DEFINITIONS:
        known |= {f"#/{word}/{k}": _alternatives(part) for k, part in mapping(mapping(schema).get(word)).items()}
    # {(references of a schema, its multipleOf): how many schemas apply to its value before these are followed}
    starts: dict[tuple[frozenset[str], frozenset[Fraction]], int] = {}
    for count, found, steps in map(_alternatives, nodes(schema)):
        starts[found, steps] = max(count, starts.get((found, steps), 0))
    visited = 0
    for (first, steps), count in starts.items():
        left, seen = list(first), set(first)
        while left and count <= MAX_SCHEMAS_OF_VALUE and visited < _MAX_VISITED:
            more, found, others = known.get(left.pop(), (0, frozenset(), frozenset()))
            left += found - seen
            seen |= found
            steps |= others
            count, visited = count + more, visited + 1
        if left or count > MAX_SCHEMAS_OF_VALUE:
            raise SchemaError(
                f"one of its values may follow more than {MAX_SCHEMAS_OF_VALUE} schemas, by references and alternatives"
            )
        if len(steps) > 1:  # the compiler takes the common multiple of those that apply together
            least = Fraction(math.lcm(*(s.numerator for s in steps)), math.gcd(*(s.denominator for s in steps)))
            _check_remainders(remainders(least))


def _check_remainders(count: int) -> None:
    if count > MAX_REMAINDERS:
        raise SchemaError(
            f"all multipleOf together, and a common multiple of those of one value, are at most {MAX_REMAINDERS} "
            f"without decimal points, not {str(count)[:32]}"
        )


def _alternatives(schema: Any) -> tuple[int, frozenset[str], frozenset[Fraction]]:
    """(Number of schemas that may apply to a value, without plain values: the compiler merges alternatives of these;
    the references among the schemas; every multipleOf in them)."""
    count, found, steps, left = 0, set[str](), set[Fraction](), [schema]
    while left:
        part = left.pop()
        node = mapping(part)
        choices = [choice for word in ("anyOf", "oneOf", "allOf") for choice in items(node.get(word))]
        if isinstance(reference := node.get("$ref"), str):
            found.add(reference)
        if (step := multiple(node)) is not None:
            steps.add(step)
        plain = node.get("type") in _PLAIN_TYPES or "const" in node or "enum" in node
        count += bool(reference or choices or not plain)
        left += choices
    return count, frozenset(found), frozenset(steps)


def _check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Refuses minProperties > max(1, number of required properties): llguidance counts a repeated key twice.

    Also refuses expressions that take long to compile.
    """
    if (count := pattern_names(schema)) > MAX_PATTERN_NAMES:
        raise RequestError(
            f"patternProperties cannot be enforced for {count} names, at most {MAX_PATTERN_NAMES} in a schema",
            param=where,
            code="unsupported_schema",
        )
    expressions = 0
    for node in nodes(schema):
        found = [len(str(name)) for name in mapping(node.get("patternProperties"))]
        if isinstance(pattern := node.get("pattern"), str):
            found.append(len(pattern))
        _check_chars(max(found, default=0), where, "one of its patterns", MAX_PATTERN_CHARS)
        expressions += sum(found)
        _check_chars(expressions, where, "the text of all its patterns")
        least, required = node.get("minProperties"), items(node.get("required"))
        if is_number(least) and least > max(1, len({str(name) for name in required})):
            raise RequestError(
                f"minProperties cannot be enforced beyond the required properties: list {least} in 'required'",
                param=where,
                code="unsupported_schema",
            )
