"""A training run's checkpoint: one safetensors file with all that is needed to go on, written whole, then renamed.

Tensors: the optimiser's "master.NAME", "first.NAME" and "second.NAME", and the routers' biases as "buffer.NAME", all
float32. Metadata: the model's shape and the progress, as JSON.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from runs.kimi_nano.model import KimiNano, Shape
from runs.kimi_nano.optim import Optimizer

CHECKPOINT = "checkpoint.safetensors"
LOG_FILE = "log.jsonl"
EYES_FILE = "model-vision.safetensors"  # beside the text model's shards
TRAINING_FILE = "training.json"  # beside exported weights: what the training logs say of them (card.py)


@dataclass
class Progress:
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    learnt: int = 0  # tokens that were targets


def contents(model: KimiNano, optimizer: Optimizer) -> dict[str, Tensor]:
    biases = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    return optimizer.state | {f"buffer.{name}": bias for name, bias in biases.items()}


def save(path: Path, model: KimiNano, optimizer: Optimizer, progress: Progress) -> None:
    partial = path.with_name(f".{path.name}")
    metadata = {"shape": json.dumps(asdict(model.s)), "progress": json.dumps(asdict(progress))}
    tensors = {name: t.detach().cpu().contiguous() for name, t in contents(model, optimizer).items()}
    save_file(tensors, partial, metadata)
    os.replace(partial, path)


def load(path: Path) -> tuple[Shape, Progress, dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    return Shape(**json.loads(metadata["shape"])), Progress(**json.loads(metadata["progress"])), tensors


def progress_of(path: Path) -> Progress:
    with safe_open(path, "pt") as file:
        return Progress(**json.loads(file.metadata()["progress"]))


@torch.no_grad()
def restore(path: Path, model: KimiNano, optimizer: Optimizer) -> None:
    """Fills model and optimiser; the model's weights are those of the next `Optimizer.publish`."""
    shape, _, tensors = load(path)
    if shape != model.s:
        sys.exit(f"{path} was made with another shape: {shape}")
    wanted = contents(model, optimizer)
    if wanted.keys() != tensors.keys():
        sys.exit(f"{path} was made with another optimiser: resume with the same one")
    for name, tensor in tensors.items():
        wanted[name].copy_(tensor)
