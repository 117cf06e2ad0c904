"""Hints in the text of a grammar for the search for a completion (shortest_end.py)."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perilune.grammar.expressions import example
from perilune.grammar.references import items, mapping, nodes
from perilune.grammar.shortest_values import shortest_values
from perilune.grammar.unordered import required_keys

MAX_BYTES = 65_536  # of a completion
MAX_HINTS = 32
MAX_KEYS = 256
_COUNT = re.compile(r'"min(?:Length|Items)": (\d+)|\{(\d+)[,}]')  # in the text of a grammar


@dataclass(frozen=True)
class Clues:
    """Candidates as JSON bytes; the search checks each with a matcher before it uses one.

    hints   texts to try inside strings: matches of the schemas' patterns
    keys    names of required properties, escaped but without quotes, to try where an object cannot end
    values  objects and arrays, shortest first; none if no schema has a reference
    count   the highest minimum of characters or items in the grammar
    """

    hints: tuple[bytes, ...] = ()
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    count: int = 0


def clues(grammar: str) -> Clues:
    """The clues in a grammar that matcher.py wrote, from a schema or other text."""
    counts = (int((found[1] or found[2])[:9]) for found in _COUNT.finditer(grammar))
    count = min(max(counts, default=0), MAX_BYTES)
    if not grammar.startswith('{"grammars"'):
        return Clues(count=count)
    parts = json.loads(grammar)["grammars"]
    schemas = [part["json_schema"] for part in parts if "json_schema" in part]
    objects = list(nodes(schemas))
    return Clues(_hints(objects), _keys(parts, objects), shortest_values(schemas), count)


def _hints(objects: list[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """A short match of each pattern in the schemas: the search by bytes finds no match of an unanchored pattern.

    For several patterns in one `allOf` also their matches joined, which often satisfy all of them.
    """
    found: dict[bytes, None] = {}
    for node in objects:
        together = [node, *(part for part in items(node.get("allOf")) if isinstance(part, Mapping))]
        matches = [example(p) for part in together if isinstance(p := part.get("pattern"), str)]
        for text in (*matches[:1], b"".join(matches)):
            if text:
                found[_written(text.decode())] = None
    return tuple(found)[:MAX_HINTS]


def _keys(parts: list[Mapping[str, Any]], objects: list[Mapping[str, Any]]) -> tuple[bytes, ...]:
    """The properties that are required wherever the schemas list them."""
    found = dict.fromkeys(key for part in parts for key in required_keys(part["lark_grammar"] or ""))
    optional: set[str] = set()
    for node in objects:
        names = [name for name in items(node.get("required")) if isinstance(name, str)]
        found |= dict.fromkeys(names)
        optional.update(name for name in mapping(node.get("properties")) if name not in names)
    return tuple(_written(key) for key in found if key not in optional)[:MAX_KEYS]


def _written(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False)[1:-1].encode()
