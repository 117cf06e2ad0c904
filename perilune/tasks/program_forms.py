"""More wordings of small programs, by kind; programs.py has those that structural problems may show besides."""

from typing import Final

from perilune.tasks.forms import FORMS
from perilune.tasks.wordings import opposite

MORE: Final = {kind[1:]: forms for kind, forms in FORMS.items() if kind[0] == "#"}
MORE["min"] = tuple(map(opposite, MORE["max"]))
# What begins on a date, and what happens some days later or before.
for _kind, _ends in (
    (
        "after",
        " and {n} days later it is over| and takes effect {n} days later|. {n} days after that I \
call|; {n} days later comes the letter",
    ),
    (
        "before",
        "; {n} days earlier I have to be ready|. I order {n} days before \
that|, and {n} days before that comes the notice",
    ),
):
    MORE[_kind] += tuple(
        [
            f"{begin} {{d}}{end}. {ask}"
            for begin in (
                "A parcel is posted on",
                "The fair opens on",
                "We plant beans on",
                "My visa is dated",
                "The contract is signed on",
            )
            for end in _ends.split("|")
            for ask in (
                "On which date?",
                "Which date is that?",
                "Give that date as YYYY-MM-DD.",
                "date?",
                "When is that?",
            )
        ]
    )
