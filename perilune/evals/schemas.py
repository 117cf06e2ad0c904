"""Tests an OpenAI-compatible endpoint's tool calls and structured answers over awkward schemas, each judged exactly.

An answer counts as valid only if everything about it is right: it ended before max_tokens, every call names a declared
tool under the native id that comes next, its arguments (or its text) are JSON that satisfies the schema, and no
control marker shows anywhere. What the endpoint refuses to enforce is listed apart.
"""

import dataclasses
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.table import Table

from perilune.client.endpoint import Endpoint, EndpointError, Reply, gather, thinking_switch
from perilune.evals.evaluate import FATAL
from perilune.evals.misfits import misfits
from perilune.evals.schema_maker import Drawn
from perilune.text.stream import Content, Reasoning, ToolArguments, ToolStart

Kind = Literal["required", "named", "auto", "json_schema"]
KINDS: tuple[Kind, ...] = ("required", "named", "auto", "json_schema")
TEMPERATURES = (1.0, 1.0, 1.2, 1.5)
REFUSED = (400, 422)
MAX_ERRORS = 20
MARKER = re.compile(r"<\|[a-z_]{2,40}\|>|</?think>|\[(?:BOS|EOS|EOT|PAD|UNK)\]")


@dataclass(frozen=True, slots=True)
class Case:
    """One request. `schemas` are indices: of the declared tools, or the one of the answer."""

    kind: Kind
    schemas: tuple[int, ...]
    thinking: bool
    stream: bool
    parallel: bool
    earlier: int  # calls that the conversation has made already
    native: bool  # whether these calls have native ids
    temperature: float
    seed: int


@dataclass(slots=True)
class Tally:
    """`cut` (at max_tokens) and `leaks` are among the invalid; `refused` requests are not among the answers.

    `texts`: answers without a call where none was demanded. `texts_cut` of them ran into max_tokens; nothing bounds
    free text, so those are neither valid nor invalid.
    """

    answers: int = 0
    valid: int = 0
    refused: int = 0
    calls: int = 0
    cut: int = 0
    texts: int = 0
    texts_cut: int = 0
    leaks: int = 0
    streamed: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Outcome:
    tallies: dict[Kind, Tally] = field(default_factory=lambda: {kind: Tally() for kind in KINDS})
    refused: dict[int, str] = field(default_factory=dict)  # schema -> why
    failures: list[dict[str, Any]] = field(default_factory=list)


def plan(drawn: Sequence[Drawn], count: int, seed: int) -> list[Case]:
    """First every schema alone, once; then mixtures."""
    rng = random.Random(f"{seed}/cases")
    cases = []
    for i in range(count):
        alone = i < len(drawn)
        kind = rng.choice(("named", "required", "json_schema") if alone else KINDS)
        # Two and more schemas share a prompt, which has to fit a small context.
        others = 0 if alone or kind == "json_schema" else rng.choice([0, 1, 1, 2])
        chosen = (i % len(drawn), *(rng.randrange(len(drawn)) for _ in range(others)))
        cases.append(
            Case(
                kind,
                tuple(dict.fromkeys(chosen)),
                thinking=rng.random() < 0.4,
                stream=rng.random() < 0.5,
                parallel=rng.random() < 0.7,
                earlier=0 if kind == "json_schema" else rng.choice([0, 0, 1, 3]),
                native=rng.random() < 0.5,
                temperature=rng.choice(TEMPERATURES),
                seed=i,
            )
        )
    return cases


def request(case: Case, drawn: Sequence[Drawn], max_tokens: int) -> dict[str, Any]:
    """The case as a /v1/chat/completions body."""
    body: dict[str, Any] = {
        "temperature": case.temperature,
        "seed": case.seed,
        "max_tokens": max_tokens,
        **thinking_switch(case.thinking),
    }
    if case.thinking:
        body["max_thinking_tokens"] = max_tokens // 4
    asked = {"role": "user", "content": _words(case, drawn)}
    if case.kind == "json_schema":
        schema = drawn[case.schemas[0]].schema
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        return body | {"messages": [asked], "response_format": form}
    functions = [{"name": name(s), "parameters": drawn[s].schema} for s in case.schemas]
    choice: Any = case.kind
    if case.kind == "named":
        choice = {"type": "function", "function": {"name": name(case.schemas[0])}}
    return body | {
        "messages": [*_history(case), asked],
        "tools": [{"type": "function", "function": f} for f in functions],
        "tool_choice": choice,
        "parallel_tool_calls": case.parallel,
    }


def name(schema: int) -> str:
    """The tool name for a schema, in one of four common spellings."""
    return (f"get_item_{schema}", f"item.get-{schema}", f"getItem{schema}", f"get_item_{schema}_v2")[schema % 4]


def _words(case: Case, drawn: Sequence[Drawn]) -> str:
    schema = drawn[case.schemas[0]].schema
    properties = schema.get("properties", {})
    some = ", ".join(f"{p}: {w}" for p, w in zip(properties, ("Lima", "7", "old stone")))
    return f"Get the item {case.schemas[0]} with {some or 'nothing'}."


def _history(case: Case) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for k in range(case.earlier):
        called = name(case.schemas[0])
        id = f"functions.{called}:{k}" if case.native else f"call_{k:03}abc"
        call = {"id": id, "type": "function", "function": {"name": called, "arguments": "{}"}}
        found += [
            {"role": "user", "content": f"Get item {k}."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id, "content": '{"found": false}'},
        ]
    return found


# ---- asking


async def run(
    endpoint: Endpoint,
    drawn: Sequence[Drawn],
    cases: Sequence[Case],
    *,
    concurrency: int,
    max_tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> Outcome:
    """Asks all cases, `concurrency` at a time. Raises EndpointError when the endpoint is gone or fails too often.

    A schema that was refused is not asked for again: cases that come later go without it.
    """
    outcome = Outcome()
    queue = iter(cases)
    errors = 0

    async def ask(case: Case) -> None:
        nonlocal errors
        tally = outcome.tallies[case.kind]
        left = tuple(s for s in case.schemas if s not in outcome.refused)
        if not left or (left[0] != case.schemas[0] and case.kind in ("named", "json_schema")):
            tally.refused += 1
            return
        case = dataclasses.replace(case, schemas=left)
        try:
            reply = await _ask(endpoint, case, request(case, drawn, max_tokens))
        except EndpointError as e:
            if e.status in REFUSED:
                tally.refused += 1
                outcome.refused.setdefault(_blamed(case, str(e)), str(e))
                return
            errors += 1
            if e.status in FATAL or errors > MAX_ERRORS:
                raise
            tally.answers += 1
            outcome.failures.append(_failure(case, drawn, str(e), None))
        else:
            _count(outcome, case, drawn, reply)

    async def work() -> None:
        for case in queue:
            await ask(case)
            advance()

    await gather([work() for _ in range(concurrency)])
    return outcome


def _blamed(case: Case, why: str) -> int:
    """The schema that a refusal is about: the tool it names by number or by name, else the case's own."""
    numbers = [int(n) for n in re.findall(r"tools\[(\d+)\]", why)]
    named = [s for s in case.schemas if f"'{name(s)}'" in why]
    return next((case.schemas[n] for n in numbers if n < len(case.schemas)), (*named, case.schemas[0])[0])


async def _ask(endpoint: Endpoint, case: Case, body: dict[str, Any]) -> Reply:
    if not case.stream:
        return await endpoint.complete(body)
    thoughts, text, reason, usage, closed = "", "", None, None, False
    calls: dict[int, list[str]] = {}
    async for chunk in endpoint.stream(body):
        for event in chunk.events:
            match event:
                case Reasoning(piece):
                    thoughts += piece
                case Content(piece):
                    text += piece
                case ToolStart(index, id, called):
                    calls[index] = [id, called, ""]
                case ToolArguments(index, piece):
                    calls[index][2] += piece
        reason, usage = chunk.finish_reason or reason, chunk.usage or usage
        closed |= chunk.closed_by_grammar
    made = [calls[i] for i in sorted(calls)]
    named = tuple((n, a) for _, n, a in made)
    return Reply(text, thoughts, named, reason, usage, tuple(id for id, _, _ in made), closed)


def _count(outcome: Outcome, case: Case, drawn: Sequence[Drawn], reply: Reply) -> None:
    tally = outcome.tallies[case.kind]
    tally.answers += 1
    tally.streamed += case.stream
    tally.tokens += reply.usage.completion if reply.usage else 0
    tally.calls += len(reply.tool_calls)
    cut = reply.finish_reason == "length" and not reply.closed_by_grammar
    text = case.kind == "auto" and not reply.tool_calls
    tally.cut += cut and not text
    tally.texts += text
    tally.texts_cut += cut and text
    faults = list(judge(case, drawn, reply))
    tally.leaks += any(f.startswith("leak") for f in faults)
    if faults:
        outcome.failures.append(_failure(case, drawn, "; ".join(faults), reply))
    elif not (cut and text):
        tally.valid += 1


def _failure(case: Case, drawn: Sequence[Drawn], why: str, reply: Reply | None) -> dict[str, Any]:
    return {
        "why": why,
        "case": dataclasses.asdict(case),
        "schemas": [drawn[s].schema for s in case.schemas],
        "content": reply.content if reply else None,
        "reasoning": reply.reasoning if reply else None,
        "tool_calls": [list(c) for c in reply.tool_calls] if reply else None,
        "ids": list(reply.ids) if reply else None,
        "finish_reason": reply.finish_reason if reply else None,
    }


# ---- judging


def judge(case: Case, drawn: Sequence[Drawn], reply: Reply) -> Iterator[str]:
    """Everything that is wrong with an answer."""
    expected = "length" if reply.closed_by_grammar else "tool_calls" if reply.tool_calls else "stop"
    answered = case.kind == "auto" and not reply.tool_calls
    if reply.finish_reason != expected and not (answered and reply.finish_reason == "length"):
        yield f"finish_reason is {reply.finish_reason!r}, not {expected!r}"
    for what, text in (("content", reply.content), ("reasoning", reply.reasoning)):
        if found := MARKER.search(text):
            yield f"leak of {found[0]} in {what}"
    if case.kind == "json_schema":
        if reply.tool_calls:
            yield "a call that was not asked for"
        yield from misfits(reply.content, drawn[case.schemas[0]].schema)
        return
    if case.kind != "auto" and not reply.tool_calls:
        yield "no call"
    if case.kind != "auto" and reply.content:
        yield "text beside a forced call"
    if len(reply.tool_calls) > 1 and (not case.parallel or case.kind == "named"):
        yield f"{len(reply.tool_calls)} calls instead of one"
    declared = {name(s): drawn[s].schema for s in case.schemas[: 1 if case.kind == "named" else None]}
    for k, ((called, arguments), id) in enumerate(zip(reply.tool_calls, reply.ids, strict=True), case.earlier):
        if id != f"functions.{called}:{k}":
            yield f"id {id!r} instead of functions.{called}:{k}"
        if called not in declared:
            yield f"{called!r} is not declared"
            continue
        if found := MARKER.search(arguments):
            yield f"leak of {found[0]} in arguments"
        yield from misfits(arguments, declared[called])


# ---- reporting


def rows(model: str, outcome: Outcome, schemas: int, **settings: Any) -> list[dict[str, Any]]:
    """One ledger row per kind and one for all; shares in percent."""
    made = []
    total = Tally()
    for tally in outcome.tallies.values():
        for f in Tally.__slots__:
            setattr(total, f, getattr(total, f) + getattr(tally, f))
    for kind, tally in [*outcome.tallies.items(), ("all", total)]:
        judged = tally.answers - tally.texts_cut
        made.append(
            {
                "bench": "schemas",
                "model": model,
                "kind": kind,
                **dataclasses.asdict(tally),
                "valid_share": round(100 * tally.valid / judged, 3) if judged else None,
                "schemas": schemas,
                "schemas_refused": len(outcome.refused),
                "refused_share": round(100 * len(outcome.refused) / schemas, 2),
                **settings,
            }
        )
    return made


def table(made: Sequence[dict[str, Any]]) -> Table:
    last = made[-1]
    share = f"{last['schemas_refused']} of {last['schemas']} schemas refused ({last['refused_share']:.1f} %)"
    shown = Table(title=f"answers that are valid in every respect; {share}")
    columns = (
        "answers",
        "valid",
        "valid %",
        "calls",
        "cut",
        "texts",
        "cut texts",
        "leaks",
        "streamed",
        "refused",
        "tokens",
    )
    shown.add_column("asked for")
    for column in columns:
        shown.add_column(column, justify="right")
    for r in made:
        if r is last:
            shown.add_section()
        values = [r["answers"], r["valid"], "-" if r["valid_share"] is None else f"{r['valid_share']:.2f}"]
        values += [r[c] for c in ("calls", "cut", "texts", "texts_cut", "leaks", "streamed", "refused")]
        mean = f"{r['tokens'] / r['answers']:.0f}" if r["answers"] else "-"
        shown.add_row(r["kind"], *map(str, values), mean)
    return shown


def refusals(outcome: Outcome, drawn: Sequence[Drawn]) -> list[str]:
    """What was refused, the most frequent reason first."""
    reasons = Counter(
        (drawn[s].sort, re.sub(r"^\S+ answered \d+: |tool '[^']*' |the schema ", "", why))
        for s, why in outcome.refused.items()
    )
    return [f"{count} x {sort}: {why}" for (sort, why), count in reasons.most_common()]
