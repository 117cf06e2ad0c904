"""More small programs for training, worked as those of programs.py: by index, or by a running value."""

from collections.abc import Callable, Sequence
from datetime import date, timedelta
from functools import lru_cache
from random import Random
from typing import Any, Final

from perilune.tasks.problem import pick
from perilune.tasks.words import NAMES, PLAIN, made_up

Made = tuple[str, tuple[Any, ...], dict[str, Any], str,
    str]  # kind of forms.py, key, places, trace, answer  # fmt: skip

LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_VOWELS: Final = "aeiou"
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December")  # fmt: skip
LENGTHS: Final = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS: Final = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth",
    "ninth", "tenth", "eleventh", "twelfth")  # fmt: skip


def word(rng: Random) -> str:
    """3 to 8 letters or 10 to 12, real or made up or at random."""
    roll = rng.random()
    if roll < 0.2:
        return "".join([LETTERS[int(rng.random() * 26)] for _ in range(3 + int(rng.random() * 5))])
    while True:
        one = pick(rng, PLAIN) if roll < 0.5 else pick(rng, NAMES).lower() if roll < 0.6 else made_up(rng)
        if rng.random() < 0.12:
            one = pick(rng, (one + one[-1] + pick(rng, PLAIN), one[0] + one[1:4] * 2 + one[4:]))  # letters twice
        if 3 <= len(one) <= 8 or 10 <= len(one) <= 12:
            return one


@lru_cache(maxsize=128)
def indexed(letters: str) -> str:
    return "".join([f"{i}{c}" for i, c in enumerate(letters, 1)])


def counted(w: str, wanted: str) -> str:
    """The trace of counting: the letters with their places, then each with how many of `wanted` there were so far."""
    trace, seen = "", 0
    for c in w:
        seen += c in wanted
        trace += f"{c}{seen}"
    return f"{indexed(w)}\n{trace}"


def spelled(text: str) -> str:
    """The letters of each word with their places."""
    return " ".join(map(indexed, text.split(" ")))


def lettered(words: Sequence[str], down: bool = False) -> str:
    """The trace of sorting: the words left, their first letters, the next ones of those that tie, and the one taken.

    `pear,fig,plum:p,f,p:fig`, then `pear,plum:p,p;e,l:pear`.
    """
    lines, left = [], list(words)
    for best in sorted(words, reverse=down):
        columns, tied = [",".join([w[0] for w in left])], [w for w in left if w[0] == best[0]]
        while len(set(tied)) > 1:
            n = len(columns)
            columns.append(",".join([w[n : n + 1] or "-" for w in tied]))
            tied = [w for w in tied if w[: n + 1] == best[: n + 1]]
        lines.append(f"{','.join(left)}:{';'.join(columns)}:{best}")
        left.remove(best)
    return "\n".join(lines)


def ordinal(rng: Random, n: int) -> str:
    return ORDINALS[n - 1] if n < 13 and rng.random() < 0.6 else f"{n}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(n, 'th') }"


def _items(rng: Random, top: int = 100) -> list[int]:
    return [int(rng.random() * top) for _ in range(3 + int(rng.random() * 4))]


def _numbered(items: list[int]) -> str:
    return ",".join([f"{i}:{x}" for i, x in enumerate(items, 1)])


def _sum(rng: Random) -> Made:
    items = _items(rng, pick(rng, (10, 30, 100)))
    total, lines = items[0], []
    for x in items[1:]:
        lines.append(f"{total}+{x}={total + x}")
        total += x
    return "sum list", ("sum", *items), {"x": items}, "\n".join(lines), str(total)


def _parity(rng: Random) -> Made:
    items = _items(rng)
    kind = pick(rng, ("evens", "odds", "count evens"))
    wanted = 1 if kind == "odds" else 0
    kept, lines = [], []
    for x in items:
        if x % 2 == wanted:
            kept.append(x)
        lines.append(
            f"{x} {'odd' if x % 2 else 'even'}:{len(kept) if kind == 'count evens' else ','.join(map(str, kept))}"
        )
    answer = str(len(kept)) if kind == "count evens" else str(kept)
    return kind, (kind, *items), {"x": items}, "\n".join(lines), answer


def _slice(rng: Random) -> Made:
    items = _items(rng)
    n, head = 1 + int(rng.random() * (len(items) - 1)), rng.random() < 0.5
    kept = items[:n] if head else items[-n:]
    shown = _numbered(items).split(",")
    return ("head" if head else "tail", ("slice", head, n, *items), {"x": items, "n": n},
        f"{_numbered(items)}\n{','.join(shown[:n] if head else shown[-n:])}", str(kept))  # fmt: skip


def _end(rng: Random) -> Made:
    items, last = _items(rng), rng.random() < 0.6
    at = len(items) if last else 1
    return ("last" if last else "first", ("end", last, *items), {"x": items},
        f"{_numbered(items)}\n{at}:{items[at - 1]}", str(items[at - 1]))  # fmt: skip


def _member(rng: Random) -> Made:
    items = list(dict.fromkeys(_items(rng)))
    k, kind = pick(rng, items), pick(rng, ("drop", "place", "append"))
    at = items.index(k) + 1
    if kind == "append":
        k = int(rng.random() * 100)
        return kind, ("append", k, *items), {"x": items, "k": k}, ",".join(map(str, [*items, k])), str([*items, k])
    rest = str([x for x in items if x != k])
    return (kind, (kind, k, *items), {"x": items, "k": k}, f"{_numbered(items)}\n{at}:{k}",
        rest if kind == "drop" else str(at))  # fmt: skip


def _times(rng: Random) -> Made:
    items = _items(rng, 6)
    k, seen, lines = pick(rng, items), 0, []
    for x in items:
        seen += x == k
        lines.append(f"{x}:{seen}")
    return "times list", ("times", k, *items), {"x": items, "k": k}, "\n".join(lines), str(seen)


def _each(rng: Random) -> Made:
    items, k = _items(rng, 50), 2 + int(rng.random() * 9)
    double = rng.random() < 0.5
    made = [2 * x if double else x + k for x in items]
    lines = [f"{x}*2={y}" if double else f"{x}+{k}={y}" for x, y in zip(items, made)]
    return ("double" if double else "plus", ("each", 0 if double else k, *items), {"x": items, "k": k},
        "\n".join(lines), str(made))  # fmt: skip


def _letter(rng: Random) -> Made:
    w = word(rng)
    kind = pick(rng, ("first letter", "last letter", "nth letter", "nth letter"))
    n = 1 if kind == "first letter" else len(w) if kind == "last letter" else 1 + int(rng.random() * len(w))
    return kind, ("letter", n, w), {"w": w, "n": n, "o": ordinal(rng, n)}, f"{indexed(w)}\n{n}{w[n - 1]}", w[n - 1]


def _without(rng: Random) -> Made:
    w = word(rng)
    kind = pick(rng, ("drop vowels", "drop letter", "swap letter"))
    c, e = pick(rng, w), pick(rng, LETTERS)
    if kind == "drop vowels":
        made = "".join([x if x not in _VOWELS else "-" for x in w])
    else:
        made = "".join([x if x != c else "-" if kind == "drop letter" else e for x in w])
    return kind, (kind, w, c, e), {"w": w, "c": c, "e": e}, f"{indexed(w)}\n{indexed(made)}", made.replace("-", "")


def _case(rng: Random) -> Made:
    w = word(rng)
    if rng.random() < 0.5:
        return "lower", ("lower", w), {"W": w.upper()}, f"{indexed(w.upper())}\n{indexed(w)}", w
    return "capital", ("capital", w), {"w": w}, f"{indexed(w)}\n1{w[0].upper()}", w.capitalize()


def _built(rng: Random) -> Made:
    w, v, n = word(rng), word(rng), 2 + int(rng.random() * 3)
    if rng.random() < 0.4:
        return "repeat", ("repeat", w, n), {"w": w, "n": n}, "\n".join([f"{i}:{w}" for i in range(1, n + 1)]), w * n
    return "glue", ("glue", w, v), {"w": w, "v": v}, f"{indexed(w)}\n{indexed(v)}", w + v


def _text(rng: Random) -> Made:
    found = list(
        dict.fromkeys(
            [pick(rng, PLAIN) if rng.random() < 0.6 else made_up(rng) for _ in range(3 + int(rng.random() * 3))]
        )
    )
    kind = pick(rng, ("hyphen", "words", "last word", "reverse words", "longest", "alphabet"))
    text = " ".join(found)
    numbered = " ".join([f"{i}:{w}" for i, w in enumerate(found, 1)])
    trace, answer = numbered, str(len(found))
    if kind == "hyphen":
        trace = answer = "-".join(found)
    elif kind == "last word":
        answer = found[-1]
    elif kind == "reverse words":
        trace, answer = f"{numbered}\n{' '.join(reversed(numbered.split()))}", " ".join(reversed(found))
    elif kind == "longest":
        best, lines = "", []
        for w in found:
            best = w if len(w) > len(best) else best
            lines.append(f"{indexed(w)} {len(w)}:{best}")
        trace, answer = "\n".join(lines), best
    elif kind == "alphabet":
        trace, answer = lettered(found), " ".join(sorted(found))
    return kind, (kind, text), {"t": text, "l": str(found).replace("'", '"')}, trace, answer


def _yes_or_no(rng: Random) -> Made:
    w = word(rng)[:5]
    if rng.random() < 0.5:
        half = w[:3]
        w = half + half[::-1][int(rng.random() * 2) :] if rng.random() < 0.5 else w
        back = w[::-1]
        return "palindrome", ("palindrome", w), {"w": w}, f"{indexed(w)}\n{indexed(back)}", "yes" if back == w else "no"
    c = pick(rng, w) if rng.random() < 0.5 else pick(rng, LETTERS)
    lines = f"{indexed(w)}\n{''.join([f'{x}{1 if x == c else 0}' for x in w])}"
    return "has letter", ("has", c, w), {"w": w, "c": c}, lines, "yes" if c in w else "no"


def any_day(rng: Random) -> date:
    """A date, often near the end of a month, of February above all."""
    if rng.random() < 0.25:
        first = date(1990 + int(rng.random() * 50), 3 if rng.random() < 0.5 else 1 + int(rng.random() * 12), 1)
        return first + timedelta(int(rng.random() * 9) - 6)
    return date(1990 + int(rng.random() * 50), 1 + int(rng.random() * 12), 1 + int(rng.random() * 28))


def _date_before(rng: Random) -> Made:
    start, n = any_day(rng), 1 + int(rng.random() * 28)
    end = start - timedelta(n)
    lines = [f"{start.day}-{n}={start.day - n}"]
    if start.day <= n:
        length = (start.replace(day=1) - timedelta(1)).day
        lines += [f"{end:%Y-%m} has {length}", f"{start.day - n}+{length}={end.day}"]
    return ("before", ("days before", str(start), n), {"d": start, "n": n},
        "\n".join([*lines, end.isoformat()]), end.isoformat())  # fmt: skip


def _two_dates(rng: Random) -> Made:
    d = any_day(rng)
    e = d + timedelta(int(rng.random() * 900) - 450)
    if e == d:
        e += timedelta(3)
    kind = pick(rng, ("later", "earlier"))
    best = max(d, e) if kind == "later" else min(d, e)
    return (kind, (kind, str(min(d, e)), str(max(d, e))), {"d": d, "e": e},
        f"{d}{'<' if d < e else '>'}{e}", best.isoformat())  # fmt: skip


def _calendar(rng: Random) -> Made:
    roll = rng.random()
    first, n = int(rng.random() * 7), 1 + int(rng.random() * 27)
    if roll < 0.45:
        rest, lines = n, []
        while rest >= 7:
            lines.append(f"{rest}-7={rest - 7}")
            rest -= 7
        lines += [f"{i}:{DAYS[(first - i) % 7]}" for i in range(rest + 1)]
        return ("weekday back", ("weekday back", first, n), {"w": DAYS[first], "n": n}, "\n".join(lines),
            DAYS[(first - n) % 7])  # fmt: skip
    month = int(rng.random() * 12)
    if roll < 0.6:
        return ("next day", ("next day", first), {"w": DAYS[first]},
            f"0:{DAYS[first]}\n1:{DAYS[(first + 1) % 7]}", DAYS[(first + 1) % 7])  # fmt: skip
    if roll < 0.75:
        return ("next month", ("next month", month), {"m": MONTHS[month]},
            f"{month + 1}:{MONTHS[month]}\n{month % 12 + (2 if month < 11 else -10)}:{MONTHS[(month + 1) % 12]}",
            MONTHS[(month + 1) % 12])  # fmt: skip
    year = 1990 + int(rng.random() * 50)
    length = 29 if month == 1 and year % 4 == 0 else LENGTHS[month]
    return ("month", ("month", month, year), {"m": f"{MONTHS[month]} {year}"},
        f"{year}-{month + 1:02d} has {length}", str(length))  # fmt: skip


KINDS: Final[tuple[Callable[[Random], Made], ...]] = (
    _sum, _sum, _parity, _parity, _each, _slice, _end, _member, _times, _letter, _letter, _without, _without, _case,
    _built, _text, _text, _yes_or_no, _date_before, _two_dates, _calendar,
)  # fmt: skip
