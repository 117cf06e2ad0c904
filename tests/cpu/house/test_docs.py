"""The documentation cannot drift: what `make check` looks at is in order, and each of its checks sees a fault."""

import re
from pathlib import Path

import pytest

from runs import readme
from runs.docs import chart, references, rooms, screenshot, tables
from tests.cpu.house.test_imports import MAY

KNOWN = {"2", "2.3", "6"}
PAGE, S, SPEC = "docs/formats.md", "section", "spec"  # apart: this file is looked at too


def test_nothing_is_out_of_date() -> None:
    assert list(readme.problems()) == []


def test_an_edited_table_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PEER_PREFILL", {**tables.PEER_PREFILL, 10000: 41.0})
    stale = [why.split(":")[0] for why in readme.problems()]
    assert stale == ["README.md", "docs/speed.md", "docs/images/speed.svg is out of date"]


@pytest.mark.parametrize(("text", "faults"), [
    (f"{PAGE} {S} 2.3", 0), (f"{PAGE} {S}s 2 and 6", 0), (f"see {PAGE}\n# {S} 6)", 0), (f"{S} begin", 0),
    ("format 3", 0), (f"{PAGE} {S} 2.4", 1), (f"{PAGE} {S}s 2 and 7", 1), (f"{S} 2.3", 1),
    (f"({SPEC} 2.3)", 1), (f"{SPEC} {S} 6", 1),
])  # fmt: skip
def test_citations_resolve(text: str, faults: int) -> None:
    assert len(list(references.wrong_sections(text, KNOWN))) == faults


def test_the_headings_of_the_formats_are_numbered() -> None:
    found = references.sections((references.ROOT / references.FORMATS).read_text())
    assert {"1", "1.3", "2.3", "3.3", "4.2", "5.9", "6.3", "8"} <= found
    assert references.sections("# 1 Page\n## 2. A\n### 2.3 B\n") == {"2", "2.3"}


def test_links_and_files_resolve(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A heading, here\n")
    good = "[a](there.md) [b](there.md#a-heading-here) [c](https://example.org/x) `[d](no.md)`\n# Own\n[e](#own)"
    assert list(references.wrong_links(good, tmp_path)) == []
    bad = "[a](nowhere.md) ![b](there.md#other) [c](#none)"
    assert len(list(references.wrong_links(bad, tmp_path))) == 3
    assert list(references.missing_files("`engine/engine.py` `perilune/engine/engine.py` `engine/motor.py`")) == [
        "engine/motor.py"
    ]


def test_the_first_screen_stays_one() -> None:
    text = (readme.ROOT / "README.md").read_text()
    assert list(readme.first_screen(text)) == []
    assert len(list(readme.first_screen("\n" * 20 + text))) == 2  # make serve and make test slip down
    assert len(list(readme.first_screen(text + "\n| a |\n|---|\n| 1 |\n"))) == 1
    long = re.sub(r"(\|---.*\n)", r"\1| more | 1 | 1 | 1 | 1 | 1 |\n", text, count=1)
    assert len(list(readme.first_screen(long))) == 1


def test_the_chart_has_ours_the_floor_and_the_peer() -> None:
    shown, picture = tables.first_screen(), chart.speed()
    assert len(shown) <= readme.MOST_ROWS
    for m in shown:
        for time in (m.ours, m.floor, m.peer):
            assert f">{time:g} {m.unit}<" in picture
    widths = {
        kind: re.findall(rf'class="{kind}" [^>]* width="([\d.]+)"', picture)[1:] for kind in ("ours", "peer", "floor")
    }
    for m, ours, peer, floor in zip(shown, widths["ours"], widths["peer"], widths["floor"], strict=True):
        assert float(ours) / float(floor) == pytest.approx(m.floor / m.ours, abs=1e-3)
        assert float(peer) / float(floor) == pytest.approx(m.floor / m.peer, abs=1e-3)


def test_the_boxes_are_the_import_table() -> None:
    may, height, picture, text = rooms.rooms(), rooms.rows(), rooms.picture(), rooms.text()
    assert len(may) <= 24 and all(f">{room}</text>" in picture for room in may)
    assert all(height[a] > height[b] for a, b in rooms.arrows()), "an arrow points up"
    for rule, allowed in MAY.items():
        if rule.split(".")[0] in may:
            line = next(line for line in text.splitlines() if line.split(" ")[0] == rule)
            assert all(name in line for name in allowed or ())
    # What the arrows leave out follows from them.
    reached: dict[str, set[str]] = {}
    for room in sorted(may, key=height.__getitem__):
        below = {b for a, b in rooms.arrows() if a == room}
        reached[room] = below.union(*(reached[b] for b in below))
        assert may[room] <= reached[room]


def test_a_page_that_looks_different_asks_for_a_new_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(screenshot.problems()) == []
    for name in ("page.html", "style.css"):
        (tmp_path / name).write_bytes((screenshot.PAGE / name).read_bytes())
    (tmp_path / "style.css").write_text((tmp_path / "style.css").read_text().replace("78rem", "60rem"))
    monkeypatch.setattr(screenshot, "PAGE", tmp_path)
    assert len(list(screenshot.problems())) == 3


def test_the_logs_index_has_every_heading() -> None:
    text = (references.ROOT / references.LOG).read_text()
    headings = re.findall(r"^## (.+)$", text, re.M)
    index = re.findall(r"^- \[(.+)\]\(#(.+)\)$", text, re.M)
    assert [title for title, _ in index] == headings[2:] and headings[:2] == ["State of play", "Index"]
    assert {anchor for _, anchor in index} <= references.anchors(text)
