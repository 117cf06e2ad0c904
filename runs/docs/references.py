"""Checks that what pages and code refer to exists: sections of docs/formats.md, links, files, commands."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from runs.docs.tables import ROOT

FORMATS = "docs/formats.md"
LOG = "docs/LOG.md"  # may name files that have gone since
CODE = (".py", ".cu", ".cuh", ".cpp", ".h", ".html", ".sh", ".toml")

_SECTION = re.compile(r"\b(spec|formats?|section|sections)\s+(\d+(?:\.\d+)?)((?:(?:, | and | to )\d+(?:\.\d+)?)*)")
_HEADING = re.compile(r"^#+ (.+)$", re.M)
_LINK = re.compile(r"\]\(([^)\s]+)\)|\bsrc=\"([^\"]+)\"")
_PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|cu|cuh|cpp|h|html|sh|md|jsonl|svg|png|toml))`")


def problems() -> Iterator[str]:
    known = sections((ROOT / FORMATS).read_text())
    for path in texts():
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if name == LOG:
            continue
        yield from (f"{name}: {why}" for why in wrong_sections(text, known, own=name == FORMATS))
        if path.suffix == ".md" and not name.startswith("perilune/"):
            yield from (f"{name}: {why}" for why in wrong_links(text, path.parent))
            yield from (f"{name}: no file {missing}" for missing in missing_files(text))


def texts() -> list[Path]:
    """Sources and pages of the checkout."""
    rooms = [ROOT / name for name in ("perilune", "runs", "tests", "docs", "examples")]
    found = [p for room in rooms for p in room.rglob("*") if p.suffix in (*CODE, ".md")]
    return sorted([*found, *ROOT.glob("*.md"), ROOT / "pyproject.toml"])


def pages() -> list[Path]:
    """Markdown pages that describe the current tree."""
    return [p for p in texts() if p.suffix == ".md" and "bundled" not in p.parts and p != ROOT / LOG]


def sections(text: str) -> set[str]:
    """Numbers of the headings of a page: 2, 2.3."""
    return set(re.findall(r"^##+ (\d+(?:\.\d+)?)\.? ", text, re.M))


def wrong_sections(text: str, known: set[str], *, own: bool = False) -> Iterator[str]:
    """Citations of sections that do not exist, or without the name of their page; `own`: of the text's own sections."""
    flat = re.sub(r"\s*\n\s*(?:#|//)?\s*", " ", text)
    for found in _SECTION.finditer(flat):
        numbers = re.findall(r"\d+(?:\.\d+)?", found[0])
        if found[1] in ("section", "sections"):
            if not own and not flat[: found.start()].endswith(f"{FORMATS} "):
                yield f"{found[0]!r} does not say of which page: write {FORMATS} {found[0]}"
            yield from (f"{FORMATS} has no section {n}" for n in numbers if n not in known)
        elif "." in found[0]:
            yield f"{found[0]!r}: write {FORMATS} section {numbers[0]}"


def wrong_links(text: str, directory: Path) -> Iterator[str]:
    """Links and pictures of a page in `directory` that lead nowhere in the checkout."""
    for link in (a or b for a, b in _LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S))):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        file = (directory / unquote(target)).resolve() if target else None
        if file is not None and not file.exists():
            yield f"the link {link} leads nowhere"
        elif anchor and anchor not in anchors(text if file is None else file.read_text()):
            yield f"the link {link} names no heading"


def anchors(text: str) -> set[str]:
    """Headings as links spell them."""
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in _HEADING.findall(text)}


def missing_files(text: str) -> Iterator[str]:
    """Paths in code spans that are neither in the checkout nor in the package."""
    for path in dict.fromkeys(_PATH.findall(text)):
        if not any((base / path).exists() for base in (ROOT, ROOT / "perilune")):
            yield path
