"""Trains the byte-level BPE vocabulary of kimi-nano and writes it in the family's files.

`tiktoken.model` holds "base64(bytes) rank" lines: 256 single bytes, then the merges. Merges are learnt inside the
pieces of the family's split expression, and never inside digits, so that each digit stays one token. The 256 special
slots follow the ranks in the same order as in the Kimi vocabulary, so `<think>` is base + 22 here as there.
"""

import base64
import itertools
import json
from collections import Counter
from pathlib import Path

import regex

from perilune.text.tokenizer import CONFIG_FILE, SPLIT_PATTERN, VOCABULARY_FILE

MERGES = 512
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


def learn(texts: list[str], merges: int) -> list[bytes]:
    """Token bytes by rank: 256 bytes, then `merges` merges, most frequent first (ties: the smaller pair)."""
    split = regex.compile(SPLIT_PATTERN, regex.V1)
    pieces = Counter(piece for text in texts for piece in split.findall(text) if not regex.search(r"\p{N}", piece))
    words = [([bytes([b]) for b in piece.encode()], count) for piece, count in sorted(pieces.items())]
    ranks = [bytes([b]) for b in range(256)]
    while len(ranks) < 256 + merges:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for parts, count in words:
            for pair in itertools.pairwise(parts):
                pairs[pair] += count
        if not pairs:
            raise ValueError(f"the text yields only {len(ranks) - 256} merges of {merges}: give more varied text")
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merged = best[0] + best[1]
        ranks.append(merged)
        for parts, _ in words:
            i = 0
            while i < len(parts) - 1:
                if (parts[i], parts[i + 1]) == best:
                    parts[i : i + 2] = [merged]
                i += 1
    return ranks


def write(ranks: list[bytes], out: Path) -> None:
    """Writes tiktoken.model and tokenizer_config.json into the directory `out`."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    (out / VOCABULARY_FILE).write_text("".join(lines))
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
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
