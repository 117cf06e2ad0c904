"""JSON objects asked for with remarks on keys (type, choices, null), in a line, rows, sentences; for `json_extract`."""

import re
from random import Random
from typing import Any, Final

from perilune.tasks.composed.entries import CASES, RULES, TYPES, Made, Wanted, entry, lines_of, placed, type_of, worded
from perilune.tasks.composed.slips import Found
from perilune.tasks.problem import pick
from perilune.tasks.wordings import enumerated, singular

_REMARK: Final = re.compile(r":? \(?\{r\}\)?")


def _as_wanted(rng: Random, text: str, value: Any, kind: str) -> tuple[Any, str, bool]:
    """The value in the wanted form, a remark that describes this form, and whether the request needs the remark."""
    if kind == "port" or (kind == "code" and value.isdigit()):
        return *pick(rng, ((str(value), "a string"), (int(value), "number"))), True
    if kind[0] == "~" and isinstance(value, str):
        form = "three-letter code" if "EUR" in kind and rng.random() < 0.5 else pick(rng, ("{}", '"{}"'))
        return value, pick(rng, (" or ", "/")).join({form.format(o): 0 for o in kind[1:].split(",")}), True
    made = [(value, pick(rng, TYPES[type_of(value)]), False)]
    first, _, last = str(value).partition(" ")
    if kind == "product":
        made += [(singular(value), "singular", True)]
    elif kind in ("person", "person2") and last:
        made += [(first, "first name only", True), (last, "only the last name", True)]
    elif isinstance(value, str):
        made += [(value, 'without "the"' if f"the {value}" in text else "as written", False)]
    return pick(rng, made)


def notice(rng: Random, text: str, found: Found) -> Made:
    """The prompt's messages, the trace and the object for a text and what it states."""
    (case, _), form, nested = pick(rng, CASES), pick(rng, RULES["remarked"]), rng.random() < 0.6
    before, block, few, often = rng.random() < 0.5, rng.random() < 0.3, rng.random(), rng.random()
    groups, tree = dict[str, list[str]](), dict[str, Any]()
    wanted, parts, numbers, after, left = [], [], [], "", []
    for names, value, there, kind in found:
        dotted = nested and "." in names[0]
        if (not there and (dotted or few < 0.5)) or (not dotted and rng.random() > few + 0.5):
            left += [names[0].replace(".", " ")] * (there and not isinstance(value, bool))
            continue
        want, remark, must = _as_wanted(rng, text, value, kind) if there else (None, pick(rng, RULES["or null"]), True)
        clause = names[-1] if names[1:] and "whether" in names[-1] else ""
        word = pick(rng, names[: len(names) - bool(clause)])
        key = word if dotted else case(word.replace(".", " "))
        wanted.append(Wanted(key, "", type_of(want), (want,)))
        if dotted:
            outer, inner = word.split(".")
            groups.setdefault(outer, []).append(f'"{inner}"')
            continue
        meaning = clause or (f"{names[0]} or not" if isinstance(value, bool) else f"the {names[0].replace('.', ' ')}")
        said = must or rng.random() < often
        parts.append((form if said else _REMARK.sub("", form)).format(k=key, m=meaning, r=remark))
        if said and "{r}" not in form:
            if type_of(want) in ("integer", "number"):
                numbers.append(key)
            else:
                after += f" {key}: {remark}."
    if all(w.values[0] is None for w in wanted):
        return entry(rng)
    wanted.sort(key=lambda w: "." in w.key)
    for w in wanted:
        *above, key = w.key.split(".")
        (tree.setdefault(above[0], {}) if above else tree)[key] = w.values[0]
    if numbers:
        after += f" {enumerated(numbers)} {pick(rng, ('must be', 'as'))} {'numbers' if numbers[1:] else 'a number'}."
    if groups:
        each = "each " if len(groups) > 1 else ""
        inside = enumerated(next(iter(groups.values())))
        parts.append(enumerated([f'"{group}"' for group in groups]) + f" ({each}an object with {inside})")
    shown = "".join([f"\n- {part}" for part in parts]) if block else enumerated(parts, pick(rng, (" and ", ", ")))
    if form == '"{k}": {r}':
        shown = f"{{{', '.join(parts)}}}"
    ask = worded(rng, "<block>" if block else "<ask>", shown, "", "below" if before else "above")
    if left and rng.random() < 0.5:
        after += pick(rng, RULES["leave"]).format(pick(rng, left))
    if after:
        ask = ask.rstrip(".") + ("\n" + after[1:] if block else "." + after)
    messages = placed(rng, ask, text, before, system=0.1)
    if rng.random() < 0.1 and messages[0]["role"] == "user":
        messages = ({"role": "system", "content": "You convert texts to JSON."}, *messages)
    return messages, "\n".join(lines_of("", wanted, 0)), tree
