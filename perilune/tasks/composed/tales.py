"""Stories of several steps for `word_problems`, put together from what there is, what happens to it and what is asked.

The start may be a number, groups, or two parts, one given relative to the other ("twice as many later"); changes may
come in groups or by the day; the question may be about what is left, what is missing to a goal, a price or a share.
Relations go from one person to the next; rates are amounts per time. Every step is worded by itself,
so that steps, order and wordings vary. The text has the letters of its pattern (arithmetic.py) as places.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from perilune.tasks.problem import pick
from perilune.tasks.wordings import capital, expand, lined
from perilune.tasks.words import lines

Story = tuple[str, str, str]  # pattern, text, unit

RULES: Final = lined(lines("school.txt"))
_TIMES: Final = (("on Monday", "on Tuesday"), ("in the morning", "in the afternoon"), ("yesterday", "today"),
    ("last week", "this week"), ("in May", "in June"), ("on the first day", "on the second day"), ("at first", "later"),
    ("before lunch", "after lunch"), ("in the first hour", "in the second hour"), ("on Friday",
    "on Saturday"))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Topic:
    """Forms by their effect on the amount; `#` is a number, `@` another one, `%` a small one. `unit`: of the answer."""

    unit: str
    starts: tuple[tuple[str, str], ...]  # the expression of # @ %, and the form
    gains: tuple[tuple[str, str], ...]
    losses: tuple[tuple[str, str], ...]
    left: tuple[str, ...]
    goal: tuple[str, ...]  # what is missing to the goal #; none where nothing can be missing
    worth: tuple[str, ...] = ()  # what % times the amount is


def _forms(text: str) -> tuple[tuple[str, str], ...]:
    """Rows of `expression: form`."""
    rows = [row.strip().partition(": ") for row in text.split("\n") if row.strip()]
    return tuple([(kind, form) for kind, _, form in rows])


_PARTS: Final = """
#+#*%: {n} <had> # {o} <first> and % times as many <second>.
#+#*2: {n} <had> # {o} <first> and twice as many <second>.
#+#*2: <first> {n} <had> # {o}, <second> it was double that.
#+#+@: {n} <had> # {o} <first> and @ more than that <second>.
#+#-@: {n} <had> # {o} <first>, but @ fewer <second>.
#+@: {n} <had> # {o} <first> and @ {o} <second>.
#+@: {n} <had> # {o} <first> and another @ <second>.
#*2: <first> and <second>, {n} <had> # {o} every time.
"""
TOPICS: Final = (
    Topic("{o}", _forms("""
#: {n} <had> # {o}.
#: There were # {o} in the cellar.
#: {n} {has} a collection of # {o}.
#*%: {n} <had> % {box} of # {o} <each>.
#*%: There are % {box} with # {o} <each>.
#*%: Every one of the % {box} that {n} <had> holds # {o}.
#+@: {n} <had> # big and @ small {o}.
#+@: {n} <had> # {o}, and {m} brought another @.
        """ + _PARTS),
        _forms("""
+#: {P} <got> # more.
+#: {P} <got> another # {o}.
+#: {m} gave {i} # {o}.
+#: # {o} came in the post.
+#*%: {P} <got> % more {box} with # {o} <each>.
+#*%: {P} <got> # more every day for % days.
+#*%: % <friends> brought # {o} each.
+#*%: {m} added % {box} of # {o}.
        """), _forms("""
-#: {P} <used> #.
-#: {P} <used> # of the {o}.
-#: {P} <gave> # of them to {m}.
-#: # were broken.
-#: {m} took #.
-#: the dog ran off with # of them.
-#*%: {P} <gave> # {o} to each of % <friends>.
-#*%: {P} <gave> # each to % <friends>.
-#*%: {P} <used> # a day for % days.
-#*%: {P} filled % {box} with # {o} each and sold them.
-#*%: % <friends> took # each.
-#*%: each of the % <friends> got # of them.
        """), ("<left>?",), ("{P} need{s} # {o} <total>. How many are missing?",
        "How many more {does} {p} need to reach #?", "{P} want{s} to have #. How many {o} {does} {p} still need?",
        "The goal is # {o}. How many must {p} still find?", "How many are missing until {p} {has} #?"),
        ("Every one is sold for % dollars. How much money is that?",
        "{P} sell{s} them all at % euros each. What {does} "
        "{p} get?", "Each weighs % grams. How heavy are they <total>?",
        "Each needs % minutes of work. How many minutes "
        "is that?")),
    Topic("{cur}", _forms("""
#: {n} had # {cur} in {h} purse.
#: {n} saved # {cur}.
#: {n} had # {cur} in the bank.
#*%: {n} earned # {cur} a day for % days.
#*%: {n} put aside # {cur} each month for % months.
#*%: {n} sold % {o} at # {cur} each.
#+@: {n} got # {cur} from {m} and @ {cur} from an uncle.
#+@: {n} earned # {cur} <first> and @ {cur} <second>.
        #+#*2: {n} earned # {cur} <first> and twice as much <second>.
#+#+@: {n} earned # {cur} <first> and @ {cur} more than that <second>.
#+#-@: {n} earned # {cur} <first> and @ {cur} less <second>.
        """), _forms("""
+#: {P} earned another # {cur}.
+#: {m} gave {i} # {cur}.
+#: {P} found # {cur} in an old coat.
+#*%: {P} worked % hours for # {cur} an hour.
+#*%: {P} sold % {o} for # {cur} apiece.
+#*%: % <friends> paid {i} # {cur} each.
        """), _forms("""
-#: {P} spent # {cur} on food.
-#: {P} paid # {cur} for the bus.
-#: a new pair of shoes cost # {cur}.
-#: {P} lent {m} # {cur}.
-#*%: {P} bought % {o} at # {cur} each.
-#*%: {P} bought % tickets, each for # {cur}.
-#*%: {P} paid # {cur} a week for % weeks.
-#*%: % {o} were # {cur} a piece, and {p} took them all.
        """), ("How much money {does} {p} have left?", "How much is left?", "How many {cur} remain?", "How much money "
        "{does} {n} have now?", "What is left of it?", "How much can {p} still spend?", "how much left?"),
        ("The bike that {p} want{s} costs # {cur}. How much is still missing?", "How much more {does} {p} need for a # "
        "{cur} camera?", "{P} save{s} for a trip of # {cur}. How many {cur} must {p} still earn?")),
    Topic("pages", _forms("""
#: {n} {has} a book of # pages.
#: The book that {n} borrowed has # pages.
#+@: {n} {has} to read two books, one of # pages and one of @ pages.
        """), (), _forms("""
-#: {P} read # pages <first>.
-#: {P} read # pages on the train.
-#: <second> {p} read another # pages.
-#*%: {P} read # pages a day for % days.
-#*%: {P} read % chapters of # pages each.
        -#-#*2: {P} read # pages <first> and twice as many <second>.
-#-#-@: {P} read # pages <first> and @ more than that <second>.
-#-@: {P} read # pages <first> and @ <second>.
        """), ("How many pages are left?", "How many pages {does} {p} still have to read?", "How many pages to go?",
        "How many pages remain?"), ()),
    Topic("km", _forms("""
#: The way to the coast is # km.
#: {n} {has} a trip of # km ahead.
        """), (), _forms("""
-#: {P} drove # km before the first break.
-#: {P} covered # km <first>.
-#*%: {P} drove % hours at # km an hour.
-#*%: {P} went # km on each of % days.
        -#-#*2: {P} did # km <first> and twice that <second>.
-#-@: {P} did # km <first> and @ km <second>.
        """), ("How many km are left?", "How far is it still?", "How many km {does} {p} still have to go?"), ()),
    Topic("litres", _forms("""
#: A tank held # litres.
#: There were # litres of water in the pool.
#*%: {n} poured % buckets of # litres into the tank.
        """), _forms("""
+#: {P} pumped in # litres.
+#: rain added # litres.
+#*%: {P} poured in % cans of # litres each.
+#*%: for % hours # litres an hour ran in.
        """), _forms("""
-#: {P} took out # litres for the garden.
-#: # litres leaked out overnight.
-#*%: # litres a day leaked out for % days.
-#*%: {P} filled % buckets with # litres each from it.
        """), ("How many litres are in it now?", "How much water is there now, in litres?", "How many litres are left?",
        "how full is it now, in litres?"), ("It can hold # litres. How many litres are missing until it is full?",
        "How many litres fit in before it is full at #?")),
    Topic("people", _forms("""
#: There were # people in the hall.
#: A ship left with # people on board.
#*%: % buses brought # people each to the fair.
#*%: % classes of # pupils each go to the museum.
#+@: A camp has # boys and @ girls.
#+@: # women and @ men sat in the theatre.
        """), _forms("""
+#: # more joined.
+#: # came in from the rain.
+#*%: % groups of # people each arrived.
        """), _forms("""
-#: # went home.
-#: # left early.
-#: # of them had to leave.
-#*%: % taxis took away # people each.
-#*%: # left every hour for % hours.
        """), ("How many people are there now?", "How many are left?", "How many people stayed?", "How many are still "
        "there?"), ("There is room for # people. How many places are free?", "How many more can come in if # is the "
        "most?"), ("A ticket costs % euros for each of them. How many euros is that?",)),
)  # fmt: skip
_MONEY: Final = ("euros", "dollars", "pounds", "francs", "coins", "crowns")


_OWN_TIME: Final = re.compile(r"<first>|last week|lunch|before the first|on \w+day|\w+ hour| days")


class _Letters:
    def __init__(self) -> None:
        self._large, self._small = iter("abcdefg"), iter("kj")

    def put(self, kind: str, form: str) -> tuple[str, str]:
        """The expression and the form with letters in the place of # @ %."""
        for mark in "#@%":
            if mark in kind:
                letter = next(self._small if mark == "%" else self._large)
                kind, form = kind.replace(mark, letter), form.replace(mark, f"{{{letter}}}")
        return kind, form


def happenings(rng: Random, thing: str) -> Story:
    """What there is, one to three things that happen to it, and a question."""
    topic, letters = pick(rng, TOPICS[:1] * 4 + TOPICS[1:2] * 2 + TOPICS[2:]), _Letters()
    kind, form = letters.put(*pick(rng, topic.starts))
    pattern, parts = kind, [capital(form)]
    small = kind.count("*") - kind.count("*2")
    for _ in range(pick(rng, (1, 1, 1, 2, 2, 3)) if len(pattern) < 6 else 1):
        kind, form = pick(rng, topic.gains if topic.gains and rng.random() < 0.4 else topic.losses)
        small += "%" in kind
        if small > 2 or len(set(pattern) & set("abcdefg")) > 4:
            break
        if "<first>" in form and "<first>" in "".join(parts):
            continue
        kind, form = letters.put(kind, form)
        pattern += kind
        then = "" if _OWN_TIME.search(form) else expand(rng, RULES, "<then>")
        starts = form.startswith("{P}")
        if starts and len(parts) > 1 and parts[-1].startswith(("{P}", "{n}")) and rng.random() < 0.3:
            parts[-1] = parts[-1][:-1] + pick(rng, (" and ", " and then ", ", then ", " but ")) + form[4:]
        elif then and not form.startswith("<"):
            parts.append(then + ("{p}" + form[3:] if starts else form))
        else:
            parts.append(capital(form))
    roll, unit = rng.random(), topic.unit
    if topic.goal and roll < 0.15:
        goal, ask = letters.put("#", pick(rng, topic.goal))
        pattern = goal + "".join([{"+": "-", "-": "+"}.get(c, c) for c in f"+{pattern}"])
    elif topic.worth and roll < 0.3 and len(pattern) == 3 and pattern[1] in "+-":
        pattern, ask = f"({pattern})*k", pick(rng, topic.worth).replace("%", "{k}")
        unit = next((u for u in ("dollars", "euros", "grams", "minutes") if u in ask), "")
    elif roll > 0.92 and len(pattern) == 3 and pattern[1] in "+-" and topic is TOPICS[0]:
        pattern = f"({pattern})/k"
        ask = pick(rng, ("{P} share{s} them equally among {k} <friends>. How many does each get?",
            "They go into {k} {box} in equal parts. How many {o} are in one of them?",
            "The rest is split evenly between {k} <friends>. How many {o} each?"))  # fmt: skip
    else:
        ask = expand(rng, RULES, pick(rng, topic.left))
        for _ in range(20 * ("-" not in pattern)):  # nothing was taken
            if re.search("left|remain|still|leave|stay", ask):
                ask = expand(rng, RULES, pick(rng, topic.left))
    if rng.random() < 0.2:
        parts.insert(1 + int(rng.random() * len(parts)), pick(rng, RULES["idle"]))
    ask = capital(ask) if rng.random() < 0.9 else ask
    plain = ask[-1] == "?" and "." not in ask and not re.search("{[a-gjk]}", ask)
    if plain and rng.random() < 0.1:
        parts.insert(0, ask.replace("{p}", "{n}"))
    elif rng.random() < 0.06 and parts[-1] not in RULES["idle"]:
        parts[-1] = parts[-1][:-1] + ", so " + ask[:1].lower() + ask[1:]
    else:
        parts.append(ask)
    first, second = pick(rng, _TIMES)
    text = expand(rng, RULES, " ".join(parts).replace("<first>", first).replace("<second>", second))
    text = ". ".join([capital(s) for s in text.split(". ")])
    money = pick(rng, _MONEY)
    return pattern, text.replace("{cur}", money), unit.replace("{cur}", money)


# ---- relations -----------------------------------------------------------------------------------------------------

# Unit, what one has, more and less of it, times it, and the question for one and for all.
_SCALES: Final = (
    ("years", "{0} is {1} years old", "{0} is {1} years older than {2}", "{0} is {1} years younger than {2}",
        "{0} is {1} times as old as {2}", "How old is {0}?", "How old are they all together?"),
    ("points", "{0} scored {1} points", "{0} scored {1} more points than {2}", "{0} got {1} points fewer than {2}",
        "{0} has {1} times the points of {2}", "How many points does {0} have?",
        "How many points do they have in all?"),
    ("cm", "{0} is {1} cm tall", "{0} is {1} cm taller than {2}", "{0} is {1} cm shorter than {2}",
        "{0} is {1} times as tall as {2}", "How tall is {0}, in cm?", "What do their heights add up to, in cm?"),
    ("kg", "{0} weighs {1} kg", "{0} weighs {1} kg more than {2}", "{0} is {1} kg lighter than {2}",
        "{0} weighs {1} times as much as {2}", "How heavy is {0}?", "What do they weigh together?"),
    ("euros", "{0} earns {1} euros a day", "{0} earns {1} euros more than {2}", "{0} gets {1} euros less than {2}",
        "{0} earns {1} times as much as {2}", "What does {0} earn?", "How much do they earn together?"),
    ("{o}", "{0} has {1} {{o}}", "{0} has {1} more {{o}} than {2}", "{0} has {1} fewer {{o}} than {2}",
        "{0} has {1} times as many {{o}} as {2}", "How many {{o}} does {0} have?",
        "How many {{o}} do they have together?"),
    ("minutes", "{0} takes {1} minutes", "{0} needs {1} minutes longer than {2}", "{0} is {1} minutes faster than {2}",
        "{0} takes {1} times as long as {2}", "How many minutes does {0} take?", "How many minutes is that in all?"),
)  # fmt: skip
KIN: Final = ("{q}", "{q}", "{r}'s brother", "{r}'s sister", "{r}'s mother", "the teacher", "{r}'s cousin")
THIRD: Final = ("{t}", "{t}", "a friend", "the trainer", "{r}'s uncle", "the neighbour")


def relations(rng: Random, thing: str) -> Story:
    """Two or three people, each relative to the one before; the question is about the last or all."""
    unit, has, more, less, times, ask, both = pick(rng, _SCALES)
    who = ["{r}", pick(rng, KIN), pick(rng, THIRD)]
    values, said, letters, small = ["a"], [has.format(who[0], "{a}")], iter("bc"), iter("kj")
    elided = False
    for i in range(1 if rng.random() < 0.3 else 2):
        roll, before = rng.random(), values[-1]
        if roll < 0.35 and "*" not in before:
            by = "2" if rng.random() < 0.5 else next(small)
            values.append(f"({before})*{by}" if len(before) > 1 else f"{before}*{by}")
            form = times.replace("{1} times", "twice") if by == "2" else times
            said.append(form.format(who[i + 1], f"{{{by}}}", who[i]))
        else:
            letter, up = next(letters), rng.random() < 0.55
            values.append(before + ("+" if up else "-") + letter)
            form = (more if up else less).format(who[i + 1], f"{{{letter}}}", who[i])
            short = i == 0 and rng.random() < 0.3  # only for the second person: later, two could be meant
            said.append(form.removesuffix(f" than {who[i]}") if short else form)
            elided = elided or short
    if rng.random() < 0.2 and not elided:
        said = said[::-1]
    text = pick(rng, (". ", ". ", ", and ", "; ", ", ", ", while ")).join(said)
    if unit == "years" and rng.random() < 0.4:
        text = re.sub("} years old(?!er)", "}", text)
    if rng.random() < 0.3 and "(" not in "".join(values):
        pattern, asked = "+".join(values), both.format()
    else:
        pattern, asked = values[-1], ask.format(who[len(values) - 1])
    text = ". ".join([capital(s) for s in text.split(". ")])
    return pattern, f"{asked} {text}." if rng.random() < 0.1 else f"{text}. {asked}", unit


# ---- rates ---------------------------------------------------------------------------------------------------------

_RATES: Final = (  # the unit, what is done each time, the pattern of it
    ("minutes", "{r} walks {a} minutes to work and {a} minutes back", "a*2"), ("km", "{n} run{s} {a} km", "a"),
    ("minutes", "{r} needs {a} minutes to school and the same time home", "a*2"), ("calls",
    "{n} answer{s} {a} calls", "a"),
    ("euros", "{n} pay{s} {a} euros for the bus", "a"), ("pages", "{n} read{s} {a} pages", "a"),
    ("minutes", "{n} practise{s} {a} minutes before school and {b} minutes after it", "(a+b)"),
    ("eggs", "the hens of {r} lay {a} eggs", "a"), ("km", "{n} cycle{s} {a} km there and the same way back", "a*2"),
    ("letters", "{n} write{s} {a} letters", "a"), ("loaves", "the bakery sells {a} loaves and {b} rolls", "(a+b)"),
    ("dollars", "{n} get{s} {a} dollars for it", "a"), ("visitors", "the museum has {a} visitors", "a"),
    ("dollars", "{n} spend{s} {a} dollars on lunch and {b} dollars on coffee", "(a+b)"),
    ("euros", "{n} earn{s} {a} euros and spend{s} {b} euros of it; the rest is saved", "(a-b)"),
)  # fmt: skip
_OFTEN: Final = (", {k} days a week", " on {k} days of the week", ", {k} times a week",
    ". That is so on {k} days a week",
    ", and that {k} times a week", " (on {k} days a week)")  # fmt: skip


def rates(rng: Random, thing: str) -> Story:
    """So much each time, so many times a week, for so many weeks; some may have been there before."""
    unit, said, pattern = pick(rng, _RATES)
    unit = "pieces" if unit == "loaves" else unit
    pattern, roll, extra = pattern + "*k", rng.random(), ""
    if roll < 0.45:
        said += pick(rng, (" each day", " every working day", " a day", " each time"))
        length = pick(rng, ("in {k} days", "over {k} days", "on {k} such days", "after {k} days"))
        if "working day" in said:
            length = "on {k} such days"
        if "each time" in said:
            length = pick(rng, ("when it is done {k} times", "for {k} times"))
    else:
        said += pick(rng, _OFTEN)
        length = pick(rng, ("in a week", "per week", "a week"))
        if roll > 0.7:
            pattern, length = pattern + "*j", pick(rng, ("in {j} weeks", "over {j} weeks", "after {j} weeks"))
    many = "How much" if unit in ("euros", "dollars") else f"How many {unit}"
    many = "How much is saved" if "saved" in said else f"{many} is that"
    ask = pick(rng, (f"{many} {length}?", f"{many} {length}, please?", f"{many} {length}, all counted?"))
    if "(" not in pattern and rng.random() < 0.12:
        pattern, extra = pattern + "+c", f" {{c}} {unit} from before count as well."
    elif rng.random() < 0.2:
        extra = " " + pick(rng, RULES["idle"])
    return pattern, f"{capital(said)}.{extra} {ask}", unit


_ALL: Final[tuple[Callable[[Random, str], Story], ...]] = (*(happenings,) * 5, *(relations,) * 2, rates)


def tale(rng: Random, thing: str) -> Story:
    return pick(rng, _ALL)(rng, thing)
