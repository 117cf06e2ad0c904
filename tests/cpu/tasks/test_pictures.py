"""Problems with pictures: the same for the same seed, right by what was drawn, nothing of one split in another."""

import base64
import io
import re
from collections import Counter
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from PIL import Image

from perilune.core.errors import ConfigError
from perilune.media.limits import Limits
from perilune.tasks.families import PICTURES, check, copy_baseline, problems
from perilune.tasks.pictures import charts, screens, shapes, sums, wider
from perilune.tasks.pictures.canvas import Canvas, Mark, colours, new_pair
from perilune.tasks.pictures.problems import GRIDS_OF, MAKERS, scene_of, shown
from perilune.tasks.pictures.scene import GRIDS, MOST_ON_ONE_SIDE, MOST_PATCHES, Scene, frame
from perilune.tasks.problem import SPLITS, Answer, answer_of, partition, pick
from perilune.tasks.wordings import bare

COUNT = 60
LIMITS = Limits(in_patch_limit=MOST_PATCHES, patch_limit_on_one_side=MOST_ON_ONE_SIDE)


def painted(name: str, split: str = "train", count: int = COUNT) -> list[tuple[Scene, Canvas]]:
    rng, grids = Random(f"test:{name}:{split}"), GRIDS_OF.get(name, GRIDS)
    scenes = (scene_of(name, rng, split, pick(rng, grids)) for _ in range(count))
    return [(scene, scene.paint()) for scene in scenes]


def lines(marks: list[Mark]) -> list[str]:
    """The text that was drawn: glyphs by height, then from left to right, with a space at wide gaps."""
    found: dict[float, list[Mark]] = {}
    for mark in marks:
        if len(mark.name) == 1:
            found.setdefault(round(mark.bottom, 3), []).append(mark)
    texts = []
    for _, glyphs in sorted(found.items()):
        glyphs.sort(key=lambda m: m.left)
        gaps = [b.left - a.right > 0.12 * (a.bottom - a.top) for a, b in pairwise(glyphs)]
        texts.append(glyphs[0].name + "".join(" " * gap + m.name for gap, m in zip(gaps, glyphs[1:])))
    return texts


def test_there_are_no_wide_wordings() -> None:
    with pytest.raises(ConfigError, match="picture_sums has no wide wordings: choose from train, heldout, structural"):
        problems("picture_sums", "wide", 8, thinking=True)


@pytest.mark.parametrize("split", SPLITS[:-1])
@pytest.mark.parametrize("name", sorted(PICTURES))
def test_problems_are_reproducible_and_judged(name: str, split: str) -> None:
    found = problems(name, split, 8, thinking=True)
    assert found == problems(name, split, 8, thinking=True)
    assert len({p.key for p in found}) == 8
    for p in found:
        assert partition(p.key) == p.split == split
        assert check(p, answer_of(p.reply)) and not check(p, Answer("certainly 1234567"))
        assert not check(p, copy_baseline(p))
        (message,) = p.messages
        (url,) = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
        image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
        assert np.ptp(np.asarray(image)) > 60, "something is in the picture"
        fit = LIMITS.fit(*image.size)
        assert (fit.rows, fit.columns) in GRIDS


def test_sums_are_what_the_picture_says() -> None:
    for scene, canvas in painted("picture_sums"):
        drawn = "".join(mark.name for mark in canvas.marks)
        found = re.fullmatch(r"(\d+)([+-])(\d+)=?\??", drawn)
        assert found is not None, drawn
        a, b = int(found[1]), int(found[3])
        assert scene.content == f"{a} {found[2]} {b} = {a + b if found[2] == '+' else a - b}"
        assert scene.reasoning.startswith(scene.caption) and scene.caption == drawn.rstrip("=?")


def test_shapes_are_counted_as_they_were_drawn() -> None:
    asked = Counter[str]()
    for scene, canvas in painted("picture_shapes", count=300):
        drawn = [mark.name.split() for mark in canvas.marks]
        words = re.findall(r"[a-z]+", scene.question)
        kinds = [shape for word in words for shape in shapes.SHAPES if word in (shape, shapes.several(shape))]
        named = [word for word in words if word in shapes.COLOURS]
        if scene.content.isdigit():
            own = [d for d in drawn if (not named or d[0] == named[0]) and (not kinds or d[1] == kinds[0])]
            assert int(scene.content) == len(own), (scene, drawn)
            asked["count"] += 1
        elif scene.content in shapes.COLOURS:
            assert [d[0] for d in drawn if d[1] == kinds[0]] == [scene.content]
            asked["colour"] += 1
        else:
            first, second = kinds or named
            counts = {word: sum(word in d for d in drawn) for word in (first, second)}
            assert counts[first] != counts[second]
            assert scene.content.startswith(max(counts, key=lambda word: counts[word]))
            asked["more"] += 1
        pairs = Counter(map(tuple, drawn))
        assert scene.caption == "\n".join(shapes.counted(pairs[k], k) for k in shapes.ALL_KINDS if k in pairs)
    assert min(asked.values()) > 20, asked


def test_charts_and_tables_hold_what_is_asked() -> None:
    asked = Counter[str]()
    for scene, canvas in painted("picture_charts", count=150):
        if scene.key[1] == "table":
            read = dict(line.rsplit(" ", 1) for line in lines(canvas.marks))
            name, _, value = scene.reasoning.split("\n")[-1].rpartition(" ")
            assert scene.content == (read[name] if name else str(len(read))), (scene, read)
            assert not name or (name in scene.question and value == scene.content), scene
            asked["table"] += 1
            continue
        bars = sorted((m for m in canvas.marks if m.name == charts.BAR), key=lambda m: m.left)
        floor = bars[0].bottom
        labels = sorted((m for m in canvas.marks if m.name.isalpha() and len(m.name) == 1), key=lambda m: m.left)
        heights = {label.name: bar.bottom - bar.top for label, bar in zip(labels, bars, strict=True)}
        name, _, value = scene.reasoning.split("\n")[-1].rpartition(" ")
        if scene.reasoning.split("\n") == list(heights):
            assert scene.content == str(len(bars))
        elif scene.content.isdigit():
            assert name in scene.question and value == scene.content, scene
            bar = bars[[m.name for m in labels].index(name)]
            own = [m for m in canvas.marks if m.name.isdigit() and m.bottom < floor and _above(m, bar)]
            assert "".join(m.name for m in sorted(own, key=lambda m: m.left)) == scene.content
            asked["value"] += 1
        else:
            order = sorted(heights, key=lambda name: -heights[name])
            high = scene.question in charts.HIGHEST or "max" in scene.reasoning or ">" in scene.reasoning
            low = scene.question in charts.LOWEST or "min" in scene.reasoning or "<" in scene.reasoning
            assert high != low and scene.content == order[0 if high else -1]
            assert scene.reasoning in (">".join(order), "<".join(order[::-1]), f"{scene.caption}\n{name} {value}")
            asked["extreme"] += 1
    assert min(asked.values()) > 15, asked


def _above(glyph: Mark, bar: Mark) -> bool:
    """Whether the middle of a value lies over the bar; values are at most three digits wide."""
    middle = (bar.left + bar.right) / 2
    return abs((glyph.left + glyph.right) / 2 - middle) < 1.6 * (glyph.right - glyph.left) and glyph.bottom <= bar.top


def test_buttons_and_words_are_those_drawn() -> None:
    for scene, canvas in painted("picture_buttons"):
        side = next((word for word in ("left", "middle", "right") if word in scene.question), "")
        drawn = "".join(mark.name for mark in canvas.marks)
        labels = re.findall(r"\[(.*?)\]", scene.caption)
        assert (
            drawn.endswith("".join(labels).replace(" ", ""))
            and scene.content == labels[{"middle": 1, "right": -1}.get(side, 0)]
        )
        assert (len(labels) > 1) == bool(side) and (len(labels) == 3 or side != "middle")
        assert scene.reasoning.replace(" ", "").replace("\n", " ") == scene.content
    for scene, canvas in painted("picture_text"):
        assert "".join(mark.name for mark in canvas.marks) == scene.content.replace(" ", "")


def test_structure_is_never_in_training() -> None:
    new_words = {word.lower() for word in (*charts.NEW_ITEMS, *screens.NEW_BUTTONS)}
    assert not new_words & set(map(str.lower, (*charts.ITEMS, *screens.BUTTONS, *screens.TITLES)))
    for name in ("picture_charts", "picture_buttons", "picture_text"):
        for scene, _ in painted(name, count=150):
            assert not new_words & set(re.findall(r"\w+", scene.caption.lower()))
    for scene, canvas in painted("picture_shapes"):
        assert not any(shapes.new_kind((c, s)) for c, s in (m.name.split() for m in canvas.marks)), scene
    for scene, canvas in painted("picture_shapes", "structural"):
        assert any(shapes.new_kind((c, s)) for c, s in (m.name.split() for m in canvas.marks)), scene
    assert {s.question for s, _ in painted("picture_sums", "structural")} <= set(sums.NEW_ASKED)
    rng = Random(5)
    for new in (False, True):
        pairs = [colours(rng, new) for _ in range(50)]
        assert all(new_pair(*pair) == new for pair in pairs)


def test_training_has_more_questions_and_none_of_the_new_ones() -> None:
    rng, forms = Random(3), (charts.VALUE, charts.NEW_VALUE, wider.VALUE)
    found = [wider.asked(rng, "train", *forms) for _ in range(2000)]
    assert len(set(found)) > 700 and all(form.count("{name}") == 1 and "<" not in form for form in found)
    kept = tuple(map(bare, charts.NEW_VALUE))
    assert not [form for form in found if bare(form).startswith(kept)]
    assert {wider.asked(rng, "heldout", *forms) for _ in range(99)} <= set(charts.VALUE)
    assert {wider.asked(rng, "structural", *forms) for _ in range(99)} == set(charts.NEW_VALUE)


def test_frames_end_at_their_grid() -> None:
    rng = Random(2)
    for grid in GRIDS:
        sizes = [frame(rng, grid) for _ in range(50)]
        for one in sizes:
            fit = LIMITS.fit(one.width, one.height)
            assert (fit.rows, fit.columns) == grid and fit.tokens == one.slots
            assert abs(fit.width * one.unit - one.width) <= one.unit
    assert set(MAKERS) == set(PICTURES)


def test_pictures_are_blanked_or_left_out() -> None:
    for one in problems("picture_charts", "heldout", 4, thinking=False):
        assert shown(one, "real") is one
        (text,) = [part for part in one.messages[0]["content"] if part["type"] == "text"]
        assert shown(one, "none").messages[0]["content"] == [text]
        blank = shown(one, "blank")
        kinds = [[part["type"] for part in p.messages[0]["content"]] for p in (one, blank)]
        assert kinds[0] == kinds[1] and (blank.key, blank.reply) == (one.key, one.reply)
        first, second = (
            Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))
            for p in (one, blank)
            for part in p.messages[0]["content"]
            if part["type"] == "image_url"
        )
        assert first.size == second.size and np.asarray(second).min() == 255
    (text_problem,) = problems("add_sub", "heldout", 1, thinking=False)
    assert shown(text_problem, "blank") is text_problem
