"""Paragraphs of documentation: cleaned from files the caller names, or put together by program.

A passage about a function begins with its signature on a line of its own, whatever its source.
"""

import ast
import re
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, Final

from perilune.core.errors import ConfigError
from perilune.tasks.fields import fields, value
from perilune.tasks.problem import partition, pick
from perilune.tasks.tools import VERBS, random_noun
from perilune.tasks.words import any_word, made_up

# Enough that questions can be asked without any file; written for this project.
BUILT_IN: Final = (
    "bisect.insort(a, x, lo=0, hi=None, *, key=None)\nPut x into the sorted list a so that it stays sorted. If x is "
    "already there, the new item goes to the right of it. The search takes logarithmic time, but moving the items "
    "behind it takes linear time.",
    "heapq.heappush(heap, item)\nAdd item to the heap. The smallest item stays at index zero, so that it can be read "
    "without a search.",
    "math.gcd(*integers)\nReturn the greatest common divisor of the integers. With no arguments the result is zero.",
    "textwrap.shorten(text, width, placeholder=' [...]')\nCollapse the white space of text and cut it to the given "
    "width. Words at the end are dropped until the rest and the placeholder fit.",
    "statistics.fmean(data, weights=None)\nConvert data to floats and return their mean. It runs faster than mean and "
    "always returns a float.",
    "shutil.copyfile(src, dst, *, follow_symlinks=True)\nCopy the contents of the file src to a file named dst. "
    "Permissions are not copied. The two names must not mean the same file.",
    "random.sample(population, k, *, counts=None)\nReturn a list of k items chosen from the population without "
    "replacement. The population itself is left unchanged.",
    "json.dumps(obj, *, indent=None, sort_keys=False)\nWrite obj as a string of JSON. A positive indent puts every "
    "member on a line of its own.",
    "itertools.pairwise(iterable)\nReturn successive overlapping pairs of the input. There is one pair less than there "
    "are items. Added in version 3.10.",
    "str.removeprefix(prefix, /)\nIf the string starts with prefix, return the rest of it. Otherwise return the string "
    "as it is. Added in version 3.9.",
    "functools.lru_cache(maxsize=128, typed=False)\nWrap a function so that recent results are kept. Arguments must be "
    "hashable, because a dictionary stores the results.",
    "pathlib.Path.mkdir(mode=0o777, parents=False, exist_ok=False)\nCreate a directory at this path. If parents is "
    "true, missing directories above it are created as well.",
    "A list is a mutable sequence. Items may be of different types, though most lists hold items of one type. Slicing "
    "a list makes a new list.",
    "A tuple cannot be changed after it was made. It can serve as the key of a dictionary if all of its items are "
    "hashable.",
    "A generator function contains a yield expression. Calling it returns an iterator, and its body runs only when the "
    "iterator is asked for a value.",
    "The with statement runs a block under the control of a context manager. The manager's exit method is called even "
    "if the block raises an exception.",
    "A module is a file with definitions and statements. Its statements run the first time the module is imported. "
    "Later imports find it in a table of loaded modules.",
    "Integers have unlimited precision. Division with a single slash gives a float, while a double slash rounds "
    "towards minus infinity.",
    "An exception that is not handled ends the program with a traceback. The last line of the traceback names the type "
    "of the exception and its message.",
    "Dictionaries keep the order in which keys were inserted. Looking up a key that is absent raises KeyError, unless "
    "the get method is used.",
    "Strings are sequences of code points. They are immutable, so methods that seem to change a string return a new "
    "one.",
    "A set holds distinct hashable objects. Testing for membership takes constant time on average, and the order of "
    "the items is not defined.",
)  # fmt: skip

_MIN_CHARS: Final = 80
_MAX_CHARS: Final = 700
_ROLE: Final = re.compile(r":[a-z:+-]+:`[!~]?([^`<]*?)(?:\s*<[^`>]*>)?`")
_LINK: Final = re.compile(r"`([^`<]+?)\s*<[^`>]*>`__?")
_DIRECTIVE: Final = re.compile(r"\.\. ([a-z:-]+)::\s*(.*)")
_SIGNATURE: Final = re.compile(r"[A-Za-z_][\w.]*\(.*\)")
_UNDERLINE: Final = re.compile(r"([=\-~^*#+\"'.:`])\1{2,}")
_DESCRIBES: Final = ("function", "method", "class", "classmethod", "staticmethod", "exception", "data", "attribute")
_VERSIONS: Final = {"versionadded": "Added in version", "versionchanged": "Changed in version",
                    "deprecated": "Deprecated since version"}  # fmt: skip


def passages(files: Iterable[Path], *, min_chars: int = _MIN_CHARS, max_chars: int = _MAX_CHARS) -> list[str]:
    """Paragraphs of reStructuredText (`.rst`, `.txt`) and Python files (`.py`), distinct, in order of appearance.

    The description of a function stays with its signature. Longer paragraphs are cut between sentences or, in code,
    between lines. ConfigError if a file cannot be read as UTF-8 text.
    """
    found: dict[str, None] = {}
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"cannot read {file} as documentation: {e}") from e
        whole = _code_blocks(text) if file.suffix == ".py" else _rst_paragraphs(text)
        joint = "\n" if file.suffix == ".py" else " "
        for paragraph in whole:
            for part in _cut(paragraph, max_chars, joint):
                if len(part) >= min_chars:
                    found.setdefault(part)
    return list(found)


def docstrings(files: Iterable[Path], *, max_chars: int = _MAX_CHARS) -> list[str]:
    """Signature and docstring of the public functions and methods in Python files, as paragraphs to ask about.

    ConfigError if a file cannot be read or is not Python.
    """
    found: dict[str, None] = {}
    for file in files:
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, SyntaxError) as e:
            raise ConfigError(f"cannot read {file} as Python: {e}") from e
        scopes = [(file.stem, tree.body)]
        scopes += [(f"{file.stem}.{node.name}", node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
        for scope, body in scopes:
            for node in body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                    passage = f"{scope}.{node.name}({_parameters(node)})\n{_clean(text)}"
                    if text.endswith(".") and _MIN_CHARS <= len(passage) <= max_chars:
                        found.setdefault(passage)
    return list(found)


def _parameters(node: ast.FunctionDef) -> str:
    """As in documentation: without annotations and without self."""
    every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg)
    for argument in every:
        if argument is not None:
            argument.annotation = None
    return re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))


def passage_key(text: str) -> tuple[str, str]:
    return "passage", blake2b(text.encode(), digest_size=8).hexdigest()


def passage_split(text: str) -> str:
    """The only split that may show this passage, in questions or as plain text."""
    return partition(passage_key(text))


def _cut(paragraph: str, limit: int, joint: str) -> list[str]:
    pieces = paragraph.split("\n") if joint == "\n" else re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)
    parts: list[str] = []
    for piece in pieces:
        if parts and len(parts[-1]) + len(piece) < limit:
            parts[-1] += joint + piece
        else:
            parts.append(piece)
    return [p.strip("\n") for p in parts if len(p) <= limit]


def _code_blocks(text: str) -> list[str]:
    """Top-level definitions and the text between them."""
    return [block.rstrip() for block in re.split(r"\n\n\n+", text.replace("\t", "    ")) if block.strip()]


def _rst_paragraphs(text: str) -> list[str]:
    blocks: list[str] = []
    signature = ""
    for raw in re.split(r"\n\s*\n", text):
        lines = [line for line in raw.split("\n") if line.strip()]
        if not lines or lines[0].lstrip().startswith((">>>", "|", "+--", "===", "* -")):
            continue
        if lines[0].strip() == "..":  # a comment, even if what it hides looks like a directive
            signature = ""
            continue
        block = " ".join([line.strip() for line in lines])
        if directive := _DIRECTIVE.match(block):
            name = directive[1].split(":")[-1]
            if name in _DESCRIBES:
                head = lines[0].strip().split("::", 1)[1].strip().rstrip("\\").strip()
                signature = head if _SIGNATURE.fullmatch(head) else ""
                continue
            if name in _VERSIONS and blocks:
                version, _, what = _clean(directive[2]).partition(" ")
                note = f"{_VERSIONS[name]} {version}{': ' if what else ''}{what}"
                blocks[-1] += f" {note.rstrip('.')}."
            continue
        if block.startswith((".. ", ":")) or any(_UNDERLINE.fullmatch(line.strip()) for line in lines):
            signature = ""
            continue
        described = lines[0].startswith(" ") and bool(signature)
        block = _clean(block)
        if block[-1:] not in ".!?:)":
            continue
        blocks.append(f"{signature}\n{block}" if described else block)
        signature = ""
    return blocks


def _clean(text: str) -> str:
    text = _LINK.sub(r"\1", _ROLE.sub(r"\1", text))
    text = text.replace("``", "").replace("\\ ", "").replace("\\", "")
    return re.sub(r"(?<!\w)\*{1,2}(\S(?:[^*]*\S)?)\*{1,2}(?!\w)", r"\1", text).replace(" :: ", ": ").replace("::", ":")


# ---- invented documentation ----------------------------------------------------------------------------------------

_OPENINGS: Final = (
    "{V} the {n}.", "{V} the {n} and return it.", "{V} a {n}.", "{V} the given {n}.", "{V} every {n}.",
    "{V} the {n} of the {w}.",
)  # fmt: skip
_REMARKS: Final = (
    "If {p} is missing, {w} is used.", "The {w} is left unchanged.", "{p} must not be empty.",
    "It raises {E} if the {w} is unknown.", "The result is a {w}.", "Unlike {f}, it does not {v2} the {w}.",
    "The {p} argument names the {w}.", "It is safe to call it while {w} is open.", "This takes constant time.",
    "When {p} is given, the {w} comes first.", "See also {f}.", "It returns None if there is no {w}.",
)  # fmt: skip
_ERRORS: Final = ("ValueError", "KeyError", "TypeError", "OSError", "IndexError", "LookupError", "RuntimeError")


def invented(rng: Random, new: bool) -> str:
    """Documentation of a function that does not exist: all the facts in it can only be copied."""
    verb, noun = pick(rng, pick(rng, VERBS)), random_noun(rng, new)
    name = f"{verb} {noun}".replace(" ", "_") if rng.random() < 0.7 else made_up(rng)
    module = made_up(rng) if rng.random() < 0.5 else any_word(rng)
    parameters = fields(rng, 1 + int(rng.random() * 4), 0.5 if new else 0.0)
    plain = int(rng.random() * (len(parameters) + 1))
    signature = [f.name for f in parameters[:plain]]
    signature += [f"{f.name}={_literal(rng, value(rng, f))}" for f in parameters[plain:]]
    sentences = [pick(rng, _OPENINGS).format(V=verb.capitalize(), n=noun, w=any_word(rng))]
    for _ in range(1 + int(rng.random() * 3)):
        sentences.append(
            pick(rng, _REMARKS).format(
                p=pick(rng, parameters).name,
                w=any_word(rng),
                E=pick(rng, _ERRORS),
                f=f"{module}.{made_up(rng)}",
                v2=verb,
            )
        )
    if rng.random() < 0.5:
        sentences.append(f"Added in version {1 + int(rng.random() * 5)}.{int(rng.random() * 15)}.")
    text = " ".join([s[0].upper() + s[1:] for s in sentences])
    return f"{module}.{name}({', '.join(signature)})\n{text}"


def _literal(rng: Random, drawn: Any) -> str:
    return "None" if rng.random() < 0.2 else repr(drawn) if not isinstance(drawn, list) else "()"
