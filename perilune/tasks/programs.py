"""Small string, list and date programs, run by the model: the family `programs`.

Letters and items get their index first (1p2l3a4n), which also parts a word into letters whatever the vocabulary; then
each line follows from the lines above by index, or by a running value. `7<9:2` reads: compare, the count is now 2.

Structure: structural problems are worded anew, and half of them have a length
that training never shows (9 letters, 7 items).
"""

import re
from collections.abc import Callable
from datetime import date, timedelta
from random import Random
from typing import Any, Final

from perilune.tasks.composed.instructions import instruction
from perilune.tasks.composed.procedures import coded, procedure
from perilune.tasks.composed.readings import compared
from perilune.tasks.composed.snippets import listing, task
from perilune.tasks.composed.sums import ordered, whether
from perilune.tasks.forms import MORE
from perilune.tasks.more_programs import DAYS, KINDS, LETTERS, ORDINALS, any_day, counted, indexed
from perilune.tasks.pipelines import loop, pipeline
from perilune.tasks.problem import Answer, Problem, Reply, belongs, pick, user, widely
from perilune.tasks.wordings import agreeing, bare, in_words, lined, phrase
from perilune.tasks.words import NAMES, PLAIN, made_up

Run = tuple[tuple[Any, ...], str, str, str]  # key, question, trace, answer


def _form(rng: Random, kind: str, split: str, **words: Any) -> str:
    forms = _FORMS[kind]
    if not widely(split):
        return pick(rng, forms[1 if split == "structural" else 0]).format(**words)
    form = pick(rng, MORE[kind] if rng.random() < 0.65 else forms[0])
    return _asked(rng, form, tuple(map(bare, forms[1])), words)


def _asked(rng: Random, form: str, kept: tuple[str, ...], words: dict[str, Any]) -> str:
    """The form as people write it; a list without its brackets now and then. Code is left as it is."""
    if any(mark in form for mark in ("(", "[", "*", "==")):
        return form.format(**words)
    if "x" in words and rng.random() < 0.45:
        inside = str(words["x"])[1:-1]
        head, _, tail = inside.rpartition(", ")
        forms = (inside, inside, inside.replace(",", ""), f"{head} and {tail}", inside.replace(", ", ","),
                 inside.replace(",", ";"), f"({inside})", f"{{{inside}}}")  # fmt: skip
        words["x"] = pick(rng, forms)
    form = agreeing(form, words)
    if isinstance(words.get("n"), int) and rng.random() < 0.2:
        words["n"] = in_words(words["n"])
    return phrase(rng, form, kept).format(**words)


# ---- words -------------------------------------------------------------------------------------------------------


def _word(rng: Random, long: bool) -> str:
    """4 to 8 letters; `long`: 9."""
    if long:
        return "".join([made_up(rng) for _ in range(3)])[:9]
    roll = rng.random()
    if roll < 0.25:
        return "".join([LETTERS[int(rng.random() * 26)] for _ in range(3 + int(rng.random() * 5))])
    while True:
        word = pick(rng, PLAIN) if roll < 0.6 else made_up(rng)
        if len(word) <= 8:
            return word


def _reverse(rng: Random, split: str, long: bool) -> Run:
    w = _word(rng, long)
    back = "".join([f"{i}{w[i - 1]}" for i in range(len(w), 0, -1)])
    return ("reverse", w), _form(rng, "reverse", split, w=w), f"{indexed(w)}\n{back}", w[::-1]


def _alternate(rng: Random, split: str, long: bool) -> Run:
    w = _word(rng, long)
    kept = "".join([f"{i}{w[i - 1]}" for i in range(1, len(w) + 1, 2)])
    return ("alternate", w), _form(rng, "alternate", split, w=w), f"{indexed(w)}\n{kept}", w[::2]


def _upper(rng: Random, split: str, long: bool) -> Run:
    w = _word(rng, long)
    return ("upper", w), _form(rng, "upper", split, w=w), f"{indexed(w)}\n{indexed(w.upper())}", w.upper()


def _length(rng: Random, split: str, long: bool) -> Run:
    w = _word(rng, long)
    return ("length", w), _form(rng, "length", split, w=w), indexed(w), str(len(w))


def _count_letter(rng: Random, split: str, long: bool) -> Run:
    w = _word(rng, long)
    c = pick(rng, w) if rng.random() < 0.85 else pick(rng, LETTERS)
    return ("count", w, c), _form(rng, "count", split, w=w, c=c), counted(w, c), str(w.count(c))


def _vowels(rng: Random, split: str, long: bool) -> Run:
    w = _word(rng, long)
    n = sum(c in "aeiou" for c in w)
    return ("vowels", w), _form(rng, "vowels", split, w=w), counted(w, "aeiou"), str(n)


def _initials(rng: Random, split: str, long: bool) -> Run:
    words = [
        pick(rng, PLAIN) if rng.random() < 0.7 else pick(rng, NAMES).lower() for _ in range(2 + int(rng.random() * 4))
    ]
    text = " ".join(words)
    trace = "\n".join([f"{w}: {w[0]}" for w in words])
    return ("initials", text), _form(rng, "initials", split, w=text), trace, "".join([w[0] for w in words])


# ---- lists -------------------------------------------------------------------------------------------------------


def _items(rng: Random, long: bool, top: int = 100) -> list[int]:
    count = 7 if long else 3 + int(rng.random() * 4)
    return [int(rng.random() * top) for _ in range(count)]


def _shown(items: list[int]) -> str:
    return "[" + ", ".join(map(str, items)) + "]"


def _sort(rng: Random, split: str, long: bool) -> Run:
    items, down = _items(rng, long), rng.random() < 0.35
    rest, lines = list(items), []
    while rest:
        best = max(rest) if down else min(rest)
        lines.append(f"{','.join(map(str, rest))}:{best}")
        rest.remove(best)
    forms = "sort down" if down else "sort"
    answer = _shown(sorted(items, reverse=down))
    return ("sort", down, *items), _form(rng, forms, split, x=_shown(items)), "\n".join(lines), answer


def _extreme(rng: Random, split: str, long: bool) -> Run:
    items, largest = _items(rng, long), rng.random() < 0.5
    lines, best = [], items[0]
    for x in items:
        best = max(x, best) if largest else min(x, best)
        lines.append(f"{x}:{best}")
    forms = "max" if largest else "min"
    return ("extreme", largest, *items), _form(rng, forms, split, x=_shown(items)), "\n".join(lines), str(best)


def _numbered(items: list[int]) -> list[str]:
    return [f"{i}:{x}" for i, x in enumerate(items, 1)]


def _reverse_list(rng: Random, split: str, long: bool) -> Run:
    items = _items(rng, long)
    there = _numbered(items)
    trace = f"{','.join(there)}\n{','.join(there[::-1])}"
    return ("reverse list", *items), _form(rng, "reverse list", split, x=_shown(items)), trace, _shown(items[::-1])


def _every_second(rng: Random, split: str, long: bool) -> Run:
    items = _items(rng, long)
    there = _numbered(items)
    trace = f"{','.join(there)}\n{','.join(there[::2])}"
    return ("every second", *items), _form(rng, "second", split, x=_shown(items)), trace, _shown(items[::2])


def _nth(rng: Random, split: str, long: bool) -> Run:
    items = _items(rng, long)
    n = 1 + int(rng.random() * len(items))
    trace = ",".join(_numbered(items))
    return (("nth", n, *items), _form(rng, "nth", split, x=_shown(items), n=n, o=ORDINALS[n - 1]),
        f"{trace}\n{n}:{items[n - 1]}", str(items[n - 1]))  # fmt: skip


def _size(rng: Random, split: str, long: bool) -> Run:
    items = _items(rng, long)
    return ("size", *items), _form(rng, "size", split, x=_shown(items)), ",".join(_numbered(items)), str(len(items))


def _above(rng: Random, split: str, long: bool) -> Run:
    items, k = _items(rng, long), 10 + int(rng.random() * 80)
    lines, seen = [], 0
    for x in items:
        seen += x > k
        lines.append(f"{x}{'>' if x > k else '<' if x < k else '='}{k}:{seen}")
    return ("above", k, *items), _form(rng, "above", split, x=_shown(items), k=k), "\n".join(lines), str(seen)


def _unique(rng: Random, split: str, long: bool) -> Run:
    items = _items(rng, long, top=7)
    kept: list[int] = []
    lines = []
    for x in items:
        if x not in kept:
            kept.append(x)
        lines.append(f"{x}:{','.join(map(str, kept))}")
    return ("unique", *items), _form(rng, "unique", split, x=_shown(items)), "\n".join(lines), _shown(kept)


# ---- dates -------------------------------------------------------------------------------------------------------


def _month_length(day: date) -> int:
    return (date(day.year + day.month // 12, day.month % 12 + 1, 1) - day.replace(day=1)).days


def _days_after(rng: Random, split: str, long: bool) -> Run:
    start, n = any_day(rng), 1 + int(rng.random() * 28)
    end, total, length = start + timedelta(n), start.day + n, _month_length(start)
    lines = [f"{start.day}+{n}={total}", f"{start:%Y-%m} has {length}"]
    if total > length:
        lines.append(f"{total}-{length}={end.day}")
    lines.append(end.isoformat())
    return ("days after", str(start), n), _form(rng, "after", split, d=start, n=n), "\n".join(lines), end.isoformat()


def _between(rng: Random, split: str, long: bool) -> Run:
    start = any_day(rng)
    end = start + timedelta(1 + int(rng.random() * 60))
    lines, total, month = [], 0, start
    if (start.year, start.month) == (end.year, end.month):
        total = end.day - start.day
        lines.append(f"{end.day}-{start.day}={total}")
    else:
        length = _month_length(start)
        total = length - start.day
        lines.append(f"{start:%Y-%m} has {length}: {length}-{start.day}={total}")
        month = start.replace(day=1) + timedelta(length)
        while (month.year, month.month) != (end.year, end.month):
            length = _month_length(month)
            lines.append(f"{month:%Y-%m} has {length}: {total}+{length}={total + length}")
            total += length
            month += timedelta(length)
        lines.append(f"{end:%Y-%m} {end.day}: {total}+{end.day}={total + end.day}")
        total += end.day
    return ("between", str(start), str(end)), _form(rng, "between", split, d=start, e=end), "\n".join(lines), str(total)


def _weekday(rng: Random, split: str, long: bool) -> Run:
    first, n = int(rng.random() * 7), 1 + int(rng.random() * 34)
    rest, lines = n, []
    while rest >= 7:
        lines.append(f"{rest}-7={rest - 7}")
        rest -= 7
    for i in range(rest + 1):
        lines.append(f"{i}:{DAYS[(first + i) % 7]}")
    answer = DAYS[(first + n) % 7]
    style = int(rng.random() * 60)  # a date for the wording, so that there are enough different questions
    day = date(2024, 1, 1) + timedelta(style)
    question = _form(rng, "weekday", split, w=DAYS[first], n=n, d=f"{day:%d}".lstrip("0"), e=f"{day:%B}")
    return ("weekday", first, n, style), question, "\n".join(lines), answer


# A line for each kind: trained wordings and, behind `||`, new ones.
_LINES: Final = lined("""
reverse: Reverse the word {w}.|Write {w} backwards.|What is {w} spelled backwards?|Reverse the string "{w}".|Spell {w} \
from the end.||Please reverse {w}.|What is the word {w} written backwards?
alternate: Take every second letter of {w}, beginning with the first.|Write the letters of {w} at odd places.|What is \
"{w}"[::2]?||Which letters of {w} are at odd places?|Write every second letter of {w}, beginning with the first.
upper: Write {w} in capitals.|Make {w} upper case.|What is "{w}".upper()?|Put {w} in upper case.||Write the word {w} \
in upper case.|What is {w} in capitals?
length: How many letters does {w} have?|What is len("{w}")?|How long is the word {w}?|Count the letters of {w}.||How \
many letters are there in {w}?|What is the length of the word {w}?
count: How many times does {c} occur in {w}?|How often is the letter {c} in {w}?|Count the letter {c} in {w}.|What is \
"{w}".count("{c}")?|How many {c}'s are in {w}?||How often does the letter {c} occur in {w}?|Count how many times {c} \
is in the word {w}.
vowels: How many vowels does {w} have?|Count the vowels of {w}.|How many vowels are in the word {w}?||What is the \
number of vowels in {w}?|How many vowels are there in {w}?
initials: Take the first letter of each word: {w}|What are the first letters of "{w}"?|Write the initials of: {w}||\
What are the initials of "{w}"?|Write the first letter of each word of "{w}".
sort: Sort {x}.|Sort the list {x}.|What is sorted({x})?|Put {x} in ascending order.|Sort {x} upwards.||Please sort the \
numbers {x}.|Write {x} in ascending order.
sort down: Sort {x} in descending order.|Sort the list {x} downwards.|What is sorted({x}, reverse=True)?|Put {x} in \
descending order.||Please sort the numbers {x} downwards.|Write {x} in descending order.
max: What is the largest number in {x}?|What is max({x})?|Find the maximum of {x}.|Which number of {x} is largest?||\
What is the maximum of {x}?|Name the largest number of {x}.
min: What is the smallest number in {x}?|What is min({x})?|Find the minimum of {x}.|Which number of {x} is smallest?||\
What is the minimum of {x}?|Name the smallest number of {x}.
reverse list: Reverse the list {x}.|What is {x}[::-1]?|Write {x} backwards.|Turn the list {x} around.||Please reverse \
{x}.|What is the list {x} written backwards?
second: Take every second item of {x}, beginning with the first.|What is {x}[::2]?|Keep the items of {x} at odd \
places.||Write every second item of {x}, beginning with the first.|Which items of {x} are at odd places?
nth: What is item number {n} of {x}?|Which number is at place {n} of {x}?|Give item {n} of the list {x}.||Name item \
number {n} of {x}.|What is at place {n} of the list {x}?
size: How many items does {x} have?|What is len({x})?|How long is the list {x}?|Count the items of {x}.||How many \
items are there in {x}?|What is the length of the list {x}?
above: How many numbers in {x} are larger than {k}?|Count the items of {x} above {k}.|How many of {x} are greater than \
{k}?||How many items of {x} are above {k}?|Count the numbers in {x} that are larger than {k}.
unique: Remove the duplicates from {x}.|Keep only the first of equal items in {x}.|Drop repeated items from {x}.|What \
is list(dict.fromkeys({x}))?||Remove repeated items from the list {x}.|Drop the duplicates from {x}.
after: Which date is {n} days after {d}?|What is {d} plus {n} days?|Add {n} days to {d}.|It is {d}. What is the date \
in {n} days?||What date is it {n} days after {d}?|Name the date {n} days after {d}.
between: How many days are there between {d} and {e}?|How many days is it from {d} to {e}?|Count the days from {d} to \
{e}.|What is the number of days between {d} and {e}?||How many days are there from {d} to {e}?|Count the days between \
{d} and {e}.
weekday: {e} {d} is a {w}. Which weekday is it {n} days later?|Today, {e} {d}, is {w}. What day is it in {n} days?|If \
{e} {d} is a {w}, which weekday is {n} days after it?||{e} {d} is a {w}. What day is it {n} days later?|If {e} {d} is \
a {w}, which weekday is it in {n} days?
""")
_FORMS: Final = {kind: (forms[: forms.index("")], forms[forms.index("") + 1 :]) for kind, forms in _LINES.items()}
_KINDS: Final[tuple[Callable[[Random, str, bool], Run], ...]] = (
    _reverse, _reverse, _alternate, _upper, _length, _count_letter, _vowels, _initials, _sort, _sort, _extreme,
    _reverse_list, _every_second, _nth, _size, _above, _unique, _days_after, _between, _weekday,
)  # fmt: skip


_SYSTEM: Final = ("You are a Python interpreter.", "Reply with what the code prints and nothing more.",
    "You run programs. Write what they print, without comments.", "Output only, no explanation.")  # fmt: skip
_BARE: Final = re.compile(r"(.?)(?<!\d)\d+(; |, ?|;| and | )\d+")


def _alike(question: str, content: str) -> str:
    """A list with the signs around and between its items that the question's list has."""
    shown = None if "[" in question else _BARE.search(question)
    if not shown or len(content) < 3:
        return content
    inside = content[1:-1].replace(", ", shown[2].replace(" and", ","))
    return f"({inside})" if shown[1] == "(" else f"{{{inside}}}" if shown[1] == "{" else inside


def sample_programs(rng: Random, split: str, thinking: bool) -> Problem:
    new = split == "structural"
    while True:
        plain, roll = (rng.random(), rng.random()) if widely(split) else (1.0, 1.0)
        if split == "train" and rng.random() < 0.27:
            key, question, trace, content = listing(rng, "<tiny>" if rng.random() < 0.42 else "<fresh>")
        elif plain < 0.42:
            key, question, trace, content = (listing if plain < 0.22 else coded if plain < 0.32 else task)(rng)
        elif roll < 0.62:
            if roll < 0.12:
                key, question, worked, content = (whether if roll < 0.02 else ordered if roll < 0.04 else compared)(rng)
                trace = worked()
            else:
                made = instruction if roll < 0.39 else procedure if roll < 0.56 else loop if roll < 0.58 else pipeline
                key, question, trace, content = made(rng)
        elif roll < 0.79:
            kind, key, words, trace, content = pick(rng, KINDS)(rng)
            question = _asked(rng, pick(rng, MORE[kind]), (), words)
            if kind == "alphabet" and "sorted(" in question:
                content = str(content.split())
        else:
            key, question, trace, content = pick(rng, _KINDS)(rng, split, new and rng.random() < 0.5)
        if belongs(key, split):
            break
    if split == "train" and key[0] == "code" and not re.search(rf"(^|[\W_]){re.escape(content)}$", trace):
        trace += f"\n{content}"
    if content.startswith("["):
        content = _alike(question, content)
    messages: tuple[dict[str, Any], ...] = (user(question),)
    if key[0] == "code" and rng.random() < 0.12:
        messages = ({"role": "system", "content": pick(rng, _SYSTEM)}, *messages)
    return Problem("programs", split, key, messages, Reply(trace if thinking else "", content), thinking=thinking)


def same_result(problem: Problem, answer: Answer) -> bool:
    """The same text, but for white space and a full stop or quotes; case counts; and no tool was called."""
    return not answer.tool_calls and _bare(answer.content) == _bare(problem.reply.content)


def _bare(text: str) -> str:
    return "".join(text.split()).strip(".\"'`")
