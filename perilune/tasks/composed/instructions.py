"""Small programs over a word, a few words or a list, put as people put them, for `programs`.

An instruction is put together from what is given ("I have the words a, b and c"), where it is (before, after or
inside), and what is to be done with it, which is said with "it" or "them" or with the thing itself. Lists are written
in many ways, with the answer in the same one. The trace is worked by index or by a running value, as in programs.py.
"""

import re
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate
from random import Random
from typing import Any, Final

from perilune.tasks.composed import exercises as more
from perilune.tasks.composed.clauses import clause, sentence
from perilune.tasks.composed.exercises import Task, picked, places
from perilune.tasks.more_programs import DAYS, LETTERS, any_day, counted, indexed, word
from perilune.tasks.problem import pick
from perilune.tasks.wordings import capital, enumerated, lined, numeral, phrase, small
from perilune.tasks.words import NAMES, PLAIN, made_up

Made = tuple[tuple[Any, ...], str, str, str]  # key, question, trace, answer
_VOWELS: Final = "aeiou"


def _letters_of(rng: Random) -> tuple[str, list[Task]]:
    """A word, and what can be done with it."""
    w = word(rng)
    i = indexed(w)
    n, c, e = 1 + int(rng.random() * min(4, len(w) - 1)), pick(rng, w), pick(rng, LETTERS)
    place = {1: "first", 2: "second", 3: "third", 4: "fourth"}[n]
    count = pick(rng, (str(n), ("one", "two", "three", "four")[n - 1]))
    letters = "letter" if n == 1 else pick(rng, (f"{count} letters", f"{count} letters", f"{count} characters"))
    swapped = w[-1] + w[1:-1] + w[0]
    consonants = "".join([x if x not in _VOWELS else "-" for x in w])
    kept = "".join([x if x in _VOWELS else "-" for x in w])
    dropped = "".join([x if x != c else "-" for x in w])
    tasks: list[Task] = [
        ("reverse", "spell {x} backwards|write {x} backwards|reverse {x}|turn {x} around|read {x} from the end|what "
            "is {x} backwards?|give {x} with the letters in the opposite order|mirror {x}",
            f"{i}\n{''.join([f'{j}{w[j - 1]}' for j in range(len(w), 0, -1)])}", w[::-1]),
        ("length", "how many letters does {x} have?|count the letters of {x}|how long is {x}?|what is the length of "
            "{x}?|how many characters are in {x}?|tell me how many letters {x} has", i, str(len(w))),
        ("nth", f"what is the {place} letter of {{x}}?|give the {place} letter of {{x}}|which letter comes {place} "
            f"in {{x}}?|I need the {place} letter of {{x}}|take letter number {n} of {{x}}",
            f"{i}\n{n}{w[n - 1]}", w[n - 1]),
        ("last", "what is the last letter of {x}?|with which letter does {x} end?|give the final letter of {x}",
            f"{i}\n{len(w)}{w[-1]}", w[-1]),
        ("begin", f"what are the first {letters} of {{x}}?|give the first {letters} of {{x}}|take the first "
            f"{letters} of {{x}}|keep only the first {letters} of {{x}}|how does {{x}} begin, first {letters} only?",
            f"{i}\n{indexed(w[:n])}", w[:n]),
        ("end", f"what are the last {letters} of {{x}}?|give the last {letters} of {{x}}|keep only the last "
            f"{letters} of {{x}}|which {letters} does {{x}} end with?", f"{i}\n{indexed(w[-n:])}", w[-n:]),
        ("cut", f"drop the first {letters} of {{x}}|remove the first {letters} of {{x}}|what is {{x}} without its "
            f"first {letters}?", f"{i}\n{indexed('-' * n + w[n:])}", w[n:]),
        ("cut end", f"drop the last {letters} from {{x}}|remove the last {letters} of {{x}}|take away the last "
            f"{letters} of {{x}}|what is left of {{x}} without the last {letters}?|cut {count} off the end of {{x}}",
            f"{i}\n{indexed(w[:-n] + '-' * n)}", w[:-n]),
        ("upper back", "uppercase {x} and then reverse it|write {x} backwards in capitals|reverse {x} and put it in "
            "capitals|turn {x} around and make it upper case|{x}, from the last letter to the first, in capitals",
            f"{i}\n{''.join([f'{j}{w[j - 1].upper()}' for j in range(len(w), 0, -1)])}", w[::-1].upper()),
        ("cut both", "remove the first and the last letter of {x}|what is {x} without its first and last "
            "letter?|drop both end letters of {x}|strip one letter from each end of {x}",
            f"{i}\n{indexed('-' + w[1:-1] + '-')}", w[1:-1]),
        ("spaced", "write {x} with a space between the letters|spell {x} with spaces|put a blank between all letters "
            "of {x}", i, " ".join(w)),
        ("dashed", "put a dash between all letters of {x}|spell {x} with hyphens|separate the letters of {x} with "
            "dashes", i, "-".join(w)),
        ("same", "is {x} the same backwards? yes or no|does {x} read the same from both ends, yes or no?",
            f"{i}\n{''.join([f'{j}{w[j - 1]}' for j in range(len(w), 0, -1)])}",
            "yes" if w == w[::-1] else "no"),
        ("contains", f"is there the letter {c} in {{x}}? yes or no|does {{x}} contain the letter {c}, yes or no?",
            counted(w, c), "yes"),
        ("lacks", f"is there the letter {e} in {{x}}? yes or no|does {{x}} contain the letter {e}, yes or no?",
            counted(w, e), "yes" if e in w else "no"),
        ("count", f"how often does {c} occur in {{x}}?|how many times is the letter {c} in {{x}}?|count the {c}s in "
            f"{{x}}|how many {c}'s does {{x}} have?|how many times do you see {c} in {{x}}?", counted(w, c),
            str(w.count(c))),
        ("vowels", "how many vowels does {x} have?|count the vowels in {x}|what is the number of vowels in {x}?",
            counted(w, _VOWELS), str(sum(x in _VOWELS for x in w))),
        ("consonants", "how many consonants does {x} have?|count the consonants in {x}|number of letters in {x} that "
            "are no vowels?", counted(w, "".join(set(LETTERS) - set(_VOWELS))), str(sum(x not in _VOWELS for x in w))),
        ("drop vowels", "remove all vowels from {x}|write {x} without vowels|take every vowel out of {x}|delete a, "
            "e, i, o and u in {x}|keep the consonants of {x} only", f"{i}\n{indexed(consonants)}",
            consonants.replace("-", "")),
        ("keep vowels", "keep only the vowels of {x}|which vowels are in {x}, in order?|remove all consonants from "
            "{x}", f"{i}\n{indexed(kept)}", kept.replace("-", "")),
        ("drop letter", f"remove every {c} from {{x}}|write {{x}} without {c}|delete all {c}s in {{x}}|take the "
            f"letter {c} out of {{x}}", f"{i}\n{indexed(dropped)}", dropped.replace("-", "")),
        ("replace", f"replace every {c} in {{x}} with {e}|replace {c} by {e} in {{x}}|change each {c} of {{x}} to "
            f"{e}|in {{x}}, write {e} instead of {c}|swap all {c}s of {{x}} for {e}",
            f"{i}\n{indexed(w.replace(c, e))}", w.replace(c, e)),
        ("swap", "swap the first and the last letter of {x}|exchange the first letter of {x} with the last one|in "
            "{x}, let the first and last letters change places", f"{i}\n{indexed(swapped)}", swapped),
        ("upper", "write {x} in capital letters|put {x} in capitals|make {x} upper case|uppercase {x}|turn {x} into "
            "capitals", f"{i}\n{indexed(w.upper())}", w.upper()),
        ("capital", "write {x} with a capital first letter|capitalise {x}|make only the first letter of {x} a capital",
            f"{i}\n1{w[0].upper()}", w.capitalize()),
        ("twice", "write {x} twice without a space|repeat {x} two times in one word|double {x} as a text",
            f"1:{w}\n2:{w}", w + w),
        ("add", f"add {e} at the end of {{x}}|put the letter {e} after {{x}}|append {e} to {{x}}",
            f"{i}\n{indexed(w + e)}", w + e),
        ("front", f"put {e} in front of {{x}}|add the letter {e} at the start of {{x}}|begin {{x}} with an extra {e}",
            f"{i}\n{indexed(e + w)}", e + w),
    ]  # fmt: skip
    if len(w) < 4 or not kept.replace("-", "") or not consonants.replace("-", "") or not dropped.replace("-", ""):
        tasks = tasks[:4]
    return w, tasks


def _running(items: list[str], best: Callable[[str, str], str]) -> str:
    """The trace of a search: each item and the best so far."""
    return "\n".join([f"{x}:{b}" for x, b in zip(items, accumulate(items, best))])


def _lengths(items: list[str], longest: bool) -> tuple[str, str]:
    best, lines = items[0], []
    for w in items:
        best = w if (len(w) > len(best) if longest else len(w) < len(best)) else best
        lines.append(f"{indexed(w)} {len(w)}:{best}")
    return "\n".join(lines), best


def _plain(rng: Random) -> str:
    return pick(rng, PLAIN)


def _name(rng: Random) -> str:
    return pick(rng, NAMES)


def _words_of(rng: Random, out: Callable[[list[str]], str]) -> tuple[list[str], list[Task]]:
    """A few words, and what can be done with them."""
    draw = pick(rng, (_plain, made_up, _name, word))
    found = list(dict.fromkeys([draw(rng) for _ in range(3 + int(rng.random() * 3))]))
    n = 1 + int(rng.random() * min(3, len(found)))
    place, shown = ("first", "second", "third")[n - 1], places(found)
    by_length = sorted(found, key=len)
    (long, longest), (short, shortest) = _lengths(found, True), _lengths(found, False)
    sizes = f"{' '.join([f'{indexed(w)} {len(w)}' for w in found])}\n{picked(found, by_length)}"
    mark = pick(rng, (("dash", "-"), ("hyphen", "-"), ("plus sign", "+"), ("underscore", "_"), ("slash", "/")))
    tasks: list[Task] = [
        ("alphabet", "sort {x} alphabetically|put {x} in alphabetical order|sort {x} from a to z|order {x} by the "
            "alphabet|how do {x} look in alphabetical order?|arrange {x} alphabetically|sort {x} "
            "(alphabetically)|sort {x}|in what order would a dictionary list {x}?", picked(found, sorted(found)),
            out(sorted(found))),
        ("longest", "which of {x} is the longest?|find the longest of {x}|which one of {x} has the most letters?", long,
            longest),
        ("shortest", "which of {x} is the shortest?|find the shortest of {x}|which one of {x} has the fewest letters?",
            short, shortest),
        ("by length", "sort {x} by length, shortest first|order {x} from the shortest to the longest", sizes,
            out(by_length)),
        ("nth", f"what is the {place} of {{x}}?|give me the {place} of {{x}}|which of {{x}} comes {place}?|take "
            f"number {n} of {{x}}", f"{shown}\n{n}:{found[n - 1]}", found[n - 1]),
        ("last", "which of {x} comes last?|give me the last of {x}|what is the last one of {x}?",
            f"{shown}\n{len(found)}:{found[-1]}", found[-1]),
        ("count", "how many of {x} are there?|count {x}|how many items are in {x}?", shown, str(len(found))),
        ("reverse", "reverse the order of {x}|put {x} in the opposite order|list {x} from last to first",
            f"{shown}\n{','.join(reversed(shown.split(',')))}", out(found[::-1])),
        ("join", f"join {{x}} with a {mark[0]}|put a {mark[0]} between {{x}}|connect {{x}} with a {mark[0]}",
            mark[1].join(found), mark[1].join(found)),
        ("glue", "write {x} as one word without spaces|stick {x} together|join {x} without anything between",
            ",".join(found), "".join(found)),
        ("initials", "take the first letter of each of {x}|what do the first letters of {x} spell?",
            "\n".join([f"{w}: {w[0]}" for w in found]), "".join([w[0] for w in found])),
        ("z to a", "sort {x} from z to a|put {x} in reverse alphabetical order|order {x} alphabetically, z first",
            picked(found, sorted(found)[::-1]), out(sorted(found)[::-1])),
        ("first of all", "which of {x} comes first in the alphabet?|which of {x} would a dictionary list first?",
            _running(found, min), min(found)),
        ("last of all", "which of {x} comes last in the alphabet?|which of {x} would be last in a dictionary?",
            _running(found, max), max(found)),
        ("upper all", "write {x} in capitals|put {x} in upper case|uppercase {x}", ",".join(found),
            out([w.upper() for w in found])),
        ("lengths", "how many letters does each of {x} have?|give the length of each of {x}|count the letters of "
            "each of {x}", "\n".join([f"{indexed(w)} {len(w)}" for w in found]), out([str(len(w)) for w in found])),
        ("drop", f"remove {found[n - 1]} from {{x}}|take {found[n - 1]} out of {{x}}|{{x}} without {found[n - 1]}",
            ",".join([w if w != found[n - 1] else "-" for w in found]), out([w for w in found if w != found[n - 1]])),
        ("ends", "give the last letter of each of {x}|take the final letter of each of {x} and join them",
            "\n".join([f"{w}: {w[-1]}" for w in found]), "".join([w[-1] for w in found])),
        ("swap ends", "swap the first and the last of {x}|let the first and last of {x} change places", shown,
            out([found[-1], *found[1:-1], found[0]])),
    ]  # fmt: skip
    if len(set(map(len, found))) < len(found):  # two of one length: which one is meant is not said
        tasks = [t for t in tasks if t[0] not in ("longest", "shortest", "by length")]
    return found, tasks if len(found) > 2 else tasks[4:5]


def _numbers_of(rng: Random, out: Callable[[list[str]], str]) -> tuple[list[str], list[Task]]:
    """A few numbers, and what can be done with them."""
    top, k = pick(rng, (10, 30, 100, 100)), 2 + int(rng.random() * 40)
    items = [int(rng.random() * top) for _ in range(3 + int(rng.random() * 4))]
    if rng.random() < 0.3:
        items[-1] = pick(rng, items)
    found, shown = list(map(str, items)), places(list(map(str, items)))
    total, added = items[0], []
    for x in items[1:]:
        added.append(f"{total}+{x}={total + x}")
        total += x
    above = [str(x) for x in items if x > k]
    evens = [str(x) for x in items if x % 2 == 0]
    marks = "\n".join([f"{x}{'>' if x > k else '<' if x < k else '='}{k}" for x in items])
    parity = "\n".join([f"{x} {'odd' if x % 2 else 'even'}" for x in items])
    distinct = list(dict.fromkeys(found))
    up = list(map(str, sorted(items)))
    best = {big: list(map(str, accumulate(items, max if big else min))) for big in (True, False)}
    tasks: list[Task] = [
        ("sort", "sort {x} ascending|sort {x}|put {x} in order from small to large|order {x}, smallest first|arrange "
            "{x} from low to high|put {x} in order from lowest to highest|line {x} up, lowest first",
            picked(found, up), out(up)),
        ("down", "sort {x} descending|put {x} in order from large to small|order {x}, biggest first|put {x} in order "
            "from highest to lowest|rank {x}, highest first", picked(found, up[::-1]), out(up[::-1])),
        ("sum", "add up {x}|what is the sum of {x}?|add {x} together|give me the total of {x}", "\n".join(added),
            str(total)),
        ("max", "what is the biggest of {x}?|which of {x} is the largest?|find the maximum of {x}",
            "\n".join([f"{x}:{b}" for x, b in zip(items, best[True])]), best[True][-1]),
        ("min", "what is the smallest of {x}?|which of {x} is the lowest?|find the minimum of {x}",
            "\n".join([f"{x}:{b}" for x, b in zip(items, best[False])]), best[False][-1]),
        ("reverse", "reverse {x}|give {x} in reverse order|turn {x} around|list {x} backwards",
            f"{shown}\n{','.join(reversed(shown.split(',')))}", out(found[::-1])),
        ("count", "how many of {x} are there?|count {x}|how many numbers are in {x}?", shown, str(len(items))),
        ("above", f"which of {{x}} are above {k}?|keep only those of {{x}} that are greater than {k}|give me only "
            f"the ones of {{x}} over {k}", marks, out(above)),
        ("how many above", f"how many of {{x}} are above {k}?|count those of {{x}} that are bigger than {k}", marks,
            str(len(above))),
        ("evens", "which of {x} are even?|keep the even ones of {x}|from {x}, keep only the even ones|drop the odd "
            "ones from {x}|leave out what is odd in {x}", parity, out(evens)),
        ("how many even", "how many of {x} are even?|count the even ones of {x}", parity, str(len(evens))),
        ("unique", "remove the duplicates from {x}|list {x} without repeats|drop what occurs twice in {x}", shown,
            out(distinct)),
        ("double", "double each of {x}|multiply each of {x} by 2|give twice each of {x}|what are {x}, each "
            "doubled?|give {x}, every one of them doubled", "\n".join([f"{x}*2={2 * x}" for x in items]),
            out([str(2 * x) for x in items])),
        ("plus", f"add {k} to each of {{x}}|increase each of {{x}} by {k}|raise every one of {{x}} by {k}",
            "\n".join([f"{x}+{k}={x + k}" for x in items]), out([str(x + k) for x in items])),
        ("odds", "which of {x} are odd?|keep only the odd ones of {x}|from {x}, keep the odd ones", parity,
            out([str(x) for x in items if x % 2])),
        ("below", f"which of {{x}} are below {k}?|keep those of {{x}} that are less than {k}|from {{x}}, keep what "
            f"is smaller than {k}|throw out of {{x}} what is {k} or more", marks,
            out([str(x) for x in items if x < k])),
        ("at least", f"how many of {{x}} are at least {k}?|count those of {{x}} that are {k} or more", marks,
            str(sum(x >= k for x in items))),
        ("in it", f"is {k} among {{x}}? yes or no|does {k} occur in {{x}}, yes or no?",
            "\n".join([f"{x}{'=' if x == k else '!='}{k}" for x in items]), "yes" if k in items else "no"),
        ("drop", f"remove {found[1]} from {{x}}|take {found[1]} out of {{x}}|{{x}} without {found[1]}",
            ",".join([x if x != found[1] else "-" for x in found]),
            out([x for x in found if x != found[1]]) if found.count(found[1]) == 1 else ""),
        ("swap", "swap the first and the last of {x}|exchange the first and last of {x}", shown,
            out([found[-1], *found[1:-1], found[0]])),
        ("two", "give the first two of {x}|keep only the first two of {x}|take the two at the beginning of {x}", shown,
            out(found[:2])),
        ("spread", "what is the difference between the largest and the smallest of {x}?|by how much does the largest "
            "of {x} exceed the smallest?",
            "\n".join([f"{x}:{a}:{b}" for x, a, b in zip(items, best[True], best[False])])
            + f"\n{best[True][-1]}-{best[False][-1]}={max(items) - min(items)}",
            str(max(items) - min(items))),
        ("first", "what is the first of {x}?|give me the first of {x}", f"{shown}\n1:{found[0]}", found[0]),
        ("last", "what is the last of {x}?|which of {x} comes last?", f"{shown}\n{len(found)}:{found[-1]}", found[-1]),
        ("add", f"append {k} to {{x}}|add {k} at the end of {{x}}|put {k} behind {{x}}", ",".join([*found, str(k)]),
            out([*found, str(k)])),
    ]  # fmt: skip
    return found, tasks


# ---- how it is put ---------------------------------------------------------------------------------------------------

_QUOTED: Final = ("{w}", "{w}", "'{w}'", '"{w}"', "the word {w}", "the word '{w}'", 'the word "{w}"',
    "the string '{w}'",
    "`{w}`", "*{w}*", "the name {w}", "the text {w}")  # fmt: skip
_GIVEN: Final = ("I have {x}.", "Here is {x}.", "Take {x}.", "Given: {x}", "Look at {x}.", "This is {x}.",
    "We have {x}.",
    "My input is {x}.", "Consider {x}.", "You get {x}.", "Input: {x}\n", "{x}\n", "{x}.", "Let's take {x}.",
    "I've got {x}.", "There is {x}.", "On my sheet there is {x}.", "Somebody wrote {x}.")  # fmt: skip
_ITEMS: Final = ("the {k} {x}", "the {k}: {x}", "these {k}: {x}", "{x}", "a list with {x}", "the list {x}",
    "{n} {k}: {x}",
    "the following {k}: {x}")  # fmt: skip


# The thing, and what is asked of "it".
_FRAMES: Final = (
    "{x}\n^ {f}", "in: {x}\ntask: {f}\nout: ?", "Input: {x}\nWanted: {f}\nOutput:", "{x} ({f})", "{x} -> {f}",
    "Exercise 3: {F}\n{x}", "Q: {F} {x}\nA:", "{x}: {f}", "For {x}: {f}", '"""{x}"""\n{F}', "data = {x}; {f}",
    "hey can u do this one, {f}: {x}", "{F} Here: {x}", "> {x}\n{f}", "TODO {f}\nvalue: {x}", "{F}\nGiven is {x}",
    "{f} ... {x}", "7) {x} - {f}", "{x}, {f}", "{F} ({x})", "{f}, i mean {x}", "{F}\nData: {x}", "{x}. Now {f}",
    "{f} = {x}", "you there? {x}. {f}", "Concerning {x}: {f}", "<{x}> {f}", "the input being {x}, {f}", "{F}:\n\n{x}",
)  # fmt: skip


_LETTERS: Final = re.compile(r"([A-Za-z]+ ){3,9}[A-Za-z]+")
Out = Callable[[list[str]], str]
_PARTED: Final = lined("""
, : comma separated|separated by commas|with commas between
 : separated by spaces|with spaces between|with a space between
; : separated by semicolons|with semicolons between
^: one per line|each on its own line
""")


def _style(rng: Random) -> tuple[Out, Out]:
    """How a list is written in the question and in the answer."""
    roll, mark = rng.random(), pick(rng, (" ", "; ", ",", " / "))
    if roll < 0.25:
        return (lambda items: f"[{', '.join(items)}]"), (lambda items: f"[{', '.join(items)}]")
    if roll < 0.4:
        return mark.join, mark.join
    if roll < 0.65:
        head = pick(rng, ("", "", "- ", "* ", "{}. ", "{}) "))
        out = ", ".join if head else "\n".join
        return (lambda items: "\n".join([head.format(i) + x for i, x in enumerate(items, 1)])), out
    return enumerated if roll < 0.82 else ", ".join, ", ".join


def _line(rng: Random) -> str:
    """A sentence of letters and spaces, now and then with a word twice."""
    line = ""
    while not _LETTERS.fullmatch(line):
        line = sentence(rng, clause(rng)).replace(",", "")
    if rng.random() < 0.3:
        line += f" {pick(rng, ('and more', 'but no', 'or another'))} {max(line.split(), key=len)}"
    return capital(line) if rng.random() < 0.3 else line.lower()


def _put(rng: Random, form: str, thing: str, pronoun: str, raw: str) -> str:
    """The form about the thing: in one sentence, or about "it" with the thing before or after."""
    asks = form.endswith("?")
    roll = rng.random()
    said = re.sub(r"^\{x\}[:,]? ", "", form).replace("{x}", pronoun)
    if "\n" in thing:  # each item has its own line
        after = rng.random() < 0.35
        said, thing = capital(said) if rng.random() < 0.8 else said, thing.strip("\n")
        said += "" if asks else pick(rng, (".", "") if after else (".", ":", "", ":"))
        said = phrase(rng, said, asking=0.0) if rng.random() < 0.5 else said
        gap = pick(rng, ("\n", "\n\n"))
        return f"{thing}{gap}{said}" if after else f"{said}{gap}{thing}"
    if roll < 0.4:
        text = form.replace("{x}", "{thing}") if asks else form.replace("{x}", "{thing}") + "."
    elif roll < 0.66:
        text = pick(rng, _GIVEN).replace("{x}", "{thing}") + " " + capital(said)
        text += "" if asks else pick(rng, (".", ".", " please.", "", ", please"))
    elif roll < 0.78:
        text = said + pick(rng, (": {thing}", "\n{thing}", ": {thing}", " - {thing}"))
    elif roll < 0.85 and (parted := re.fullmatch(r"((?:sort|order|arrange) )\{x\},? \(?([^()]+)\)?", form)):
        text = f"{parted[1]}{pick(rng, ('these', pronoun))}: {{thing}} ({parted[2]})"
    else:
        text, thing = pick(rng, _FRAMES).format(x="{thing}", f=said, F=capital(said)), pick(rng, (raw, raw, thing))
    text = text if rng.random() < 0.3 else capital(text)
    text = phrase(rng, text) if rng.random() < 0.55 else text
    return text.replace("{thing}", thing)


def _days_before(rng: Random) -> Made:
    """A date some days before another one, in the same month or the one before."""
    day, n = any_day(rng), 1 + int(rng.random() * 27)
    then = day - timedelta(n)
    lines = [f"{day.day}-{n}={day.day - n}"]
    if then.month != day.month:
        length = (day.replace(day=1) - timedelta(1)).day
        lines += [f"{then:%Y-%m} has {length}", f"{length}{day.day - n if day.day < n else '-0'}={then.day}"]
    days = "1 day" if n == 1 else f"{numeral(rng, n, 0.25)} days"
    form = pick(rng, ("what date is {n} before {d}?", "which day is {n} earlier than {d}?", "subtract {n} from {d}",
        "{d} minus {n}?", "today is {d}. What date was it {n} ago?", "go back {n} from {d}", "{n} before {d}?",
        "the party is on {d}, the letters go out {n} before. On which date?"))  # fmt: skip
    question = phrase(rng, capital(form)).format(n=days, d=day)
    return ("days before", str(day), n), question, "\n".join([*lines, then.isoformat()]), then.isoformat()


def _calendar(rng: Random) -> Made:
    """Years and weekdays counted on or back, and dates counted back."""
    if rng.random() < 0.3:
        return _days_before(rng)
    back = rng.random() < 0.5
    if rng.random() < 0.5:
        year, n = 1900 + int(rng.random() * 140), 1 + int(rng.random() * 60)
        then = year - n if back else year + n
        form = pick(rng, ("what year was it {n} years before {y}?",
            "which year is {n} years earlier than {y}?", "go back {n} years from {y}",
            "{n} years before {y} was which year?", "it is {y}. What year was it {n} years ago?") if back
            else ("what year is {n} years after {y}?", "in what year will it be {n} years later than {y}?",
            "add {n} years to {y}", "a tree was planted in {y}. In which year is it {n} years old?",
            "{y} plus {n} years?"))  # fmt: skip
        key: tuple[Any, ...] = ("years", year, n, back)
        return key, phrase(rng, capital(form)).format(n=n, y=year), f"{year}{'-' if back else '+'}{n}={then}", str(then)
    first, n = int(rng.random() * 7), 1 + int(rng.random() * 6)
    there = [(first + (-i if back else i)) % 7 for i in range(n + 1)]
    form = pick(rng, ("which day was {n} days before {w}?", "which weekday comes {n} days before {w}?",
    "what day was it {n} "
        "days ago if today is {w}?") if back else ("which day is {n} days after {w}?",
        "if the parcel leaves on {w} and needs "
        "{n} days, on which day does it arrive?", "{w} and {n} days more, what day is that?",
        "what day follows {n} days "
        "after {w}?"))  # fmt: skip
    trace = "\n".join([f"{i}:{DAYS[d]}" for i, d in enumerate(there)])
    days = "1 day" if n == 1 else f"{numeral(rng, n, 0.25)} days"
    question = phrase(rng, capital(form).replace("{n} days", "{d}")).format(w=DAYS[first], d=days)
    return ("weekday", first, -n if back else n, question), question, trace, DAYS[there[-1]]


def instruction(rng: Random) -> Made:
    """The key, the question, the trace and the answer."""
    roll, new = rng.random(), rng.random() < 0.4
    if roll < 0.1:
        return _calendar(rng)
    if roll < 0.2:
        return more.exercise(rng)
    if roll < 0.38:
        w, tasks = _letters_of(rng)
        name, forms, trace, answer = _drawn(rng, more.of_word(rng, w) if new else tasks, "w")
        shown, raw = pick(rng, _QUOTED).replace("{w}", w), pick(rng, ("{w}", '"{w}"')).replace("{w}", w)
        key = "more letters" if new else "letters"
        return (key, name, w, answer), _put(rng, forms, shown, "it", raw), trace, answer
    out: Out = lambda items: "\0" + "\0".join(items)  # noqa: E731
    shape, written = _style(rng)
    if roll < 0.57:
        line = _line(rng)
        name, forms, trace, answer = _drawn(rng, more.of_line(rng, line, out), "")
        forms, answer = _separated(rng, forms, answer, ", ".join)
        kind = pick(rng, ("sentence", "line", "text", "phrase"))
        thing = pick(rng, ("'{}'", '"{}"', '"{}"', "the {k} '{}'", 'the {k} "{}"', "\n{}", "\n{}")).format(line, k=kind)
        pronoun = pick(rng, (f"this {kind}", "this", f"the following {kind}" if "\n" in thing else "it", f"the {kind}"))
        return ("line", name, line, answer), _put(rng, forms, thing, pronoun, f'"{line}"'), trace, answer
    listed = roll < 0.78
    items, tasks = (_words_of if listed else _numbers_of)(rng, out)
    if new:
        if rng.random() < 0.3:
            few = list(dict.fromkeys(items))[:3]
            items = [*few, *few[:2]] if rng.random() < 0.4 else [*items, *few[:1] * pick(rng, (1, 2))]
            rng.shuffle(items)
            tasks = more.of_repeats(items, out)
        else:
            tasks = (more.of_words if listed else more.of_numbers)(rng, items, out)
    name, forms, trace, answer = _drawn(rng, tasks, "l" if listed else "n")
    forms, answer = _separated(rng, forms, answer, written)
    kind, raw = pick(rng, _KINDS[listed]), shape(items)
    thing = raw if "\n" in raw else pick(rng, _ITEMS).format(k=kind, x=raw, n=len(items))
    pronoun = pick(rng, ("them", f"these {kind}", f"the {kind}", "them"))
    if "\n" in raw:
        pronoun = pick(rng, ("these", f"these {kind}", f"the {kind} listed here", "the lot"))
    key = "more items" if new else "items"
    return (key, name, *items, answer), _put(rng, small(forms), thing, pronoun, raw), trace, answer


_KINDS: Final = (("numbers", "numbers", "values", "items"), ("words", "words", "terms", "items"))


def _separated(rng: Random, form: str, answer: str, out: Out) -> tuple[str, str]:
    """The form and the answer; if that is a list, the form says at times what to put between its items."""
    if "\0" not in answer:
        return form, answer
    items = answer[1:].split("\0")
    if len(items) > 1 and rng.random() < 0.4:
        mark, said = pick(rng, tuple(_PARTED.items()))
        how, out = pick(rng, said), mark.replace("^", "\n").join
        form += f" {capital(how)}, please" if form[-1] == "?" else pick(rng, (f", {how}", f" ({how})"))
    return form, out(items)


def _drawn(rng: Random, tasks: list[Task], kind: str) -> Task:
    """A task that has an answer, with one of its forms."""
    name, forms, trace, answer = pick(rng, [task for task in tasks if task[3] not in ("", "\0")])
    return name, pick(rng, (*forms.split("|"), *more.MORE.get(kind + name, ()))), trace, answer
