"""The drafter factory: corpora, training against the equations, exact resume, export, and the walk that evaluates."""

import dataclasses
import json
import math
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from perilune.cli.draft.group import command
from perilune.core.errors import CheckpointError, ConfigError
from perilune.draft import prompts as prompts_module
from perilune.draft.capture import Capture
from perilune.draft.collect import Decoded, Forced, Plan, about, collect, fingerprint
from perilune.draft.corpus import Corpus, Row
from perilune.draft.evaluate import Tally, lookup, summed, walk, walk_lookup
from perilune.draft.export import export
from perilune.draft.prompts import Chats, Problems, Prompt, Topics
from perilune.draft.shards import SHARDS
from perilune.draft.topics import DOMAINS, ask
from perilune.draft.train import Options, train
from perilune.formats.hub import resolve_model
from perilune.loading.load import load
from perilune.loading.synthetic import random_weights
from perilune.model.config import KimiConfig
from perilune.model.draft_config import config_for
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.kimi_k2 import KimiK2
from perilune.model.weights import Weights
from perilune.speculation.drafter import Drafts, Followed
from perilune.speculation.eagle3 import load_drafter
from perilune.tasks.families import problems
from perilune.tasks.problem import partition
from runs.kimi_nano.data import Codec
from tests import fake_endpoint
from tests.cpu.model.test_eagle3 import TARGET, V
from tests.cpu.tasks.test_tasks import SPLIT_KEY

AUX = [1, 2, 4]


@pytest.fixture(scope="module")
def target() -> tuple[KimiConfig, Weights]:
    config = KimiConfig.from_dict(TARGET)
    return config, random_weights(config, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def model(target: tuple[KimiConfig, Weights]) -> KimiK2:
    return KimiK2(*target, max_positions=64)


def drafts_config(target: KimiConfig, **changes: Any) -> tuple[dict[str, Any], Eagle3Config]:
    raw = config_for(target, aux_ids=AUX, intermediate_size=24) | changes
    return raw, Eagle3Config.from_dict(raw)


def some_rows(count: int, seed: int = 0) -> list[Row]:
    """Texts that can be learnt: each counts up from a random token in steps of its family."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        length = int(torch.randint(9, 24, (1,), generator=g))
        start, step = int(torch.randint(V, (1,), generator=g)), 1 + i % 3
        given = int(torch.randint(1, length - 3, (1,), generator=g))
        rows.append(Row(tuple((start + step * k) % V for k in range(length)), given, i % 3, i % 2 == 0))
    return rows


def corpus_of(path: Path, rows: Sequence[Row]) -> Corpus:
    corpus = Corpus(path, {"families": ["a", "b", "c"], "max_tokens": 32})
    corpus.add(rows[: len(rows) // 2])
    corpus.add(rows[len(rows) // 2 :])
    return corpus


# ---- capture -------------------------------------------------------------------------------------------------------


def test_captured_states_are_those_of_single_texts(model: KimiK2) -> None:
    rows = some_rows(7, seed=5)
    together = Capture(model, (0, 3), tokens=96, block_size=8)([row.ids for row in rows])
    at = 0
    for row in rows:
        alone = Capture(model, (0, 3), tokens=32, block_size=16)([row.ids])
        own = slice(at, at := at + len(row.ids))
        assert torch.allclose(together.aux[own], alone.aux, atol=1e-5)
        assert torch.allclose(together.hidden[own], alone.hidden, atol=1e-5)
    assert at == len(together.aux)


# ---- corpora -------------------------------------------------------------------------------------------------------


class Parrot:
    """Stands in for the engine: an answer is a function of its prompt and parameters."""

    def __init__(self) -> None:
        self.info, self.asked = SimpleNamespace(max_model_len=900), 0

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[Any]) -> list[Any]:
        self.asked += len(prompts)
        return [
            SimpleNamespace(token_ids=tuple((sum(p) + (q.seed or 0) + i) % V for i in range(3 + sum(p) % 5)))
            for p, q in zip(prompts, params)
        ]


def test_collecting_again_goes_on_where_it_stopped(tmp_path: Path) -> None:
    nano = resolve_model("kimi-nano")
    source, plan = Problems(nano, 1), Plan(rows=20, shard_rows=8, max_tokens=64, seed=1)
    parrot: Any = Parrot()
    decoded = Decoded.by(parrot, plan)
    whole = Corpus(tmp_path / "whole", about(source, plan, nano))
    collect(decoded, source, plan, whole)
    assert [s.rows for s in whole.shards] == [8, 8, 4] and parrot.asked == 20

    part = Corpus(tmp_path / "part", about(source, plan, nano))
    collect(decoded, source, dataclasses.replace(plan, rows=8), part)
    with (tmp_path / "part" / SHARDS).open("a") as file:
        file.write('["rows-00001.safe')  # killed while it wrote
    part = Corpus(tmp_path / "part", about(source, plan, nano))
    collect(decoded, source, dataclasses.replace(plan, workers=1), part)
    assert part.rows() == whole.rows() and part.fingerprint() == whole.fingerprint()
    assert {row.greedy for row in part.rows()} == {True, False}
    assert max(row.family for row in part.rows()) < len(part.families)

    few = Corpus(tmp_path / "few", about(source, plan, nano))
    for rows in (11, 20):  # the second shard of the first run has 3 prompts
        collect(decoded, source, dataclasses.replace(plan, rows=rows), few)
        few = Corpus(tmp_path / "few", about(source, plan, nano))
    assert few.rows() == whole.rows() and [s.prompts for s in few.shards] == [8, 3, 8, 1]

    with pytest.raises(ConfigError, match=r"another corpus .it differs in max_tokens"):
        Corpus(tmp_path / "part", about(source, dataclasses.replace(plan, max_tokens=65), nano))
    with (tmp_path / "part" / "rows-00001.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    with pytest.raises(CheckpointError, match=r"rows-00001.safetensors is missing or damaged"):
        Corpus(tmp_path / "part").rows()


def test_a_model_trained_again_is_another_one(tmp_path: Path) -> None:
    """Its files have the same names and sizes, and the same index."""
    nano = Path(shutil.copytree(resolve_model("kimi-nano"), tmp_path / "nano"))
    before = fingerprint(nano)
    assert before == fingerprint(resolve_model("kimi-nano"))
    with (nano / "model-00003-of-00003.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert fingerprint(nano) != before


def test_a_server_answers_as_the_engine_here_would(tmp_path: Path) -> None:
    nano, parrot = resolve_model("kimi-nano"), Parrot()

    def run(out: str, *given: str) -> Any:
        args = ["collect", "--out", str(tmp_path / out), "--rows", "12", "--shard-rows", "8", "--workers", "0", *given]
        return CliRunner().invoke(command, args)

    def said(body: dict[str, Any]) -> dict[str, Any]:
        params = SimpleNamespace(seed=body["seed"])
        (answer,) = parrot.generate([body["prompt"]], [params])
        return {"choices": [{"index": 0, "text": "", "token_ids": list(answer.token_ids)}]}

    with fake_endpoint.serving() as fake:
        fake.models[0]["max_model_len"], fake.answer = 900, said
        failed = run("served", "--url", "http://127.0.0.1:9/v1", "--seed", "2")
        assert "cannot connect" in str(failed.exception) and not (tmp_path / "served").exists()
        result = run("served", "--url", fake.url, "--max-num-seqs", "3", "--seed", "1")
        assert result.exit_code == 0, result.output
        assert 1 < fake.most <= 3, "as many at once as asked for"
        with pytest.MonkeyPatch.context() as full:
            full.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
            assert run("served", "--url", fake.url, "--seed", "1").exit_code == 0
        assert all(b["return_token_ids"] and b["temperature"] in (0, 1) and b["top_p"] == 1 for b in fake.bodies)
        fake.answer = lambda body: {"choices": [{"index": 0, "text": "Hi"}]}
        assert "does not return token ids" in str(run("other", "--url", fake.url).exception)
        fake.answer = lambda body: {"choices": [{"token_ids": [1, 2, 4096]}]}
        assert "it serves another model" in str(run("another", "--url", fake.url).exception)
        assert "leave out --url" in str(run("forced", "--url", fake.url, "--forced").exception)
        assert "device configure an engine here" in str(run("device", "--url", fake.url, "--device", "cpu").exception)
    assert "give its address with --url" in str(run("name", "--model-name", "x").exception)
    source, plan = Problems(nano, 1), Plan(rows=12, shard_rows=8, max_tokens=1024, seed=1)
    here = Corpus(tmp_path / "here", about(source, plan, nano))
    engine: Any = parrot
    collect(Decoded.by(engine, plan), source, plan, here)
    assert here.rows() == Corpus(tmp_path / "served", here.about).rows() and len(here.rows()) > 10


def test_forced_rows_are_what_decoding_would_have_said(model: KimiK2) -> None:
    """As far as the expected answer is right, and one token more; in passes of several texts."""
    plan = Plan(rows=9, shard_rows=9, max_tokens=12, seed=0, forced=True)
    alone = Capture(model, (), tokens=48, block_size=16)

    def greedy(ids: tuple[int, ...], count: int) -> tuple[int, ...]:
        for _ in range(count):
            ids += (int(model.logits(alone([ids]).hidden[-1:]).argmax()),)
        return ids

    prompts, wanted = [], []
    for i in range(9):
        given = tuple(range(i, i + 1 + i % 4))
        said = greedy(given, 14)[len(given) :]
        expected = [*said]
        if i % 3:
            expected[2 * i % 14] = (said[2 * i % 14] + 1) % V
        wrong = next((k for k in range(12) if expected[k] != said[k]), 11)
        prompts.append(Prompt(given, i, tuple(expected)))
        wanted.append(Row(given + said[: wrong + 1], len(given), i, True))
    assert Forced(Capture(model, (), tokens=64, block_size=16), plan)(prompts, 0) == wanted


def test_generated_prompts_are_of_the_training_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import perilune.draft.prompts as module

    drawn = []
    plain = module.training_mix
    monkeypatch.setattr(module, "training_mix", lambda *given: drawn.append(plain(*given)) or drawn[-1])
    source = Problems(resolve_model("kimi-nano"), 5)
    made = source.prompts(3, 40)
    assert {p.split for p in drawn} == {"train"}
    assert {partition(p.key[: SPLIT_KEY.get(p.family)]) for p in drawn} == {"train"}
    assert {p.thinking for p in drawn} == {True, False} and any(p.tools for p in drawn)
    assert source.prompts(13, 5) == made[10:15]

    codec = Codec(resolve_model("kimi-nano"))
    assert [list(p.expected) for p in made] == [codec.target(p) for p in drawn[:40]]
    assert [list(p.ids) for p in made] == [codec.prompt(p) for p in drawn[:40]]
    rare = dataclasses.replace(source, weights=(("add_sub", 0.0), ("programs", 0.5)))
    counts = Counter(rare.families[p.family] for p in rare.prompts(0, 80))
    assert not counts["add_sub"] and counts["programs"] > 30 and len(counts) > 4
    assert rare.about() != source.about() == {"source": "generated", "seed": 5}


def test_topics_are_many_and_functions_of_their_number() -> None:
    nano = resolve_model("kimi-nano")
    source = Topics(nano, 5, tuple(DOMAINS))
    made = source.prompts(0, 60)
    assert source.prompts(17, 5) == made[17:22] and {p.family for p in made} == set(range(len(DOMAINS)))
    assert {p.family for p in made[::2]} == {p.family for p in made[1::2]} and not any(p.expected for p in made)
    for domain in DOMAINS:
        asked = [ask(domain, Random(f"{domain}{i}")) for i in range(300)]
        assert len({messages[-1]["content"] for messages, _, _ in asked}) > 200, domain
        assert {thinking for _, _, thinking in asked} == {True, False}
        assert all(bool(tools) == (domain == "tools") for _, tools, _ in asked)
        assert not any("{" in messages[-1]["content"] for messages, _, _ in asked)
        assert any(m["role"] == "system" for messages, _, _ in asked for m in messages)
    with pytest.raises(ConfigError, match="unknown domains in 'poems'"):
        Topics(nano, 5, ("poems",))


def test_chats_ask_for_every_assistant_turn(tmp_path: Path) -> None:
    nano = resolve_model("kimi-nano")
    user = {"role": "user", "content": "2 + 2?"}
    said = {"role": "assistant", "content": "4", "reasoning_content": "secret thoughts"}
    lines = [{"messages": [user, said, user, said], "family": "sums"}, {"messages": [user], "thinking": False}]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    source = Chats(nano, file)
    prompts = source.prompts(0, 99)
    assert source.limit() == len(prompts) == 3 and source.families == ("sums", "chats")
    from perilune.text.tokenizer import Tokenizer

    read = Tokenizer.from_directory(nano)
    texts = [read.decode(p.ids) for p in prompts]
    assert texts[0].endswith("<think>") and texts[1].endswith("<think>")
    assert "secret" not in texts[1] and texts[1].count("2 + 2?") == 2 and texts[2].endswith("<think></think>")
    assert source.prompts(1, 1) == prompts[1:2]
    twice = tmp_path / "twice.jsonl"
    twice.write_text(json.dumps({"messages": [user, said, said]}))
    assert read.decode(Chats(nano, twice).prompts(1, 1)[0].ids).endswith(
        "<|im_end|>" + "<|im_assistant|>assistant<|im_middle|><think>"
    ), "a message after a message is a turn of its own"
    for bad, says in (
        ("{", "line 1 is not JSON"),
        ('{"messages": []}', "non-empty list"),
        ('{"messages": [{"content": "x"}]}', 'with a "role"'),
        ('{"messages": [{"role": "user"}], "thinking": 1}', "thinking true or false"),
        ("", "holds no chat"),
    ):
        wrong = tmp_path / f"{abs(hash(bad))}.jsonl"
        wrong.write_text(bad)
        with pytest.raises(ConfigError, match=says):
            Chats(nano, wrong).prompts(0, 1)
    wrong.write_bytes(b'\xff{"messages": []}\n')
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        Chats(nano, wrong).prompts(0, 1)


def test_a_line_of_chats_is_not_read_beyond_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_module, "MAX_LINE", 1000)
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n{"x": "' + "x" * 4_000_000 + '"}')
    tracemalloc.start()
    with pytest.raises(ConfigError, match="line 2 must be an object"):
        list(prompts_module._read(file))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1e6


# ---- evaluation ----------------------------------------------------------------------------------------------------


class Oracle:
    """A drafter that is right for a number of tokens that depends on the position, and checks what it is told."""

    aux_layers, longest = (0, 2), 8

    def __init__(self, rows: Sequence[Row], aux: Sequence[Tensor]) -> None:
        self.rows, self.aux = rows, aux

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return 0

    def scratch_bytes(self, block_size: int, dtype: torch.dtype, max_num_seqs: int) -> int:
        return 0

    def allocate(self, *_: Any, **__: Any) -> None:
        self.first = 0

    def propose(self, followed: Followed, length: int, min_confidence: float = 0.0) -> Drafts:
        tokens = torch.zeros(len(followed.work), length, dtype=torch.int64)
        for k, (w, start) in enumerate(zip(followed.work, followed.starts)):
            # Requests are told apart by their tokens: the walk numbers them anew in every batch.
            row = next(
                i
                for i, r in enumerate(self.rows)
                if r.ids[w.start : w.end] == w.tokens and self.same(i, w, followed, start)
            )
            ids, own = self.rows[row].ids, slice(start, start + w.count)
            assert followed.following[own].tolist() == list(ids[w.start + 1 : w.end + 1])
            assert followed.step.positions[own].tolist() == list(range(w.start, w.end))
            assert int(followed.last[k]) == start + w.count - 1
            right = self.right(row, w.end)
            for j in range(length):
                truth = ids[w.end + 1 + j] if w.end + 1 + j < len(ids) else 0
                tokens[k, j] = truth if j < right else (truth + 1) % V
        return Drafts(tokens, torch.ones(tokens.shape))

    def same(self, row: int, w: Any, followed: Followed, start: int) -> bool:
        return torch.allclose(followed.features[start : start + w.count], self.aux[row][w.start : w.end], atol=1e-5)

    @staticmethod
    def right(row: int, end: int) -> int:
        return (7 * row + 3 * end) % 5


def test_the_walk_counts_what_serving_would(model: KimiK2) -> None:
    rows = some_rows(9, seed=11)
    capture = Capture(model, (0, 2), tokens=512, block_size=16)
    aux = [capture([row.ids]).aux for row in rows]
    done: list[int] = []
    tallies = walk(Oracle(rows, aux), capture, rows, 3, at_once=4, block_size=16, advance=done.append)
    assert done == [4, 4, 1]
    for i, (row, tally) in enumerate(zip(rows, tallies)):
        cycles, end, tokens = 0, row.given, 0  # ids[end] is drawn, but not yet computed
        while end + 1 < len(row.ids):
            stand = min(Oracle.right(i, end), 3, len(row.ids) - end - 1)
            tokens += min(stand + 1, len(row.ids) - end - 1)
            cycles, end = cycles + 1, end + stand + 1
        assert (tally.cycles, tally.tokens) == (cycles, tokens) and tokens == len(row.ids) - row.given - 1
    total = summed(tallies)
    assert total.length == pytest.approx(sum(t.tokens for t in tallies) / sum(t.cycles for t in tallies))
    assert 1.0 <= total.length <= 4.0 and len(total.record()["by_position"]) == 3


def test_a_tally_counts_positions_until_the_first_wrong_one() -> None:
    tally = Tally()
    assert tally.add([1, 2, 3], [1, 2, 9, 4]) == 2
    assert tally.add([5, 5, 5], [4]) == 0
    assert tally.add([7, 8], [7]) == 1  # the text ends with a draft: nothing comes after it
    assert (tally.cycles, tally.tokens, tally.asked, tally.stood) == (3, 3 + 1 + 1, [3, 1, 1], [2, 1, 0])
    assert math.isnan(Tally().length)


def test_lookup_takes_the_longest_and_then_the_latest_match() -> None:
    assert lookup([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == (9, 2)
    assert lookup([5, 2, 3, 9, 6, 2, 3, 8, 7, 2, 3], 2) == (8, 7)
    assert lookup([1, 2, 3, 4], 3) == () and lookup([1, 3, 2, 3], 3) == ()
    assert lookup([4, 4, 4, 4], 3) == (4,)
    (tally,) = walk_lookup([Row((1, 2, 3, 4, 1, 2, 3, 4, 9), 6, 0, True)], 3)
    assert (tally.cycles, tally.tokens) == (1, 2)


def test_a_trained_drafter_is_right_where_training_says(
    tmp_path: Path, target: tuple[KimiConfig, Weights], model: KimiK2
) -> None:
    """From corpus to serving drafter: on texts that it has learnt, its greedy chains are often right."""
    raw, config = drafts_config(target[0])
    # The target's own answers, so that what it says is what comes.
    rows = []
    for start in range(12):
        ids = [start, start + 1]
        capture = Capture(model, (), tokens=32, block_size=16)
        for _ in range(10):
            ids.append(int(model.logits(capture([ids]).hidden[-1:]).argmax()))
        rows.append(Row(tuple(ids), 2, 0, True))
    corpus = corpus_of(tmp_path / "corpus", rows)
    options = Options(steps=150, unroll=3, chains=200, rate=1e-2, decay=1.0)
    records: list[dict[str, Any]] = []
    trainee = train(model, config, [corpus], tmp_path / "run", options, capture_tokens=256, on_record=records.append)
    first = next(r for r in reversed(records) if r["kind"] == "step")["agreement"][0]
    export(tmp_path / "draft", raw, {n: p.detach() for n, p in trainee.checkpoint(torch.float32).items()})
    drafter = load_drafter(tmp_path / "draft", *target, dtype=torch.float32, device=torch.device("cpu"))
    capture = Capture(model, drafter.aux_layers, tokens=256, block_size=16)
    total = summed(walk(drafter, capture, rows, 3, block_size=16))
    assert first > 0.4 and total.stood[0] / total.asked[0] == pytest.approx(first, abs=0.15)
    assert total.length > 1.4


def test_the_verbs_make_a_drafter_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def run(args: str) -> dict[str, Any]:
        result = CliRunner().invoke(command, [*args.split(), "--device", "cpu"], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return found

    made = run("collect --out corpus --rows 9 --forced --workers 0")
    assert made["rows"] <= 9 and made["answer_tokens"] > 10
    shape = "--aux-layers 1,3,4 --intermediate-size 448 --unroll 1"
    trained = run(f"train --corpus corpus --run run --out drafter --steps 1 {shape}")
    assert 4_800_000 < trained["bytes"] < 5_000_000
    captured = run("capture --corpus corpus --out states --aux-layers 1,3,4")
    assert captured["rows"] == captured["of"] == made["rows"] and captured["bytes"] > made["tokens"] * 3 * 384 * 2
    Path("mha").mkdir()
    for left in ("m.safetensors", ".unfinished"):
        Path("mha", left).touch()
    other = run(
        f"train --corpus corpus --states states --run run2 --out mha --steps 1 {shape} --form mha --draft-vocab 512 "
        "--loss hybrid"
    )
    assert other["bytes"] > 2_000_000
    config, weights = load(resolve_model("kimi-nano"), dtype=torch.float32, device="cpu")
    cut = load_drafter(Path("mha"), config, weights, dtype=torch.float32, device=torch.device("cpu"))
    assert cut.config.form == "mha" and cut.config.draft_vocab_size == 512
    drafter = load_drafter(Path("drafter"), config, weights, dtype=torch.float32, device=torch.device("cpu"))
    assert drafter.aux_layers == (2, 4, 5) and drafter.config.norm_output and drafter.config.fc_norm
    Path("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
    for args, said in (
        ("train --corpus corpus --run run --out drafter --steps 1", "already holds a checkpoint"),
        ("train --corpus corpus --run run3 --out d3 --gpus 2", "several GPUs need --steps"),
        ("train --corpus corpus --run run3 --out d3 --from drafter --form mha", "--from brings its own shape"),
        ("collect --out c --chats chats.jsonl --forced", "--forced needs answers"),
    ):
        with pytest.raises(ConfigError, match=said):
            run(args)


@pytest.mark.parametrize("given", ["train --run run --out out --draft-vocab 9", "capture --out out", "mine --out out"])
def test_a_corpus_of_another_model_is_one_line(tmp_path: Path, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Corpus(Path("corpus"), {"families": ["a"]}).add([Row(tuple(range(163_580, 163_600)), 4, 0, True)])
    with pytest.raises(ConfigError, match="has token 163599, but the model's vocabulary has"):
        CliRunner().invoke(command, [*given.split(), "--corpus", "corpus"], catch_exceptions=False)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"], "no empty directory is left"


def test_the_bundled_drafter_is_right_on_held_out_problems() -> None:
    nano = resolve_model("kimi-nano")
    config, weights = load(nano, dtype=torch.float32, device="cpu")
    drafter = load_drafter(nano / "drafter", config, weights, dtype=torch.float32, device=torch.device("cpu"))
    model = KimiK2(config, weights, max_positions=1024)
    capture = Capture(model, drafter.aux_layers, tokens=2048, block_size=16)
    asked = [
        p for name in ("add_sub", "tool_call", "json_extract") for p in problems(name, "heldout", 3, thinking=True)
    ]
    codec = Codec(nano)
    prompts = [Prompt(tuple(codec.prompt(p)), 0, tuple(codec.target(p))) for p in asked]
    rows = Forced(capture, Plan(9, 9, 300, 0, forced=True))(prompts, 0)
    total = summed(walk(drafter, capture, rows, 3, block_size=16))
    assert total.length > 3.0, total.record()
    assert summed(walk_lookup(rows, 3)).length < 2.0
    size = sum(f.stat().st_size for f in (nano / "drafter").glob("*.safetensors"))
    assert size < 5_000_000
