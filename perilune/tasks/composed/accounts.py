"""Paragraphs of clauses (clauses.py) and a question for one part of one of them, for `doc_questions`.

A question asks for one part and repeats some of the others, in the order of a question ("where did Ida bake it") or of
a statement ("do you know where Ida baked it"). Other clauses share the verb or the subject with the one that answers.
"""

from random import Random
from typing import Final

from perilune.tasks.composed.clauses import (
    ACTS,
    CREATURES,
    STAYS,
    Clause,
    Noun,
    bare_noun,
    clause,
    deed,
    doer,
    finite,
    full_name,
    invented,
    passive,
    quantity,
    sentence,
    when,
    where,
    with_article,
)  # fmt: skip
from perilune.tasks.composed.subjects import ASIDES
from perilune.tasks.composed.turns import turned
from perilune.tasks.problem import pick
from perilune.tasks.wordings import capital, enumerated, lined
from perilune.tasks.words import ADJECTIVES, OBJECTS, lines, made_up

Account = tuple[str, str, str, str]  # paragraph, question, answer, the sentence or row that has it

# ---- questions ---------------------------------------------------------------------------------------------------


def _auxiliary(made: Clause) -> tuple[str, str]:
    """What goes before the subject in a question, and the verb after it."""
    base, _, _ = made.verb
    if made.mood in ("will", "must", "can"):
        return made.mood, base
    if made.mood == "present":
        return ("do" if made.who.plural else "does"), base
    return "did", base


def _asked(rng: Random, made: Clause, words: str, kept: list[str]) -> tuple[str, bool]:
    """The question for an adjunct or (`what`) the object; whether it has the order of a statement."""
    rest = " ".join([p for p in kept if rng.random() < 0.3])
    rest = f" {rest}" if rest else ""
    what = (
        f" {made.what.short}" if made.what and not words.startswith(("what ", "how many ")) and words != "what" else ""
    )
    indirect = rng.random() < 0.22
    if passive(made) and made.what and what:
        were = "were" if made.what.plural else "was"
        by = f" by {made.who.short}" if rng.random() < 0.3 else ""
        if indirect:
            return f"{words}{what} {were} {made.verb[2]}{by}{rest}", True
        return f"{words} {were}{what} {made.verb[2]}{by}{rest}", False
    auxiliary, base = _auxiliary(made)
    if indirect:
        return f"{words} {made.who.short} {finite(made)}{what}{rest}", True
    if rng.random() < 0.05 and not rest:
        return f"{made.who.short} {finite(made)}{what} {words}", False
    return f"{words} {auxiliary} {made.who.short} {base}{what}{rest}", False


def _agent_asked(rng: Random, made: Clause) -> str:
    kept = [text for _, text in made.parts if made.what is None or rng.random() < 0.35]  # "who waited" may fit two
    what = [made.what.short] if made.what else []
    if passive(made) and made.what and rng.random() < 0.5:
        were = "were" if made.what.plural else "was"
        return " ".join([f"by whom {were} {made.what.short} {made.verb[2]}", *kept])
    mood = Clause(Noun("", ""), made.verb, made.what, made.mood)
    who = "who" if made.who.person or rng.random() < 0.7 else "what"
    return " ".join([who, finite(mood), *what, *kept])


# Scenes, reports, words and forms by kind; then paragraphs of documentation (documents.py).
SCENES, REPORTS, _WORDS, *_ = lines("scenes.txt").split("\n\n")
FORMS: Final = lined(_WORDS)


def question(rng: Random, made: Clause) -> tuple[str, str]:
    """A question for one part of the clause, and that part."""
    asked: list[tuple[str, str]] = [*made.parts]
    what = made.what
    if what:
        asked.append((f"how many {what.short}", what.counted) if what.counted else ("what", what.text))
    roll = rng.random()
    if roll < 0.22:
        text, indirect = _agent_asked(rng, made), rng.random() < 0.25
        answer = made.who.text.strip(",")
    else:
        words, answer = pick(rng, asked)
        text, indirect = _asked(rng, made, words, [t for w, t in made.parts if w != words])
        if answer.startswith(("in ", "on ", "at ")) and rng.random() < 0.5 and words not in ("where", "how"):
            answer = answer[3:]
    form = pick(rng, FORMS["indirect" if indirect else "plain"])
    return form.format(q=text, Q=capital(text)), answer


# ---- paragraphs --------------------------------------------------------------------------------------------------

_LINKS: Final = (". ", ". ", ". ", ". ", "; ", ", and ", ", but ", ", while ", ".\n", ". Then ", ". Meanwhile, ")


def narrated(rng: Random) -> Account | None:
    """A paragraph, a question, its answer and the sentence that has it; None if the answer is not there just once."""
    first = clause(rng)
    made = [first]
    for _ in range(int(rng.random() * 5)):
        roll = rng.random()
        made.append(clause(rng, first.verb if roll < 0.3 else (), first.who if 0.3 < roll < 0.55 else None))
    for one in made[1:]:
        same = one.who is first.who
        if (not same and one.who.short == first.who.short) or (same and one.verb == first.verb):
            return None
        if one.what and first.what and one.what.short == first.what.short:
            return None
    asked, answer = question(rng, first)
    rng.shuffle(made)
    text, line, before, pronoun = "", "", None, pick(rng, ("she", "he")) if first.who.person else "it"
    for one in made:
        said, named = sentence(rng, one), one.who.text.strip(",")
        meant = before is one.who and said.startswith(one.who.text) and not one.who.plural and rng.random() < 0.8
        said = pronoun + said[len(one.who.text) :] if meant else said
        link = pick(rng, _LINKS) if text else ""
        if not text or link.endswith((". ", "\n")):
            said = capital(said)
        if one is first:
            line = f"{said}\n{pronoun}: {named}" if meant else said
        text += link + said
        if rng.random() < 0.12:
            text += ". " + pick(rng, ASIDES).rstrip(".")
        before = one.who
    return _answered(text + ".", asked, answer, line)


def _answered(text: str, asked: str, answer: str, line: str) -> Account | None:
    """The account, its answer spelled as in the text; None unless the text has it exactly once."""
    lower, wanted = text.lower(), answer.lower()
    if lower.count(wanted) != 1:
        return None
    at = lower.find(wanted)
    return text, asked, text[at : at + len(answer)], line


# ---- the same said of several --------------------------------------------------------------------------------------


def compared(rng: Random) -> Account | None:
    """Several subjects with a part each and one verb, repeated or left out: "Sam likes tea, Kim coffee"."""
    who: dict[str, Noun] = {}
    for _ in range(2 + int(rng.random() * 3)):
        one = doer(rng) if rng.random() < 0.5 else Noun(name := full_name(rng), name, person=True)
        if not one.plural and "," not in one.text:
            who[one.short] = one
    if len(who) < 2:
        return None
    roll, mood = rng.random(), pick(rng, ("past", "past", "present", "will"))
    verb, thing, unit = invented(rng) if rng.random() < 0.1 else pick(rng, ACTS), "", ""
    if roll < 0.4:  # counted
        unit = " " + (pick(rng, OBJECTS) if rng.random() < 0.7 else made_up(rng) + "s")
        ask, answers = f"how many{unit}", [quantity(rng) for _ in who]
    elif roll < 0.7:
        ask, answers = "what", [deed(rng).text for _ in who]
    else:
        kind, ask = pick(rng, ((where, "where"), (when, "when")))
        found = [kind(rng) for _ in who]
        answers = [part for _, part in found]
        if len({part.split(" ")[0] for part in answers}) > 1:  # "until" and "for" answer different questions
            return None
        ask = found[0][0] if len({words for words, _ in found}) == 1 else ask
        if rng.random() < 0.4:
            verb = pick(rng, STAYS)
        else:
            thing = " " + deed(rng).text
    if len(set(answers)) < len(answers):
        return None
    gapped, said = rng.random() < 0.5, []
    for i, (one, answer) in enumerate(zip(who.values(), answers)):
        whole = not i or not gapped
        middle = f" {finite(Clause(one, verb, None, mood))}{thing}" if whole else ""
        said.append(f"{one.text}{middle} {answer}{unit if whole else ''}")
    rows = [enumerated(said, pick(rng, (" and ", ", and ", ", ")))] if gapped or rng.random() < 0.4 else said
    text = pick(rng, (". ", ". ", ".\n")).join([capital(row) for row in rows]) + "."
    chosen, answer = pick(rng, tuple(zip(who.values(), answers)))
    if 0.4 <= roll < 0.7 and rng.random() < 0.35:
        asked, answer = f"who {finite(Clause(Noun('', ''), verb, None, mood))} {answer}", chosen.text
    else:
        auxiliary, base = _auxiliary(Clause(chosen, verb, None, mood))
        asked = f"{ask} {auxiliary} {chosen.short} {base}{thing}"
    row = next((row for row in rows if answer.lower() in row.lower()), "")
    return _answered(text, pick(rng, FORMS["plain"]).format(q=asked, Q=capital(asked)), answer, capital(row))


# ---- rows and names ------------------------------------------------------------------------------------------------

_ROW: Final = ("- {k}: {v}", "{k}: {v}", "* {k} - {v}", "{k} = {v}", "{i}. {k}: {v}", "{k} ... {v}", "{k} ({v})",
    "{k}, {v}")  # fmt: skip


def rows(rng: Random) -> Account | None:
    """Rows of a label and what is noted for it, under a heading or not."""
    held: dict[str, str] = {}
    for _ in range(2 + int(rng.random() * 5)):
        label = bare_noun(rng) if rng.random() < 0.6 else f"{bare_noun(rng)} {bare_noun(rng)}"
        roll = rng.random()
        value = (pick(rng, ACTS)[2] if roll < 0.3 else when(rng)[1] if roll < 0.45 else full_name(rng) if roll < 0.6
            else f"{quantity(rng)} {pick(rng, OBJECTS)}" if roll < 0.75 else pick(rng, ADJECTIVES) if roll < 0.85
            else where(rng)[1])  # fmt: skip
        if label not in " ".join(held) and value not in held.values():
            held[label] = value
    if len(held) < 2:
        return None
    form, named = pick(rng, _ROW), rng.random() < 0.5
    lines = [form.format(k=capital(k) if named else k, v=v, i=i) for i, (k, v) in enumerate(held.items(), 1)]
    label, value = pick(rng, tuple(held.items()))
    text = pick(rng, ("\n", "\n", "\n", "; ")).join(lines)
    if rng.random() < 0.4:
        text = f"{capital(bare_noun(rng))}{pick(rng, ('', ':', ' notes', ' list:'))}\n{text}"
    line = next(row for row in lines if value in row)
    return _answered(text, pick(rng, FORMS["row"]).format(k=label), value, line)


def called(rng: Random) -> Account | None:
    """Names of things, among other clauses, and a question for one name."""
    made: dict[str, str] = {}
    lines = []
    for _ in range(1 + int(rng.random() * 3)):
        noun = bare_noun(rng)
        thing = pick(rng, ("{x} of {y}", "{z}", "{z} {w}")).format(
            x=f"the {noun}", y=with_article(pick(rng, CREATURES)), z=with_article(f"{pick(rng, ADJECTIVES)} {noun}"),
            w=where(rng)[1])  # fmt: skip
        name = with_article(made_up(rng)) if rng.random() < 0.4 else made_up(rng).capitalize()
        if thing in made or name in made.values():
            continue
        made[thing] = name
        lines.append(capital(pick(rng, FORMS["called"]).format(a=thing, b=name, j=pick(rng, ADJECTIVES))))
    thing, name = pick(rng, tuple(made.items()))
    line = next(row for row in lines if name in row)
    lines += [sentence(rng, clause(rng)) for _ in range(int(rng.random() * 3))]
    rng.shuffle(lines)
    text = ". ".join([capital(row) for row in lines]) + "."
    return _answered(text, pick(rng, FORMS["asked"]).format(a=thing), name, line)


_HEADS: Final = ("Ticket {}: ", "Log {}\n", "Note no {}: ", "[{}] ", "Report {}:\n", "Dear all, ", "Re: {}\n\n", "PS: ")


def passage(rng: Random) -> Account:
    """A paragraph, a question, its answer, and the sentence or row that has it."""
    while True:
        roll = rng.random()
        kind = turned if roll < 0.47 else narrated if roll < 0.8 else compared if roll < 0.88 else rows
        kind = called if roll > 0.95 else kind
        made = kind(rng)
        if made and rng.random() < 0.15:
            made = _answered(pick(rng, _HEADS).format(int(rng.random() * 9999)) + made[0], *made[1:])
        if made:
            return made
