"""Trains an EAGLE-3 draft on corpora of the target's answers, in one process or, sharded, in several (draft.ranks).

The target runs over each batch for its hidden states (online capture); what fits `keep_gb` is kept for later epochs.
Batches are fixed; the seed gives each epoch an order of its own. So with a schedule in steps, a run depends only on its
options and the number of processes, and one that was stopped and resumed ends with the same bits on the same device.
The saved state is unsharded, so any number of processes can resume it.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from perilune.core.errors import CheckpointError, ConfigError
from perilune.draft import ranks
from perilune.draft.batch import LONGEST_UNROLL
from perilune.draft.capture import Capture
from perilune.draft.corpus import Corpus, Row, require_tokens
from perilune.draft.lessons import Lessons
from perilune.draft.losses import LOSSES
from perilune.draft.optimizer import Optimizer, distribute
from perilune.draft.states import States
from perilune.draft.storage import safe_open, save_file
from perilune.draft.trainee import Trainee
from perilune.draft.vocabulary import most_frequent
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.kimi_k2 import KimiK2
from perilune.model.names import DRAFT_HEAD

STATE = "state.safetensors"
LOG = "log.jsonl"
WARMUP, FALL = 50, 0.5  # steps of warm-up; share of the schedule, its last, in which the learning rate falls to 0
CLIP = 1.0
LOG_STEPS = 20  # steps between lines of the log, at which a run may also be saved


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`steps` > 0 is the length of the schedule; 0: it takes `minutes`."""

    steps: int = 0
    minutes: float = 2.0
    loss: str = "kl"  # of draft.losses
    unroll: int = 5  # chain steps that are trained
    decay: float = 0.9  # weight of a chain step, relative to the one before it
    chains: int = 16384  # of a batch, roughly
    rate: float = 2e-3
    weight_decay: float = 0.1
    seed: int = 0
    keep_gb: float = 8.0
    recompute: bool = False  # attention and logits in the backward pass: slower, in far less memory
    window_share: float = 0.5  # of a batch's chains, where there are mined windows
    save_every: float = 60.0  # seconds

    def __post_init__(self) -> None:
        for name, low in (("unroll", 1), ("chains", 1), ("steps", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, not {getattr(self, name)}")
        if self.unroll > LONGEST_UNROLL:
            raise ConfigError(f"unroll must be at most {LONGEST_UNROLL}, not {self.unroll}")
        if self.loss not in LOSSES:
            raise ConfigError(f"unknown loss {self.loss!r}: choose from {', '.join(LOSSES)}")
        if not 0 < self.window_share < 1:
            raise ConfigError(f"window_share must be between 0 and 1, not {self.window_share}")
        if not self.steps and not self.minutes > 0:
            raise ConfigError("the schedule needs a length: give steps or minutes")


@dataclass(slots=True)
class Progress:
    step: int = 0
    seconds: float = 0.0


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
    windows: Sequence[Corpus] = (),
    start: Mapping[str, Tensor] | None = None,
    own_head: bool = False,
    states: States | None = None,
    capture_tokens: int = 131072,
    stop_after: int = 0,
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
) -> Trainee:
    """Trains to the end of the schedule, going on from `out` if it holds an unfinished run.

    A draft vocabulary smaller than the target's has the most frequent tokens of the corpora. In a group of processes,
    each calls this with the model on its own device.

    windows     mined windows, taught in addition to the corpora (Options.window_share)
    start       the checkpoint that training begins with; default: random weights
    own_head    learn a head; implied by a smaller vocabulary and by a start that has one
    states      hidden states of the corpora, captured before: then only the model's embedding, norm and head are used
    stop_after  save and return after this many steps of this call (0: at the end)
    on_record   is called with every record of the log
    """
    if model.weights.lm_head.format != "dense":
        raise ConfigError(
            "training needs the target's lm_head as floating-point numbers: load it with rest_dtype=dtype"
        )
    if ranks.count() > 1 and not options.steps:
        raise ConfigError("several processes need a schedule in steps, not in minutes: their clocks differ")
    out.mkdir(parents=True, exist_ok=True)
    device = model.weights.norm.device

    def log(kind: str, **record: Any) -> None:
        if ranks.rank() == 0:
            line = {"kind": kind, **record}
            with (out / LOG).open("a") as file:
                file.write(json.dumps(line) + "\n")
            on_record(line)

    rows = [row for corpus in corpora for row in corpus.rows()]
    mined = [row for corpus in windows for row in corpus.rows()]
    require_tokens([*rows, *mined], model.config.vocab_size)
    layers = config.aux_layers(model.config.num_hidden_layers)
    if states is not None:
        rows = _captured(states, [*corpora, *windows], layers, rows, mined, model.weights.norm)
    vocabulary = _vocabulary(config, rows, start)
    own_head = own_head or vocabulary is not None or DRAFT_HEAD in (start or {})
    about = {
        "options": asdict(options),
        "draft": asdict(config),
        "own_head": own_head,
        "corpora": [c.fingerprint() for c in corpora],
        "windows": [c.fingerprint() for c in windows],
        "start": _fingerprint(start) if start is not None else None,
        "states": states.fingerprint() if states is not None else None,
    }
    job = json.dumps(about, sort_keys=True)
    trainee = Trainee(
        config, model.weights.embed, model.weights.lm_head.weight, seed=options.seed, vocabulary=vocabulary,
        own_head=own_head, recompute=options.recompute, start=start,
    )  # fmt: skip
    lessons = Lessons(
        rows,
        states or Capture(model, layers, tokens=capture_tokens),
        device,
        chains=options.chains,
        seed=options.seed,
        keep_bytes=options.keep_gb * 1e9,
        windows=mined,
        window_share=options.window_share,
        part=ranks.rank(),
        parts=ranks.count(),
    )
    if start is None:
        squares = torch.stack([x.float().square().mean() for x in lessons[0][1].chunk(config.num_aux, -1)])
        trainee.settle(ranks.mean(squares).tolist())
    if ranks.count() > 1:
        ranks.shard(trainee, "lesson", device)
    parameters = dict(trainee.named_parameters())
    optimizer = Optimizer(parameters, weight_decay=options.weight_decay)
    progress = _restore(out / STATE, job, parameters, optimizer)
    log(
        "start", rows=len(rows), windows=len(mined), chains=lessons.chains, batches=len(lessons), step=progress.step,
        parameters=sum(p.numel() for p in parameters.values()), processes=ranks.count(), options=asdict(options),
        torch=torch.__version__, device=str(device),
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
            lesson = trainee.lesson(batch, aux, hidden, options.unroll, options.decay, options.loss)
        lesson.loss.backward()
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), CLIP)
        rate = options.rate * rate_at(done, progress.step)
        optimizer.step(rate)
        progress.step += 1
        losses.append(lesson.loss.detach())
        agreements.append(lesson.agreement)
        if progress.step % LOG_STEPS == 0:
            means = ranks.mean(torch.cat([torch.stack(losses).mean()[None], torch.stack(agreements).mean(0)]))
            loss, *agreement = means.tolist()  # waits for the device, so that the time below includes the step
            now = time.monotonic()
            log(
                "step", step=progress.step, epoch=round(progress.step / len(lessons), 2), loss=round(loss, 4),
                agreement=[round(a, 4) for a in agreement], rate=round(rate, 6),
                step_seconds=round((now - spoken) / len(losses), 4), seconds=round(progress.seconds, 1),
            )  # fmt: skip
            losses, agreements, spoken = [], [], now
            if ranks.agreed(now - saved > options.save_every, device):
                _save(out / STATE, job, parameters, optimizer, progress)
                saved = time.monotonic()
    _save(out / STATE, job, parameters, optimizer, progress)
    log("stop", finished=done >= 1.0, **asdict(progress))
    return trainee


def _captured(
    states: States,
    corpora: Sequence[Corpus],
    layers: Sequence[int],
    rows: list[Row],
    mined: list[Row],
    like: Tensor,
) -> list[Row]:
    """The rows of `rows` that have states; all of `mined` must have them."""
    wanted = {"corpora": [c.fingerprint() for c in corpora], "layers": list(layers)}
    if other := [key for key, value in wanted.items() if states.about.get(key) != value]:
        raise ConfigError(f"{states.directory} was captured with other {' and '.join(other)}: capture again")
    found = states.serve([*rows, *mined], like, (len(layers) * len(like), len(like)))
    if not found:
        raise ConfigError(f"{states.directory} holds no states: capture with more --gb, for a file of 65,536 tokens")
    if len(found) < len(rows) and mined:
        raise ConfigError(f"{states.directory} does not hold all corpora, so it has no windows: capture with more --gb")
    return found[: len(rows)]


def _vocabulary(
    config: Eagle3Config, rows: Sequence[Row], start: Mapping[str, Tensor] | None
) -> tuple[int, ...] | None:
    if config.draft_vocab_size == config.vocab_size:
        return None
    if start is None:
        return most_frequent(rows, config.draft_vocab_size, config.vocab_size)
    return tuple((start["d2t"].long() + torch.arange(config.draft_vocab_size)).tolist())


def _fingerprint(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _save(path: Path, job: str, parameters: Mapping[str, Tensor], optimizer: Optimizer, progress: Progress) -> None:
    tensors = {f"master/{name}": p for name, p in parameters.items()}
    whole = ranks.whole(tensors | {f"optimizer/{name}": t for name, t in optimizer.state().items()})
    if ranks.rank() == 0:
        partial = path.with_name(f".{path.name}")
        save_file(whole, partial, {"job": job, "progress": json.dumps(asdict(progress))})
        os.replace(partial, path)


@torch.no_grad()
def _restore(path: Path, job: str, parameters: Mapping[str, Tensor], optimizer: Optimizer) -> Progress:
    if not path.is_file():
        return Progress()
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if not metadata.keys() >= {"job", "progress"}:
            raise CheckpointError(f"{path} is no save of a training: remove it, or choose an empty directory")
        if metadata["job"] != job:
            raise ConfigError(
                f"{path.parent} holds a run with other options or another corpus: repeat that one, or choose an empty "
                "directory"
            )
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    for name, p in parameters.items():
        value = tensors[f"master/{name}"]
        p.copy_(distribute(value, p) if isinstance(p, DTensor) else value)
    kind = "optimizer/"
    optimizer.restore({n.removeprefix(kind): t for n, t in tensors.items() if n.startswith(kind)})
    return Progress(**json.loads(metadata["progress"]))


def options_of(values: Mapping[str, Any]) -> Options:
    """Options from those values that are not None."""
    known = {f.name for f in fields(Options)}
    return Options(**{k: v for k, v in values.items() if k in known and v is not None})
