"""The mean of kimi-nano's weights and those of the stage before: python -m runs.kimi_nano.average --with DIR

A training may move weights far (experts by 0.70 of their norm, the rest by 0.48) and still stay in the same basin of
the loss. The mean may then answer other people's wordings better than either end (Wortsman et al., "Robust fine-tuning
of zero-shot models"). Experts are rounded to INT4 anew: 9.5 % of their norm changes. The tower is averaged, too.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from perilune.formats.writer import write
from runs.kimi_nano import card
from runs.kimi_nano.export import SHARD_BYTES, add_eyes, read_back, spread
from runs.kimi_nano.state import EYES_FILE, TRAINING_FILE

# Weight of the stage before in the mean. With 0, 0.15 and 0.3, one stage answered 191, 192 and 196 of 248 problems of
# other authors correctly, the next one 141, 138 and 136 of 250.
SHARE = 0.15


def mean(new: Mapping[str, Tensor], old: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """(1 - share) new + share old, each in its new dtype. SystemExit if a tensor's name or shape differs."""
    if {n: t.shape for n, t in new.items()} != {n: t.shape for n, t in old.items()}:
        raise SystemExit("the two models differ in names or shapes: only stages of one model have a mean")
    return {n: ((1 - share) * t.float() + share * old[n].float()).to(t.dtype) for n, t in new.items()}


def average(model: Path, before: Path, share: float) -> None:
    """Replaces the weights in `model`, and notes the mean in its training.json."""
    text = mean(read_back(model).state_dict(), read_back(before).state_dict(), share)
    seeing = (model / EYES_FILE).is_file()  # False between export and the training of the tower
    eyes = mean(load_file(model / EYES_FILE), load_file(before / EYES_FILE), share) if seeing else {}
    config = json.loads((model / "config.json").read_text())
    del config["text_config"]["quantization_config"]  # the writer adds it
    partial = model.with_name(f".{model.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write(partial, spread(text), config=config, form="int4", shard_bytes=SHARD_BYTES)
    if eyes:
        add_eyes(partial, eyes)
    noted = json.loads((model / TRAINING_FILE).read_text())
    fact = {"share": share, "with": card.weights_hash(before)}
    noted |= {"weights_sha256": card.weights_hash(partial), "averaged": fact}
    card.write_facts(partial / TRAINING_FILE, noted)
    made = {file.name for file in partial.iterdir()}
    shutil.copytree(model, partial, ignore=lambda folder, _: made if folder == str(model) else (), dirs_exist_ok=True)
    replaced = model.with_name(f".{model.name}.replaced")
    model.rename(replaced)  # in one step, so that no directory has weights of both stages
    partial.rename(model)
    shutil.rmtree(replaced)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Average kimi-nano's weights with those of the stage before.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, default=Path("perilune/bundled/kimi-nano"), help="checkpoint whose weights are replaced")
    add("--with", type=Path, required=True, dest="before", metavar="DIR", help="checkpoint of the stage before")
    add("--share", type=float, default=SHARE, help="share of the stage before, 0 to 1")
    args = parser.parse_args()
    if not 0 <= args.share <= 1:
        parser.error(f"--share is {args.share}: give a number from 0 to 1")
    if not (args.model / TRAINING_FILE).is_file():
        parser.error(f"{args.model} has no {TRAINING_FILE}, made by runs.kimi_nano.export from a whole training's log")
    with torch.no_grad():
        average(args.model, args.before, args.share)


if __name__ == "__main__":
    main()
