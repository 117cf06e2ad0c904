"""Training data: generated problems and plain text as packed blocks of token ids.

A block is a function of (seed, block number) alone, so a resumed run sees what an uninterrupted one would, whatever the
number of worker processes. Problems are rendered by the chat template and the tokenizer that serve the model, so the
two can never disagree; only the assistant's last turn is learnt. Plain text is learnt throughout.
"""

import json
import os
import random
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from perilune.tasks.documents import BUILT_IN, docstrings, passages
from perilune.tasks.families import Family, build_families, learn_words, training_mix
from perilune.tasks.problem import Problem, assistant, pick
from perilune.text.chat import ChatTemplate, Special, next_tool_index
from perilune.text.tokenizer import Tokenizer
from runs.kimi_nano import tokenizer as vocabulary
from runs.kimi_nano.written import records

LONGEST = 2048  # tokens of a sample; longer ones are left out
TEXT_SHARE = 0.16  # share of plain text in a block's tokens
MOST_FAILED = 20  # problems that a data process leaves out because their generator fails
SPLIT_SAMPLES, SPLIT_TOKENS = 0.25, 0.05  # share of problems with split tokens; share of their prompts' tokens
TEXT_LENGTH = 512
HELD_OUT_TEXTS = 50  # every fiftieth text is never trained on
SKIPPED = ("test", "tests", "idlelib", "turtledemo", "site-packages", "dist-packages", "__pycache__", "lib2to3")
CORPUS_FILE = "corpus.npz"
PASSAGES_FILE = "passages.json"


class Codec:
    """Prompts and expected answers of problems as token ids, in the vocabulary of `directory`."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.from_directory(directory)
        self.template = ChatTemplate()
        self.end = self.tokenizer.special("<|im_end|>")
        self.think_end = self.tokenizer.special("</think>")
        self._halves = halves(self.tokenizer)

    def split(self, ids: Sequence[int], rng: random.Random) -> list[int]:
        """The ids, SPLIT_TOKENS of them as two tokens with the same bytes, so that words are known by their letters
        too (BPE-dropout, Provilkov et al. 2020)."""
        found: list[int] = []
        for i in ids:
            ways = self._halves.get(i)
            found += pick(rng, ways) if ways and rng.random() < SPLIT_TOKENS else (i,)
        return found

    def prompt(self, problem: Problem) -> list[int]:
        """Everything before the answer: it ends with an open `<think>`, or with an empty thought."""
        return self.template.render_ids(
            self.tokenizer, problem.messages, tools=problem.tools or None, thinking=problem.thinking
        )

    def target(self, problem: Problem) -> list[int]:
        """`{reasoning}</think>{content}{tool calls}<|im_end|>`; without thinking, from the content on.

        The template renders the turn as one of the past. With tool calls it keeps the reasoning; a final answer loses
        it there, so the reasoning is spliced in here.
        """
        pieces = self.template.pieces([assistant_turn(problem)], thinking=False, add_generation_prompt=False)
        ids = [*self.tokenizer.encode(problem.reply.reasoning), self.think_end] if problem.thinking else []
        for piece in pieces[pieces.index(Special("</think>")) + 1 :]:
            ids += [self.tokenizer.special(piece.name)] if isinstance(piece, Special) else self.tokenizer.encode(piece)
        return ids


def halves(tokenizer: Tokenizer) -> dict[int, list[tuple[int, int]]]:
    """Maps an id to all pairs of ids that have the same bytes together. Control tokens have no pairs."""
    ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.special("[BOS]"))}
    found = {
        i: [(ids[b[:at]], ids[b[at:]]) for at in range(1, len(b)) if b[:at] in ids and b[at:] in ids]
        for b, i in ids.items()
    }
    return {i: pairs for i, pairs in found.items() if pairs}


def assistant_turn(problem: Problem) -> dict[str, Any]:
    """The expected reply as an OpenAI message, tool calls numbered on from the conversation's."""
    return assistant(problem.reply, next_tool_index(problem.messages))


# ---- plain text ----------------------------------------------------------------------------------------------------


def library_files() -> list[Path]:
    """The running Python's standard library without tests, in a fixed order."""
    library = Path(sysconfig.get_path("stdlib"))
    return [f for f in sorted(library.rglob("*.py")) if not set(f.relative_to(library).parts[:-1]) & set(SKIPPED)]


def documentation_files(docs: Path | None) -> list[Path]:
    """The `*.rst.txt` files below `docs`, in a fixed order."""
    files = sorted(docs.rglob("*.rst.txt")) if docs else []
    if docs and not files:
        sys.exit(f"--docs {docs} holds no *.rst.txt file: unpack the Python documentation's sources there")
    return files


def texts(files: Sequence[Path]) -> list[str]:
    return [text for f in files if (text := f.read_text("utf-8", errors="replace")).strip()]


def make_vocabulary(out: Path, seed: int, plain: Sequence[str], *, problems: int, merges: int) -> None:
    """Learns the vocabulary from rendered problems and `plain`; problems get three times the weight of `plain`."""
    rng = random.Random(f"{seed}:vocabulary")
    template, rendered, mix = ChatTemplate(), [], families(out)
    for _ in range(problems):
        p = training_mix(rng, mix)
        pieces = [*template.pieces(p.messages, tools=p.tools or None, add_generation_prompt=False), p.reply.reasoning]
        pieces += template.pieces([assistant_turn(p)], thinking=False, add_generation_prompt=False)
        rendered += [piece for piece in pieces if isinstance(piece, str)]
    weight = max(1, round(3 * sum(map(len, plain)) / sum(map(len, rendered))))
    pieces_of = vocabulary.count(rendered)
    counts = vocabulary.count(plain)
    for piece, n in pieces_of.items():
        counts[piece] += weight * n
    vocabulary.write(vocabulary.learn(counts, merges), out)


@dataclass(frozen=True)
class Corpus:
    """Plain text as ids: `ids` uint16; `starts`: indices at which a line begins; `held_out`: ids of whole texts that
    are not trained on."""

    ids: np.ndarray
    starts: np.ndarray
    held_out: np.ndarray

    @classmethod
    def build(cls, plain: Sequence[str], tokenizer: Tokenizer) -> "Corpus":
        """Texts one after another, each followed by [EOS]."""
        end = tokenizer.special("[EOS]")
        kept: list[int] = []
        apart: list[int] = []
        for i, text in enumerate(plain):
            (apart if i % HELD_OUT_TEXTS == 0 else kept).extend([*tokenizer.encode(text), end])
        ids = np.array(kept, np.uint16)
        breaks = np.array([b"\n" in tokenizer.token_bytes(i) or i == end for i in range(tokenizer.vocab_size)])
        starts = np.flatnonzero(breaks[ids[: -TEXT_LENGTH - 1]]).astype(np.int64) + 1
        return cls(ids, starts, np.array(apart, np.uint16))

    def save(self, path: Path) -> None:
        partial = path.with_name(f".{path.name}")
        np.savez(partial, ids=self.ids, starts=self.starts, held_out=self.held_out)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Corpus":
        with np.load(path) as file:
            return cls(file["ids"], file["starts"], file["held_out"])

    def piece(self, rng: random.Random) -> list[int]:
        """TEXT_LENGTH tokens from the beginning of some line on, or up to the end of its text."""
        start = int(self.starts[rng.randrange(len(self.starts))])
        ids: list[int] = self.ids[start : start + TEXT_LENGTH].tolist()
        end = int(self.ids[-1])
        return ids[: ids.index(end) + 1] if end in ids else ids


def families(run: Path) -> dict[str, Family]:
    """All families; `doc_questions` asks about the passages kept in the run's directory too. Where the directory
    has problems that people wrote, they are among the training problems."""
    found = build_families((*BUILT_IN, *kept_passages(run)))
    file = run / records.FILE
    return records.Written(records.read(file)).mixed(found) if file.is_file() else found


def kept_passages(run: Path) -> list[str]:
    path = run / PASSAGES_FILE
    found: list[str] = json.loads(path.read_text()) if path.is_file() else []
    return found


def prose(run: Path) -> list[tuple[str, str]]:
    """(source, text) of the plain texts of people that the run's directory has."""
    file = run / records.FILE
    return records.plain(records.read(file)) if file.is_file() else []


def save_passages(run: Path, files: Sequence[Path], library: Sequence[Path]) -> int:
    """Keeps the paragraphs of documentation files and of the library's docstrings for `families`; their number."""
    found = [*passages(files), *docstrings(library)]
    partial = run / f".{PASSAGES_FILE}"
    partial.write_text(json.dumps(found))
    partial.replace(run / PASSAGES_FILE)
    return len(found)


# ---- blocks --------------------------------------------------------------------------------------------------------


def pack(samples: Sequence[tuple[list[int], int]], size: int) -> dict[str, torch.Tensor]:
    """(ids, number of leading ids that are not learnt) of samples of at most `size` tokens together, as a block.

    stream [2, size] int16: ids; targets, -1 where there is none. starts [B + 1] int32; the rest of the block is filled
    with one more "sample" of zeros per LONGEST tokens.
    """
    stream = np.zeros((2, size), np.int16)
    stream[1] = -1
    starts = [0]
    for ids, given in samples:
        at, n = starts[-1], len(ids)
        stream[0, at : at + n] = ids
        stream[1, at + given - 1 : at + n - 1] = ids[given:]
        starts.append(at + n)
    while starts[-1] < size:
        starts.append(min(starts[-1] + LONGEST, size))
    return {"stream": torch.from_numpy(stream), "starts": torch.tensor(starts, dtype=torch.int32)}


class Blocks(IterableDataset[dict[str, torch.Tensor]]):
    """Endless blocks of `size` tokens: first, first + each, ...; worker w of n makes every n-th of them from w on."""

    def __init__(self, run: Path, seed: int, size: int, first: int, each: int = 1) -> None:
        self.run, self.seed, self.size, self.first, self.each = run, seed, size, first, each
        self._codec: Codec | None = None
        self._corpus: Corpus | None = None
        self._families: dict[str, Family] = {}
        self._failed = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        self._codec, self._corpus = Codec(self.run), Corpus.load(self.run / CORPUS_FILE)
        self._families = families(self.run)
        learn_words([*kept_passages(self.run), *(text for _, text in prose(self.run))])
        number = self.first + self.each * mine
        while True:
            yield self._block(number)
            number += self.each * workers

    def _block(self, number: int) -> dict[str, torch.Tensor]:
        assert self._codec is not None and self._corpus is not None
        rng = random.Random(f"{self.seed}:{number}")
        samples: list[tuple[list[int], int]] = []
        used = plain = 0
        while True:
            if plain <= TEXT_SHARE * used:
                ids, given = self._corpus.piece(rng), 1
                plain += len(ids)
            else:
                made = self._problem(rng)
                if made is None:
                    continue
                problem, prompt = made
                if rng.random() < SPLIT_SAMPLES:
                    prompt = self._codec.split(prompt, rng)
                ids, given = prompt + self._codec.target(problem), len(prompt)
                if len(ids) > LONGEST:
                    continue
            if used + len(ids) > self.size:
                return pack(samples, self.size)
            samples.append((ids, given))
            used += len(ids)

    def _problem(self, rng: random.Random) -> tuple[Problem, list[int]] | None:
        """A problem. If its generator fails, as once in a million problems, the error is printed and there is none: one
        bad problem must not end a training. After MOST_FAILED the error is raised."""
        try:
            problem = training_mix(rng, self._families)
            return problem, self._codec.prompt(problem)
        except Exception:
            self._failed += 1
            if self._failed > MOST_FAILED:
                raise
            traceback.print_exc()
            return None


def loader(blocks: IterableDataset[dict[str, torch.Tensor]], workers: int) -> DataLoader[dict[str, torch.Tensor]]:
    """Blocks in the order of their numbers, made ahead by `workers` processes (0: by this one, when asked for).

    The processes are forked as soon as it is iterated: do that before CUDA is used.
    """
    if not workers:
        return DataLoader(blocks, batch_size=None)
    return DataLoader(
        blocks, batch_size=None, num_workers=workers, prefetch_factor=3, pin_memory=torch.cuda.is_available(),
        multiprocessing_context="fork", timeout=300, worker_init_fn=_give_way,
    )  # fmt: skip


def _give_way(worker: int) -> None:
    """A data process yields CPUs to the process that launches kernels: with 30 of them on 32 CPUs a training step took
    52 to 83 ms, and waited 0.5 % of its time for data."""
    os.nice(10)
