"""How a checkpoint is read: each byte once however many share the work, and an interrupt leaves nothing behind."""

import os
import signal
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from perilune.bench import loading as bench
from perilune.core.errors import ConfigError
from perilune.dist.slicing import Slicing
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.writer import write
from perilune.loading import jobs, progress
from perilune.loading.load import load
from perilune.model.config import KimiConfig
from perilune.model.names import expected
from tests.cpu.loading.test_load import CONFIG, flat


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    g = torch.Generator().manual_seed(0)
    config = CONFIG | {"vocab_size": 104}  # so that ranks can share it
    shapes = expected(KimiConfig.from_dict(config))
    directory = tmp_path_factory.mktemp("int4")
    tensors = ((name, torch.randn(shape, generator=g)) for name, shape in shapes.items())
    write(directory, tensors, config=config, form="int4", shard_bytes=50_000)
    return directory


@pytest.fixture
def reads(monkeypatch):
    """How often each byte of each tensor was read: {tensor: counts}."""
    counts: dict[str, torch.Tensor] = {}
    real, lock = Checkpoint.read_into, threading.Lock()

    def read_into(self, info, out, start=0):
        with lock:
            seen = counts.setdefault(info.name, torch.zeros(info.nbytes, dtype=torch.int32))
            seen[start : start + out.nbytes] += 1
        real(self, info, out, start)

    monkeypatch.setattr(Checkpoint, "read_into", read_into)
    return counts


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_readers_together_read_each_byte_of_the_experts_once(path, reads, ranks, monkeypatch):
    monkeypatch.setattr(jobs, "STAGE_BYTES", 2048)  # several pieces of each tensor
    whole = load(path, dtype=torch.float32, device="cpu")[1]
    reads.clear()
    parts = [load(path, dtype=torch.float32, device="cpu", slicing=Slicing(r, ranks, True))[1] for r in range(ranks)]
    experts_read = {name: seen for name, seen in reads.items() if ".mlp.experts." in name}
    with Checkpoint.open(path) as checkpoint:
        assert experts_read.keys() == {name for name in checkpoint.tensors if ".mlp.experts." in name}
    for name, seen in experts_read.items():
        assert (seen == 1).all(), name
    for i in (1, 2):
        experts = [flat(p.layers[i].ffn.experts) for p in parts]
        for joined, tensor in zip(zip(*experts), flat(whole.layers[i].ffn.experts)):
            assert torch.cat(joined).equal(tensor)
        assert all(p.layers[i].ffn.gate.equal(whole.layers[i].ffn.gate) for p in parts)


def test_the_bar_sums_what_ranks_read(path, monkeypatch):
    bars = []

    class Kept(progress.Bar):
        def __init__(self, name):
            super().__init__(name)
            bars.append(self)

    monkeypatch.setattr(progress, "Bar", Kept)
    load(path, dtype=torch.float32, device="cpu", progress=True, threads=1, slicing=Slicing(1, 2, True))
    task = bars[0]._bar.tasks[0]
    assert task.completed == task.total > 0 and task.description == path.name
    bars[0].report(1, 5, 100)
    assert (task.completed, task.total) == (bars[0]._ranks[0][0] + 5, bars[0]._ranks[0][1] + 100)


@pytest.mark.parametrize("ranks", [5, 8])
def test_more_ranks_than_experts(path, ranks):
    with pytest.raises(ConfigError, match=r"4 heads|cannot be shared out"):
        load(path, dtype=torch.float32, device="cpu", slicing=Slicing(0, ranks, True))


@pytest.mark.parametrize("when", [1, 4, 9])
def test_an_interrupt_stops_every_thread_at_its_next_piece(path, monkeypatch, when):
    """Pieces last from the interrupt on until the loader has noticed it, and every tensor has many: without the check
    between pieces each thread would go on with its next one.

    It may come while threads are still being started.
    """
    monkeypatch.setattr(jobs, "STAGE_BYTES", 256)
    real, pieces, begun = Checkpoint.read_into, Counter(), threading.Event()
    made = []  # the loader's events; the first says that it stops

    def event():
        made.append(threading.Event())
        return made[-1]

    def slow(self, info, out, start=0):
        pieces.update(n=1)
        if pieces["n"] >= when:
            begun.set()
        if begun.is_set():
            assert made[0].wait(60)
        else:
            time.sleep(0.01)
        real(self, info, out, start)

    monkeypatch.setattr(jobs, "threading", SimpleNamespace(Event=event, Thread=threading.Thread))
    monkeypatch.setattr(Checkpoint, "read_into", slow)
    stopper = threading.Thread(target=lambda: (begun.wait(), os.kill(os.getpid(), signal.SIGINT)))
    stopper.start()
    with pytest.raises(KeyboardInterrupt):
        load(path, dtype=torch.float32, device="cpu", threads=4)
    stopper.join()
    assert pieces["n"] <= when + 4, "each thread ends with its piece"
    # A thread that was interrupted while it was started may still begin; it finds that there is nothing to do.
    while left := [t for t in threading.enumerate() if t.name.startswith("load-") and t.ident is not None]:
        left[0].join(60)
        assert not left[0].is_alive()


def test_the_bench_checkpoint_is_what_it_says(tmp_path):
    """Sizes are computed before anything is written, and what cannot be is refused then."""
    config = bench._config(12)
    assert config.hidden_size == 7168 and config.moe_intermediate_size == 2048 and config.num_hidden_layers == 3
    assert 11.9e9 < bench._bytes(config) <= 12e9
    assert bench._config(40).num_hidden_layers > 3
    with pytest.raises(ConfigError, match="ask for more"):
        bench._config(0.5)
    with pytest.raises(ConfigError, match="are needed"):
        bench._require_room(tmp_path, 10**18)
    parts = dict(bench._tensors("model.layers.1.mlp.experts.0.up_proj.weight", (64, 256)))
    assert {k.rsplit(".", 1)[1]: (tuple(v.shape), v.dtype) for k, v in parts.items()} == {
        "weight_packed": ((64, 32), torch.int32),
        "weight_scale": ((64, 8), torch.bfloat16),
        "weight_shape": ((2,), torch.int64),
    }
    assert all(v.isfinite().all() for v in parts.values())
