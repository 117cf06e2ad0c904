"""Training drafters: lessons against the equations, losses, both forms, vocabularies, and stops."""

import dataclasses
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from perilune.core.errors import CheckpointError, ConfigError
from perilune.draft import ranks
from perilune.draft import trainee as trainee_module
from perilune.draft.batch import LONGEST_UNROLL, Batch
from perilune.draft.capture import Capture, Captured
from perilune.draft.corpus import Corpus, Row
from perilune.draft.export import export
from perilune.draft.losses import LOSSES, overlap
from perilune.draft.optimizer import Muon, Optimizer
from perilune.draft.states import States, about, capture, token_bytes
from perilune.draft.storage import save_file
from perilune.draft.train import Options, options_of, train
from perilune.draft.trainee import Trainee
from perilune.draft.vocabulary import mapping, most_frequent
from perilune.loading.eagle3 import load_draft, read_tensors
from perilune.loading.synthetic import random_weights
from perilune.model.config import KimiConfig
from perilune.model.draft_config import config_for
from perilune.model.eagle3 import Eagle3
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.kimi_k2 import KimiK2, Span, Step
from perilune.model.weights import Weights
from tests.cpu.draft.test_draft import corpus_of, some_rows
from tests.cpu.model.eagle3_equations import Plain
from tests.cpu.model.test_eagle3 import LAYERS, TARGET, D, V

AUX = [1, 2, 4]
CPU = torch.device("cpu")
FORMS: dict[str, dict[str, Any]] = {
    "mla": {"form": "mla"},
    "mha": {"form": "mha"},
    "mla-cut": {"form": "mla", "draft_vocab": 40},
    "mha-cut": {"form": "mha", "draft_vocab": 40},
}


def a_target() -> tuple[KimiConfig, Weights]:
    config = KimiConfig.from_dict(TARGET)
    return config, random_weights(config, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def target() -> tuple[KimiConfig, Weights]:
    return a_target()


@pytest.fixture(scope="module")
def model(target: tuple[KimiConfig, Weights]) -> KimiK2:
    return KimiK2(*target, max_positions=64)


def drafts_config(
    target: KimiConfig, form: str = "mla", draft_vocab: int | None = None, **changes: Any
) -> tuple[dict[str, Any], Eagle3Config]:
    made: Any = form
    raw = config_for(target, form=made, aux_ids=AUX, intermediate_size=24, draft_vocab=draft_vocab) | changes
    return raw, Eagle3Config.from_dict(raw)


def head_of(weights: Weights) -> Tensor:
    assert weights.lm_head.format == "dense"
    return weights.lm_head.weight


def a_trainee(target: tuple[KimiConfig, Weights], config: Eagle3Config) -> Trainee:
    """With norms and a head that are not what they begin as: those would hide where they belong."""
    cut = config.draft_vocab_size < V
    g = torch.Generator().manual_seed(4)
    vocabulary = sorted(torch.randperm(V, generator=g)[: config.draft_vocab_size].tolist()) if cut else None
    trainee = Trainee(config, target[1].embed, head_of(target[1]), seed=3, vocabulary=vocabulary, own_head=cut)
    with torch.no_grad():
        for name, p in trainee.named_parameters():
            if p.dim() == 1:
                p.copy_(torch.randn(p.shape, generator=g) * 0.2 + 1)
            elif name == "lm_head.weight":
                p.add_(torch.randn(p.shape, generator=g) * 0.1)
    return trainee


def states_for(rows: Sequence[Row], seed: int) -> tuple[Tensor, Tensor]:
    """(aux, hidden) of all tokens, random."""
    g = torch.Generator().manual_seed(seed)
    tokens = sum(len(row.ids) for row in rows)
    return torch.randn(tokens, 3 * D, generator=g), torch.randn(tokens, D, generator=g)


# ---- lessons ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "flags"),
    [
        ("mla", {"fc_norm": True, "norm_output": True}),
        ("mla", {"fc_norm": False, "norm_output": False, "norm_before_residual": True}),
        ("mla", {"fc_norm": True, "norm_output": False, "norm_before_fc": True}),
        ("mla-cut", {}),
        ("mha", {}),
        ("mha", {"num_key_value_heads": 1, "norm_output": True}),
        ("mha-cut", {"norm_before_residual": True}),
    ],
)
def test_lessons_are_chains_of_the_equations(
    target: tuple[KimiConfig, Weights], form: str, flags: dict[str, Any]
) -> None:
    raw, config = drafts_config(target[0], **FORMS[form], **flags)
    trainee = a_trainee(target, config)
    rows, steps, decay = some_rows(5, seed=2), 4, 0.7
    rows[1], rows[3] = dataclasses.replace(rows[1], weight=3.0), dataclasses.replace(rows[3], weight=0.0)
    batch = Batch.of(rows, CPU)
    aux, hidden = states_for(rows, 1)
    lesson = trainee.lesson(batch, aux, hidden[batch.taught], steps, decay)

    head = head_of(target[1])
    shared = {"embed_tokens.weight": target[1].embed, "lm_head.weight": head}
    plain = Plain(raw, shared | dict(trainee.named_parameters()))
    ids = torch.arange(V) if trainee.vocabulary is None else trainee.vocabulary
    entropies: list[list[float]] = [[] for _ in range(steps)]
    weights: list[list[float]] = [[] for _ in range(steps)]
    agreed: list[list[bool]] = [[] for _ in range(steps)]
    at = 0
    for row in rows:
        own_aux, own_hidden = aux[at : at + len(row.ids)], hidden[at : at + len(row.ids)]
        at += len(row.ids)
        truth = (own_hidden @ head.T).softmax(-1)
        for begin in range(row.given - 1, len(row.ids) - 2):
            g = plain.features(own_aux[: begin + 1])
            for j in range(steps):
                if begin + j + 2 >= len(row.ids):
                    break
                logits, after = plain(g, torch.tensor(row.ids[1 : begin + j + 2]))
                wanted = truth[begin + j + 1]
                entropies[j].append(-(wanted[ids] * logits[-1].detach().log_softmax(-1)).sum().item())
                weights[j].append(row.weight)
                if row.weight:
                    agreed[j].append(bool(ids[logits[-1].argmax()] == wanted.argmax()))
                g = torch.cat([g, after[-1:]])
    means = [sum(e * w for e, w in zip(es, ws)) / sum(ws) for es, ws in zip(entropies, weights)]
    shares = [decay**j for j in range(steps)]
    loss = sum(m * w for m, w in zip(means, shares)) / sum(shares)
    assert lesson.loss.item() == pytest.approx(loss, rel=1e-5)
    assert lesson.agreement.tolist() == pytest.approx([sum(a) / len(a) for a in agreed], abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_parts_of_a_batch_make_the_whole(target: tuple[KimiConfig, Weights], loss: str) -> None:
    """Loss, agreement and gradients of a batch are the means over its parts: what several processes rely on."""
    _, config = drafts_config(target[0])
    rows = some_rows(6, seed=4)
    rows[2] = dataclasses.replace(rows[2], weight=2.5)

    def learn(rows: Sequence[Row], whole: Sequence[Row], shares: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        trainee = a_trainee(target, config)
        batch = Batch.of(rows, CPU, whole=whole, shares=shares)
        own = torch.cat([torch.full((len(row.ids),), whole.index(row)) for row in rows])
        order = torch.cat([torch.arange(len(row.ids)) for row in rows])
        starts = torch.tensor([sum(len(r.ids) for r in whole[:i]) for i in range(len(whole))])
        aux, hidden = (t[starts[own] + order] for t in states_for(whole, 5))
        lesson = trainee.lesson(batch, aux, hidden[batch.taught], 3, 0.8, loss)
        lesson.loss.backward()  # type: ignore[no-untyped-call]
        return lesson.loss, lesson.agreement, {n: p.grad for n, p in trainee.named_parameters() if p.grad is not None}

    whole, first, second = learn(rows, rows, 1), learn(rows[::2], rows, 2), learn(rows[1::2], rows, 2)
    assert torch.allclose(whole[0], (first[0] + second[0]) / 2, rtol=1e-5)
    assert torch.allclose(whole[1], (first[1] + second[1]) / 2)
    for name, grad in whole[2].items():
        assert torch.allclose(grad, (first[2][name] + second[2][name]) / 2, atol=1e-6), name


def test_what_is_computed_twice_is_the_same(
    target: tuple[KimiConfig, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainee_module, "SCORES", 200)  # so that there are pieces
    _, config = drafts_config(target[0], **FORMS["mha-cut"])
    rows = some_rows(6, seed=4)
    batch = Batch.of(rows, CPU)
    aux, hidden = states_for(rows, 5)
    found = []
    for recompute in (False, True):
        trainee = a_trainee(target, config)
        trainee.recompute = recompute
        lesson = trainee.lesson(batch, aux, hidden[batch.taught], 3, 0.8, "hybrid")
        lesson.loss.backward()  # type: ignore[no-untyped-call]
        found.append([lesson.loss, lesson.agreement, *(p.grad for p in trainee.parameters())])
    for a, b in zip(*found):
        assert a is not None and b is not None and torch.allclose(a, b, atol=1e-6)


def test_totals_count_what_chains_guess() -> None:
    rows = [Row(tuple(range(9)), 4, 0, True, 2.0), Row(tuple(range(5)), 2, 0, True)]
    batch = Batch.of(rows, CPU)  # 4 and 2 chains
    assert batch.totals.tolist() == [2 * 4 + 2, 2 * 3 + 1, 4, 2, 1, 1, 1, 1] and len(batch.totals) == LONGEST_UNROLL
    assert batch.counts.tolist() == [6, 4, 2, 1, 1, 1, 1, 1] and batch.weight.tolist() == [2, 2, 2, 2, 1, 1]


def test_features_begin_small(target: tuple[KimiConfig, Weights]) -> None:
    """Whatever the size of the target's stream; where there are norms before fc, nothing changes."""
    rows = some_rows(6, seed=3)
    aux, _ = states_for(rows, 8)
    aux *= torch.tensor([1.0, 30.0, 400.0]).repeat_interleave(D)
    for form in ("mha", "mla"):
        _, config = drafts_config(target[0], form)
        trainee = Trainee(config, target[1].embed, head_of(target[1]), seed=1)
        before = trainee.get_parameter("fc.weight").clone()
        trainee.settle([float(x.square().mean()) for x in aux.chunk(3, -1)])
        assert torch.equal(before, trainee.get_parameter("fc.weight")) == (form == "mla")
        if form == "mha":
            size = float((aux @ trainee.get_parameter("fc.weight").T).detach().square().mean().sqrt())
            assert 0.7 < size < 1.4 and float((aux @ before.T).detach().abs().max()) > 100


# ---- losses --------------------------------------------------------------------------------------------------------


def random_pair(seed: int, shape: tuple[int, ...] = (7, 30)) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(shape, generator=g) * 2 for _ in "pq")
    return p.softmax(-1), q.log_softmax(-1)


def test_losses_say_what_they_are() -> None:
    p, log_q = random_pair(0)
    q = log_q.exp()
    rejected = 0.5 * (p - q).abs().sum(-1)
    assert torch.allclose(LOSSES["tv"](p, log_q), rejected, atol=1e-6)
    assert torch.allclose(LOSSES["nla"](p, log_q), -(1 - rejected).log(), atol=1e-5)
    divergence = LOSSES["kl"](p, log_q) + (p * p.log()).sum(-1)
    assert torch.allclose(divergence, torch.nn.functional.kl_div(log_q, p, reduction="none").sum(-1), atol=1e-5)
    share = (-3 * (1 - rejected)).exp()
    mixed = share * LOSSES["kl"](p, log_q) + (1 - share) * rejected
    assert torch.allclose(LOSSES["hybrid"](p, log_q), mixed, atol=1e-5)


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "kl"])
def test_acceptance_losses_accept_more_than_kl(loss: str) -> None:
    """One guess for several contexts, as a draft too small to tell them apart: the mean of their distributions, which
    is what KL wants, is not what most is accepted of."""
    p, _ = random_pair(3, (5, 12))
    accepted = {}
    for name in ("kl", loss):
        logits = torch.zeros(12, requires_grad=True)
        adam = torch.optim.Adam([logits], lr=0.05)
        for _ in range(400):
            log_q = logits.log_softmax(-1).expand(5, 12)
            value = LOSSES[name](p, log_q).mean()
            adam.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            adam.step()
        accepted[name] = float(overlap(p, logits.detach().log_softmax(-1).expand(5, 12)).mean())
    assert accepted[loss] > accepted["kl"] + 0.003, accepted


# ---- optimiser ------------------------------------------------------------------------------------------------------


def test_muon_is_torchs() -> None:
    g = torch.Generator().manual_seed(0)
    ours = {
        name: torch.randn(shape, generator=g, requires_grad=True) for name, shape in (("a", (12, 5)), ("b", (4, 9)))
    }
    theirs = [p.detach().clone().requires_grad_() for p in ours.values()]
    muon = Muon(ours, 0.1)
    torchs = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for p, q in zip(ours.values(), theirs):
            p.grad = torch.randn(p.shape, generator=g)
            q.grad = p.grad.clone()
        muon.step(0.02 * (step + 1))
        torchs.param_groups[0]["lr"] = 0.02 * (step + 1)
        torchs.step()  # type: ignore[no-untyped-call]
        for p, q in zip(ours.values(), theirs):
            assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)


def test_the_optimizer_remembers_everything() -> None:
    def made() -> tuple[dict[str, Tensor], Optimizer]:
        shapes = {"a": (4, 4), "b": (4,), "lm_head.weight": (6, 4)}
        parameters = {name: torch.ones(shape, requires_grad=True) for name, shape in shapes.items()}
        return parameters, Optimizer(parameters, weight_decay=0.1)

    def learn(parameters: dict[str, Tensor], optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            for name, p in parameters.items():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step * 10 + len(name)))
            optimizer.step(0.1)

    first, optimizer = made()
    learn(first, optimizer, range(3))
    assert {k.rpartition(":")[0] for k in optimizer.state()} == set(first) and first["a"].grad is None
    again, restored = made()
    with torch.no_grad():
        for name, p in again.items():
            p.copy_(first[name])
    restored.restore({name: t.clone() for name, t in optimizer.state().items()})
    learn(first, optimizer, range(3, 5))
    learn(again, restored, range(3, 5))
    assert all(torch.equal(again[name], p) for name, p in first.items())


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_a_stopped_run_ends_alike(
    tmp_path: Path, target: tuple[KimiConfig, Weights], model: KimiK2
) -> None:
    _, config = drafts_config(target[0])
    corpus = corpus_of(tmp_path / "corpus", some_rows(24))
    options = Options(steps=40, unroll=2, chains=60, rate=5e-3, keep_gb=0.0)
    records: list[dict[str, Any]] = []
    whole = train(model, config, [corpus], tmp_path / "whole", options, capture_tokens=128, on_record=records.append)
    wanted = dict(whole.named_parameters())
    losses = [r["loss"] for r in records if r["kind"] == "step"]
    assert losses[-1] < losses[0] - 0.1, losses
    assert records[-1]["kind"] == "stop" and records[-1]["finished"]

    # Neither a stop nor keeping the hidden states changes anything.
    stopped: Any = {"capture_tokens": 128, "stop_after": 17, "on_record": records.append}
    train(model, config, [corpus], tmp_path / "halves", options, **stopped)
    assert records[-1]["step"] == 17 and not records[-1]["finished"]
    halves = train(model, config, [Corpus(tmp_path / "corpus")], tmp_path / "halves", options, capture_tokens=128)
    for name, p in halves.named_parameters():
        assert torch.equal(p, wanted[name]), name
    kept = dataclasses.replace(options, keep_gb=1.0)
    for name, p in train(model, config, [corpus], tmp_path / "kept", kept, capture_tokens=128).named_parameters():
        assert torch.equal(p, wanted[name]), name

    with pytest.raises(ConfigError, match="other options or another corpus"):
        train(model, config, [corpus], tmp_path / "halves", dataclasses.replace(options, steps=41))


def test_a_full_disk_and_a_damaged_save_are_one_line(
    tmp_path: Path, target: tuple[KimiConfig, Weights], model: KimiK2
) -> None:
    _, config = drafts_config(target[0])
    corpus = corpus_of(tmp_path / "corpus", some_rows(24))
    options = Options(steps=1, unroll=2, chains=60)
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most))  # files end there, as on a full disk
    try:
        with pytest.raises(ConfigError, match=r"cannot write .*state.safetensors.*repeat the command"):
            train(model, config, [corpus], tmp_path / "run", options, capture_tokens=128)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    (tmp_path / "run/state.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"state.safetensors is damaged .*remove it"):
        train(model, config, [corpus], tmp_path / "run", options, capture_tokens=128)
    save_file({"x": torch.ones(1)}, tmp_path / "run/state.safetensors")
    with pytest.raises(CheckpointError, match=r"state.safetensors is no save of a training: remove it"):
        train(model, config, [corpus], tmp_path / "run", options, capture_tokens=128)


def test_options() -> None:
    assert options_of({"steps": 5, "chains": None, "corpus": "x"}) == Options(steps=5)
    for wrong in ({"unroll": 0}, {"unroll": 9}, {"chains": 0}, {"steps": -1}, {"minutes": 0.0}, {"loss": "l2"}):
        with pytest.raises(ConfigError):
            Options(**wrong)


def test_processes_need_a_schedule_in_steps(
    tmp_path: Path, target: tuple[KimiConfig, Weights], model: KimiK2, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "count", lambda: 2)
    _, config = drafts_config(target[0])
    with pytest.raises(ConfigError, match="a schedule in steps"):
        train(model, config, [corpus_of(tmp_path, some_rows(4))], tmp_path / "run", Options(minutes=1.0))


# ---- what comes of it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_a_trained_draft_is_served_as_it_was_trained(
    tmp_path: Path, target: tuple[KimiConfig, Weights], model: KimiK2, form: str
) -> None:
    """Of either form and vocabulary: after a few steps and the export, the engine's model has the training's logits."""
    raw, config = drafts_config(target[0], **FORMS[form])
    corpus = corpus_of(tmp_path / "corpus", some_rows(12))
    options = Options(steps=4, unroll=2, chains=60, rate=5e-3)
    trainee = train(model, config, [corpus], tmp_path / "run", options, capture_tokens=128, own_head=form == "mha")
    with torch.no_grad():
        for p in trainee.parameters():
            p.copy_(p.bfloat16())
    export(tmp_path / "draft", raw, trainee.checkpoint())
    read, weights = load_draft(tmp_path / "draft", *target, dtype=torch.float32, device="cpu")
    assert read == config and weights.embed is target[1].embed and config.aux_layers(LAYERS) == (2, 3, 5)
    assert (weights.lm_head is target[1].lm_head) == (form == "mla")

    row = some_rows(1, seed=9)[0]
    batch = Batch.of([row], CPU)
    aux, _ = states_for([row], 3)
    with torch.no_grad():
        steps = list(trainee.unrolled(batch, aux, 3))
    serving = Eagle3(read, weights, max_positions=64)
    ids, n, chains = torch.tensor(row.ids), len(row.ids), len(batch.begin)
    pages = torch.zeros(8, 16, config.kv_width)

    def forward(begin: int, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        count = len(tokens)
        positions = torch.arange(begin, begin + count)
        span = Span(
            torch.arange(8, dtype=torch.int32)[None], torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([begin + count], dtype=torch.int32), slice(0, count),
        )  # fmt: skip
        return serving.hidden(Step(tokens, positions, positions.clone(), span, None), features, pages)

    for chain in range(0, chains, 3):
        begin = row.given - 1 + chain
        states, features = forward(0, ids[1 : begin + 2], serving.features(aux[: begin + 1]))
        for j, step in enumerate(steps):
            if begin + j + 2 >= n:
                break
            if j:
                states, features = forward(begin + j, ids[begin + j + 1 : begin + j + 2], features[-1:].clone())
            logits = serving.logits(states[-1:])[0]
            assert torch.allclose(logits, step.logits[chain], atol=2e-5), (chain, j)
            assert serving.target_ids(logits.argmax(-1)) == trainee.likeliest(step.logits)[chain]


def test_an_exported_draft_is_what_other_engines_read(tmp_path: Path, target: tuple[KimiConfig, Weights]) -> None:
    raw, config = drafts_config(target[0])
    trainee = a_trainee(target, config)
    export(tmp_path / "draft", raw, trainee.checkpoint())
    read, weights = load_draft(tmp_path / "draft", *target, dtype=torch.float32, device="cpu")
    assert read == config and weights.fc.format == "dense"
    own = dict(trainee.named_parameters())
    assert torch.equal(weights.fc.weight, own["fc.weight"].detach().bfloat16().float())
    assert all(n.startswith(("midlayer.", "fc.", "fc_norm.", "norm.")) for n in own)
    for ids in ([2, 3, 5], [1, 1, 2], [1, 4, 6], []):
        with pytest.raises(ConfigError, match="must begin with 1"):
            config_for(target[0], aux_ids=ids)

    raw, config = drafts_config(target[0], **FORMS["mha-cut"])
    trainee = a_trainee(target, config)
    assert trainee.vocabulary is not None
    export(tmp_path / "cut", raw, trainee.checkpoint())
    stored = load_file(tmp_path / "cut" / "model.safetensors")
    assert stored["d2t"].dtype == torch.int64 and stored["t2d"].dtype == torch.bool
    assert torch.equal(torch.arange(40) + stored["d2t"], trainee.vocabulary)
    assert stored["t2d"].nonzero().flatten().tolist() == trainee.vocabulary.tolist()
    assert stored["lm_head.weight"].shape == (40, D) and stored["midlayer.self_attn.k_proj.weight"].shape == (16, 2 * D)
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and not {"fc_norm", "norm_output"} & raw.keys()
    for size in (0, V + 1):
        with pytest.raises(ConfigError, match="must have 1 to"):
            config_for(target[0], aux_ids=AUX, draft_vocab=size or -1)


def test_the_draft_says_what_is_said_most(tmp_path: Path, target: tuple[KimiConfig, Weights], model: KimiK2) -> None:
    rows = [Row((9, 9, 9, 5, 6, 7, 7), 3, 0, True), Row((1, 2, 3, 3, 8, 8), 1, 0, True, 2.0)]
    assert most_frequent(rows, 3, V) == (3, 7, 8) and most_frequent(rows, V, V) == tuple(range(V))
    assert most_frequent(rows, 5, V) == (3, 6, 7, 8, 0) or most_frequent(rows, 5, V) == (0, 3, 6, 7, 8)
    with pytest.raises(ConfigError, match="must have 1 to"):
        most_frequent(rows, V + 1, V)
    maps = mapping(torch.tensor([1, 5, 6]), 8)
    assert maps["d2t"].tolist() == [1, 4, 4] and maps["t2d"].nonzero().flatten().tolist() == [1, 5, 6]

    # A run that begins with another draft keeps that one's vocabulary and head.
    raw, config = drafts_config(target[0], **FORMS["mla-cut"])
    corpus = corpus_of(tmp_path / "corpus", some_rows(12))
    first = a_trainee(target, config)
    with torch.no_grad():
        for p in first.parameters():
            p.copy_(p.bfloat16())
    export(tmp_path / "first", raw, first.checkpoint())
    options = Options(steps=1, unroll=1, chains=60, rate=0.0)
    second = train(model, config, [corpus], tmp_path / "run", options, start=read_tensors(tmp_path / "first"))
    assert first.vocabulary is not None and second.vocabulary is not None
    assert torch.equal(first.vocabulary, second.vocabulary)
    assert torch.equal(
        dict(first.named_parameters())["lm_head.weight"], dict(second.named_parameters())["lm_head.weight"]
    )


# ---- states on disk --------------------------------------------------------------------------------------------------


def test_training_from_disk_is_training_with_the_target(
    tmp_path: Path, target: tuple[KimiConfig, Weights], model: KimiK2
) -> None:
    """Bounded, resumed, checked; nearly the same comes of it."""
    _, config = drafts_config(target[0])
    corpus = corpus_of(tmp_path / "corpus", some_rows(24))
    layers = config.aux_layers(LAYERS)
    captured = Capture(model, layers, tokens=128)
    rows = corpus.rows()
    what = about([corpus], layers, "it")
    States(tmp_path / "states", what)
    options = Options(steps=20, unroll=2, chains=60, rate=5e-3)
    with pytest.raises(ConfigError, match="holds no states: capture with more --gb"):
        train(model, config, [corpus], tmp_path / "none", options, states=States(tmp_path / "states"))
    half = token_bytes(rows, len(layers), D) / 2
    capture(rows, captured, States(tmp_path / "states", what), most_bytes=half, shard_tokens=100)
    part = States(tmp_path / "states", what)
    assert 0 < part.rows < 24 and part.nbytes < half + 5000
    with (tmp_path / "states" / "shards.jsonl").open("a") as file:
        file.write('{"file": "states-000')  # killed while it wrote
    capture(rows, captured, States(tmp_path / "states", what), most_bytes=1e9, shard_tokens=100)
    states = States(tmp_path / "states")
    assert states.rows == 24 and len(states.shards) > len(part.shards)
    served = states.serve(rows, torch.empty(0))
    for some in (rows[3:5], rows[20:21], rows[::7]):
        own, wanted = states.taught(some), captured.taught(some)
        for a, b in ((own.aux, wanted.aux), (own.hidden, wanted.hidden)):
            assert torch.allclose(a, b, rtol=2**-7, atol=1e-4)  # they are bfloat16 on disk
    assert served == rows

    ends = KimiK2(target[0], dataclasses.replace(target[1], layers=[]), max_positions=1)
    drafts = [
        train(ends, config, [corpus], tmp_path / "from-disk", options, states=States(tmp_path / "states")),
        train(model, config, [corpus], tmp_path / "from-target", options, capture_tokens=128),
    ]
    for (name, p), q in zip(drafts[0].named_parameters(), drafts[1].parameters()):
        assert torch.allclose(p, q, atol=0.02), name  # the target's states are not rounded
    with pytest.raises(ConfigError, match="captured with other layers"):
        other = drafts_config(target[0], eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})[1]
        train(ends, other, [corpus], tmp_path / "x", options, states=States(tmp_path / "states"))
    with pytest.raises(ConfigError, match="other states"):
        States(tmp_path / "states", about([corpus], layers, "another"))
    with (tmp_path / "states" / states.shards[0].file).open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x77")
    with pytest.raises(CheckpointError, match=r"states-00000.safetensors is missing or damaged"):
        train(ends, config, [corpus], tmp_path / "y", options, states=States(tmp_path / "states"))


@pytest.mark.parametrize("widths", [(3 * D + 3, D + 1), (3 * D, D + 1), (2 * D, D)])
def test_states_of_another_width_are_refused(
    tmp_path: Path, target: tuple[KimiConfig, Weights], model: KimiK2, widths: tuple[int, int]
) -> None:
    _, config = drafts_config(target[0])
    corpus = corpus_of(tmp_path / "corpus", some_rows(4))
    rows, layers = corpus.rows(), config.aux_layers(LAYERS)
    tokens, answers = sum(len(r.ids) for r in rows), sum(len(r.ids) - r.given for r in rows)
    states = States(tmp_path / "states", about([corpus], layers, "it"))
    states.add(rows, Captured(torch.ones(tokens, widths[0]), torch.ones(answers, widths[1])))
    with pytest.raises(ConfigError, match=rf"have widths {widths[0]} and {widths[1]}, this model's {3 * D} and {D}:"):
        train(model, config, [corpus], tmp_path / "run", Options(steps=2, unroll=2, chains=60), states=states)
