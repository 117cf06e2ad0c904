"""Exact-match scores of checked tasks through an OpenAI endpoint: greedy, every answer judged by a program.

perilune/tasks has the problems and the judges (evals/given.py for problems of a file); this file asks, counts and
tabulates.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.markup import escape
from rich.table import Table

from perilune.client.endpoint import Endpoint, EndpointError, Reply, gather, thinking_switch
from perilune.core.errors import ConfigError
from perilune.evals import given
from perilune.evals.given import Given
from perilune.tasks.families import FAMILIES, check, constant_baseline, copy_baseline, family, problems
from perilune.tasks.pictures.problems import shown
from perilune.tasks.problem import Answer, Problem, answer_of

HELD_OUT, STRUCTURAL = "heldout", "structural"
TITLES = {HELD_OUT: "in-distribution", STRUCTURAL: "structural", given.SPLIT: "exact match"}  # columns of the table
Z = 1.959964  # of a 95 % interval
FATAL = (None, 401, 403, 404)  # statuses after which every other request would fail alike
REFUSED_MEDIA = (400, 415, 422)  # statuses with which servers refuse a picture
MAX_ERRORS = 20
CONSTANTS = 64  # answers tried as constant baseline of a file's family, 7 us per problem: 10,000 would take 11 minutes


@dataclass(frozen=True, slots=True)
class Cell:
    """The problems behind one number of the table. The baselines are shares of 1 and need no model."""

    family: str
    split: str
    thinking: bool
    problems: Sequence[Problem | Given]
    constant: float
    copy: float

    @classmethod
    def draw(cls, family: str, split: str, thinking: bool, count: int, seed: int, pictures: str) -> Self:
        asked = problems(family, split, count, seed=seed, thinking=thinking)
        constant = sum(check(p, constant_baseline(family)) for p in asked) / count
        copy = sum(check(p, copy_baseline(p)) for p in asked) / count
        return cls(family, split, thinking, [shown(p, pictures) for p in asked], constant, copy)

    @classmethod
    def of_file(cls, asked: Sequence[Given]) -> Self:
        """A cell of one family's problems. `constant`: the best score if all get the same answer, one of the
        CONSTANTS most frequent ones."""
        answers = Counter(json.dumps(p.answer, sort_keys=True) for p in asked).most_common(CONSTANTS)
        constants = [_as_answer(json.loads(answer)) for answer, _ in answers]
        constant = max(sum(p.right(*answer) for p in asked) for answer in constants) / len(asked)
        copy = sum(p.right(p.copy(), ()) for p in asked) / len(asked)
        return cls(asked[0].family, given.SPLIT, asked[0].thinking, asked, constant, copy)


@dataclass(slots=True)
class Tally:
    """`errors` (refused by the server) and `cut` (at max_tokens) are among the wrong answers."""

    done: int = 0
    right: int = 0
    errors: int = 0
    cut: int = 0
    counted: int = 0  # answers with a token count from the server
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """A wrong answer, for people to read."""

    problem: Problem | Given
    reply: Reply | None
    error: str | None

    def record(self) -> dict[str, Any]:
        p, got = self.problem, self.reply
        return {
            "family": p.family,
            "split": p.split,
            "thinking": p.thinking,
            "messages": list(p.messages),
            "tools": list(p.tools),
            "expected": _expected(p),
            "content": got.content if got else None,
            "reasoning": got.reasoning if got else None,
            "tool_calls": [list(c) for c in got.tool_calls] if got else None,
            "finish_reason": got.finish_reason if got else None,
            "error": self.error,
        }


def chosen(names: str | None) -> list[str]:
    """The families of a comma-separated list; without one, all that are meant to be evaluated."""
    if names is None:
        return [f.name for f in FAMILIES.values() if f.evaluated]
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise ConfigError(f"--families names none: choose from {', '.join(FAMILIES)}")
    return list(dict.fromkeys(family(name).name for name in wanted))


def plan(families: Sequence[str], modes: Sequence[bool], count: int, seed: int, pictures: str = "real") -> list[Cell]:
    """The cells of an evaluation: `count` problems per family and mode, half of each split. `pictures`: see `shown`."""
    splits = ((HELD_OUT, count - count // 2), (STRUCTURAL, count // 2))
    return [Cell.draw(f, split, mode, n, seed, pictures) for f in families for mode in modes for split, n in splits]


def plan_of_file(path: Path, names: str | None, modes: Sequence[bool]) -> list[Cell]:
    """The cells of a file of problems (evals/given.py); `names` chooses among its families."""
    families: dict[str, list[Given]] = {}
    for problem in given.read(path, thinking=modes[0]):
        families.setdefault(problem.family, []).append(problem)
    wanted = list(families) if names is None else [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in families] or (["none"] if not wanted else []):
        raise ConfigError(f"{path} has no family {unknown[0]!r}: choose from {', '.join(families)}")
    return [
        Cell.of_file([replace(p, thinking=mode) for p in families[name]])
        for name in dict.fromkeys(wanted)
        for mode in modes
    ]


async def evaluate(
    endpoint: Endpoint,
    cells: Sequence[Cell],
    *,
    concurrency: int,
    max_tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> tuple[list[Tally], list[Failure]]:
    """Asks every problem of every cell, `concurrency` at a time; `advance` is called after each.

    Raises EndpointError when the endpoint is gone or refuses every request, and after MAX_ERRORS single refusals;
    ConfigError when pictures are to be shown to a model that takes none.
    """
    await _require_sight(endpoint, cells)
    tallies = [Tally() for _ in cells]
    failures: list[Failure] = []
    queue: Iterator[tuple[Problem | Given, Tally]] = ((p, t) for cell, t in zip(cells, tallies) for p in cell.problems)

    async def work() -> None:
        for problem, tally in queue:
            reply, error = None, None
            try:
                reply = await endpoint.complete(request(problem, max_tokens))
            except EndpointError as e:
                if e.status in FATAL or sum(t.errors for t in tallies) >= MAX_ERRORS:
                    raise
                error = str(e)
                tally.errors += 1
            tally.done += 1
            if reply is not None:
                tally.cut += reply.finish_reason == "length"
                if reply.usage is not None:
                    tally.counted += 1
                    tally.tokens += reply.usage.completion
            if reply is not None and _right(problem, reply):
                tally.right += 1
            else:
                failures.append(Failure(problem, reply, error))
            advance()

    await gather([work() for _ in range(concurrency)])
    return tallies, failures


async def _require_sight(endpoint: Endpoint, cells: Sequence[Cell]) -> None:
    """Sends one picture, if a cell has any. ConfigError if it is refused: the model has no vision."""
    every = (p for cell in cells for p in cell.problems)
    if (shows := next(filter(_has_picture, every), None)) is None:
        return
    try:
        await endpoint.complete(request(shows, 1))
    except EndpointError as e:
        if e.status in REFUSED_MEDIA:
            raise ConfigError(
                f"{endpoint.model} takes no pictures ({e}): choose families without pictures, or a model that sees"
            ) from e
        if e.status in FATAL:
            raise


def _has_picture(problem: Problem | Given) -> bool:
    contents = (message.get("content") for message in problem.messages)
    parts = (part for c in contents if isinstance(c, list) for part in c)
    return any(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


def request(problem: Problem | Given, max_tokens: int) -> dict[str, Any]:
    """The problem as a /v1/chat/completions body, greedy."""
    body: dict[str, Any] = {
        "messages": list(problem.messages),
        "temperature": 0,
        "max_tokens": max_tokens,
        **thinking_switch(problem.thinking),
    }
    if problem.tools:
        body["tools"] = list(problem.tools)
    if isinstance(problem, Given) and problem.response_format is not None:
        body["response_format"] = problem.response_format
    return body


def _right(problem: Problem | Given, reply: Reply) -> bool:
    if isinstance(problem, Given):
        return problem.right(reply.content, reply.tool_calls)
    return check(problem, Answer(reply.content, reply.tool_calls))


def _expected(problem: Problem | Given) -> dict[str, Any]:
    if isinstance(problem, Given):
        return problem.expected()
    answer = answer_of(problem.reply)
    return {"content": answer.content, "tool_calls": [list(c) for c in answer.tool_calls]}


def _as_answer(answer: Any) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls that give `answer` of a file."""
    if isinstance(answer, list) and answer and isinstance(answer[0], str):
        answer = answer[0]
    if isinstance(answer, list):
        return "-", [(call["name"], json.dumps(call["arguments"])) for call in answer]
    return answer if isinstance(answer, str) else json.dumps(answer), []


def wilson(right: int, count: int) -> tuple[float, float]:
    """95 % confidence interval of a share, by Wilson's score: sensible at 0, at 1 and for small counts."""
    assert 0 <= right <= count and count > 0, (right, count)
    share, z2 = right / count, Z * Z
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def row(model: str, cell: Cell, tally: Tally, **settings: Any) -> dict[str, Any]:
    """The cell as a ledger row; shares in percent."""
    low, high = wilson(tally.right, tally.done)
    return {
        "bench": "evaluate",
        "model": model,
        "family": cell.family,
        "split": cell.split,
        "thinking": cell.thinking,
        "n": tally.done,
        "right": tally.right,
        "exact_match": _percent(tally.right / tally.done),
        "low": _percent(low),
        "high": _percent(high),
        "constant": _percent(cell.constant),
        "copy": _percent(cell.copy),
        "errors": tally.errors,
        "cut": tally.cut,
        "mean_tokens": round(tally.tokens / tally.counted, 1) if tally.counted else None,
        **settings,
    }


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line per family: percentages with their 95 % intervals; the last line is the mean over families.

    With both modes measured the splits are shown with thinking on, and "thinking off" covers both splits together.
    """
    modes = {r["thinking"] for r in rows}
    main = max(modes)
    shown = Table(title=f"exact match in %, 95 % intervals, thinking {'on' if main else 'off'}")
    shown.add_column("family")
    splits = [title for split, title in TITLES.items() if any(r["split"] == split for r in rows)]
    columns = [*splits, *(["thinking off"] if len(modes) == 2 else [])]
    for name in (*columns, "constant", "copy", "n", "tokens"):
        shown.add_column(name, justify="right")
    means: dict[str, list[float]] = {name: [] for name in columns}
    for name in dict.fromkeys(r["family"] for r in rows):
        mine = [r for r in rows if r["family"] == name]
        parts = {
            **{t: [r for r in mine if r["thinking"] == main and r["split"] == s] for s, t in TITLES.items()},
            "thinking off": [r for r in mine if r["thinking"] != main],
        }
        for column in columns:
            if parts[column]:
                means[column].append(_share(parts[column]))
        tokens = [r["mean_tokens"] for r in mine if r["thinking"] == main and r["mean_tokens"] is not None]
        shown.add_row(
            escape(name),  # a file's families may look like rich's tags, of which a closing one is an error
            *(_cell(parts[column]) for column in columns),
            f"{max(r['constant'] for r in mine):.1f}",
            f"{max(r['copy'] for r in mine):.1f}",
            str(sum(r["n"] for r in mine)),
            f"{sum(tokens) / len(tokens):.0f}" if tokens else "-",
        )
    shown.add_section()
    total = sum(r["n"] for r in rows)
    shown.add_row(
        "mean", *(f"{_mean(means[name]):.1f}" if means[name] else "-" for name in columns), "", "", str(total), ""
    )
    return shown


def remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the table does not show: answers cut off or refused."""
    found = []
    if cut := sum(r["cut"] for r in rows):
        found.append(f"{cut} answers were cut off by --max-tokens and count as wrong if what came does not match")
    if errors := sum(r["errors"] for r in rows):
        found.append(f"{errors} requests were refused by the server and count as wrong; --failures has the reasons")
    return found


def _cell(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return "-"
    low, high = wilson(sum(r["right"] for r in rows), sum(r["n"] for r in rows))
    return f"{_share(rows):.1f} ({100 * low:.1f}-{100 * high:.1f})"


def _share(rows: Sequence[dict[str, Any]]) -> float:
    right, count = (sum(int(r[key]) for r in rows) for key in ("right", "n"))
    return 100 * right / count


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(share: float) -> float:
    return round(100 * share, 2)
