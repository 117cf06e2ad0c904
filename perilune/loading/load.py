"""From a model directory to weights in memory.

First every tensor's name, shape and type is checked against the configuration, then all destinations are allocated
(weights_plan.py), then threads fill them straight from the files (jobs.py). Each of several ranks reads and holds only
its slices (dist/slicing.py). Beyond the weights, each thread holds one staging buffer and, for a moment, rows that it
rearranges or dequantises: those of kv_b_proj (17 MB in Kimi K2), or float32 rows of another matrix, about as large as
the staging buffer.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from perilune.core.errors import ConfigError, sized
from perilune.dist.slicing import WHOLE, Slicing
from perilune.formats import synthetic
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.served import require_served
from perilune.loading import jobs
from perilune.loading.apart import Apart
from perilune.loading.progress import Report, counted
from perilune.loading.rounding import Rounding
from perilune.loading.survey import spell, survey
from perilune.loading.synthetic import random_weights
from perilune.loading.weights_plan import WeightsPlan
from perilune.model.config import KimiConfig
from perilune.model.weights import Layer, Weights

MAX_THREADS = 8  # one H200 took 14.8 GB/s from the page cache with 8, 12.6 with 16


def load(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    threads: int | None = None,
    progress: bool | Report = False,
    slicing: Slicing = WHOLE,
    rounding: Rounding | None = None,
    apart: bool = False,
) -> tuple[KimiConfig, Weights]:
    """The configuration and weights of the checkpoint in `path`, or random ones by its mark (formats/synthetic.py).

    dtype     of every floating-point weight but the router (float32) and quantisation scales (as stored)
    threads   reading at once; default: one per CPU, at most 8
    progress  show a bar on stderr; or a function that is called with (bytes read, bytes to read), now and then
    slicing   what this rank holds: the same records, narrower. Bytes of other ranks' slices are not read
    rounding  if given, scales of INT4 experts become compact, and their errors are added to it
    apart     allocate dense linear layers in separate memory, because the caller will convert them (apart.py)

    Raises CheckpointError naming what is wrong with the directory, ConfigError if the weights do not fit the device or
    a tensor cannot be split over so many ranks.
    After an interrupt it ends once the pieces that are being read are complete, and no thread is left.
    """
    config = KimiConfig.from_directory(path)
    memory = Apart(torch.device(device)) if apart else None
    if (mark := synthetic.read(path)) is not None:
        made = random_weights(
            config, dtype=dtype, device=device, seed=mark.seed, slicing=slicing, rounding=rounding, apart=memory
        )
        return config, made
    require_served(config.quantization, str(path))
    with Checkpoint.open(path) as checkpoint, torch.no_grad():
        found = survey(checkpoint, config)
        plan = WeightsPlan(config, checkpoint, found, dtype, torch.device(device), slicing, rounding, memory)
        try:
            weights = plan.weights()
        except RuntimeError as e:  # torch.OutOfMemoryError on a GPU, a plain RuntimeError on the CPU
            raise ConfigError(
                f"{path}: cannot allocate the weights ({sized(found.text_bytes)} as stored) as {spell(dtype)} "
                f"on {device}: {str(e).splitlines()[0]}"
            ) from e
        # Moves the jobs, which refer to the plan, out of it: the cycle would keep a closed model's weights alive.
        todo, plan.jobs = plan.jobs, []
        with counted(path.name, sum(job.nbytes for job in todo), progress) as advance:
            jobs.run(todo, threads or default_threads(), torch.device(device), advance)
    return config, weights


def layers(
    path: Path, *, dtype: torch.dtype, device: torch.device | str, threads: int | None = None
) -> Iterator[Layer]:
    """The layers of the checkpoint in `path`, in order, each loaded when it is asked for: a caller that keeps no layer
    needs memory for one layer. Raises as `load`."""
    config = KimiConfig.from_directory(path)
    require_served(config.quantization, str(path))
    with Checkpoint.open(path) as checkpoint, torch.no_grad():
        plan = WeightsPlan(config, checkpoint, survey(checkpoint, config), dtype, torch.device(device))
        for number in range(config.num_hidden_layers):
            try:
                layer = plan.layer(number)
            except RuntimeError as e:  # torch.OutOfMemoryError on a GPU, a plain RuntimeError on the CPU
                raise ConfigError(
                    f"{path}: cannot allocate layer {number} as {spell(dtype)} on {device}: {str(e).splitlines()[0]}"
                ) from e
            jobs.run(plan.jobs, threads or default_threads(), torch.device(device), _ignore)
            plan.jobs.clear()
            yield layer
            del layer  # drop the last reference: otherwise this layer would stay in memory beside the next one


def default_threads() -> int:
    return min(MAX_THREADS, os.cpu_count() or 1)


def _ignore(_: int) -> None: ...
