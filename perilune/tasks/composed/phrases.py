"""What people ask of a phrase, a word or a few words, for `programs`: done by a line of Python, which is traced."""

from random import Random
from typing import Any, Final

from perilune.tasks.composed.snippets import run
from perilune.tasks.more_programs import LETTERS, ordinal, word
from perilune.tasks.problem import pick
from perilune.tasks.records import lines
from perilune.tasks.wordings import capital, enumerated, phrase
from perilune.tasks.words import PLAIN, any_word

# What is done, over a phrase s, a word t, words w and the alphabet a; and the forms that ask for it.
_TASKS: Final = [row.split(" = ", 1) for row in lines("phrases.txt").splitlines()]
_ENDS: Final = ("", "", "", " What do you get?", " What is the result?", " Tell me the result.")


def task(rng: Random) -> tuple[tuple[Any, ...], str, str, str]:
    """The key, the question, the trace and the answer."""
    code, forms = pick(rng, _TASKS)
    w = rng.sample(PLAIN, 3 + int(rng.random() * 3))
    h = pick(rng, w)[0]
    w[1:2] = dict.fromkeys([*[x for x in rng.sample(PLAIN, 60) if x[0] == h and x not in w][:1], any_word(rng)])
    s, t = " ".join([any_word(rng) for _ in range(2 + int(rng.random() * 3))]), word(rng)
    s = s.upper() if "lower" in code else s
    c = pick(rng, s.replace(" ", ""))
    e = pick(rng, [x for x in LETTERS if x not in t + c.lower()])
    n, p = 1 + int(rng.random() * 3), 4 + int(rng.random() * 16)
    z = t[-2:] if rng.random() < 0.5 else pick(rng, w)[-2:]
    given: dict[str, Any] = {
        "c": c, "d": pick(rng, t if "t" in code[:2] else w[0]), "e": e, "h": h, "z": z,
        "b": LETTERS[p - 1], "k": pick(rng, "-_+/"), "i": n - 1, "n": n, "m": 4 + n, "p": p, "y": p + 1,
    }  # fmt: skip
    trace, answer = run(f"s = '{s}'\nt = '{t}'\nw = {w}\na = '{LETTERS}'\nprint({code.format(**given)})")
    if not answer:
        return task(rng)
    q, mark = pick(rng, ("", "'", '"')), pick(rng, '\'""')
    shown = {k: f"{q}{x}{q}" if isinstance(x, str) else x for k, x in given.items()}
    shown |= {"x": f"{mark}{s}{mark}", "t": f"{q}{t}{q}", "z": f'"{z}"', "o": ordinal(rng, n)}
    shown["l"] = pick(rng, (", ".join(w), ", ".join(w), enumerated(w)))
    form = capital(pick(rng, forms.split("|")))
    if "{x}" in form and rng.random() < 0.15:
        form = form.replace("{x}", "this phrase") + "\n{x}"
    elif form[-1] not in "?}" or ": {" not in form:
        form += "" if form[-1] == "?" else "." + pick(rng, _ENDS)
    question = phrase(rng, form).format(**shown)
    return ("task", code.format(**given), s, t, *w), question, trace, answer
