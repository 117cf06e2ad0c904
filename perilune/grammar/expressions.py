"""Estimates about clients' regular expressions, made with Python's parser: its syntax is nearly llguidance's."""

import json
import re
import re._constants as sre  # type: ignore[import-not-found]  # typeshed leaves private modules out
import re._parser as parser  # type: ignore[import-not-found]  # as above
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from llguidance import LLMatcher

from perilune.grammar.byte_tokens import over_bytes

MAX_CHARS = 65_536  # of an example

# Python's warnings about a client's expression must not fill the log.
warnings.filterwarnings("ignore", "Possible (nested )?set", FutureWarning)


def length(expression: str) -> int:
    """Lower bound on the characters of a match; 0 if none is known."""
    try:
        return int(parser.parse(expression).getwidth()[0])
    except (re.error, OverflowError, RecursionError):
        return 0


def example(expression: str) -> bytes:
    """A short text that the expression matches, as UTF-8; empty if none is known.

    An estimate: callers have to check that the text matches.
    """
    try:
        return "".join(_match(parser.parse(expression))).encode()
    except (re.error, KeyError, OverflowError, RecursionError, UnicodeEncodeError):
        return b""


def finder(expression: str) -> Callable[[str], bool]:
    """A function that says whether the expression is found in a text, with the compiler's semantics of `pattern`.

    Python's `re` would hold the GIL while it backtracks: "^(a|a)*$" takes twice as long for each further "a".
    ValueError, from either, for an expression that Python or the compiler does not read, or that takes too long.
    """
    try:
        re.compile(expression)
    except (re.error, OverflowError, RecursionError) as e:
        raise ValueError(str(e)) from e
    grammar = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": expression}))
    start = LLMatcher(over_bytes(), grammar, log_level=0)
    if start.is_error():
        raise ValueError(start.get_error())

    def found_in(text: str) -> bool:
        matcher = start.deep_copy()
        written = json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")
        found = matcher.try_consume_tokens(list(written)) == len(written) and bool(matcher.is_accepting())
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return found

    return found_in


_CATEGORIES = {
    sre.CATEGORY_DIGIT: "0",
    sre.CATEGORY_NOT_DIGIT: "a",
    sre.CATEGORY_SPACE: " ",
    sre.CATEGORY_NOT_SPACE: "a",
    sre.CATEGORY_WORD: "a",
    sre.CATEGORY_NOT_WORD: " ",
}


_RANGES = (sre.LITERAL, sre.RANGE)
_SOME = "a0 _Z~\u00e9\u0416\u4e2d\U0001f600"  # tried for a negated class; the last ones for classes that exclude ASCII


def _match(sequence: Any) -> Iterator[str]:
    for kind, value in sequence:
        if kind is sre.LITERAL:
            yield chr(value)
        elif kind is sre.NOT_LITERAL:
            yield "a" if value != ord("a") else "b"
        elif kind is sre.ANY:
            yield "a"
        elif kind is sre.IN:
            yield _member(value)
        elif kind is sre.BRANCH:
            yield min(("".join(_match(branch)) for branch in value[1]), key=len)
        elif kind is sre.SUBPATTERN:
            yield from _match(value[-1])
        elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            part = "".join(_match(value[2])) if value[0] else ""
            if len(part) * value[0] > MAX_CHARS:
                raise OverflowError("too long a match")
            yield part * value[0]
        elif kind is not sre.AT:
            raise KeyError(kind)


def _member(choices: Any) -> str:
    """A character of a class, an ordinary one if the class is negated."""
    negated = choices[0][0] is sre.NEGATE
    if not negated:
        kind, value = choices[0]
        return _CATEGORIES[value] if kind is sre.CATEGORY else chr(value if kind is sre.LITERAL else value[0])
    excluded = [value if kind is sre.RANGE else (value, value) for kind, value in choices[1:] if kind in _RANGES]
    found = next((c for c in _SOME if not any(low <= ord(c) <= high for low, high in excluded)), None)
    if found is None:
        raise KeyError("no character for a negated class")
    return found
