"""Word problems of people: GSM8K's training problems (openai/grade-school-math, MIT) and those of MAWPS (a training
fold of arkilpatel/SVAMP, MIT) whose solution is an expression that perilune.tasks.working can compute.

The steps of a solution, <<48/2=24>> and so on, become one expression over the numbers of the text; a step's result that
a later step uses is replaced by that step. Numbers that the text has as digits are drawn anew where the expression
still has a whole result in every step. MAWPS has the expression itself, operator first; a problem that has a number
which its expression lacks is left out, because several of those expressions are wrong.

Records: {"family", "source", "text", "tokens"}: tokens of the expression as `solve` takes them, where ["#", i] is the
i-th number of the text.
"""

import csv
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any, Final

from perilune.tasks.facts import noted
from perilune.tasks.problem import Problem, Reply, pick, user
from perilune.tasks.wordings import phrase
from perilune.tasks.words import NAMES, made_up
from perilune.tasks.working import Tokens, solve, solve_trace

GSM8K, MAWPS = "grade-school-math", "SVAMP"
MOST_TOKENS = 13  # tokens of an expression
REDRAWN = 0.7  # share of problems with new numbers
# Numbers that a solution may use although the text does not have them as digits.
COMMON = {"2", "3", "4", "5", "6", "7", "8", "10", "12", "60"}
_NUMBER: Final = re.compile(r"(?<![\w.,/])\d{1,3}(?:,\d{3})+(?![\w./%])|(?<![\w.,/])\d+(?![\w/%]|[.,]\d)")
_STEP: Final = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
_TOKEN: Final = re.compile(r"\d+|[-+*/()]")

Expression = list[Any]  # of numbers, operators, parentheses and ["#", i]


def read(root: Path) -> Iterator[dict[str, Any]]:
    """The records of the training splits of the repositories that are there."""
    file = root / GSM8K / "grade_school_math" / "data" / "train.jsonl"
    for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
        given = json.loads(line)
        text = " ".join(given["question"].split())
        tokens = expression(text, given["answer"])
        if tokens is not None and "{" not in text:
            yield {"family": "word_problems", "source": GSM8K, "text": text, "tokens": tokens}
    file = root / MAWPS / "data" / "cv_mawps" / "fold0" / "train.csv"
    seen = set()
    with file.open(encoding="utf-8", newline="") if file.is_file() else nullcontext(()) as lines:
        for row in csv.DictReader(lines):
            made = _of_mawps(row["Question"], row["Numbers"], row["Equation"], float(row["Answer"]))
            if made is not None and made[0] not in seen:
                seen.add(made[0])
                yield {"family": "word_problems", "source": MAWPS, "text": made[0], "tokens": made[1]}


_JOINED: Final = (
    (r" ([.,?!;:%])", r"\1"),
    (r" ?['’] ?(s|t|re|ll|ve)\b", r"'\1"),
    (r"\$ (?=\d)", "$"),
    (r"(?<=\w) - (?=[a-z])", "-"),
)


def _of_mawps(question: str, given: str, equation: str, value: float) -> tuple[str, Expression] | None:
    """The text with its numbers in place and the expression; None if a number is no whole one or is not used."""
    numbers, parts = [float(n) for n in given.split()], equation.split()
    if any(n != int(n) or n < 1 for n in numbers) or {p for p in parts if p.startswith("number")} != {
        f"number{i}" for i in range(len(numbers))
    }:
        return None
    text = re.sub(r"number(\d+)", lambda m: str(int(numbers[int(m[1])])), " ".join(question.split()))
    for pattern, shown in _JOINED:
        text = re.sub(pattern, shown, text)
    if re.findall(r"number(\d+)", question) != [str(i) for i in range(len(numbers))] or "{" in text:
        return None
    if [int(m[0].replace(",", "")) for m in _NUMBER.finditer(text)] != numbers:
        return None
    stack: list[Expression] = []
    for part in reversed(parts):
        if part not in ("+", "-", "*", "/"):
            number = float(part.removeprefix("number"))
            if number != int(number):
                return None
            stack.append([["#", int(number)] if part.startswith("number") else int(number)])
            continue
        sides = []
        for side, loose in ((stack.pop(), "*/"), (stack.pop(), "-*/")):
            signs = {t for t in side if isinstance(t, str)}
            bound = (part in loose and signs & {"+", "-"}) or (sides and part == "/" and signs)
            if bound and len(side) != 3:
                return None
            sides.append(["(", *side, ")"] if bound else side)
        stack.append([*sides[0], part, *sides[1]])
    if len(stack) != 1 or not 3 <= len(stack[0]) <= MOST_TOKENS or (" at " in text and "-" in equation):
        return None  # several problems of speed are solved with a difference
    solved = _solved(stack[0], [int(n) for n in numbers])
    return (text, stack[0]) if solved is not None and solved[0] == value else None


def expression(text: str, answer: str) -> Expression | None:
    """The solution as one expression; None if it is not one that `solve` can compute to the answer."""
    numbers = [m[0].replace(",", "") for m in _NUMBER.finditer(text)]
    known: dict[str, Expression] = {n: [["#", i]] for i, n in enumerate(numbers) if numbers.count(n) == 1}
    whole: Expression = []
    for left, right in _STEP.findall(answer):
        made = _parsed(left.replace(" ", ""), known)
        if made is None or not right.strip().isdigit():
            return None
        known[right.strip()] = whole = made
    literal = {str(t) for t in whole if isinstance(t, int)} - set(numbers)
    if literal - COMMON:
        return None  # a number that no step gives
    value = answer.rpartition("####")[2].strip().replace(",", "")
    if not 3 <= len(whole) <= MOST_TOKENS:
        return None
    solved = _solved(whole, [int(n) for n in numbers])
    return whole if solved is not None and str(solved[0]) == value else None


def _parsed(step: str, known: Mapping[str, Expression]) -> Expression | None:
    """A step with known numbers in the place of its operands; None if it has anything else than whole numbers."""
    parts = _TOKEN.findall(step)
    if "".join(parts) != step:
        return None
    out: Expression = []
    for i, part in enumerate(parts):
        if not part.isdigit():
            out.append(part)
            continue
        made = known.get(part, [int(part)])
        beside = {parts[i - 1] if i else "", parts[i + 1] if i + 1 < len(parts) else ""}
        binds = beside & {"*", "/"} or (i and parts[i - 1] == "-")
        inner = any(t in ("+", "-") for t in made if isinstance(t, str))
        quotient = i and parts[i - 1] == "/"
        if len(made) > 1 and ((binds and inner) or quotient or (len(made) > 1 and beside & {"*", "/"} and inner)):
            if len(made) != 3:  # `solve` has no parentheses in parentheses, and none around more than two numbers
                return None
            out += ["(", *made, ")"]
        else:
            out += made
    return out


def _tokens(given: Expression, numbers: list[int]) -> Tokens:
    return [numbers[t[1]] if isinstance(t, list) else t for t in given]


def _solved(given: Expression, numbers: list[int]) -> Any:
    """As `solve`; None if the expression is none of those that `solve` takes."""
    tokens = _tokens(given, numbers)
    for i, token in enumerate(tokens):
        if token == "(" and tokens[i + 4 : i + 5] != [")"]:
            return None
    if tokens[0] in ("+", "-") or any(t == 0 for t in tokens):
        return None
    try:
        return solve(tokens)
    except (AssertionError, ValueError, ZeroDivisionError):
        return None


def problem(record: dict[str, Any], rng: Random, tables: Mapping[str, Any]) -> Problem:
    """A training problem, often with other numbers and names."""
    given, places = record["tokens"], list(_NUMBER.finditer(record["text"]))
    numbers = [int(m[0].replace(",", "")) for m in places]
    used = {t[1] for t in given if isinstance(t, list)}
    drawn = numbers
    if rng.random() < REDRAWN:
        for _ in range(12):
            other = [_like(rng, n) if i in used else n for i, n in enumerate(numbers)]
            if _solved(given, other) is not None:
                drawn = other
                break
    value, steps = _solved(given, drawn)
    text, at = "", 0
    for place, before, number in zip(places, numbers, drawn):
        shown = place[0] if number == before else str(number)
        text, at = text + record["text"][at : place.start()] + shown, place.end()
    text = phrase(rng, _renamed(text + record["text"][at:], rng).replace("{", "("), asking=0.0)
    key = ("expression", "".join(map(str, _tokens(given, drawn))))
    return noted(Problem("word_problems", "train", key, (user(text),), Reply(solve_trace(steps), str(value))))


def _like(rng: Random, number: int) -> int:
    """Another number of about the same size; small ones stay small."""
    if number < 3:
        return number
    high = 9 if number < 10 else 99 if number < 100 else 999 if number < 1000 else number
    low = 2 if number < 10 else 10 if number < 100 else 100
    made = low + int(rng.random() * (high - low + 1)) if number < 1000 else number
    return made // 10 * 10 if number % 10 == 0 and made >= 20 else made


_NAME: Final = re.compile(r"\b[A-Z][a-z]{2,}\b")
_KNOWN: Final = frozenset(NAMES)


def _renamed(text: str, rng: Random) -> str:
    """Names of people that the generators know too are replaced by others, everywhere alike."""
    found = [name for name in dict.fromkeys(_NAME.findall(text)) if name in _KNOWN]
    for name in found:
        if rng.random() < 0.5:
            other = pick(rng, NAMES) if rng.random() < 0.8 else made_up(rng).capitalize()
            if other not in text:
                text = re.sub(rf"\b{name}\b", other, text)
    return text
