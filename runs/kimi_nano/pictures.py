"""Training data of kimi-nano's eyes: blocks of problems with pictures of one size, drawn and preprocessed as a server
would. A block is a function of (seed, block number) alone."""

import base64
import io
import string
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from perilune.media.patches import Patches, patches_of
from perilune.tasks.families import SYSTEM_PROMPTS, learn_words
from perilune.tasks.pictures.canvas import Canvas
from perilune.tasks.pictures.charts import BAR
from perilune.tasks.pictures.problems import GRIDS_OF, problem, scene_of
from perilune.tasks.pictures.scene import GRIDS, PATCH, Scene
from perilune.tasks.pictures.shapes import ALL_KINDS
from perilune.tasks.problem import Problem, pick
from perilune.text.history import Image
from runs.kimi_nano.data import Codec, pack
from runs.kimi_nano.tower import LIMITS

MARKS = ("", *string.digits, *string.ascii_letters, *"+-=?", BAR, *(f"{colour} {shape}" for colour, shape in ALL_KINDS))
CODES = {name: i for i, name in enumerate(MARKS)}
WEIGHTS = {
    "picture_sums": 0.2, "picture_shapes": 0.22, "picture_charts": 0.28, "picture_buttons": 0.18, "picture_text": 0.12,
}  # fmt: skip
THINKING_SHARE = 0.65
WHOLE_SHARE = 0.3  # thoughts about sums that are learnt whole; others up to line 3, which says what is in the picture
SYSTEM_SHARE = 0.1
TEXT_TOKENS = 46  # room for a sample's text beside its picture; the mean is 41
REDRAWS = 200  # tries to find a sample that fits the rest of a block; after that, the block stays shorter


class Pictures(IterableDataset[dict[str, torch.Tensor]]):
    """Endless blocks of `size` tokens from number `first` on; worker w of n makes first + w, first + w + n, ... Labels
    are words of `passages` too."""

    def __init__(self, vocabulary: Path, seed: int, size: int, first: int = 0, passages: Sequence[str] = ()) -> None:
        self.vocabulary, self.seed, self.size, self.first, self.passages = vocabulary, seed, size, first, passages

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        codec, number = Codec(self.vocabulary), self.first + mine
        if self.passages:
            learn_words(self.passages)
        while True:
            yield self.block(codec, number)
            number += workers

    def block(self, codec: Codec, number: int) -> dict[str, torch.Tensor]:
        """pixels uint8 [n, patches, 3, P, P]; marks uint8 [n, rows, 2 columns]; slots int16 [n, tokens], the caption's
        ids and then line ends; places int64 of all their tokens in the stream; grid [2]; and what `pack` gives."""
        rng = Random(f"{self.seed}:pictures:{number}")
        grid = pick(rng, GRIDS)
        tokens = grid[0] * grid[1] // 4
        names = [name for name in WEIGHTS if grid in GRIDS_OF.get(name, GRIDS)]
        shares = [WEIGHTS[name] for name in names]
        line_end, pad = codec.tokenizer.encode("\n"), codec.tokenizer.special("<|media_pad|>")
        samples: list[tuple[list[int], int]] = []
        found: dict[str, list[Any]] = {"pixels": [], "marks": [], "slots": []}
        used = redrawn = 0
        # Every block with this grid has equally many samples, so that few shapes of tensors occur.
        while len(samples) < self.size // (tokens + TEXT_TOKENS) and redrawn < REDRAWS:
            name = rng.choices(names, shares)[0]
            scene = scene_of(name, rng, "train", grid)
            caption = codec.tokenizer.encode(scene.caption)
            if len(caption) >= tokens:
                continue
            thinking = rng.random() < THINKING_SHARE
            ids, given = sample(codec, name, scene, tokens, rng, thinking)
            if used + len(ids) > self.size:
                redrawn += 1
                continue
            canvas = scene.paint()
            patches, own = seen(canvas, rng)
            assert own == grid, (own, grid)
            samples.append((ids, given))
            used += len(ids)
            found["pixels"].append(patches)
            found["marks"].append(marks(canvas, grid))
            found["slots"].append(caption + line_end * (tokens - len(caption)))
        block = pack(samples, self.size)
        block["places"] = (block["stream"][0] == pad).nonzero()[:, 0]
        block["grid"] = torch.tensor(grid)
        for key, kind in (("pixels", np.uint8), ("marks", np.uint8), ("slots", np.int16)):
            block[key] = torch.from_numpy(np.stack(found[key]).astype(kind, copy=False))
        return block


def sample(codec: Codec, name: str, scene: Scene, tokens: int, rng: Random, thinking: bool) -> tuple[list[int], int]:
    """(ids, number of leading ids that are not learnt)."""
    asked = problem(name, "train", scene, Image(tokens), rng, thinking)
    if rng.random() < SYSTEM_SHARE:
        asked = replace(asked, messages=({"role": "system", "content": pick(rng, SYSTEM_PROMPTS)}, *asked.messages))
    prompt, target = codec.prompt(asked), codec.target(asked)
    if thinking and name == "picture_sums" and rng.random() > WHOLE_SHARE:
        target = codec.tokenizer.encode("\n".join(scene.reasoning.split("\n")[:3]) + "\n")
    return prompt + target, len(prompt)


def seen(canvas: Canvas, rng: Random) -> tuple[Patches, tuple[int, int]]:
    """What a server makes of the picture, sent as a file; its rows and columns of patches."""
    file = io.BytesIO()
    canvas.finished(rng).save(file, "BMP")
    patches, (_, rows, columns) = patches_of(file.getvalue(), LIMITS)
    return patches, (rows, columns)


def marks(canvas: Canvas, grid: tuple[int, int]) -> NDArray[np.uint8]:
    """[rows, 2 columns]: what covers the middle of each half of a patch, as an index into MARKS."""
    scale = LIMITS.fit(*canvas.image.size).width / canvas.image.width
    found = np.zeros((grid[0], 2 * grid[1]), np.uint8)
    for name, left, top, right, bottom in canvas.marks:
        first, end = _covered(left * scale * 2 / PATCH, right * scale * 2 / PATCH)
        high, low = _covered(top * scale / PATCH, bottom * scale / PATCH)
        found[high:low, first:end] = CODES[name]
    return found


def _covered(start: float, stop: float) -> tuple[int, int]:
    """(first, end) of the cells with their middle between start and stop; at least the cell around the midpoint."""
    first, end = max(0, round(start)), max(0, round(stop))
    middle = max(0, int((start + stop) / 2))
    return (first, end) if end > first else (middle, middle + 1)


def placed(problems: list[Problem]) -> list[tuple[Problem, Patches, tuple[int, int]]]:
    """Problems as a server reads them: messages with decoded pictures, patches, grid."""
    found = []
    for one in problems:
        parts = one.messages[0]["content"]
        url = next(part["image_url"]["url"] for part in parts if part["type"] == "image_url")
        patches, (_, rows, columns) = patches_of(base64.b64decode(url.partition(",")[2]), LIMITS)
        tokens = Image(rows * columns // 4)
        content = [tokens if part["type"] == "image_url" else part for part in parts]
        asked = replace(one, messages=({"role": "user", "content": content},))
        found.append((asked, patches, (rows, columns)))
    return found
