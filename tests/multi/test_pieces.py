"""Partial outputs of prompts that travel in pieces: the tokens of one rank, and one error where a rank is lost between
pieces."""

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from perilune import LLM, SamplingParams
from perilune.core.errors import EngineError
from perilune.dist import pieces
from tests.multi.conftest import CONFIG
from tests.multi.test_answers import WAYS, alike

LONG = "The quick brown fox jumps over the lazy dog, and then it runs home. " * 5  # several steps of 48 tokens
PROMPTS = [LONG, "A", LONG[30:120], f"1, 2, 3. {LONG}"]  # a step has parts of several, of few and of many tokens
# test_answers.py has four ranks with pieces, test_sharded_kv.py has sharded KV.
LAYOUTS: dict[str, dict[str, Any]] = {"tp 2": dict(tp=2), "ep 2": dict(tp=2, ep=2)}
PIECE = 9  # tokens: a step of 48 has six pieces, more than are in flight


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_one_rank(monkeypatch: pytest.MonkeyPatch, one: LLM, layout: str) -> None:
    sent: list[int] = []
    send = pieces.Gathered.send

    def counted(self: pieces.Gathered, part: Tensor) -> None:
        sent.append(len(part))
        send(self, part)

    monkeypatch.setattr(pieces.Gathered, "send", counted)
    ways = [replace(p, max_tokens=8, prompt_logprobs=None) for p in WAYS[:4]]
    expected = one.generate(PROMPTS, ways)
    with LLM(
        "kimi-nano",
        **CONFIG,
        **LAYOUTS[layout],
        kv_blocks=64,
        draft="eagle3",
        draft_tokens=3,
        exchange_piece_tokens=PIECE,
    ) as llm:
        alike(llm.generate(PROMPTS, ways), expected)
        layers = len(one._engine.runner.model.weights.layers) if one._engine else 0
        assert max(sent) == PIECE and min(sent) < PIECE and len(sent) >= 2 * layers * 6
        sent.clear()
        llm.generate("A", replace(ways[0], max_tokens=3))
        assert not sent, "only prompts that are longer than a piece travel so"
        if layout == "tp 2":
            a_rank_that_is_killed_between_pieces_is_one_error(monkeypatch, llm)


def a_rank_that_is_killed_between_pieces_is_one_error(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    assert llm._engine is not None and llm._engine._ranks is not None
    (rank,) = llm._engine._ranks._ranks
    receive = pieces.Gathered.receive
    calls = 0

    def harmed(self: pieces.Gathered) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        if calls == 8:  # in the first layer's second sum, while three pieces are in flight
            os.kill(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
        return receive(self)

    monkeypatch.setattr(pieces.Gathered, "receive", harmed)
    with pytest.raises(EngineError, match=r"rank 1 of 2 \(process \d+\) ended by SIGKILL"):
        llm.generate(f"Another one: {LONG}", SamplingParams(temperature=0.0, max_tokens=4))
    assert calls >= 8
