"""Wordings of whole-number questions: sums, differences, products, quotients, comparisons, conversions.

Imperatives end with a full stop, so that `wordings.phrase` may make them polite. Nothing here holds a form of `NEW_*`
in arithmetic.py (`wordings.phrase` sees to that for what it puts together).
"""

from typing import Final

from perilune.tasks.records import lines
from perilune.tasks.wordings import lined, opposite

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
