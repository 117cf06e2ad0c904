"""How a checkpoint is read: each byte once however many share the work, and an interrupt leaves nothing behind."""

import os
import signal
import threading
import time
from collections import Counter

import pytest
import torch

from perilune.bench import loading as bench
from perilune.core.errors import ConfigError
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.writer import write
from perilune.loading import load as loading
from perilune.loading.load import load
from perilune.model.config import KimiConfig
from perilune.model.names import expected
from tests.cpu.loading.test_load import CONFIG, flat


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    g = torch.Generator().manual_seed(0)
    shapes = expected(KimiConfig.from_dict(CONFIG))
    directory = tmp_path_factory.mktemp("int4")
    tensors = ((name, torch.randn(shape, generator=g)) for name, shape in shapes.items())
    write(directory, tensors, config=CONFIG, form="int4", shard_bytes=50_000)
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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_readers_together_read_each_byte_of_the_experts_once(path, reads, ranks, monkeypatch):
    monkeypatch.setattr(loading, "STAGE_BYTES", 2048)  # several pieces of each tensor
    whole = load(path, dtype=torch.float32, device="cpu")[1]
    reads.clear()
    parts = [load(path, dtype=torch.float32, device="cpu", part=(r, ranks))[1] for r in range(ranks)]
    with Checkpoint.open(path) as checkpoint:
        assert reads.keys() == checkpoint.tensors.keys()
    for name, seen in reads.items():
        assert (seen == (1 if ".mlp.experts." in name else ranks)).all(), name
    for i in (1, 2):
        experts = [flat(p.layers[i].ffn.experts) for p in parts]
        for joined, tensor in zip(zip(*experts), flat(whole.layers[i].ffn.experts)):
            assert torch.cat(joined).equal(tensor)
        assert all(p.layers[i].ffn.gate.equal(whole.layers[i].ffn.gate) for p in parts)


def test_the_bar_ends_at_what_a_part_reads(path, monkeypatch):
    seen = Counter()

    class Bar:
        def __init__(self, name, total):
            seen["total"] += total

        def __enter__(self):
            return lambda n: seen.update(read=n)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(loading, "_progress", Bar)
    load(path, dtype=torch.float32, device="cpu", progress=True, threads=1, part=(1, 3))
    assert seen["read"] == seen["total"] > 0


@pytest.mark.parametrize("part", [(1, 1), (-1, 2), (0, 5), (0, 0)])
def test_a_part_that_does_not_exist(path, part):
    with pytest.raises(ConfigError, match="rank must be below ranks"):
        load(path, dtype=torch.float32, device="cpu", part=part)


@pytest.mark.parametrize("when", [1, 4, 9])
def test_an_interrupt_stops_every_thread_at_its_next_piece(path, monkeypatch, when):
    """Pieces take 0.5 s each from the interrupt on, and every tensor has many: without the check between pieces each
    thread would go on with its next one. On a busy machine the interrupt may arrive a second late.

    It may come while threads are still being started.
    """
    monkeypatch.setattr(loading, "STAGE_BYTES", 256)
    real, pieces, begun = Checkpoint.read_into, Counter(), threading.Event()

    def slow(self, info, out, start=0):
        pieces.update(n=1)
        if pieces["n"] >= when:
            begun.set()
        time.sleep(0.5 if begun.is_set() else 0.01)
        real(self, info, out, start)

    monkeypatch.setattr(Checkpoint, "read_into", slow)
    stopper = threading.Thread(target=lambda: (begun.wait(), os.kill(os.getpid(), signal.SIGINT)))
    stopper.start()
    with pytest.raises(KeyboardInterrupt):
        load(path, dtype=torch.float32, device="cpu", threads=4)
    stopper.join()
    assert pieces["n"] <= 20
    count = pieces["n"]
    time.sleep(0.6)
    assert pieces["n"] == count and not [t for t in threading.enumerate() if t.name.startswith("load-")]


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
