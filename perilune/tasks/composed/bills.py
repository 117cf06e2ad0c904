"""Stories of prices, amounts and comparisons for `word_problems`, put together from rows or clauses.

A bill has things at a price each, perhaps a fee or a discount, and perhaps what is paid; it is in sentences, a list or
a note. A comparison has two of a kind (people, days, shops, colours), the second given relative to the first ("29
fewer"), and asks for the second or for both together. Patterns are those of arithmetic.py; the text has their letters
as places.
"""

from collections.abc import Callable
from random import Random
from typing import Final

from perilune.tasks.composed.clauses import ACTS
from perilune.tasks.problem import pick
from perilune.tasks.wordings import capital, expand, singular
from perilune.tasks.words import CONTAINERS, OBJECTS, PLAIN, listed, made_up

Story = tuple[str, str, str]  # pattern, text, unit

_MONEY: Final = listed("euros dollars pounds francs coins crowns rupees yen pesos")
_FEES: Final = listed("shipping delivery packing service insurance parking cleaning tax deposit wrapping entry")
_RULES: Final[dict[str, tuple[str, ...]]] = {
    "who": ("{n}", "{n}", "I", "we", "my sister", "a customer", "the school", "our neighbour", "old {r}", "the club"),
    "buys": ("bought", "ordered", "got", "paid for", "took", "picked"),
    "each": ("each", "apiece", "per piece", "a piece", "each one", "one"),
    "total": ("what's the total?", "how much is that in total?", "total?", "what does it cost?", "how much to pay?",
        "what is the bill?", "what do I owe?", "what did it come to?", "how much was spent?", "sum?",
        "price of it all?",
        "how much altogether?", "what do they want from me?", "what has to be paid?", "what will it cost?"),
    "change": ("change?", "how much change is that?", "what comes back?", "how much money is left?", "what is left?",
        "how much do we get back?", "what's the change?", "how much remains?", "what do I still have?"),
}  # fmt: skip


def _thing(rng: Random) -> str:
    return made_up(rng) + "s" if rng.random() < 0.15 else pick(rng, OBJECTS)


def _priced(rng: Random, count: str, price: str, thing: str, money: str) -> str:
    sign = {"dollars": "${p}", "euros": "EUR {p}"}.get(money, "{p}")
    amount = pick(rng, ("{p}", "{p} {m}", "{p} {m}", sign)).replace("{p}", price).replace("{m}", money)
    return pick(rng, ("{c} {t} at {a} each", "{c} {t} for {a} each", "{c} {t}, {a} each", "{c} x {t} ({a})",
        "{c} {t} that cost {a} each", "{c} {t} at {a}", "{c} {t} ({a} apiece)", "{c} times {t}, {a} per piece",
        "{t} for {a} each, {c} of them")).format(c=count, t=thing, a=amount)  # fmt: skip


def bill(rng: Random) -> Story:
    money, one, two, fee = pick(rng, _MONEY), _thing(rng), _thing(rng), pick(rng, _FEES)
    first, second = _priced(rng, "{k}", "{a}", one, money), _priced(rng, "{m}", "{c}", two, money)
    roll = rng.random()
    lists = [first, second]
    if roll < 0.4:
        pattern, extra = ("a*k+b", f"{{b}} {pick(rng, (money, ''))} for {fee}") if roll < 0.22 else ("a*k-b", "")
        extra = extra.replace("  ", " ") or pick(rng, (f"a discount of {{b}} {money}",
            f"minus a voucher of {{b}} {money}",
            f"{{b}} {money} off with a coupon"))  # fmt: skip
        lists = [first, extra]
    elif roll < 0.62:
        pattern, lists = "b-a*k", [first]
    else:
        pattern = "a*k+c*j"
        lists[1] = lists[1].replace("{m}", "{j}")
    asks = expand(rng, _RULES, "<change>" if pattern == "b-a*k" else "<total>")
    paid = ""
    if pattern == "b-a*k":
        paid = pick(rng, ("Paid with {b} {m}.", "The cashier got {b} {m}.", "There were {b} {m} in the purse.",
            "Cash at hand: {b} {m}.",
            "{b} {m} in the wallet.", "The budget is {b} {m}.")).replace("{m}", money)  # fmt: skip
    roll = rng.random()
    if roll < 0.3:
        head = pick(rng, ("Order:", "Receipt", "Bill no {x}:", "Shopping list", "Invoice", "To pay:", "Cart:", ""))
        body = "\n".join([pick(rng, ("- ", "- ", "* ", "")) + row for row in lists])
        text = f"{head}\n{body}\n{paid}".strip() + "\n" + capital(asks)
    elif roll < 0.7:
        who = expand(rng, _RULES, "<who> <buys>")
        joined = pick(rng, (" and ", " and ", ", plus ", " as well as ")).join(lists)
        text = f"{capital(who)} {joined}. {paid} {capital(asks)}".replace(".  ", ". ")
    elif roll < 0.85:
        text = f"{capital(asks)} {capital(', '.join(lists))}. {paid}".rstrip()
    else:
        text = f"{', '.join(lists)}. {paid} {asks}".replace(".  ", ". ")
    return pattern, text, money


_KINDS: Final = (("{n}", "{m}"), ("{n}", "{m}"), ("Monday", "Tuesday"), ("the first week", "the second week"),
    ("the red box", "the blue box"), ("class 4a", "class 4b"), ("the old shop", "the new shop"), ("January",
        "February"),
    ("the morning", "the afternoon"), ("team one", "team two"), ("{n}", "{h} brother"), ("last year", "this year"),
    ("my garden", "the neighbour's garden"), ("the north side", "the south side"), ("{n}", "{r}"))  # fmt: skip
_DIFFERENT: Final[dict[str, tuple[str, ...]]] = {
    "a+b": ("{b} more", "{b} more {t}", "an additional {b}", "{b} {t} more"),
    "a-b": ("{b} fewer", "{b} less", "{b} fewer {t}", "{b} {t} fewer"),
    "a*k": ("{k} times as many", "{k} times as many {t}", "{k} times the number"),
}  # fmt: skip


def comparison(rng: Random) -> Story:
    one, two = pick(rng, _KINDS)
    two = two.replace("{h}", pick(rng, ("his", "her", "their")))
    thing, kind = _thing(rng), pick(rng, tuple(_DIFFERENT))
    by = pick(rng, _DIFFERENT[kind]).replace("{t}", thing)
    when = one[0] in "MJ" or one.endswith(("week", "morning", "year"))
    verb, past, _ = pick(rng, ACTS)
    if when:
        who = pick(rng, ("we", "{n}", "the shop", "they", "the library", "I"))
        on = {"M": "on ", "J": "in "}.get(one[0], "" if one.endswith("year") else "in ")
        first = pick(rng, (f"{who} {past} {{a}} {thing} {on}{one}", f"{on}{one} {who} {past} {{a}} {thing}"))
        second = pick(rng, (f"{on}{two} {by}", f"{on}{two} it was {by}", f"{by} {on}{two}"))
        ask = f"how many {thing} did {who} {verb} {on}{two}?"
    else:
        first, past = (f"{one} has {{a}} {thing}", "") if rng.random() < 0.6 else (f"{one} {past} {{a}} {thing}", past)
        than = pick(rng, ("", "", f" than {one}")) if "as many" not in by else pick(rng, ("", f" as {one}"))
        than = "" if "number" in by else than
        second = f"{two} {past or 'has'} {by}{than}"
        ask = f"how many {thing} {'did' if past else 'does'} {two} {verb if past else 'have'}?"
    pattern, roll = kind, rng.random()
    if roll < 0.35:
        pattern = {"a+b": "a+b+a", "a-b": "a-b+a", "a*k": "a*k+a"}[kind]
        ask = pick(rng, ("how many {t} is that together?", "how many {t} in all?", "how many {t} are there in total?",
            "how many for both?", "what is the number of {t} altogether?", "total {t}?")).replace("{t}",
            thing)  # fmt: skip
    text = capital(first) + pick(rng, (". ", ", ", " and ", "; "))
    text += (capital(second) if text.endswith(". ") else second) + ". " + capital(ask)
    return pattern, text, thing


def _agrees(base: str) -> str:
    return (
        base + "es" if base.endswith(("s", "sh", "ch", "x")) else base[:-1] + "ies" if base[-2:] == "ry" else base + "s"
    )


def _shared(rng: Random, thing: str, who: str, past: str, unit: str) -> str:
    box = pick(rng, CONTAINERS)
    one = singular(box)
    return pick(rng, (
        f"{capital(who)} {past} {{a}} {thing} in {{k}} {unit}s. How many {thing} is that per {unit}?",
        f"{{a}} {thing}, {{k}} {box}, the same number in each. How many {thing} per {one}?",
        f"{{a}} {thing} are shared evenly among {{k}} people. How many does each get?",
        f"{{k}} {box} hold {{a}} {thing} together, all alike. How many {thing} are in one {one}?",
        f"{{k}} {unit}s for {{a}} {thing}. What does that make for one {unit}?",
        f"We split {{a}} {thing} into {{k}} equal parts. How big is a part?",
    ))  # fmt: skip


def steps(rng: Random) -> Story:
    """An amount that grows or shrinks at a constant rate, with a start or an addition; or a quotient."""
    thing, unit = _thing(rng), pick(rng, ("day", "week", "month", "hour", "year", "night", "trip", "round"))
    verb, past, _ = pick(rng, ACTS)
    noun = pick(rng, PLAIN) if rng.random() < 0.5 else made_up(rng)
    who = pick(rng, ("{n}", "{n}", "I", "we", "they", f"the {noun}"))
    pattern = pick(rng, ("a*k", "a*k+b", "b-a*k", "a/k", "b+a*k"))
    if pattern == "a/k":
        return pattern, _shared(rng, thing, who, past, unit), thing
    does = _agrees(verb) if who in ("{n}", f"the {noun}") else verb
    after = f"{pick(rng, ('after', 'in', 'over', 'during'))} {{k}} {unit}s"
    often = pick(rng, (f"a {unit}", f"every {unit}", f"per {unit}", f"each {unit}")).replace("a hour", "an hour")
    if pattern == "b-a*k":
        rate = pick(rng, (f"{{a}} {thing} are used up {often}", f"{often}, {{a}} of them are gone",
            f"{often} {{a}} {thing} are taken away"))  # fmt: skip
        ask = f"how many {thing} are left {after}?"
    else:
        rate = pick(rng, (f"{who} {does} {{a}} {thing} {often}", f"{often}, {who} {does} {{a}} {thing}"))
        ask = pick(
            rng, (f"how many {thing} is that {after}?", f"how many {thing} {after}?", f"{after}, how many {thing}?")
        )
    known = {
        "a*k": "", "a*k+b": pick(rng, ("{b} more come on top", f"another {{b}} {thing} arrive")),
        "b+a*k": f"there were {{b}} {thing} already", "b-a*k": f"at first there were {{b}} {thing}",
    }[pattern]  # fmt: skip
    parts = [known, rate] if known and (pattern == "b-a*k" or rng.random() < 0.5) else [rate, known]
    join = pick(rng, (". ", ". ", ", ", "; "))
    text = join.join([capital(part) if join == ". " else part for part in parts if part])
    return pattern, f"{capital(text)}. {capital(ask)}", thing


_ALL: Final[tuple[Callable[[Random], Story], ...]] = (bill, bill, comparison, comparison, steps)


def account(rng: Random, edible: bool) -> Story:
    """A bill, a comparison or a rate; `edible` is ignored."""
    return pick(rng, _ALL)(rng)
