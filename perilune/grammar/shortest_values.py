"""Short values of the schemas in a grammar, for the search for a completion: in an object that refers to itself, some
keys recurse for ever and others end, and the mask does not show which.
"""

import itertools
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from perilune.grammar.expressions import example
from perilune.grammar.references import DEFINITIONS, items, mapping, references, target, with_parts
from perilune.grammar.sizes import is_number, kind_of, kinds_of

MAX_VALUES = 64  # each may be tried at every place of a text where a value begins
MAX_VALUE_CHARS = 2_048
_MAX_NODES = 20_000  # schemas visited in one definition, and for all values of one document; a few us each
_DEEPEST = 64  # nesting depth of schemas; a level takes about 7 of the interpreter's 1,000 frames
_FORMATS = {"ipv4": "1.1.1.1", "ipv6": "::", "uri": "a:b", "uuid": "00000000-0000-4000-8000-000000000000"}


def shortest_values(roots: Sequence[Any]) -> tuple[bytes, ...]:
    """Objects and arrays that satisfy schemas in the documents `roots`, in compact JSON, shortest first.

    Estimates, to be checked by use: only keywords about types, members, items and alternatives are considered.
    """
    found = dict[bytes, None]()
    for root in {json.dumps(root): root for root in roots}.values():
        found |= dict.fromkeys(_Values(root).found())
    return tuple(sorted(found, key=len)[:MAX_VALUES])


class _Values:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._named: dict[str, str] = {}  # by reference: text of its target's shortest value so far
        self._left = _MAX_NODES

    def found(self) -> Iterator[bytes]:
        """Finds values of references until none becomes shorter, then yields the objects and arrays of all parts.

        It visits only what the root refers to: the compiler ignores unused definitions, which may refer to themselves
        in ways that it refuses.
        """
        parts, users = {"#": list(_parts(self._root))}, dict[str, dict[str, None]]()
        reached = ["#"]
        for name in reached:
            for used in references(parts[name]):
                users.setdefault(used, {})[name] = None
                if used not in parts:
                    parts[used] = list(_parts(target(self._root, used)))
                    reached.append(used)
        if not users:
            return
        waiting = OrderedDict.fromkeys(users)
        while waiting and self._left > 0:
            name, _ = waiting.popitem(last=False)
            text = self._value(target(self._root, name))
            if text is not None and len(text) < len(self._named.get(name, text + " ")):
                self._named[name] = text
                waiting |= users.get(name, {})
        self._left = _MAX_NODES
        for part in itertools.chain.from_iterable(parts.values()):
            text = self._value(part)
            if text is not None and text[0] in "{[":
                yield text.encode()

    def _value(self, node: Any, depth: int = 0) -> str | None:
        """The shortest value as JSON; None: none is known yet."""
        self._left -= 1
        if self._left < 0 or depth > _DEEPEST or node is False:
            return None
        if not isinstance(node, Mapping):
            return "0"
        if node.keys() == {"$ref"}:
            return self._named.get(node["$ref"]) if isinstance(node["$ref"], str) else None
        for word in ("anyOf", "oneOf"):
            if isinstance(choices := node.get(word), list):
                rest = {k: v for k, v in node.items() if k != word}
                together = (_together([rest, choice]) if rest else choice for choice in choices)
                return _shortest(self._value(one, depth + 1) for one in together)
        if "$ref" in node or "allOf" in node:
            rest = {k: v for k, v in node.items() if k not in ("$ref", "allOf")}
            named = [target(self._root, node["$ref"])] if "$ref" in node else []
            return self._value(_together([rest, *named, *items(node.get("allOf"))]), depth + 1)
        values = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(values, list):
            kinds = kinds_of(node.get("type"))
            fitting = (v for v in values if kind_of(v) in kinds)
            return _shortest(json.dumps(v, ensure_ascii=False, separators=(",", ":")) for v in fitting)
        names = _listed(node.get("type", ["object", "null"] if "properties" in node else "null"))
        text = _shortest(self._of_kind(node, kind, depth + 1) for kind in names)
        # In a chain of definitions that each use the next one twice, lengths double: 40 would take terabytes.
        return None if text is None or len(text) > MAX_VALUE_CHARS else text

    def _of_kind(self, node: Mapping[str, Any], kind: Any, depth: int) -> str | None:
        match kind:
            case "object":
                return self._object(node, depth)
            case "array":
                return self._array(node, depth)
            case "string":
                form, pattern = node.get("format"), node.get("pattern")
                text = _FORMATS.get(form, "") if isinstance(form, str) else ""
                text = example(pattern).decode() if isinstance(pattern, str) else text
                text += "a" * max(0, min(_count(node.get("minLength")), MAX_VALUE_CHARS) - len(text))
                return json.dumps(text, ensure_ascii=False)
            case "integer" | "number":
                ends = (node.get("minimum"), node.get("maximum"))
                low, high = (int(end) if is_number(end) else 0 for end in ends)
                return str(max(low, 0) or min(high, 0))
            case "null":
                return "null"
            case "boolean":
                return "true"
        return None

    def _object(self, node: Mapping[str, Any], depth: int) -> str | None:
        properties, others = mapping(node.get("properties")), node.get("additionalProperties", True)
        names = [name for name in items(node.get("required")) if isinstance(name, str)]
        members = [self._member(name, properties.get(name, others), depth) for name in names]
        if (more := min(_count(node.get("minProperties")), MAX_VALUE_CHARS) - len(names)) > 0:
            rest = (self._member(name, part, depth) for name, part in properties.items() if name not in names)
            members += (sorted((member for member in rest if member is not None), key=len) + [None] * more)[:more]
        known = [member for member in members if member is not None]
        return "{" + ",".join(known) + "}" if len(known) == len(members) else None

    def _member(self, name: str, schema: Any, depth: int) -> str | None:
        text = self._value(schema, depth)
        return None if text is None else f"{json.dumps(name, ensure_ascii=False)}:{text}"

    def _array(self, node: Mapping[str, Any], depth: int) -> str | None:
        count = min(_count(node.get("minItems")), MAX_VALUE_CHARS)
        texts = [self._value(part, depth) for part in items(node.get("prefixItems"))[:count]]
        if count > len(texts):
            texts += [self._value(node.get("items", True), depth)] * (count - len(texts))
        known = [text for text in texts if text is not None]
        return "[" + ",".join(known) + "]" if len(known) == len(texts) else None


def _parts(root: Any) -> Iterator[Mapping[str, Any]]:
    """The schemas of a document without its definitions, the document itself first: up to _MAX_NODES."""
    level = [root]
    for _ in range(_MAX_NODES):
        if not level:
            return
        node = level.pop()
        if isinstance(node, Mapping):
            yield node
            with_parts({word: value for word, value in node.items() if word not in DEFINITIONS}, level.append)


def _together(parts: Sequence[Any]) -> Any:
    """One schema for several that must all hold; of keywords that cannot be merged, the first."""
    made: dict[str, Any] = {}
    for part in parts:
        if not isinstance(part, Mapping):
            if part is False:
                return False
            continue
        for word, value in part.items():
            before = made.get(word)
            if before is None:
                made[word] = value
            elif word in ("properties", "patternProperties"):
                both = {name: {"allOf": [one, value[name]]} for name, one in before.items() if name in value}
                made[word] = before | value | both
            elif word in ("required", "allOf"):
                made[word] = [*before, *(one for one in value if one not in before)]
            elif word in ("anyOf", "oneOf", "$ref"):
                made["allOf"] = [*made.get("allOf", []), {word: value}]
            elif word.startswith("min") and is_number(value) and is_number(before):
                made[word] = max(value, before)
            elif word == "type":
                made[word] = [name for name in _listed(before) if name in _listed(value)]
    return made


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _shortest(texts: Iterable[str | None]) -> str | None:
    return min((text for text in texts if text is not None), key=len, default=None)


def _count(value: Any) -> int:
    return int(value) if is_number(value) and value > 0 else 0
