"""kimi-nano's eyes: what is trained is what is served, and the text model stays as it is."""

import argparse
import asyncio
import dataclasses
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import perilune
from perilune.core.config import ServerConfig
from perilune.core.sampling import SamplingParams
from perilune.engine.llm import LLM
from perilune.formats.checkpoint import Checkpoint
from perilune.loading.moonvit import load_moonvit
from perilune.media.decoder import Picture
from perilune.media.limits import Limits
from perilune.media.patches import digest
from perilune.model.moonvit import MoonVit, normalised
from perilune.server.app import build_app
from perilune.server.service import Service
from perilune.tasks import words as task_words
from perilune.tasks.families import problems
from perilune.text.chat import ChatTemplate
from runs.kimi_nano import average, card, export, eyes, eyes_card, feeder, state
from runs.kimi_nano.data import CORPUS_FILE, Codec, Corpus
from runs.kimi_nano.decode import greedy
from runs.kimi_nano.export import add_eyes
from runs.kimi_nano.model import KimiNano, Shape
from runs.kimi_nano.optim import Optimizer
from runs.kimi_nano.pictures import CODES, MARKS, Pictures, placed
from runs.kimi_nano.state import EYES_FILE
from runs.kimi_nano.tower import LIMITS, Eyes, configuration
from tests.serving import INFO, Client, FakeEngine

NANO = Path(perilune.__file__).parent / "bundled" / "kimi-nano"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled text model with a tower of random weights."""
    path = tmp_path_factory.mktemp("model")
    shutil.copytree(NANO, path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("drafter"))
    before = {f.name: hashlib.sha256(f.read_bytes()).digest() for f in path.glob("*.safetensors")}
    torch.manual_seed(3)
    add_eyes(path, {name: p.detach().bfloat16() for name, p in Eyes(configuration(384), len(MARKS)).stored()})
    after = {f.name: hashlib.sha256(f.read_bytes()).digest() for f in path.glob("*.safetensors")}
    assert {name for name, value in after.items() if value != before.get(name)} == {EYES_FILE}
    return path


def test_a_mean_of_two_stages(model: Path, tmp_path: Path) -> None:
    """Of equal text models it is the same text model: INT4 values stay as they are. Shapes that differ are an error."""
    new = shutil.copytree(model, tmp_path / "new")
    average.average(new, NANO, 0.25)
    before, after = export.read_back(NANO).state_dict(), export.read_back(new).state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[n], before[n]) for n in after)
    towers = [load_file(path / EYES_FILE) for path in (model, NANO, new)]
    for name, tensor in towers[2].items():
        assert torch.equal(tensor, (0.75 * towers[0][name].float() + 0.25 * towers[1][name].float()).bfloat16())
    noted = json.loads((new / state.TRAINING_FILE).read_text())
    assert noted["averaged"] == {"share": 0.25, "with": card.weights_hash(NANO)}
    assert noted["weights_sha256"] == card.weights_hash(new)
    (new / EYES_FILE).unlink()
    index = new / "model.safetensors.index.json"
    placed = json.loads(index.read_text())
    placed["weight_map"] = {n: file for n, file in placed["weight_map"].items() if file != EYES_FILE}
    index.write_text(json.dumps(placed))
    average.average(new, NANO, 0.25)  # a text model, which has no tower to average
    assert not (new / EYES_FILE).exists() and EYES_FILE not in index.read_text()
    found = average.mean({"a": torch.tensor([1.0, 4.0])}, {"a": torch.tensor([5.0, 0.0])}, 0.25)
    assert found["a"].tolist() == [2.0, 3.0]
    with pytest.raises(SystemExit, match="differ in names or shapes"):
        average.mean({"a": torch.zeros(2)}, {"a": torch.zeros(3)}, 0.5)


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(NANO)


@pytest.fixture(scope="module")
def block(codec: Codec) -> dict[str, torch.Tensor]:
    return Pictures(NANO, 1, 2048).block(codec, 3)


def test_blocks_are_functions_of_seed_and_number(codec: Codec, block: dict[str, torch.Tensor]) -> None:
    again, other = Pictures(NANO, 1, 2048), Pictures(NANO, 1, 2048, first=4)
    found = again.block(codec, 3)
    assert found.keys() == block.keys() and all(torch.equal(found[key], block[key]) for key in block)
    assert not torch.equal(next(iter(other))["stream"], block["stream"])
    pad = codec.tokenizer.special("<|media_pad|>")
    pictures, patches = block["pixels"].shape[:2]
    rows, columns = block["grid"].tolist()
    assert patches == rows * columns and block["marks"].shape == (pictures, rows, 2 * columns)
    assert block["places"].tolist() == [i for i, token in enumerate(block["stream"][0].tolist()) if token == pad]
    assert len(block["places"]) == block["slots"].numel() == pictures * patches // 4
    shown = {MARKS[code] for code in block["marks"].flatten().tolist()} - {""}
    assert len(shown) > 5 and all(CODES[name] for name in shown)


def test_prompts_are_those_of_a_server(codec: Codec) -> None:
    pad = codec.tokenizer.special("<|media_pad|>")

    async def check() -> None:
        engine = FakeEngine(info=dataclasses.replace(INFO, media_pad=pad))
        service = Service(engine, codec.tokenizer, ChatTemplate(), ServerConfig(), {}, LIMITS)
        client = Client(build_app(service))
        for name in eyes.EVALUATED:
            for thinking in (True, False):
                asked = problems(name, "heldout", 2, thinking=thinking)
                for one, (read, _, _) in zip(asked, placed(asked), strict=True):
                    body = {"messages": list(one.messages), "chat_template_kwargs": {"thinking": thinking}}
                    reply = await client.post("/tokenize", body)
                    assert reply.json["tokens"] == codec.prompt(read), reply.text
        await service.pictures.close()

    asyncio.run(check())


def test_what_is_trained_is_what_is_loaded(model: Path, block: dict[str, torch.Tensor]) -> None:
    run = eyes.open_run(arguments(model))
    rows, columns = block["grid"].tolist()
    with Checkpoint.open(model) as stored, torch.no_grad():
        for name, p in run.eyes.stored():
            p.copy_(stored.read(name))
    config, weights = load_moonvit(model, dtype=torch.float32, device="cpu")
    assert Limits.from_directory(model) == LIMITS
    pixels = block["pixels"]
    values = normalised(pixels.flatten(0, 1), LIMITS.image_mean, LIMITS.image_std, torch.float32)
    each = [MoonVit(config, weights)(one, [(1, rows, columns)]) for one in values.split(rows * columns)]
    with torch.no_grad():
        together, read = run.eyes(pixels, (rows, columns))
    torch.testing.assert_close(together, torch.cat(each))
    assert read.shape == (len(values), 2, len(MARKS))


def test_the_engine_answers_as_training_scores(model: Path, codec: Codec) -> None:
    run = eyes.open_run(arguments(model))
    with Checkpoint.open(model) as stored, torch.no_grad():
        for name, p in run.eyes.stored():
            p.copy_(stored.read(name))
    asked = placed(problems("picture_sums", "heldout", 3, thinking=False))
    prompts = [codec.prompt(one) for one, _, _ in asked]
    pad = codec.tokenizer.special("<|media_pad|>")
    ids = torch.tensor([i for prompt in prompts for i in prompt])
    seen = (ids == pad).nonzero()[:, 0], eyes._rows(run, [(patches, grid) for _, patches, grid in asked])
    wanted = greedy(run.text, prompts, codec.end, 8, seen)
    shown = [
        [Picture(patches, (1, *grid), grid[0] * grid[1] // 4, digest(patches, (1, *grid)))]
        for _, patches, grid in asked
    ]
    with LLM(str(model), threads=1, device="cpu", draft="off") as llm:
        found = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8), pictures=shown)
    got = [list(one.token_ids) for one in found]
    assert [ids[: ids.index(codec.end)] if codec.end in ids else ids for ids in got] == wanted


def test_a_step_moves_the_tower_alone(model: Path, block: dict[str, torch.Tensor]) -> None:
    run = eyes.open_run(arguments(model))
    run.publish()
    text = {name: tensor.clone() for name, tensor in run.text.state_dict().items()}
    before = {name: p.detach().clone() for name, p in run.eyes.named_parameters()}
    rates, part = eyes.Rates.on("cpu"), eyes.prepared(few(block, 2), "cpu")
    found = []
    for number in (1, 2, 3, 4, 5, 6):
        rates.set(True, guide=1.0, rate=1e-3, number=number)
        found.append({name: float(loss) for name, loss in run.step(part, None, rates).items()})
    assert found[0].keys() == {"marks", "slots", "answers"}
    assert all(found[-1][name] < found[0][name] for name in found[0]), found
    assert not [name for name, p in run.eyes.named_parameters() if torch.equal(p, before[name])]
    assert all(torch.equal(tensor, text[name]) for name, tensor in run.text.state_dict().items())


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a text training: a small model of random weights, a corpus, the vocabulary."""
    path = tmp_path_factory.mktemp("words")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copyfile(NANO / name, path / name)
    Corpus.build(["def f(x):\n    return x\n" * 60] * 3, Codec(path).tokenizer).save(path / CORPUS_FILE)
    shape = Shape(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, q_lora_rank=32, kv_lora_rank=64,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, intermediate_size=64, moe_intermediate_size=32,
        n_routed_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(4)
    text = KimiNano(shape)
    state.save(path / state.CHECKPOINT, text, Optimizer(text, muon=True, decay=0.1), state.Progress())
    return path


def test_the_text_model_learns_too(words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    export.export(words, model)
    before = export.read_back(model).state_dict()
    kept = dict[str, torch.Tensor]()
    ended = eyes.steps

    def steps(args: argparse.Namespace, run: eyes.Run, *rest: Any) -> bool:
        finished = ended(args, run, *rest)
        kept.update({name: tensor.clone() for name, tensor in run.text.state_dict().items()})
        return finished

    monkeypatch.setattr(eyes, "steps", steps)
    settings = {"out": out, "words": words, "words_rate": 1.0, "reading": 0.0, "minutes": 60.0, "words_kept": 0.25}
    eyes.train(arguments(model, **settings, pause_after=0.01))
    rows = [json.loads(line) for line in (out / "eyes.jsonl").read_text().splitlines()]
    first = next(row for row in rows if row["kind"] == "step")
    assert {"marks", "slots", "answers", "words"} <= first.keys()
    assert rows[-1]["finished"] is False and rows[-1]["through"] == rows[-1]["step"] > 0
    assert export.read_back(model).state_dict().keys() == before.keys() and not (model / EYES_FILE).exists()
    eyes.train(arguments(model, **settings | {"minutes": 1e-6}, resume=True))
    assert (model / EYES_FILE).is_file()
    after = export.read_back(model).state_dict()
    for name in after:  # biases of routers are not averaged; experts are, before they are rounded
        wanted = kept[name] if name.endswith("_bias") else kept[name].lerp(before[name], 0.25)
        assert ".experts." in name or torch.allclose(after[name], wanted, atol=1e-6, rtol=2**-8), name
    moved = [name for name in after if not torch.equal(after[name], before[name])]
    assert "embed_tokens.weight" in moved and any(".experts." in name for name in moved)


def test_blocks_are_used_again_while_new_ones_are_made() -> None:
    made, ready = iter(range(10**6)), threading.Semaphore(feeder.LEAST)

    def blocks() -> Iterator[dict[str, torch.Tensor]]:
        for number in made:
            ready.acquire()
            yield {"number": torch.tensor(number)}

    feed = feeder.Feeder(blocks(), lambda block: block, 1, again=True)
    first = [int(next(feed)["number"]) for _ in range(feeder.LEAST)]
    assert first == list(range(feeder.LEAST)) and feed.repeated == 0
    assert int(next(feed)["number"]) in first and feed.repeated == 1  # the data process has not finished the next
    ready.release(1000)
    feed.close()

    def broken() -> Iterator[dict[str, torch.Tensor]]:
        raise ValueError("a data process ended")
        yield {}

    with pytest.raises(ValueError, match="a data process ended"):
        next(feeder.Feeder(broken(), lambda block: block, 1, again=True))


def test_a_feeder_closes_though_its_queue_is_full_and_the_data_processes_failed() -> None:
    failed = threading.Event()

    def blocks() -> Iterator[dict[str, torch.Tensor]]:
        yield from [{}] * feeder.AHEAD
        failed.set()
        raise ValueError("a data process ended")

    feed = feeder.Feeder(blocks(), lambda block: block, 1, again=True)
    assert failed.wait(60)
    feed.close()
    assert not feed._thread.is_alive()


def test_a_training_pauses_goes_on_and_adds_the_tower(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, library = tmp_path / "run", eyes.data.library_files()[::40]
    monkeypatch.setattr(eyes.data, "library_files", lambda: library)
    before = (model / EYES_FILE).read_bytes()
    reading = 2.0  # never through the text model, which takes seconds a step on a CPU
    eyes.train(arguments(model, out=out, minutes=60.0, pause_after=0.01, reading=reading))
    log = (out / "eyes.jsonl").read_text()
    assert '"finished": false' in log and (model / EYES_FILE).read_bytes() == before
    eyes.train(arguments(model, out=out, minutes=0.02, resume=True, reading=reading))
    assert '"finished": true' in (out / "eyes.jsonl").read_text() and (model / EYES_FILE).read_bytes() != before


def test_a_training_begins_with_a_tower(model: Path, tmp_path: Path) -> None:
    run = eyes.open_run(arguments(model, tower=NANO / EYES_FILE, seed=2, word_tokens=8192))
    assert run.words_weight == 4  # 8,192 tokens of text beside 2,048 of pictures
    with Checkpoint.open(NANO) as stored:
        for name, p in run.eyes.stored():
            assert torch.equal(p.detach(), stored.read(name).float()), name
    assert torch.equal(run.optimizer.state["master.reading.weight"], run.eyes.reading.weight)
    part = load_file(NANO / EYES_FILE)
    part.popitem()
    save_file(part, tmp_path / "part.safetensors")
    with pytest.raises(SystemExit, match="is no tower of this size"):
        eyes.open_run(arguments(model, tower=tmp_path / "part.safetensors"))


def test_words_of_passages_are_among_the_labels(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_words, "_learnt", ())
    made = next(iter(Pictures(NANO, 1, 8192, 7, ("some kevasqu",))))
    shown = "".join(codec.tokenizer.decode(ids) for ids in made["slots"].tolist()).lower()
    assert "kevasqu" in shown and len(set(shown.split("\n"))) > 20


def few(block: dict[str, torch.Tensor], pictures: int) -> dict[str, torch.Tensor]:
    """The first pictures of a block."""
    tokens = block["slots"].shape[1]
    end = int(block["starts"][pictures])
    cut = {key: block[key][:pictures] for key in ("pixels", "marks", "slots")}
    text = {"starts": block["starts"][: pictures + 1], "stream": block["stream"][:, :end]}
    return block | cut | text | {"places": block["places"][: pictures * tokens]}


def arguments(model: Path, **changes: object) -> argparse.Namespace:
    fixed = dict(
        model=model, out=Path(), fonts=None, seed=1, minutes=1.0, reading=0.3, pause_after=0.0, resume=False,
        device="cpu", tower=None, guide=1.0, words=None, words_rate=5e-4, words_decay=0.1, word_tokens=2048,
        words_kept=0.0, tokens=2048, rate=2e-3, decay=0.05, compile=False, workers=0, every=1, save_every=60.0,
        score_count=0,
    )  # fmt: skip
    return argparse.Namespace(**(fixed | changes))


def test_the_card_says_what_pictures_get(tmp_path: Path, model: Path) -> None:
    ledger, log = tmp_path / "evaluate.jsonl", tmp_path / "eyes.jsonl"
    start = {
        "kind": "start",
        "step": 0,
        "parameters": 678544,
        "device": "cpu",
        "torch": "2",
        "seed": 1,
        "fonts": 50,
        "minutes": 4.5,
        "words_rate": 5e-4,
        "words_kept": 0.2,
    }
    stop = {
        "kind": "stop",
        "step": 7,
        "pictures": 3210,
        "through": 5,
        "fresh": 2,
        "again": 5,
        "seconds": 330.0,
        "finished": True,
    }
    exact = {"picture_sums": 0.8789, "picture_shapes": 0.75}
    score = {"kind": "score", "split": "structural", "mode": "thinking", "count": 256, "exact": exact}
    again = start | {"step": 7, "minutes": 0.4}  # resumed with less time, for the scores alone: no block was used
    earlier = stop | {"fresh": 100}  # of another training
    rows = (start, earlier, start, stop, again, stop | {"fresh": 0, "again": 0}, score)
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = eyes_card.trained(log, model)
    assert (facts["pictures"], facts["minutes"]) == (3210, 5.5)
    assert facts["weights_sha256"] == eyes_card.weights_hash(model)
    scored = [
        {
            "model": "kimi-nano", "server": "private", "family": name, "split": split, "thinking": thinking, "n": 100,
            "exact_match": 90.0 if how == "real" else 2.0, "low": 80, "high": 95, "constant": 4.0,
            **({} if how == "real" else {"pictures": how}),
        }
        for name in eyes.EVALUATED for split in eyes_card.SPLITS
        for thinking, how in ((True, "real"), (False, "real"), (False, "blank"), (False, "none"))
    ]  # fmt: skip
    ledger.write_text("".join(json.dumps(row) + "\n" for row in scored))
    said = eyes_card.part(facts, ledger)
    assert "| picture_sums | in-distribution | 90.0 (80-95) | 90.0 (80-95) | 4.0 | 2.0 | 2.0 | 100 |" in said
    assert "of 50 font files one in five" in said and "picture_sums 87.9 %, picture_shapes 75.0 % of 256" in said
    assert (
        "steps of 3,210 pictures in all, each used 3.5" in said
        and "In the last 5 steps the text model learnt too" in said
    )
    assert all(len(line) < 121 for line in said.splitlines() if "|" not in line), max(said.splitlines(), key=len)
    assert eyes_card.part(None, ledger) == ""
    ledger.write_text("".join(json.dumps(row) + "\n" for row in scored[:-1]))
    with pytest.raises(SystemExit, match="pictures none: run perilune evaluate"):
        eyes_card.part(facts, ledger)
    log.write_text(json.dumps(start) + "\n" + json.dumps(stop | {"finished": False}))
    with pytest.raises(SystemExit, match="unfinished"):
        eyes_card.trained(log, model)
    older = {key: value for key, value in stop.items() if key != "fresh"}
    log.write_text("".join(json.dumps(row) + "\n" for row in (start, older, score)))
    with pytest.raises(SystemExit, match="not the log of a training of eyes: 'fresh'"):
        eyes_card.trained(log, model)
