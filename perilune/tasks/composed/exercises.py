"""More tasks for instructions.py, each with forms separated by `|`; small ones over times, dates and two lists."""

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

from perilune.tasks.more_programs import LENGTHS, LETTERS, MONTHS, indexed, ordinal
from perilune.tasks.problem import pick
from perilune.tasks.wordings import capital, lined, phrase
from perilune.tasks.words import NAMES, PLAIN

Task = tuple[str, str, str, str]  # name, forms, trace, answer; left out without an answer
Out = Callable[[list[str]], str]

# More ways to ask for tasks of instructions.py: of a word (w), a list of them (l), numbers (n).
MORE: Final = lined("""
wreverse: {x} backwards|say {x} from right to left|flip {x}
wupper: {x} IN CAPS
wdrop vowels: {x} minus its vowels
wkeep vowels: just the vowels of {x}
wsame: palindrome or not: {x}? yes or no
lcount: number of words in {x}?
lalphabet: {x} in ABC order|{x}, but a to z|file {x} alphabetically|alphabetise {x}|sort {x} as in a phone book
llongest: longest of {x}?
lshortest: shortest of {x}?
lreverse: {x} in reverse
nsort: {x} from least to greatest
ndown: {x} from greatest to least
nmax: top value of {x}?
nmin: bottom value of {x}?
nspread: range of {x} (largest minus smallest)?
nsum: {x} summed up?
nevens: just the even ones of {x}
nodds: just the odd ones of {x}
nunique: {x}, each only once
""")


def places(items: Sequence[str]) -> str:
    return ",".join([f"{i}:{x}" for i, x in enumerate(items, 1)])


def picked(items: Sequence[str], rest: Sequence[str]) -> str:
    """The trace of sorting: what is left at each step and the item that is taken."""
    left, lines = list(items), []
    for best in rest:
        lines.append(f"{','.join(left)}:{best}")
        left.remove(best)
    return "\n".join(lines)


def _yes_or_no(found: object) -> str:
    return "yes" if found else "no"


def _tallied(items: Sequence[str]) -> tuple[str, str]:
    """Each item with how often it has occurred so far, and the one that occurs most if there is one."""
    first, *rest = sorted({(items.count(x), x) for x in items}, reverse=True)
    most = first[1] if first[0] > max([1, *[n for n, _ in rest]]) else ""
    return ",".join([f"{x}:{items[: i + 1].count(x)}" for i, x in enumerate(items)]), most


def of_word(rng: Random, w: str) -> list[Task]:
    i, n, m = indexed(w), pick(rng, (2, 3)), len(w) // 2 + 1
    c, p, a = pick(rng, w), ("second", "third")[n - 2], pick(rng, (w[0], pick(rng, LETTERS)))
    once = "".join([x if x not in w[:j] else "-" for j, x in enumerate(w)])
    tally, most = _tallied(w)
    name, mark = pick(rng, (("a space", " "), ("a dash", "-"), ("a comma", ", ")))
    return [
        ("back", f"what is the {p} to last letter of {{x}}?|counting from the end, what is letter {n} of {{x}}?",
            f"{i}\n{indexed(w[::-1])}\n{n}{w[-n]}", w[-n]),
        ("middle", "which letter is in the middle of {x}?", f"{i}\n{len(w)}+1={2 * m}\n{2 * m}/2={m}\n{m}{w[m - 1]}",
            w[m - 1] if len(w) % 2 else ""),
        ("where", f"at which place does {c} first occur in {{x}}, counting from 1?", f"{i}\n{w.index(c) + 1}{c}",
            str(w.index(c) + 1)),
        ("letters", "sort the letters of {x} alphabetically, as one word", picked(w, sorted(w)), "".join(sorted(w))),
        ("once", "drop repeated letters from {x}, keep the first of each", f"{i}\n{indexed(once)}",
            once.replace("-", "")),
        ("distinct", "how many different letters has {x}?", f"{i}\n{indexed(once)}\n{indexed(once.replace('-', ''))}",
            str(len(set(w)))),
        ("most", "which letter occurs most often in {x}?|most common letter of {x}?", tally, most),
        ("starts", f"does {{x}} start with {a}? yes or no", f"{i}\n1{w[0]}", _yes_or_no(a == w[0])),
        ("times", f"write {{x}} {n} times with {name} between|{{x}}, {n} times, {name} between",
            "\n".join([f"{j}:{w}" for j in range(1, n + 1)]), mark.join([w] * n)),
    ]  # fmt: skip


def of_line(rng: Random, line: str, out: Out) -> list[Task]:
    """Tasks about a line of words."""
    found = line.split()
    numbered = [f"{i}:{w}" for i, w in enumerate(found, 1)]
    n, k, w, v = (
        1 + int(rng.random() * len(found)),
        pick(rng, (2, 3)),
        pick(rng, (*found, *found[-1:] * 5)),
        pick(rng, PLAIN),
    )
    sizes, up, shown = [f"{indexed(x)} {len(x)}" for x in found], sorted(found, key=len), " ".join(numbered)
    lengths, w = list(map(len, up)), w if len(w) > 2 else up[-1]
    long, size, c = [x for x in found if len(x) > k + 2], "\n".join(sizes), pick(rng, found)[0]
    heads = [x for x in found if x[0] == c]
    q, mark = pick(rng, "\"'"), pick(rng, (("hyphens", "-"), ("underscores", "_"), ("slashes", "/")))
    o = ordinal(rng, n)
    new, seen = " ".join([v if x == w else x for x in found]), [found[: i + 1].count(w) for i in range(len(found))]
    once = line.lower().split().count(w.lower()) == seen[-1]  # not "The" and "the"
    w, v = f"{q}{w}{q}", f"{q}{v}{q}"
    return [
        ("words", "how many words does {x} have?|count the words of {x}|how many words are in {x}?|word count of {x}?",
            shown, str(len(found))),
        ("nth", f"what is the {o} word of {{x}}?|give me the {o} word of {{x}}|word number {n} of {{x}}?|which word "
            f"comes {o} in {{x}}?", f"{shown}\n{numbered[n - 1]}", found[n - 1]),
        ("last", "what is the last word of {x}?|with which word does {x} end?", f"{shown}\n{numbered[-1]}", found[-1]),
        ("back", "what is the second to last word of {x}?|last but one word of {x}?", f"{shown}\n{numbered[-2]}",
            found[-2]),
        ("long", "which word of {x} is the longest?|longest word of {x}?", size,
            up[-1] if lengths[-1] > lengths[-2] else ""),
        ("second", "what is the second longest word of {x}?",
            f"{size}\n{picked(found, up[:-3:-1])}", up[-2] if lengths[-1] > lengths[-2] > lengths[-3] else ""),
        ("short", "which word of {x} is the shortest?|shortest word of {x}?", size,
            up[0] if lengths[0] < lengths[1] else ""),
        ("upper", "write {x} in capitals|uppercase {x}|put all of {x} in upper case|all caps for {x}", shown,
            line.upper()),
        ("title", "capitalise every word of {x}|write {x}, each word with a capital first letter", shown,
            " ".join(map(capital, found))),
        ("turned", "write the words of {x} in the opposite order|reverse the word order of {x}",
            f"{shown}\n{' '.join(numbered[::-1])}", " ".join(found[::-1])),
        ("swap", f"replace {w} with {v} in {{x}}|change {w} to {v} in {{x}}|in {{x}}, write {v} instead of {w}|swap "
            f"every {w} in {{x}} for {v}|put {v} for {w} wherever it occurs in {{x}}", shown, new if once else ""),
        ("times", f"how often does the word {w} occur in {{x}}?|count how many times {w} is in {{x}}",
            "\n".join([f"{x}:{i}" for x, i in zip(found, seen)]), str(seen[-1] * once or "")),
        ("head", f"what are the first {k} words of {{x}}?|keep only the first {k} words of {{x}}",
            f"{shown}\n{' '.join(numbered[:k])}", " ".join(found[:k])),
        ("tail", f"what are the last {k} words of {{x}}?|keep only the last {k} words of {{x}}",
            f"{shown}\n{' '.join(numbered[-k:])}", " ".join(found[-k:])),
        ("initials", "join the first letters of the words of {x}|what do the initials of {x} spell?",
            "\n".join([f"{x}: {x[0]}" for x in found]), "".join([x[0] for x in found])),
        ("begin", f"which words of {{x}} begin with {c}?|only the words of {{x}} that start with {c}",
            "\n".join([f"{x}: {x[0]}" for x in found]), out(heads) if line.islower() else ""),
        ("sized", f"which words of {{x}} have more than {k + 2} letters?|keep the words of {{x}} of {k + 3} letters or "
            "more", size, out(long) if long else ""),
        ("joined", f"put {mark[0]} between the words of {{x}} instead of spaces|join the words of {{x}} with {mark[0]}",
            mark[1].join(found), mark[1].join(found)),
    ]  # fmt: skip


def of_words(rng: Random, found: list[str], out: Out) -> list[Task]:
    at = int(rng.random() * len(found))
    w, shown = found[at], places(found)
    c, n, heads = w[0], len(w), "\n".join([f"{x}: {x[0]}" for x in found])
    name, mark = pick(rng, (("semicolons", "; "), ("a comma", ", "), ("'and'", " and "), ("vertical bars", "|")))
    starts = [x for x in found if x[0] == c]
    return [
        ("begin", f"which of {{x}} begin with {c}?|only those of {{x}} that start with {c}", heads, out(starts)),
        ("how many", f"how many of {{x}} begin with the letter {c}?", heads, str(len(starts))),
        ("hold", f"which of {{x}} contain the letter {c} ?",
            "\n".join([f"{indexed(x)} {_yes_or_no(c in x)}" for x in found]),
            out([x for x in found if c in x])),
        ("big", f"which of {{x}} have {n} letters or more?", "\n".join([f"{indexed(x)} {len(x)}" for x in found]),
            out([x for x in found if len(x) >= n])),
        ("title", "capitalise the first letter of each of {x}|write {x}, each with a capital first letter",
            ",".join(found), out([capital(x) for x in found])),
        ("back", "which of {x} is second to last?|last but one of {x}?", f"{shown}\n{len(found) - 1}:{found[-2:][0]}",
            found[-2] if len(found) > 1 else ""),
        ("place", f"at which place is '{w}' in {{x}}, counting from 1?", f"{shown}\n{at + 1}:{w}", str(at + 1)),
        ("joined", f"join {{x}} with {name} between", ",".join(found), mark.join(found)),
    ]  # fmt: skip


def of_numbers(rng: Random, found: list[str], out: Out) -> list[Task]:
    x = list(map(int, found))
    up, d, odd, single = list(map(str, sorted(x))), pick(rng, (3, 4, 5)), pick(rng, (0, 1)), len(set(x)) == len(x)
    sums, total, lines, half = [sum(x[: i + 1]) for i in range(len(x))], 0, [], len(x) // 2 + 1
    for n in x:
        fits = n % 2 == odd
        lines.append(f"{n} {'odd' if n % 2 else 'even'}:{f'{total}+{n}=' if fits else ''}{total + n * fits}")
        total += n * fits
    kind = ("even", "odd")[odd]
    return [
        ("sum of", f"add up only the {kind} ones of {{x}}|sum of the {kind} ones among {{x}}?", "\n".join(lines),
            str(total)),
        ("running", "give the running sums of {x}|cumulative sums of {x}?",
            "\n".join([f"{a}+{b}={a + b}" for a, b in zip(sums, x[1:])]), out(list(map(str, sums)))),
        ("second", "what is the second largest of {x}?", picked(found, up[:-3:-1]), up[-2] if single else ""),
        ("median", "what is the median of {x}?", picked(found, up[:half]), up[half - 1] if len(x) % 2 else ""),
        ("multiples", f"which of {{x}} are multiples of {d}?|keep what can be divided by {d} in {{x}}",
            "\n".join([f"{n}={d}*{n // d}r{n % d}" for n in x]), out([str(n) for n in x if n % d == 0])),
    ]  # fmt: skip


def of_repeats(found: list[str], out: Out) -> list[Task]:
    """Tasks about items, some of which occur more than once."""
    tally, most = _tallied(found)
    kept = list(dict.fromkeys(found))
    once = [x for x in kept if found.count(x) == 1]
    more, tally2 = [x for x in kept if x not in once], f"{tally}\n{places(kept)}"
    return [
        ("single", "which of {x} occurs only once?|which one of {x} has no pair?|what is there just once in {x}?|"
            "which of {x} is not repeated?", tally, once[0] if len(once) == 1 else ""),
        ("most", "which of {x} occurs most often?|most frequent of {x}?|what comes up most in {x}?", tally, most),
        ("distinct", "remove the duplicates from {x}, keep the order|{x} without doubles|dedupe {x}", tally2,
            out(kept)),
        ("how many", "how many different ones are there in {x}?", tally2, str(len(kept))),
        ("again", "which of {x} occur more than once?", tally, out(more) if more else ""),
    ]  # fmt: skip


# ---- times, dates, numbers, two lists: forms, trace, answer --------------------------------------------------------

Small = tuple[str, str, str]


def _clock(rng: Random) -> Small:
    h, m, k, plus = int(rng.random() * 24), int(rng.random() * 60), 5 + int(rng.random() * 55), int(rng.random() * 4)
    t, noon = f"{h:02d}:{m:02d}", f"{(h + 11) % 12 + 1}:{m:02d} {'pm' if h > 11 else 'am'}"
    kind, late = pick(rng, "12+-"), h > 12
    if kind == "1":
        work = f"{h}-12={h - 12}" if late else "0+12=12" if not h else f"{h}"
        return f"write {t} in 12-hour time with am or pm|{t} as am/pm?", work, noon
    if kind == "2":
        work = f"{h - 12}+12={h}" if late else "12-12=0" if not h else f"{h}"
        return f"write {noon} in 24-hour time (hh:mm)|{noon} on the 24 hour clock?", work, t
    sign, lines, span = 1 if kind == "+" else -1, [], f"{k} minutes"
    if plus:
        span = f"{plus} hour{'s' * (plus > 1)}{pick(rng, (' and ', ' '))}{span}"
        lines.append(f"{h}{kind}{plus}={h + sign * plus}")
    h, rest, back = h + sign * plus, m + sign * k, "+-"[sign > 0]
    lines.append(f"{m}{kind}{k}={rest}")
    if not 0 <= rest < 60:
        lines += [f"{rest}{back}60={rest % 60}", f"{h}{kind}1={h + sign}"]
        h += sign
    if not 0 <= h < 24:
        lines.append(f"{h}{back}24={h % 24}")
    forms = (f"what time is it {span} after {t}?|{t} plus {span}?|a film of {span} starts at {t}. When is it over?"
        if sign > 0 else f"what time was it {span} before {t}?|I drove {span}, got here at {t}. I left?")  # fmt: skip
    return forms, "\n".join(lines), f"{h % 24:02d}:{rest % 60:02d}"


def _date(rng: Random) -> Small:
    i, year, kind = int(rng.random() * 12), 1904 + int(rng.random() * 190), int(rng.random() * 5)
    if i == 1 and kind < 2:
        i = 2
    m, length, style = MONTHS[i], LENGTHS[i], pick(rng, ("{} {m}", "{m} {}")).replace("{m}", MONTHS[i])
    d, n = 1 + int(rng.random() * 28), 2 + int(rng.random() * 26)
    t = style.format(d)
    if kind == 0:
        lines, end = [f"{d}+{n}={d + n}", f"{m} has {length}"], d + n
        if end > length:
            lines.append(f"{end}-{length}={end - length}")
            end, style = end - length, style.replace(m, MONTHS[(i + 1) % 12])
        then = style.format(end)
        return (f"which date is {n} days after {t}?|{t} plus {n} days?|lent on {t} for {n} days. Due back on?",
            "\n".join([*lines, then]), then)  # fmt: skip
    if kind == 1:
        return (
            f"how many days are left in {m} after {t}?",
            f"{m} has {length}\n{length}-{d}={length - d}",
            f"{length - d}",
        )
    if kind == 2:
        rest = year % 100
        return f"is {year} a leap year? yes or no", f"{rest}=4*{rest // 4}r{rest % 4}", _yes_or_no(rest % 4 == 0)
    if kind == 3:
        iso = f"{year}-{i + 1:02d}-{d:02d}"
        return f"write {t} {year} as YYYY-MM-DD|{t} {year} in ISO form?", f"{m}:{i + 1:02d}\n{d:02d}", iso
    now, name = year + n, pick(rng, NAMES)
    return (f"{name} was born in {year}. How old does {name} get in {now}?|born {year}, year now {now}: age this "
        "year?", f"{now}-{year}={n}", f"{n}")  # fmt: skip


def _count(rng: Random) -> Small:
    n, k, kind = 10 + int(rng.random() * 90), 3 + int(rng.random() * 7), int(rng.random() * 3)
    n -= n % k if kind == 1 and rng.random() < 0.4 else 0
    rest, below = n % k, n - n % k
    work = f"{n}={k}*{n // k}r{rest}"
    if kind == 0:
        work += f"\n{n}-{rest}={below}\n{below}+{k}={below + k}"
        return f"what is the next multiple of {k} after {n}?|first multiple of {k} above {n}?", work, f"{below + k}"
    if kind == 1:
        return (
            f"is {n} divisible by {k}? yes or no|does {k} go into {n} without a rest? yes or no",
            work,
            _yes_or_no(not rest),
        )
    a, b, c, e = n + k, n + 2 * k, n + 3 * k, n + 4 * k
    row = f"{n}, {a}, {b}, {c}"
    return (
        f"what comes next: {row}?|go on by one: {row} ...",
        f"{a}-{n}={k}\n{b}-{a}={k}\n{c}+{k}={e}",
        f"{e}",
    )


def _two(rng: Random) -> Small:
    pool, k = rng.sample(PLAIN if rng.random() < 0.5 else list(map(str, range(50))), 5), pick(rng, (1, 2))
    a, b = rng.sample(pool[:3], 3), rng.sample(pool[k : k + 3], 3)
    x, y, kind = f"[{', '.join(a)}]", f"[{', '.join(b)}]", pick(rng, (0, 1, 2))
    forms = (f"interleave {x} and {y}|{x} and {y}: take one of each by turns", f"what do {x} and {y} have in common?|"
        f"which items of {x} are in {y} too?", f"which items of {x} are not in {y}?|{x} without {y}")[kind]  # fmt: skip
    got = [w for w in a if (w in b) is (kind == 1)] if kind else [w for pair in zip(a, b) for w in pair]
    trace = ",".join([f"{w}:{_yes_or_no(w in b)}" for w in a]) if kind else f"{places(a)}\n{places(b)}\n{places(got)}"
    return forms, trace, f"[{', '.join(got)}]"


_VALUE: Final = re.compile(r"\[.*?\]|[A-Z][a-z]+|\d[\w:-]*")


def exercise(rng: Random) -> tuple[tuple[Any, ...], str, str, str]:
    """The key, the question, the trace and the answer of one over times, dates, numbers or two lists."""
    answer = "[]"
    while answer == "[]":
        forms, trace, answer = pick(rng, (_clock, _date, _date, _count, _two))(rng)
    form = pick(rng, forms.split("|"))
    key, held, form = ("exercise", form), _VALUE.findall(form), _VALUE.sub("{}", form)  # no misspelt values
    return key, phrase(rng, capital(form) if rng.random() < 0.6 else form).format(*held), trace, answer
