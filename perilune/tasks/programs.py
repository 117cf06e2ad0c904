"""Small string, list and date programs, run by the model: the family `programs`.

Letters and items get their index first (1p2l3a4n), which also parts a word into letters whatever the vocabulary; then
each line follows from the lines above by index, or by a running value. `7<9:2` reads: compare, the count is now 2.

Structure: structural problems are worded anew, and half of them have a length
that training never shows (9 letters, 7 items).
"""

from collections.abc import Callable
from datetime import date, timedelta
from random import Random
from typing import Any, Final

from perilune.tasks.composed.instructions import instruction
from perilune.tasks.composed.procedures import procedure
from perilune.tasks.composed.sums import ordered, whether
from perilune.tasks.more_programs import DAYS, KINDS, LETTERS, ORDINALS, counted, indexed
from perilune.tasks.pipelines import loop, pipeline
from perilune.tasks.problem import Answer, Problem, Reply, belongs, pick, user, widely
from perilune.tasks.program_forms import MORE
from perilune.tasks.wordings import agreeing, bare, in_words, phrase
from perilune.tasks.words import NAMES, PLAIN, made_up

Run = tuple[tuple[Any, ...], str, str, str]  # key, question, trace, answer
Forms = tuple[tuple[str, ...], tuple[str, ...]]  # trained wordings, new ones


def _form(rng: Random, forms: Forms, split: str, **words: Any) -> str:
    if not widely(split):
        return pick(rng, forms[1 if split == "structural" else 0]).format(**words)
    form = pick(rng, _MORE_OF[forms] if rng.random() < 0.65 else forms[0])
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
    return ("reverse", w), _form(rng, _REVERSE, split, w=w), f"{indexed(w)}\n{back}", w[::-1]


def _alternate(rng: Random, split: str, long: bool) -> Run:
    w = _word(rng, long)
    kept = "".join([f"{i}{w[i - 1]}" for i in range(1, len(w) + 1, 2)])
    return ("alternate", w), _form(rng, _ALTERNATE, split, w=w), f"{indexed(w)}\n{kept}", w[::2]


def _upper(rng: Random, split: str, long: bool) -> Run:
    w = _word(rng, long)
    return ("upper", w), _form(rng, _UPPER, split, w=w), f"{indexed(w)}\n{indexed(w.upper())}", w.upper()


def _length(rng: Random, split: str, long: bool) -> Run:
    w = _word(rng, long)
    return ("length", w), _form(rng, _LENGTH, split, w=w), indexed(w), str(len(w))


def _count_letter(rng: Random, split: str, long: bool) -> Run:
    w = _word(rng, long)
    c = pick(rng, w) if rng.random() < 0.85 else pick(rng, LETTERS)
    return ("count", w, c), _form(rng, _COUNT, split, w=w, c=c), counted(w, c), str(w.count(c))


def _vowels(rng: Random, split: str, long: bool) -> Run:
    w = _word(rng, long)
    n = sum(c in "aeiou" for c in w)
    return ("vowels", w), _form(rng, _VOWELS, split, w=w), counted(w, "aeiou"), str(n)


def _initials(rng: Random, split: str, long: bool) -> Run:
    words = [
        pick(rng, PLAIN) if rng.random() < 0.7 else pick(rng, NAMES).lower() for _ in range(2 + int(rng.random() * 4))
    ]
    text = " ".join(words)
    trace = "\n".join([f"{w}: {w[0]}" for w in words])
    return ("initials", text), _form(rng, _INITIALS, split, w=text), trace, "".join([w[0] for w in words])


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
    forms = _SORT_DOWN if down else _SORT
    answer = _shown(sorted(items, reverse=down))
    return ("sort", down, *items), _form(rng, forms, split, x=_shown(items)), "\n".join(lines), answer


def _extreme(rng: Random, split: str, long: bool) -> Run:
    items, largest = _items(rng, long), rng.random() < 0.5
    lines, best = [], items[0]
    for x in items:
        best = max(x, best) if largest else min(x, best)
        lines.append(f"{x}:{best}")
    forms = _MAXIMUM if largest else _MINIMUM
    return ("extreme", largest, *items), _form(rng, forms, split, x=_shown(items)), "\n".join(lines), str(best)


def _numbered(items: list[int]) -> list[str]:
    return [f"{i}:{x}" for i, x in enumerate(items, 1)]


def _reverse_list(rng: Random, split: str, long: bool) -> Run:
    items = _items(rng, long)
    there = _numbered(items)
    trace = f"{','.join(there)}\n{','.join(there[::-1])}"
    return ("reverse list", *items), _form(rng, _REVERSE_LIST, split, x=_shown(items)), trace, _shown(items[::-1])


def _every_second(rng: Random, split: str, long: bool) -> Run:
    items = _items(rng, long)
    there = _numbered(items)
    trace = f"{','.join(there)}\n{','.join(there[::2])}"
    return ("every second", *items), _form(rng, _SECOND, split, x=_shown(items)), trace, _shown(items[::2])


def _nth(rng: Random, split: str, long: bool) -> Run:
    items = _items(rng, long)
    n = 1 + int(rng.random() * len(items))
    trace = ",".join(_numbered(items))
    return (
        ("nth", n, *items),
        _form(rng, _NTH, split, x=_shown(items), n=n, o=ORDINALS[n - 1]),
        f"{trace}\n{n}:{items[n - 1]}",
        str(items[n - 1]),
    )


def _size(rng: Random, split: str, long: bool) -> Run:
    items = _items(rng, long)
    return ("size", *items), _form(rng, _SIZE, split, x=_shown(items)), ",".join(_numbered(items)), str(len(items))


def _above(rng: Random, split: str, long: bool) -> Run:
    items, k = _items(rng, long), 10 + int(rng.random() * 80)
    lines, seen = [], 0
    for x in items:
        seen += x > k
        lines.append(f"{x}{'>' if x > k else '<' if x < k else '='}{k}:{seen}")
    return ("above", k, *items), _form(rng, _ABOVE, split, x=_shown(items), k=k), "\n".join(lines), str(seen)


def _unique(rng: Random, split: str, long: bool) -> Run:
    items = _items(rng, long, top=7)
    kept: list[int] = []
    lines = []
    for x in items:
        if x not in kept:
            kept.append(x)
        lines.append(f"{x}:{','.join(map(str, kept))}")
    return ("unique", *items), _form(rng, _UNIQUE, split, x=_shown(items)), "\n".join(lines), _shown(kept)


# ---- dates -------------------------------------------------------------------------------------------------------


def _day(rng: Random) -> date:
    return date(1990 + int(rng.random() * 50), 1 + int(rng.random() * 12), 1 + int(rng.random() * 28))


def _month_length(day: date) -> int:
    return (date(day.year + day.month // 12, day.month % 12 + 1, 1) - day.replace(day=1)).days


def _days_after(rng: Random, split: str, long: bool) -> Run:
    start, n = _day(rng), 1 + int(rng.random() * 28)
    end, total, length = start + timedelta(n), start.day + n, _month_length(start)
    lines = [f"{start.day}+{n}={total}", f"{start:%Y-%m} has {length}"]
    if total > length:
        lines.append(f"{total}-{length}={end.day}")
    lines.append(end.isoformat())
    return ("days after", str(start), n), _form(rng, _AFTER, split, d=start, n=n), "\n".join(lines), end.isoformat()


def _between(rng: Random, split: str, long: bool) -> Run:
    start = _day(rng)
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
    return ("between", str(start), str(end)), _form(rng, _BETWEEN, split, d=start, e=end), "\n".join(lines), str(total)


def _weekday(rng: Random, split: str, long: bool) -> Run:
    first, n = int(rng.random() * 7), 1 + int(rng.random() * 34)
    rest, lines = n, []
    while rest >= 7:
        lines.append(f"{rest}-7={rest - 7}")
        rest -= 7
    for i in range(rest + 1):
        lines.append(f"{i}:{DAYS[(first + i) % 7]}")
    answer = DAYS[(first + n) % 7]
    style = int(rng.random() * 60)  # so that there are enough different questions: the day's name of the date
    day = date(2024, 1, 1) + timedelta(style)
    question = _form(rng, _WEEKDAY, split, w=DAYS[first], n=n, d=f"{day:%d}".lstrip("0"), e=f"{day:%B}")
    return ("weekday", first, n, style), question, "\n".join(lines), answer


_REVERSE: Final[Forms] = (
    ("Reverse the word {w}.", "Write {w} backwards.", "What is {w} spelled backwards?", "Reverse the string \"{w}\".",
     "Spell {w} from the end."),
    ("Please reverse {w}.", "What is the word {w} written backwards?"),
)  # fmt: skip
_ALTERNATE: Final[Forms] = (
    ("Take every second letter of {w}, beginning with the first.", "Write the letters of {w} at odd places.",
     "What is \"{w}\"[::2]?"),
    ("Which letters of {w} are at odd places?", "Write every second letter of {w}, beginning with the first."),
)  # fmt: skip
_UPPER: Final[Forms] = (
    ("Write {w} in capitals.", "Make {w} upper case.", "What is \"{w}\".upper()?", "Put {w} in upper case."),
    ("Write the word {w} in upper case.", "What is {w} in capitals?"),
)  # fmt: skip
_LENGTH: Final[Forms] = (
    ("How many letters does {w} have?", "What is len(\"{w}\")?", "How long is the word {w}?",
     "Count the letters of {w}."),
    ("How many letters are there in {w}?", "What is the length of the word {w}?"),
)  # fmt: skip
_COUNT: Final[Forms] = (
    ("How many times does {c} occur in {w}?", "How often is the letter {c} in {w}?", "Count the letter {c} in {w}.",
     "What is \"{w}\".count(\"{c}\")?", "How many {c}'s are in {w}?"),
    ("How often does the letter {c} occur in {w}?", "Count how many times {c} is in the word {w}."),
)  # fmt: skip
_VOWELS: Final[Forms] = (
    ("How many vowels does {w} have?", "Count the vowels of {w}.", "How many vowels are in the word {w}?"),
    ("What is the number of vowels in {w}?", "How many vowels are there in {w}?"),
)  # fmt: skip
_INITIALS: Final[Forms] = (
    ("Take the first letter of each word: {w}", "What are the first letters of \"{w}\"?", "Write the initials of: {w}"),
    ("What are the initials of \"{w}\"?", "Write the first letter of each word of \"{w}\"."),
)  # fmt: skip
_SORT: Final[Forms] = (
    ("Sort {x}.", "Sort the list {x}.", "What is sorted({x})?", "Put {x} in ascending order.", "Sort {x} upwards."),
    ("Please sort the numbers {x}.", "Write {x} in ascending order."),
)  # fmt: skip
_SORT_DOWN: Final[Forms] = (
    ("Sort {x} in descending order.", "Sort the list {x} downwards.", "What is sorted({x}, reverse=True)?",
     "Put {x} in descending order."),
    ("Please sort the numbers {x} downwards.", "Write {x} in descending order."),
)  # fmt: skip
_MAXIMUM: Final[Forms] = (
    ("What is the largest number in {x}?", "What is max({x})?", "Find the maximum of {x}.",
     "Which number of {x} is largest?"),
    ("What is the maximum of {x}?", "Name the largest number of {x}."),
)  # fmt: skip
_MINIMUM: Final[Forms] = (
    ("What is the smallest number in {x}?", "What is min({x})?", "Find the minimum of {x}.",
     "Which number of {x} is smallest?"),
    ("What is the minimum of {x}?", "Name the smallest number of {x}."),
)  # fmt: skip
_REVERSE_LIST: Final[Forms] = (
    ("Reverse the list {x}.", "What is {x}[::-1]?", "Write {x} backwards.", "Turn the list {x} around."),
    ("Please reverse {x}.", "What is the list {x} written backwards?"),
)  # fmt: skip
_SECOND: Final[Forms] = (
    ("Take every second item of {x}, beginning with the first.", "What is {x}[::2]?",
     "Keep the items of {x} at odd places."),
    ("Write every second item of {x}, beginning with the first.", "Which items of {x} are at odd places?"),
)  # fmt: skip
_NTH: Final[Forms] = (
    ("What is item number {n} of {x}?", "Which number is at place {n} of {x}?", "Give item {n} of the list {x}."),
    ("Name item number {n} of {x}.", "What is at place {n} of the list {x}?"),
)  # fmt: skip
_SIZE: Final[Forms] = (
    ("How many items does {x} have?", "What is len({x})?", "How long is the list {x}?", "Count the items of {x}."),
    ("How many items are there in {x}?", "What is the length of the list {x}?"),
)  # fmt: skip
_ABOVE: Final[Forms] = (
    ("How many numbers in {x} are larger than {k}?", "Count the items of {x} above {k}.",
     "How many of {x} are greater than {k}?"),
    ("How many items of {x} are above {k}?", "Count the numbers in {x} that are larger than {k}."),
)  # fmt: skip
_UNIQUE: Final[Forms] = (
    ("Remove the duplicates from {x}.", "Keep only the first of equal items in {x}.", "Drop repeated items from {x}.",
     "What is list(dict.fromkeys({x}))?"),
    ("Remove repeated items from the list {x}.", "Drop the duplicates from {x}."),
)  # fmt: skip
_AFTER: Final[Forms] = (
    ("Which date is {n} days after {d}?", "What is {d} plus {n} days?", "Add {n} days to {d}.",
     "It is {d}. What is the date in {n} days?"),
    ("What date is it {n} days after {d}?", "Name the date {n} days after {d}."),
)  # fmt: skip
_BETWEEN: Final[Forms] = (
    ("How many days are there between {d} and {e}?", "How many days is it from {d} to {e}?",
     "Count the days from {d} to {e}.",
     "What is the number of days between {d} and {e}?"),
    ("How many days are there from {d} to {e}?", "Count the days between {d} and {e}."),
)  # fmt: skip
_WEEKDAY: Final[Forms] = (
    ("{e} {d} is a {w}. Which weekday is it {n} days later?", "Today, {e} {d}, is {w}. What day is it in {n} days?",
     "If {e} {d} is a {w}, which weekday is {n} days after it?"),
    ("{e} {d} is a {w}. What day is it {n} days later?", "If {e} {d} is a {w}, which weekday is it in {n} days?"),
)  # fmt: skip

_MORE_OF: Final[dict[Forms, tuple[str, ...]]] = {
    _REVERSE: MORE["reverse"], _ALTERNATE: MORE["alternate"], _UPPER: MORE["upper"], _LENGTH: MORE["length"],
    _COUNT: MORE["count"], _VOWELS: MORE["vowels"], _INITIALS: MORE["initials"], _SORT: MORE["sort"],
    _SORT_DOWN: MORE["sort down"], _MAXIMUM: MORE["max"], _MINIMUM: MORE["min"], _REVERSE_LIST: MORE["reverse list"],
    _SECOND: MORE["second"], _NTH: MORE["nth"], _SIZE: MORE["size"], _ABOVE: MORE["above"], _UNIQUE: MORE["unique"],
    _AFTER: MORE["after"], _BETWEEN: MORE["between"], _WEEKDAY: MORE["weekday"],
}  # fmt: skip
_KINDS: Final[tuple[Callable[[Random, str, bool], Run], ...]] = (
    _reverse, _reverse, _alternate, _upper, _length, _count_letter, _vowels, _initials, _sort, _sort, _extreme,
    _reverse_list, _every_second, _nth, _size, _above, _unique, _days_after, _between, _weekday,
)  # fmt: skip


def sample_programs(rng: Random, split: str, thinking: bool) -> Problem:
    new = split == "structural"
    while True:
        roll = rng.random() if widely(split) else 1.0
        if roll < 0.6:
            if roll < 0.04:
                key, question, worked, content = (whether if roll < 0.02 else ordered)(rng)
                trace = worked()
            else:
                made = instruction if roll < 0.34 else procedure if roll < 0.54 else loop if roll < 0.56 else pipeline
                key, question, trace, content = made(rng)
        elif roll < 0.78:
            kind, key, words, trace, content = pick(rng, KINDS)(rng)
            question = _asked(rng, pick(rng, MORE[kind]), (), words)
        else:
            key, question, trace, content = pick(rng, _KINDS)(rng, split, new and rng.random() < 0.5)
        if belongs(key, split):
            break
    reply = Reply(trace if thinking else "", content)
    return Problem("programs", split, key, (user(question),), reply, thinking=thinking)


def same_result(problem: Problem, answer: Answer) -> bool:
    """The same text, but for white space and a full stop or quotes; case counts; and no tool was called."""
    return not answer.tool_calls and _bare(answer.content) == _bare(problem.reply.content)


def _bare(text: str) -> str:
    return "".join(text.split()).strip(".\"'`")
