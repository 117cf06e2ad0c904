"""Learns the byte-level BPE vocabulary of kimi-nano and writes it in the family's files.

`tiktoken.model` holds "base64(bytes) rank" lines: 256 single bytes, then the merges. Merges are learnt inside the
pieces of the family's split expression, and never inside digits, so that each digit stays one token. The 256 special
slots follow the ranks in the same order as in the Kimi vocabulary, so `<think>` is base + 22 here as there.

Pieces are counted once; the counts of pairs are then kept up to date merge by merge, so thousands of merges over tens
of megabytes take seconds.
"""

import base64
import heapq
import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import regex

from perilune.text.tokenizer import CONFIG_FILE, CONTROL_SLOTS, SPLIT_PATTERN, VOCABULARY_FILE

VOCABULARY = 4096  # with the special slots
MERGES = VOCABULARY - CONTROL_SLOTS - 256
# name -> (offset from the first special id, flagged special: stripped from decoded text)
SPECIAL: dict[str, tuple[int, bool]] = {
    "[BOS]": (0, True), "[EOS]": (1, True), "<|im_end|>": (2, True), "<|im_user|>": (3, True),
    "<|im_assistant|>": (4, True), "<|start_header_id|>": (6, True), "<|end_header_id|>": (7, True), "[EOT]": (9, True),
    "<|im_system|>": (10, True), "<|tool_calls_section_begin|>": (11, False), "<|tool_calls_section_end|>": (12, False),
    "<|tool_call_begin|>": (13, False), "<|tool_call_argument_begin|>": (14, False), "<|tool_call_end|>": (15, False),
    "<|im_middle|>": (17, True), "<|media_begin|>": (18, True), "<|media_content|>": (19, True),
    "<|media_end|>": (20, True), "<|media_pad|>": (21, True), "<think>": (22, False), "</think>": (23, False),
    "[UNK]": (254, True), "[PAD]": (255, True),
}  # fmt: skip

_SPLIT = regex.compile(SPLIT_PATTERN, regex.V1)
_DIGIT = regex.compile(r"\p{N}")


def count(texts: Iterable[str]) -> Counter[str]:
    """How often each piece without digits occurs."""
    pieces: Counter[str] = Counter()
    for text in texts:
        pieces.update(_SPLIT.findall(text))
    return Counter({piece: n for piece, n in pieces.items() if not _DIGIT.search(piece)})


def learn(pieces: Mapping[str, int], merges: int) -> list[bytes]:
    """Token bytes by rank: 256 bytes, then `merges` merges, most frequent first (ties: the smaller pair).

    ValueError if the pieces yield fewer merges.
    """
    ranks = [bytes([b]) for b in range(256)]
    words = [(list(piece.encode()), n) for piece, n in sorted(pieces.items())]
    pairs: defaultdict[tuple[int, int], int] = defaultdict(int)
    where: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for w, (parts, n) in enumerate(words):
        for pair in itertools.pairwise(parts):
            pairs[pair] += n
            where[pair].add(w)

    def entry(pair: tuple[int, int]) -> tuple[int, tuple[bytes, bytes], tuple[int, int]]:
        return -pairs[pair], (ranks[pair[0]], ranks[pair[1]]), pair

    heap = [entry(pair) for pair in pairs]
    heapq.heapify(heap)
    known = set(ranks)
    while len(ranks) < 256 + merges:
        if not heap:
            raise ValueError(f"the text yields only {len(ranks) - 256} merges of {merges}: give more varied text")
        frequency, _, pair = heapq.heappop(heap)
        if pair not in pairs or -frequency != pairs[pair]:  # an outdated count; the current one is in the heap, too
            continue
        token = ranks[pair[0]] + ranks[pair[1]]
        if token in known:  # two merges give the same bytes: they need one id
            del pairs[pair]
            continue
        new = len(ranks)
        ranks.append(token)
        known.add(token)
        changed: set[tuple[int, int]] = set()
        for w in where.pop(pair):
            parts, n = words[w]
            for old in itertools.pairwise(parts):
                if old in pairs:
                    pairs[old] -= n
                    changed.add(old)
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == pair:
                    parts[i : i + 2] = [new]
                i += 1
            for now in itertools.pairwise(parts):
                pairs[now] += n
                where[now].add(w)
                changed.add(now)
        for other in changed:
            if pairs[other] > 0:
                heapq.heappush(heap, entry(other))
            else:
                del pairs[other]
        pairs.pop(pair, None)
    return ranks


def write(ranks: list[bytes], out: Path) -> None:
    """Writes tiktoken.model and tokenizer_config.json into the directory `out`."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config = {
        "added_tokens_decoder": {
            str(len(ranks) + offset): {"content": name, **flags, "special": special}
            for name, (offset, special) in SPECIAL.items()
        },
        "additional_special_tokens": [n for n, (o, special) in SPECIAL.items() if special and 2 <= o < 254],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    for name, text in ((VOCABULARY_FILE, "".join(lines)), (CONFIG_FILE, json.dumps(config, indent=2) + "\n")):
        partial = out / f".{name}.tmp"
        partial.write_text(text)
        os.replace(partial, out / name)
