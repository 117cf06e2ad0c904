"""Writes the generated parts of README.md and docs/: tables from the ledger and the code, the chart, the box diagram.

python -m runs.readme           write them
python -m runs.readme --check   exit 1, with one line for each thing that is out of date or refers to nothing
"""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from runs.docs import chart, http_api, references, rooms, screenshot, tables, whole_model
from runs.docs.tables import ROOT

BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"speed": tables.speed, "whole": whole_model.four, "nano": tables.nano},
    "docs/speed.md": {
        "layers": tables.layers,
        "power": tables.power,
        "experts": tables.experts,
        "cycles": tables.cycles,
        "whole": whole_model.whole,
        "two": whole_model.two,
        "nano-speed": tables.nano_speed,
    },
    "docs/pictures.md": {"pictures": tables.pictures},
    "docs/architecture.md": {"files": tables.files, "imports": rooms.text},
    "docs/configuration.md": {"engine": tables.engine_keys, "server": tables.server_keys},
    "docs/http-api.md": {
        "index": http_api.index,
        "errors": http_api.errors,
        "headers": http_api.headers,
        "endpoints": http_api.endpoints,
        "objects": http_api.objects,
    },
}
PICTURES: dict[str, Callable[[], str]] = {"docs/images/speed.svg": chart.speed, "docs/images/rooms.svg": rooms.picture}
FIRST_COMMAND_ABOVE, MOST_ROWS = 20, 6


def block(text: str, name: str) -> re.Match[str]:
    found = re.search(f"(<!-- generated: {name} -->\n)(.*?)(\n<!-- end -->)", text, re.S)
    assert found, f"the generated block {name!r} is missing"
    return found


def replaced(text: str, name: str, content: str) -> str:
    found = block(text, name)
    return text[: found.start(2)] + content + text[found.end(2) :]


def problems() -> Iterator[str]:
    for page, blocks in BLOCKS.items():
        text = (ROOT / page).read_text()
        for name, made in blocks.items():
            if block(text, name)[2] != made():
                yield f"{page}: the block {name!r} is out of date: run python -m runs.readme"
    for picture, made in PICTURES.items():
        if not (ROOT / picture).is_file() or (ROOT / picture).read_text() != made():
            yield f"{picture} is out of date: run python -m runs.readme"
    yield from first_screen((ROOT / "README.md").read_text())
    yield from screenshot.problems()
    yield from references.problems()


def first_screen(text: str) -> Iterator[str]:
    """What keeps README a first screen: a command early, and one small table."""
    lines = text.splitlines()
    for command in ("make serve", "make test"):
        if not any(line.startswith(command) for line in lines[: FIRST_COMMAND_ABOVE - 1]):
            yield f"README.md: `{command}` belongs above line {FIRST_COMMAND_ABOVE}"
    heads = [i for i, line in enumerate(lines) if re.fullmatch(r"[|\-: ]*---[|\-: ]*", line) and "|" in line]
    if len(heads) != 1:
        yield f"README.md has {len(heads)} tables: one belongs there, the others into docs/"
    for head in heads:
        rows = next((i for i, line in enumerate(lines[head + 1 :]) if not line.startswith("|")), 0)
        if rows > MOST_ROWS:
            yield f"README.md: a table has {rows} rows: at most {MOST_ROWS}"


def write() -> None:
    for page, blocks in BLOCKS.items():
        file = ROOT / page
        text = file.read_text()
        for name, made in blocks.items():
            text = replaced(text, name, made())
        file.write_text(text)
    for picture, made in PICTURES.items():
        file = Path(ROOT / picture)
        file.parent.mkdir(exist_ok=True)
        file.write_text(made())


def main() -> None:
    if "--check" in sys.argv[1:]:
        found = list(problems())
        sys.exit("\n".join(found) if found else 0)
    write()


if __name__ == "__main__":
    main()
