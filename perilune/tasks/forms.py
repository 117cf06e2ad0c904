"""Wordings of whole-number questions (sums, differences, products, quotients, comparisons, conversions) and, as MORE by
kind, of small programs; programs.py has those that structural problems may show besides.

Imperatives end with a full stop, so that `wordings.phrase` may make them polite. No form here is one of `NEW_*`
in arithmetic.py; `wordings.phrase` makes none of those either.
"""

from typing import Final

from perilune.tasks.wordings import lined, opposite, parted
from perilune.tasks.words import lines

# By pattern; `e`: any expression, `n`: a conversion, `>x` and `+x`: the largest and the sum of several numbers.
FORMS = lined(lines("sums.txt"))
for _pattern, _signs in (("a+b", ("+", "plus")), ("a-b", ("-", "minus"))):
    _made = [f.replace("{e}", f"{{a}} {sign} {{b}}") for f in FORMS["e"] for sign in _signs]
    FORMS[_pattern] = tuple([f.replace("^", "\n") for f in FORMS[_pattern]] + _made)
FORMS |= {new: tuple(map(opposite, FORMS[old])) for new, old in (("a<b", "a>b"), ("<x", ">x"))}
OPERATOR_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "+": (" plus ", " plus ", " and "), "-": (" minus ", " minus ", " take away ", " less "),
    "*": (" times ", " times ", " multiplied by ", " x "), "/": (" divided by ",),
}  # fmt: skip
MORE: Final = {kind[1:]: forms for kind, forms in FORMS.items() if kind[0] == "#"}
MORE["min"] = tuple(map(opposite, MORE["max"]))
# What begins on a date, and what happens some days later or before.
_BEGINS: Final = parted(
    "A parcel is posted on|The fair opens on|We plant beans on|My visa is dated|The contract is signed on"
)
_DAYS: Final = {
    "after": parted(
        " and {n} days later it is over| and takes effect {n} days later|. {n} days after that I call|; {n} days later "
        "comes the letter"
    ),
    "before": parted(
        "; {n} days earlier I have to be ready|. I order {n} days before that|, and {n} days before that comes the "
        "notice"
    ),
}
_ASKS: Final = parted("On which date?|Which date is that?|Give that date as YYYY-MM-DD.|date?|When is that?")
for _kind, _ends in _DAYS.items():
    MORE[_kind] += tuple([f"{begin} {{d}}{end}. {ask}" for begin in _BEGINS for end in _ends for ask in _ASKS])
