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
from perilune.tasks.wordings import lined
from perilune.tasks.words import any_word, lines, listed, made_up

# The default passages, for callers that name no files; written for this project.
BUILT_IN: Final = tuple(lines("scenes.txt").strip().split("\n\n")[3:])

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

_FORMS: Final = lined("""
opening: {V} the {n}.|{V} the {n} and return it.|{V} a {n}.|{V} the given {n}.|{V} every {n}.|{V} the {n} of the {w}.
remark: If {p} is missing, {w} is used.|The {w} is left unchanged.|{p} must not be empty.|It raises {E} if the {w} is \
unknown.|The result is a {w}.|Unlike {f}, it does not {v2} the {w}.|The {p} argument names the {w}.|It is safe to call \
it while {w} is open.|This takes constant time.|When {p} is given, the {w} comes first.|See also {f}.|It returns None \
if there is no {w}.
""")
_ERRORS: Final = listed("ValueError KeyError TypeError OSError IndexError LookupError RuntimeError")


def invented(rng: Random, new: bool) -> str:
    """Documentation of a function that does not exist: all the facts in it can only be copied."""
    verb, noun = pick(rng, pick(rng, VERBS)), random_noun(rng, new)
    name = f"{verb} {noun}".replace(" ", "_") if rng.random() < 0.7 else made_up(rng)
    module = made_up(rng) if rng.random() < 0.5 else any_word(rng)
    parameters = fields(rng, 1 + int(rng.random() * 4), 0.5 if new else 0.0)
    plain = int(rng.random() * (len(parameters) + 1))
    signature = [f.name for f in parameters[:plain]]
    signature += [f"{f.name}={_literal(rng, value(rng, f))}" for f in parameters[plain:]]
    sentences = [pick(rng, _FORMS["opening"]).format(V=verb.capitalize(), n=noun, w=any_word(rng))]
    for _ in range(1 + int(rng.random() * 3)):
        sentences.append(
            pick(rng, _FORMS["remark"]).format(
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
