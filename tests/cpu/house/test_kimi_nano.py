"""kimi-nano's trainer: packing, decoding, resuming and export compute the same thing in every form they come in."""

import itertools
import json
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import perilune
from perilune.core.sampling import SamplingParams
from perilune.engine.llm import LLM
from perilune.formats.checkpoint import Checkpoint
from perilune.tasks import words
from perilune.tasks.families import FAMILIES, THINKING_SHARE, Family, check, problems, training_mix
from perilune.tasks.problem import Problem
from perilune.text.tokenizer import Tokenizer
from runs.kimi_nano import data, experts
from runs.kimi_nano import train as trainer
from runs.kimi_nano.attention import Packed, padded
from runs.kimi_nano.data import SPLIT_TOKENS, Blocks, Codec
from runs.kimi_nano.decode import greedy
from runs.kimi_nano.evaluate import parse_answer
from runs.kimi_nano.export import export, read_back
from runs.kimi_nano.model import EAGER, KimiNano, Shape, compiled, int4_grid, route
from runs.kimi_nano.optim import Optimizer, is_expert, orthogonalise
from runs.kimi_nano.ranks import start
from runs.kimi_nano.state import CHECKPOINT, LOG_FILE, TRAINING_FILE, load
from runs.kimi_nano.tokenizer import count, learn
from runs.kimi_nano.train import Options, rate_at, train

NANO = Path(perilune.__file__).parent / "bundled" / "kimi-nano"
SMALL = Shape(
    vocab_size=640, hidden_size=64, num_hidden_layers=2, intermediate_size=64, moe_intermediate_size=32,
    n_routed_experts=4, num_experts_per_tok=2, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16,
    qk_rope_head_dim=16, v_head_dim=16, num_attention_heads=2,
)  # fmt: skip


def options(out: Path, **changes: object) -> Options:
    fixed = dict(device="cpu", tokens=2048, steps=4, workers=0, compile=False, score_count=0, problems=200, shape=SMALL)
    return Options(out, **(fixed | changes))


@pytest.fixture(autouse=True)
def no_words_are_left_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks learn words for the whole process, and other tests expect the problems of a fresh one."""
    monkeypatch.setattr(words, "_learnt", ())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps."""
    out = tmp_path_factory.mktemp("run")
    files = sorted(Path(trainer.__file__).parent.glob("*.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "library_files", lambda: files)
        patch.setattr(words, "_learnt", ())
        train(options(out), time.monotonic())
    return out


def alone(model: KimiNano, ids: list[int]) -> torch.Tensor:
    """Logits [n, vocab] of one sample by itself."""
    packed = Packed(torch.tensor([0, len(ids)], dtype=torch.int32), len(ids), len(ids))
    hidden = model.hidden(torch.tensor(ids), packed.positions(), padded(packed, model.s.softmax_scale))
    return model.logits(hidden).detach()


def naive(text: str, merges: int) -> list[bytes]:
    """BPE by counting all pairs anew for each merge."""
    words = [([bytes([b]) for b in piece.encode()], n) for piece, n in sorted(count([text]).items())]
    ranks = [bytes([b]) for b in range(256)]
    while len(ranks) < 256 + merges:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for parts, n in words:
            for pair in itertools.pairwise(parts):
                pairs[pair] += n
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        ranks.append(b"".join(best))
        for parts, _ in words:
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i : i + 2] = [ranks[-1]]
                i += 1
    return ranks


def test_incremental_bpe_equals_the_naive_one() -> None:
    text = Path(trainer.__file__).read_text()
    assert learn(count([text]), 60) == naive(text, 60)
    with pytest.raises(ValueError, match="yields only"):
        learn(count(["ab"]), 60)


def test_packed_samples_do_not_see_each_other() -> None:
    torch.manual_seed(1)
    model = KimiNano(SMALL)
    samples = [torch.randint(0, 640, (n,)).tolist() for n in (5, 1, 17)]
    packed = Packed(torch.tensor([0, 5, 6, 23], dtype=torch.int32), 17, 23)
    stream = torch.tensor([t for s in samples for t in s])
    logits = model.logits(model.hidden(stream, packed.positions(), padded(packed, SMALL.softmax_scale)))
    assert torch.allclose(logits, torch.cat([alone(model, s) for s in samples]), atol=1e-5)


def test_cached_decoding_equals_recomputation() -> None:
    torch.manual_seed(2)
    model = KimiNano(SMALL)
    prompts = [torch.randint(0, 640, (n,)).tolist() for n in (9, 2)]
    for prompt, answer in zip(prompts, greedy(model, prompts, end=-1, limit=6)):
        ids = list(prompt)
        for _ in range(6):
            ids.append(int(alone(model, ids)[-1].argmax()))
        assert ids[len(prompt) :] == answer


def test_route_picks_by_the_bias_and_weighs_without_it() -> None:
    torch.manual_seed(3)
    h, router, bias = torch.randn(50, 64), torch.randn(8, 64) / 8, torch.randn(8)
    weights, got = route(h, router, bias, 3, 2.5)
    scores = torch.sigmoid(F.linear(h, router))
    ids = torch.topk(scores + bias, 3).indices
    wanted = torch.zeros(50, 8).scatter(1, ids, scores.gather(1, ids))
    assert torch.allclose(weights, wanted / wanted.sum(-1, keepdim=True) * 2.5, atol=1e-6)
    assert torch.equal(got, torch.bincount(ids.flatten(), minlength=8).float())


def test_grouped_experts_are_the_dense_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and all gradients, with as many tokens for an expert as routing gives, none for some."""
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    monkeypatch.setattr(experts, "compiled", lambda: (experts.inner, experts.inner_backward, experts.gathered))
    torch.manual_seed(8)
    model = KimiNano(replace(SMALL, n_routed_experts=6))
    first = next(iter(model.routers()))
    first.e_score_correction_bias[1] = -10.0  # never chosen
    tokens = torch.randint(0, SMALL.vocab_size, (90,))
    packed = Packed(torch.tensor([0, 31, 90], dtype=torch.int32), 59, 90)
    found = []
    for blocks in (EAGER, compiled(grouped=True)):
        model.zero_grad()
        loss = model.loss(tokens, packed.positions(), tokens.roll(-1), padded(packed, model.s.softmax_scale), blocks)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) == len(list(model.parameters())) + 1
    for dense, grouped in zip(*found, strict=True):
        assert torch.allclose(dense, grouped, rtol=1e-4, atol=1e-5)
    assert not first.load[1] and first.load.sum() == 2 * 90 * 2  # both runs, two experts each


def test_orthogonalise() -> None:
    torch.manual_seed(4)
    for shape in ((2, 24, 40), (2, 40, 24)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape), torch.float32))
        assert values.min() > 0.6 and values.max() < 1.3


def test_published_weights_are_what_is_served() -> None:
    torch.manual_seed(5)
    model = KimiNano(SMALL)
    optimizer = Optimizer(model, muon=True, decay=0.1)
    optimizer.publish()
    for name, p in model.named_parameters():
        master = optimizer.state[f"master.{name}"]
        assert torch.equal(p, int4_grid(master) if is_expert(name) else master), name
        assert is_expert(name) == (not torch.equal(p, master)), name


def test_schedule() -> None:
    assert rate_at(0.0, 0) < 0.01 and rate_at(0.3, 1000) == 1.0 and rate_at(0.6, 1000) == 1.0
    assert rate_at(0.8, 1000) == pytest.approx(0.5) and rate_at(1.0, 1000) == 0.0
    assert rate_at(0.0, 0, cosine=True) < 0.01 and rate_at(0.5, 1000, cosine=True) == pytest.approx(0.5)
    assert 0.85 < rate_at(0.25, 1000, cosine=True) < 0.86 and rate_at(1.0, 1000, cosine=True) == 0.0


def test_blocks_learn_only_the_last_turn(run: Path) -> None:
    codec, size = Codec(run), 4096
    block = Blocks(run, 1, size, 7)
    made = next(iter(block))
    assert torch.equal(made["stream"], next(iter(Blocks(run, 1, size, 7)))["stream"])
    assert not torch.equal(made["stream"], next(iter(Blocks(run, 1, size, 8)))["stream"])
    ids, targets = made["stream"].tolist()
    bounds = made["starts"].tolist()
    assert bounds[0] == 0 and bounds[-1] == size and sorted(bounds) == bounds
    turns = 0
    for begin, end in itertools.pairwise(bounds):
        learnt = [t for t in targets[begin:end] if t >= 0]
        assert targets[end - 1] == -1
        if learnt and ids[end - 1] == codec.end:
            turns += 1
            assert ids[end - len(learnt) : end] == learnt
            assert codec.tokenizer.special("<|im_assistant|>") not in learnt
    assert turns > 3


def test_a_generator_that_fails_is_printed_and_left_out(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = itertools.count()

    def failing(rng: random.Random, families: dict[str, Family]) -> Problem:
        if next(calls) % 40 == 0:
            raise IndexError("no second item")
        return training_mix(rng, families)

    monkeypatch.setattr(data, "training_mix", failing)
    blocks = iter(Blocks(run, 1, 4096, 7))
    next(blocks)
    assert "no second item" in capsys.readouterr().err
    monkeypatch.setattr(data, "training_mix", lambda rng, families: [][0])
    with pytest.raises(IndexError):
        next(blocks)


def test_split_tokens_have_the_same_bytes(run: Path) -> None:
    codec = Codec(run)
    ids = codec.tokenizer.encode("The harbour master counted eleven barges before breakfast. " * 40)
    split = codec.split(ids, random.Random(1))
    assert codec.tokenizer.decode(split) == codec.tokenizer.decode(ids)
    assert 0.5 * SPLIT_TOKENS < len(split) / len(ids) - 1 < 1.5 * SPLIT_TOKENS
    assert codec.split([codec.end, codec.think_end] * 99, random.Random(2)) == [codec.end, codec.think_end] * 99


def test_weights_count_the_tokens_that_problems_have() -> None:
    codec, rng, count = Codec(NANO), random.Random(4), 120
    for one in FAMILIES.values():
        drawn = [one.sample(rng, "train", rng.random() < THINKING_SHARE) for _ in range(count)]
        tokens = sum(len(codec.prompt(p)) + len(codec.target(p)) for p in drawn) / count
        assert 0.75 < tokens / one.tokens < 1.25, f"{one.name}: a problem has {tokens:.0f} tokens, not {one.tokens}"


def test_expected_answers_pass_their_checks(run: Path) -> None:
    codec = Codec(run)
    for name in ("add_sub", "tool_call", "tools_multi", "json_extract"):
        for thinking in (True, False):
            for p in problems(name, "heldout", 5, seed=1, thinking=thinking):
                target = codec.target(p)
                assert target[-1] == codec.end
                assert check(p, parse_answer(codec, target[:-1], thinking)), p
                assert not check(p, parse_answer(codec, [], thinking)), p


def test_resumed_run_equals_an_uninterrupted_one(run: Path, tmp_path: Path) -> None:
    for name in ("tiktoken.model", "tokenizer_config.json", "corpus.npz", "passages.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())

    class Interrupted(Exception):
        pass

    calls = itertools.count()
    plain = trainer.backward

    def failing(*args: object) -> object:
        if next(calls) == 2:
            raise Interrupted
        return plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "backward", failing)
        with pytest.raises(Interrupted):
            train(options(tmp_path, save_every=0.0), time.monotonic())
    assert load(tmp_path / CHECKPOINT)[1].step == 2
    train(options(tmp_path, resume=True), time.monotonic())
    (_, first, whole), (_, second, parts) = load(run / CHECKPOINT), load(tmp_path / CHECKPOINT)
    assert first.step == second.step == 4 and whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_two_ranks_learn_from_both_blocks(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of two processes is that of one with their blocks one behind the other: gradients, loads of experts."""
    outs = [tmp_path / name for name in ("two", "one")]
    for out in outs:
        out.mkdir()
        for name in ("tiktoken.model", "tokenizer_config.json", "corpus.npz", "passages.json"):
            (out / name).write_bytes((run / name).read_bytes())
    start(2, train, options(outs[0], gpus=2, steps=1), time.monotonic())

    class Joined(Blocks):
        def _block(self, number: int) -> dict[str, torch.Tensor]:
            a, b = (super(Joined, self)._block(2 * number + i) for i in range(2))
            starts = torch.cat((a["starts"], b["starts"][1:] + self.size))
            return {"stream": torch.cat((a["stream"], b["stream"]), 1), "starts": starts}

    monkeypatch.setattr(trainer, "Blocks", Joined)
    train(options(outs[1], steps=1), time.monotonic())
    (_, shared, two), (_, whole, one) = (load(out / CHECKPOINT) for out in outs)
    assert shared.learnt == whole.learnt and shared.tokens == 2 * whole.tokens == 4096
    for name, tensor in one.items():
        if name.startswith(("first", "buffer")):
            assert torch.allclose(two[name], tensor, rtol=1e-3, atol=1e-7), name
    stop = json.loads((outs[0] / LOG_FILE).read_text().splitlines()[-1])
    assert stop["kind"] == "stop" and stop["apart"] == 0.0


def test_training_goes_on_from_an_export(run: Path, tmp_path: Path) -> None:
    """The weights, the vocabulary and the shape are the export's; a resumed part keeps its own."""
    model, out = tmp_path / "model", tmp_path / "second"
    export(run, model, shard_bytes=100_000)
    (model / TRAINING_FILE).write_text(json.dumps({"steps": 4}))
    before = read_back(model).state_dict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "library_files", lambda: sorted(Path(trainer.__file__).parent.glob("*.py")))
        train(options(out, model=model, rate=0.0, decay=0.0, steps=2, shape=Shape()), time.monotonic())
        shape, progress, tensors = load(out / CHECKPOINT)
        assert shape == SMALL and progress.step == 2
        for name, weight in before.items():
            if not name.endswith("e_score_correction_bias"):
                assert torch.equal(tensors[f"master.{name}"], weight), name
        train(options(out, model=model, resume=True, steps=3), time.monotonic())
    assert load(out / CHECKPOINT)[1].step == 3
    rows = [json.loads(line) for line in (out / LOG_FILE).read_text().splitlines()]
    assert [row["steps"] for row in rows if row["kind"] == "before"] == [4, 4]
    assert (out / "tiktoken.model").read_bytes() == (run / "tiktoken.model").read_bytes()


def test_export_is_served_as_trained(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    export(run, out, shard_bytes=100_000)
    with Checkpoint.open(out) as stored:
        assert "language_model.model.layers.1.mlp.experts.3.down_proj.weight_packed" in stored.tensors
    model = read_back(out)
    rng = random.Random(6)
    codec = Codec(out)
    prompts = [codec.prompt(training_mix(rng)) for _ in range(2)]
    with LLM(out, dtype="float32", threads=1) as llm:
        done = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True))
    for prompt, completion in zip(prompts, done):
        made = list(completion.token_ids)
        wanted = alone(model, prompt + made)[len(prompt) - 1 : -1].log_softmax(-1)
        assert made == wanted.argmax(-1).tolist()
        got = torch.tensor([entry.logprob for entry in completion.logprobs])
        assert (got - wanted.amax(-1)).abs().max() < 1e-3
    assert Tokenizer.from_directory(out).vocab_size == SMALL.vocab_size
