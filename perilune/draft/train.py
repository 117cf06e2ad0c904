"""Trains an EAGLE-3 draft on corpora of the target's answers.

The target runs over each batch for its hidden states (online capture); what fits `keep_gb` is kept for later epochs.
Batches are fixed, their order is drawn anew for each epoch from the seed, so with a schedule in steps a run is a
function of its options, and one that was stopped and resumed ends with the same bits on the same device.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from perilune.core.errors import CheckpointError, ConfigError
from perilune.draft.capture import Capture
from perilune.draft.collect import LEAST_ANSWER
from perilune.draft.corpus import Corpus, Row
from perilune.draft.trainee import Batch, Trainee
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.kimi_k2 import KimiK2
from perilune.model.weights import Dense

STATE = "state.safetensors"
LOG = "log.jsonl"
WARMUP, FALL = 50, 0.5  # steps; share of the schedule in which the learning rate falls to zero
CLIP = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`steps` > 0 is the schedule's length, else it takes `minutes`."""

    steps: int = 0
    minutes: float = 2.0
    unroll: int = 5  # chain steps that are trained
    decay: float = 0.9  # weight of a chain step, relative to the one before it
    chains: int = 16384  # of a batch, roughly
    rate: float = 2e-3
    weight_decay: float = 0.1
    seed: int = 0
    keep_gb: float = 8.0
    save_every: float = 60.0  # seconds

    def __post_init__(self) -> None:
        for name, low in (("unroll", 1), ("chains", 1), ("steps", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if not self.steps and not self.minutes > 0:
            raise ConfigError("the schedule needs a length: give steps or minutes")


@dataclass(slots=True)
class Progress:
    step: int = 0
    seconds: float = 0.0


class Lessons:
    """The corpus as batches with what the target computes for them."""

    def __init__(self, rows: Sequence[Row], capture: Capture, *, chains: int, seed: int, keep_bytes: float) -> None:
        usable = [row for row in rows if row.given and len(row.ids) - row.given >= LEAST_ANSWER]
        if not usable:
            raise CheckpointError("the corpus has no answer long enough to learn from: collect more")
        Random(f"{seed}:batches").shuffle(usable)
        self._members: list[list[Row]] = []
        count = chains
        for row in usable:
            if count >= chains:
                self._members.append([])
                count = 0
            self._members[-1].append(row)
            count += len(row.ids) - row.given - 1
        for members in self._members:
            members.sort(key=lambda row: len(row.ids))  # padded less
        self._capture = capture
        self._kept: dict[int, tuple[Batch, Tensor, Tensor]] = {}
        self._room = keep_bytes
        self.chains = sum(len(row.ids) - row.given - 1 for row in usable)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, i: int) -> tuple[Batch, Tensor, Tensor]:
        """(batch, aux [N, A D], hidden [taught tokens, D])."""
        if i in self._kept:
            return self._kept[i]
        rows = self._members[i]
        batch = Batch.of(rows, self._capture.model.weights.norm.device)
        found = self._capture([row.ids for row in rows])
        lesson = (batch, found.aux, found.hidden[batch.taught])
        self._room -= batch.nbytes + sum(t.nbytes for t in lesson[1:])
        if self._room > 0:
            self._kept[i] = lesson
        return lesson


class Optimizer:
    """Muon for matrices, AdamW for norms."""

    def __init__(self, parameters: Mapping[str, Tensor], options: Options) -> None:
        self.names = [
            [name for name, p in parameters.items() if (p.dim() > 1) == matrices] for matrices in (True, False)
        ]
        matrices, vectors = ([parameters[name] for name in names] for names in self.names)
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(
                matrices, lr=options.rate, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(vectors, lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, rate: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
            part.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Every tensor it remembers, as "NAME:KEY"."""
        found: dict[str, Tensor] = {}
        for names, part in zip(self.names, self.parts):
            for i, values in part.state_dict()["state"].items():
                found |= {f"{names[i]}:{key}": value for key, value in values.items()}
        return found

    def restore(self, state: Mapping[str, Tensor]) -> None:
        for names, part in zip(self.names, self.parts):
            own: dict[int, dict[str, Tensor]] = {}
            for key, value in state.items():
                name, _, field = key.rpartition(":")
                if name in names:
                    own.setdefault(names.index(name), {})[field] = value
            part.load_state_dict({**part.state_dict(), "state": own})


def rate_at(done: float, step: int) -> float:
    """Share of the peak learning rate; `done` 0..1 of the schedule, `step` from 0."""
    return min((step + 1) / WARMUP, 1.0, max((1.0 - done) / FALL, 0.0))


def train(
    model: KimiK2,
    config: Eagle3Config,
    corpora: Sequence[Corpus],
    out: Path,
    options: Options,
    *,
    capture_tokens: int = 131072,
    stop_after: int = 0,
    tell: Callable[[dict[str, Any]], None] = lambda record: None,
) -> Trainee:
    """Trains to the end of the schedule, going on from `out` if it holds an unfinished run.

    stop_after  leave after so many steps of this call, saved (0: at the end)
    tell        gets every line of the log
    """
    if not isinstance(model.weights.lm_head, Dense):
        raise ConfigError(
            "training needs the target's lm_head as floating-point numbers: load it with rest_dtype=dtype"
        )
    out.mkdir(parents=True, exist_ok=True)
    device = model.weights.norm.device
    job = json.dumps({"options": asdict(options), "corpora": [c.fingerprint() for c in corpora]}, sort_keys=True)

    def log(kind: str, **record: Any) -> None:
        line = {"kind": kind, **record}
        with (out / LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")
        tell(line)

    trainee = Trainee(config, model.weights.embed, model.weights.lm_head.weight, seed=options.seed)
    optimizer = Optimizer(trainee.parameters, options)
    progress = _restore(out / STATE, job, trainee, optimizer)
    capture = Capture(model, config.aux_layers(model.config.num_hidden_layers), tokens=capture_tokens)
    rows = [row for corpus in corpora for row in corpus.rows()]
    lessons = Lessons(rows, capture, chains=options.chains, seed=options.seed, keep_bytes=options.keep_gb * 1e9)
    log(
        "start", rows=len(rows), chains=lessons.chains, batches=len(lessons), step=progress.step,
        parameters=sum(p.numel() for p in trainee.parameters.values()), torch=torch.__version__, device=str(device),
    )  # fmt: skip
    began = saved = spoken = time.monotonic()
    before, first = progress.seconds, progress.step
    losses: list[Tensor] = []
    agreements: list[Tensor] = []
    while True:
        progress.seconds = before + time.monotonic() - began
        done = progress.step / options.steps if options.steps else progress.seconds / (options.minutes * 60)
        if done >= 1.0 or (stop_after and progress.step - first >= stop_after):
            break
        epoch, place = divmod(progress.step, len(lessons))
        order = list(range(len(lessons)))
        Random(f"{options.seed}:epoch:{epoch}").shuffle(order)
        batch, aux, hidden = lessons[order[place]]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            lesson = trainee.lesson(batch, aux, hidden, options.unroll, options.decay)
        lesson.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(trainee.parameters.values()), CLIP)
        rate = options.rate * rate_at(done, progress.step)
        optimizer.step(rate)
        progress.step += 1
        losses.append(lesson.loss.detach())
        agreements.append(lesson.agreement)
        if progress.step % 20 == 0:
            loss = float(torch.stack(losses).mean())  # waits for the device, so the time below is true
            now = time.monotonic()
            log(
                "step", step=progress.step, epoch=round(progress.step / len(lessons), 2), loss=round(loss, 4),
                agreement=[round(a, 4) for a in torch.stack(agreements).mean(0).tolist()], rate=round(rate, 6),
                step_seconds=round((now - spoken) / len(losses), 4), seconds=round(progress.seconds, 1),
            )  # fmt: skip
            losses, agreements, spoken = [], [], now
        if time.monotonic() - saved > options.save_every:
            _save(out / STATE, job, trainee, optimizer, progress)
            saved = time.monotonic()
    _save(out / STATE, job, trainee, optimizer, progress)
    log("stop", finished=done >= 1.0, **asdict(progress))
    return trainee


def _save(path: Path, job: str, trainee: Trainee, optimizer: Optimizer, progress: Progress) -> None:
    tensors = {f"master/{name}": p for name, p in trainee.parameters.items()}
    tensors |= {f"optimizer/{name}": t for name, t in optimizer.state().items()}
    partial = path.with_name(f".{path.name}")
    save_file(
        {name: t.detach().cpu().contiguous() for name, t in tensors.items()},
        partial,
        {"job": job, "progress": json.dumps(asdict(progress))},
    )
    os.replace(partial, path)


@torch.no_grad()
def _restore(path: Path, job: str, trainee: Trainee, optimizer: Optimizer) -> Progress:
    if not path.is_file():
        return Progress()
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        if metadata["job"] != job:
            raise ConfigError(
                f"{path.parent} holds a run with other options or another corpus: repeat that one, or choose an empty "
                "directory"
            )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    for name, p in trainee.parameters.items():
        p.copy_(tensors[f"master/{name}"])
    kind = "optimizer/"
    optimizer.restore({n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)})
    return Progress(**json.loads(metadata["progress"]))


def options_of(values: Mapping[str, Any]) -> Options:
    """Options from those values that are not None."""
    known = {f.name for f in fields(Options)}
    return Options(**{k: v for k, v in values.items() if k in known and v is not None})
