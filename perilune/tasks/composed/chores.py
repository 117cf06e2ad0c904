"""Wishes of several steps, for `tools_multi`: a call needs an earlier result, or is due only on a condition.

With tools of data/errands.txt, a thing is searched for by one of its values and the next call takes its code; a value
that was found goes into the next call; or a result has more keys than the one that is asked for.

`_ROWS` are as in kits.txt; `_STATES` has things, a condition, states that meet it, others, and what is done if met.
"""

import re
from dataclasses import replace
from random import Random
from typing import Any, Final

from perilune.tasks import catalog
from perilune.tasks.composed.errands import DESKS, GROUPS, Ask, around, framed, thing_of, wanted
from perilune.tasks.composed.findings import finding
from perilune.tasks.fields import Field, fields, said, value, written
from perilune.tasks.problem import ToolCall, pick
from perilune.tasks.tools import Request, Tool, catalog_tool, opening
from perilune.tasks.wordings import capital, small
from perilune.tasks.words import NAMES, any_word
from perilune.tasks.working import add_trace

_ROWS: Final = """
send_text|send {text:message} to {to:first}|text {text} to {to}
make_note|make a note of {text:message}
send_sms|text {number:phone}: "{text:message}"|tell {number} "{text}"
dial_number|call {number:phone}
reserve_book|reserve {book_id:port}|I'd like {book_id}
play_song|play {song_id:port}
delete_task|remove number {task:small2} from my list|delete task {task}
check_account|check my {account:account} balance
lock_door|lock the {door:door} door
switch_light|turn {state:on,off} the light in the {room:spot}|lights {state} in the {room}
put_entry|put {item:noun} on my {list:shopping,todo,packing} list
"""
_STATES: Final = """
order,parcel|has not been shipped yet,is not on its way|not shipped,processing|shipped,delivered|cancel,stop
task,ticket|is still open,has not been closed|open,in progress|closed,done|close,assign
table,room|is free,is available|free,available|taken,booked|book,reserve
"""
Steps = tuple[Any, ...]  # as chore() returns them
_KEYS: Final = {"place": "room", "phone": "number", "path": "file"}


def _entry(row: str) -> catalog.Entry:
    name, *forms = row.split("|")
    title = name.replace("_", " ")
    return replace(catalog.sibling(" | ".join(("do_it", capital(title), *forms)), title.split()[-1]), names=(name,))


# What people ask for most, in usual words.
PLAIN: Final = (*map(_entry, _ROWS.strip().split("\n")),
    *[replace(e, requests=e.requests[:3]) for e in catalog.ENTRIES[:50]])  # fmt: skip


def _due(rng: Random, *kinds: str) -> tuple[Any, ...]:
    """A tool, a request with {} in place of a value of one of `kinds`, the arguments, and that value's parameter."""
    known = [e for e in (PLAIN[:2] if "message" in kinds else PLAIN[2:]) if any(p.kind in kinds for p in e.parameters)]
    while True:
        form, shown, given = catalog.asked(rng, entry := pick(rng, known), False)
        for p in entry.parameters:
            place = rf"(^|[^\",es ] ){{{p.name}}}([.,?:]|$| [\"oitfans])"
            if p.kind in kinds and re.search(place, form) and not catalog.STATEMENT.match(form):
                return catalog_tool(rng, entry), capital(form.format(**shown | {p.name: "{}"})), given, p


def _put(due: tuple[Any, ...], word: str, got: Any) -> Request:
    tool, form, given, p = due
    return _asked(tool, form.format(word), given | {p.name: got})


def _asked(tool: Tool, text: str, given: dict[str, Any]) -> Request:
    return Request(tool, text, opening(text), ToolCall(tool.name, given))


def _call(rng: Random, name: str, given: dict[str, Any], text: str) -> Request:
    places = " ".join([f"{{{k}:{'port' if isinstance(v, int) else 'noun'}}}" for k, v in given.items()])
    return _asked(catalog_tool(rng, _entry(f"{name}|{places}")), text, given)


def _carried(rng: Random, got: Any, *words: str) -> Request:
    return _put(_due(rng, "message"), pick(rng, ("it", "that", "the answer", *words)), said(got))


def _found(rng: Random) -> tuple[Any, ...]:
    """A question's result is passed on, or a number in it decides whether the next call is due.

    Returns the text, the first tool and its arguments, the key and value found, a further line of the thought, whether
    calls are due, and these calls.
    """
    found = finding(rng)
    got, note, then, holds = found.value, "", "Then", True
    due = _carried(rng, got, f"the {found.key.replace('_', ' ')}")
    if type(got) in (int, float) and rng.random() < 0.6:
        limit = round(got + (1 + int(rng.random() * got / 2)) * pick(rng, (-1, 1) if got > 5 else (1,)), 1)
        more, holds = pick(rng, (("more", got > limit), ("less", got < limit)))
        note, then = f"\n{got}{'>' if got > limit else '<'}{limit}", f"If it is {more} than {limit},"
        acted = _due(rng, "clock24", "errand", "path", "phone")
        due = _put(acted, str(old := acted[2][acted[3].name]), old)
    text = f"{found.text}{'.' * found.text[-1].isalnum()} {then} {small(due.text)}"
    return text, found.name, found.arguments, found.key, got, note, holds, [due]


def _state(rng: Random) -> tuple[Any, ...]:
    row = pick(rng, _STATES.strip().split("\n")).split("|")
    thing, condition, good, bad, verb = [pick(rng, part.split(",")) for part in row]
    given, holds = {f"{thing}_id": value(rng, Field("", "", "code"))}, rng.random() < 0.6
    form = pick(rng, ("How is {t}? If it {c}, {v} it.", "Check {t} and {v} it if it {c}.", "If {t} {c}, {v} it.",
        "{v} {t} if it {c}.", "What about {t}? If it {c}, please {v} it."))  # fmt: skip
    text = capital(form.format(t=f"{thing} {given[f'{thing}_id']}", c=condition, v=verb))
    due = _call(rng, f"{verb}_{thing}", given, text[text.lower().index(verb) :])
    name, key = pick(rng, ("get_{}", "check_{}", "{}_status")).format(thing), pick(rng, ("status", "state"))
    return text, name, given, key, good if holds else bad, f"\n{condition}: {said(holds)}", holds, [due]


def _record(rng: Random) -> tuple[Any, ...]:
    """A wish with a value to look up: of a person, of a titled thing, or each one of a list."""
    act = _due(rng, "city", "place", "phone", "email", "path", "company", "port")
    kind, name, got = act[3].kind, act[3].name, act[2][act[3].name]
    key, who, word, tool = _KEYS.get(kind, kind), pick(rng, NAMES), "{0}", "find_contact"
    given, role = {"name": who}, pick(rng, ("user", "customer", "guest"))
    if key in ("city", "room", "file") and rng.random() < 0.3:
        key = "cities" if key == "city" else f"{key}s"
        found = list(dict.fromkeys([got, *[(d := _due(rng, kind))[2][d[3].name] for _ in range(2)]]))
        word = pick(rng, ("all my {}", "all the {} on the list")).format(key)
        due = [_put(act, word, one) for one in found]
        due[1:] = [replace(d, opening=one) for d, one in zip(due[1:], found[1:])]
        return due[0].text, f"list_{key}", {}, key, found, "", True, due
    if kind == "port":
        key, tool, who = name, f"search_{name.removesuffix('_id')}", value(rng, Field("", "", "title"))
        given, word = {"title": who}, pick(rng, ('"{0}"', '"{0}" if you have it'))
    elif kind not in ("phone", "email"):
        word = pick(rng, ("{0}'s {1}", "the {1} of {0}", "their {1}"))
        tool = f"{pick(rng, ('get', 'find'))}_{role}"
        if rng.random() < 0.6:
            given = {f"{role}_id": (number := value(rng, Field("", "", "big")))}
            who = f"{role} {number}"
    due = [_put(act, word.format(who, key), got)]
    text = due[0].text
    if word[:5] == "their":
        text = f"{pick(rng, ('Fetch', 'Look up'))} {who}" + (f". {text}" if text[-1] == "?" else f" and {small(text)}")
    return text, tool, given, key, got, "", True, due


def chore(rng: Random) -> tuple[Any, ...]:
    """A wish, at some point before, between or after its calls.

    Returns the text, the past steps (calls and results), the thought about the last result, the calls that are due, the
    answer if none is, and all calls.
    """
    text, name, given, key, got, note, holds, due = pick(rng, (_found, _found, _state, _record, _record, _record))(rng)
    calls, stage, thought = [_call(rng, name, given, text), *due], rng.random(), f"{key}: {written(got)}{note}"
    if stage < 0.25:
        return text, [], "", calls[:1], "", calls
    if stage < 0.32:
        why = pick(rng, ("not found", "timed out", f"no {key}"))
        return text, [(calls[:1], [{"error": why}])], f'error: "{why}"', [], f"The tool failed: {why}.", calls
    more = {f.name: value(rng, f) for f in fields(rng, int(rng.random() * 3), 0.0)}
    shown = pick(rng, ({key: got} | more, more)) | {key: got}
    past = [(calls[:1], [pick(rng, (shown, shown, {"results": [shown]}))])]
    if not note and stage > 0.9:
        past, thought = [(calls[:1], [got])], f"result: {written(got)}"
    if not holds:
        return text, past, thought, [], f"The {key.replace('_', ' ')} is {said(got)}.", calls
    if text[-1] == "?" and len(due) == 1 and stage > 0.6:
        got = value(rng, Field("", "", pick(rng, ("small", "word"))))
        last = _carried(rng, got)
        past.append((due, [{"answer": got}]))
        return f"{text} Then {small(last.text)}", past, f"answer: {written(got)}", [last], "", [*calls, last]
    if 0.8 < stage < 0.9 and text[-1] != "?":
        past.append((due, [{"status": "ok"}] * len(due)))
        return text, past, "\n".join(['status: "ok"'] * len(due)), [], "Done.", calls
    return text, past, thought, due, "", calls


def there(rng: Random) -> list[Request]:
    """Two wishes for one city, the second with "there"."""
    while True:
        one, other = _due(rng, "city"), _due(rng, "city")
        if one[0].noun != other[0].noun and "in {}" in one[1] and "in {}" in other[1]:
            city = one[2][one[3].name]
            return [_put(one, city, city), _put((other[0], other[1].replace("in {}", "{}"), *other[2:]), "there", city)]


def counted(rng: Random) -> tuple[Any, ...]:
    """As `chore`: what a tool calculated, or how many things there are."""
    a, b, key = int(rng.random() * 400), int(rng.random() * 99), pick(rng, ("item", "count"))
    found = {any_word(rng): n for n in pick(rng, ((), (a,), (a, b)))}
    things = " and ".join(found)
    text = f"How many {things} do we have" + " in all" * (len(found) > 1) + pick(rng, ("?", f"? Items: {things}."))
    text = text if found else f"What's {a} times {b}? Use the tool."
    calls = [_call(rng, "check_stock", {"item": one}, text) for one in found]
    calls = calls or [_call(rng, "multiply", {"a": a, "b": b}, text)]
    shown: list[Any] = [{key: one, "count": n} for one, n in found.items()]
    past = [(calls, shown or [a * b])]
    if len(calls) < 2:
        what, n = ("count", found[things]) if found else ("result", a * b)
        return text, past, f"{what}: {n}", [], f"The {what} is {n}.", calls
    thought = "".join([f"{one}: {n}\n" for one, n in found.items()]) + add_trace(a, b)
    return text, past, thought, [], f"{a} + {b} = {a + b}", calls


# ---- things that are found first ----------

_BY: Final = (("email", "email", "with the mail {}"), ("email", "email", "that {} sent us"), ("date", "date", "of {}"),
    ("name", "person", "of {}"), ("person", "first", "that {} made"), ("title", "say", "called {}"),
    ("title", "say", "that says {}"), ("city", "city", "from {}"), ("phone", "phone", "with the number {}"),
    ("date", "date", "from {}"), ("day", "dayname", "of {}"), ("owner", "person", "that belongs to {}"))  # fmt: skip
_FIND: Final = ("find", "find", "look up", "look for", "search", "get me")
_MORE: Final = (("created", "date"), ("title", "say"), ("time", "clock24"), ("owner", "person"), ("city", "city"),
    ("label", "noun"), ("size", "count"))  # fmt: skip


def _fresh(rng: Random, name: str, kind: str) -> tuple[Any, str]:
    return catalog.fresh(rng, catalog.Parameter(name, kind, True, (), ()), True, {})


def _beside(asks: list[Ask], calls: list[Request]) -> list[Request]:
    """The calls, and calls of the other tools that are never made: all tools get declared."""
    more = [a.tool for a in asks if all(a.tool is not c.tool and a.tool.name != c.tool.name for c in calls)]
    return [*calls, *[Request(t, "", "", ToolCall(t.name, {})) for t in more]]


def _steps(
    rng: Random, text: str, calls: list[Request], key: str, shown: dict[str, Any], known: list[Request]
) -> Steps:
    """Two calls, of which none, one or both have been made."""
    found, (first, last), stage = shown[key], calls, rng.random()
    if stage < 0.25:
        return text, [], "", [first], "", known
    past = [([first], [pick(rng, (shown, shown, [shown], {"results": [shown]}))])]
    if stage > 0.85:
        return text, [*past, ([last], [{"status": "ok"}])], 'status: "ok"', [], "Done.", known
    return text, past, f"{key}: {written(found)}", [last], "", known


def _desk_of(rng: Random) -> tuple[str, list[Ask], Ask, Any, str]:
    """The noun of a thing, its tools, the one with a request about "it", the thing's code, and that request."""
    while True:
        head, *rows = pick(rng, DESKS)
        tools, noun = [Ask(rng, row) for row in rows], head.split(" ")[0]
        known = [t for t in tools if t.places["a"].kind == tools[0].places["a"].kind]
        it, _ = thing_of(rng, noun, known[0].places["a"])
        act = pick(rng, known)
        if act.say(1, it) and act.mood == "!":
            return noun, tools, act, it[1], wanted(act.text)


def sought(rng: Random) -> tuple[tuple[str, Request, str, dict[str, Any]], tuple[str, Request], list[Request]]:
    """A search for a thing (text, call, key of its code, result); a request to do something with "it" (text, call); and
    all calls, also of tools that are only declared."""
    noun, tools, act, code, wish = _desk_of(rng)
    name, kind, form = pick(rng, _BY)
    value, said_so = _fresh(rng, name, kind)
    search = f"{pick(rng, _FIND)} the {noun} {form.format(said_so)}"
    first = _call(rng, f"{pick(rng, ('find', 'search', 'look_up'))}_{noun}", {name: value}, search)
    key = "id" if rng.random() < 0.2 else act.places["a"].name
    more = {k: _fresh(rng, k, kind)[0] for k, kind in rng.sample(_MORE, int(rng.random() * 3)) if k != key}
    shown = {name: value} | more if rng.random() < 0.3 else more
    last = _asked(act.tool, wish, act.calls[0])
    items = [*shown.items(), (key, code)]
    rng.shuffle(items)
    return (search, first, key, dict(items)), (wish, last), _beside(tools, [first, last])


def _both(rng: Random, search: str, wish: str) -> str:
    join = pick(rng, (" and ", ", then ", ", and ", "", " and then ", "; ", "Then ", "After that, ", " and "))
    if join[:1] in " ,;" and join:
        return framed(rng, search + join + wish)
    return f"{framed(rng, search)} {f'{join}{wish}.' if join else framed(rng, wish)}"


def _sought(rng: Random) -> Steps:
    (search, first, key, shown), (wish, last), known = sought(rng)
    text = _both(rng, search, wish)
    text = around(rng, text) if rng.random() < 0.3 else text
    return _steps(rng, text, [first, last], key, shown, known)


def _same(rng: Random) -> Steps:
    """A value that the first call returns is the argument of the second, which is about another thing."""
    while True:
        head, *rows = pick(rng, [g for g in DESKS if g[0].split(" ")[0] in ("service", "article")])
        tools = [Ask(rng, row) for row in rows]
        first = next(a for a in tools if len(a.gives) and len(a.places) == 2)
        keys, kind = first.gives[0].split(":")
        last = next(a for a in tools if a is not first and kind in [p.kind for p in a.places.values()])
        it, _ = thing_of(rng, head.split(" ")[0], first.places["a"])
        key, (value, _) = pick(rng, keys.split(",")), _fresh(rng, "", kind)
        word = pick(rng, _THAT[2 * (kind == "money") :]).format(key if key != "tag" else "one")
        first.say(1, None, given={"a": it[1:]})
        useful = first.mood == "!" and last.say(1, it, True, {"c": (value, word)}) and last.mood == "!"
        if useful and first.calls[0][first.places["b"].name] != last.calls[0][last.places["b"].name]:
            break
    search, wish = wanted(first.text), wanted(last.text)
    calls = [_asked(first.tool, search, first.calls[0]), _asked(last.tool, wish, last.calls[0])]
    text = _both(rng, search, wish)
    return _steps(rng, text, calls, key, {key: value}, _beside(tools, calls))


_THAT: Final = ("the same one", "that one", "the same {}", "that {}", "the same")


_MONEY: Final = tuple([g for g in GROUPS if any("convert_currency" in row for row in g)])


def _looked_up(rng: Random) -> Steps:
    """One call: its result repeats some arguments and has the value that is asked for."""
    while True:
        rows = pick(rng, _MONEY if rng.random() < 0.12 else GROUPS)[1:]
        tools = [Ask(rng, row) for row in rows]
        if asks := [a for a in tools if a.gives]:
            break
    ask = pick(rng, asks)
    ask.say()
    end = "?" if ask.mood == "?" else "."
    text = capital(wanted(ask.text)) + end if ask.mood != "!" else framed(rng, wanted(ask.text))
    call = _asked(ask.tool, wanted(ask.text), ask.calls[0])
    other = pick(rng, [a for a in tools if a is not ask])
    if rng.random() < 0.35:
        text += " " + pick(rng, _NOT_YET).format(v=other.verb, o=other.noun)
    elif rng.random() < 0.3:
        text = around(rng, text)
    keys, kind = ask.gives[0].split(":")
    key = pick(rng, keys.split(","))
    shown = {n: v for n, v in call.call.arguments.items() if rng.random() < 0.6 and n != key}
    if "cur" in [p.kind for p in ask.places.values()]:
        shown = pick(rng, (shown, {"currency": list(call.call.arguments.values())[-1]}))
    items = [*shown.items(), *[("updated", _fresh(rng, "", "date")[0])] * (rng.random() < 0.2)]
    items.append((key, value := _fresh(rng, key, kind)[0]))
    rng.shuffle(items)
    known = _beside(tools, [call])
    if rng.random() < 0.2:
        return text, [], "", [call], "", known
    return (
        text,
        [([call], [dict(items)])],
        f"{key}: {written(value)}",
        [],
        f"The {key.replace('_', ' ')} is {said(value)}.",
        known,
    )


_NOT_YET: Final = ("Don't {v} the {o} yet.", "No {o} for now.", "Nothing more yet", "The {o} can wait.", "I only ask.",
    "I won't {v} the {o}.", "Only that, no {o}.", "I'll think about the {o} later")  # fmt: skip


def handed(rng: Random) -> Steps:
    """As `chore`: a thing is found, then used; a value is passed on; or one of a result's keys is the answer."""
    return pick(rng, (_sought, _sought, _same, _looked_up, _looked_up))(rng)
