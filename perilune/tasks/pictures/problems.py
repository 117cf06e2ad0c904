"""Families of problems with a picture: scenes as messages that any OpenAI endpoint takes."""

import base64
import io
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any, Final

from PIL import Image

from perilune.tasks.pictures.charts import chart_scene
from perilune.tasks.pictures.scene import GRIDS, Make, Scene, frame
from perilune.tasks.pictures.screens import button_scene, text_scene
from perilune.tasks.pictures.shapes import shape_scene
from perilune.tasks.pictures.sums import sum_scene
from perilune.tasks.problem import Answer, Problem, Reply, partition, pick

MAKERS: Final[dict[str, Make]] = {
    "picture_sums": sum_scene,
    "picture_shapes": shape_scene,
    "picture_charts": chart_scene,
    "picture_buttons": button_scene,
    "picture_text": text_scene,
}
NUMBERS: Final = ("picture_sums",)  # families with answers that are judged as numbers
# Grids with room for several things beside each other.
ROOMY: Final = tuple(grid for grid in GRIDS if grid[0] >= 8 and grid[0] * grid[1] >= 128)
GRIDS_OF: Final = {"picture_shapes": tuple(g for g in GRIDS if g[0] >= 6), "picture_charts": ROOMY}
FIRST_SHARE: Final = 0.85  # share of problems with the picture before the question


def scene_of(name: str, rng: Random, split: str, grid: tuple[int, int]) -> Scene:
    """A scene of this family and split in a picture of this grid."""
    while True:
        scene = MAKERS[name](rng, split, frame(rng, grid))
        if partition(scene.key) == split:
            return scene


def sampler(name: str) -> Callable[[Random, str, bool], Problem]:
    """The family's problems, each with its picture as a PNG file in a data: URL."""

    def sample(rng: Random, split: str, thinking: bool) -> Problem:
        scene = scene_of(name, rng, split, pick(rng, GRIDS_OF.get(name, GRIDS)))
        url = _url(scene.paint().finished(rng))
        return problem(name, split, scene, {"type": "image_url", "image_url": {"url": url}}, rng, thinking)

    return sample


def problem(name: str, split: str, scene: Scene, picture: Any, rng: Random, thinking: bool) -> Problem:
    """`picture` is the part of the user's message that holds it."""
    parts = [picture, {"type": "text", "text": scene.question}]
    content = parts if rng.random() < FIRST_SHARE else parts[::-1]
    reply = Reply(scene.reasoning if thinking else "", scene.content)
    return Problem(name, split, scene.key, ({"role": "user", "content": content},), reply, thinking=thinking)


SHOWN: Final = ("real", "blank", "none")


def shown(problem: Problem, how: str) -> Problem:
    """The problem with its picture ("real"), a white one of the same size ("blank") or none ("none"): the last two
    measure answers without looking. Problems without pictures are unchanged."""
    if how == "real" or not isinstance(content := problem.messages[-1]["content"], list):
        return problem
    parts = [part for part in content if part["type"] == "text"]
    if how == "blank":
        parts = [part if part["type"] == "text" else _blank(part["image_url"]["url"]) for part in content]
    return replace(problem, messages=(*problem.messages[:-1], {"role": "user", "content": parts}))


def _blank(url: str) -> dict[str, Any]:
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as image:
        return {"type": "image_url", "image_url": {"url": _white(*image.size)}}


@lru_cache(maxsize=64)
def _white(width: int, height: int) -> str:
    return _url(Image.new("RGB", (width, height), "white"))


def _url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def same_words(problem: Problem, answer: Answer) -> bool:
    """The answer has the expected words and no others; case and punctuation at the ends do not count."""
    expected, got = (text.strip(" .!?\"'[]\n").lower() for text in (problem.reply.content, answer.content))
    return not answer.tool_calls and got == expected
