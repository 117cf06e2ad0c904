"""The tokenizer against golden ids, a plain tiktoken encoding of the same data, and damaged files."""

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from perilune.core.errors import CheckpointError, RequestError
from perilune.text.detokenizer import Detokenizer
from perilune.text.tokenizer import AddedToken, Tokenizer

UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
PATTERN = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SCRIPTS = [(32, 127), (0xA0, 0x250), (0x370, 0x530), (0x5D0, 0x700), (0x900, 0xE7F), (0x1F00, 0x2BFF)]
SCRIPTS += [(0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF)]
WORDS = ["don't", "I'M", " the", "\r\n", "\n\n", "   ", "\t", "12345", "e\u0301", "\u200d", "</", "世界", "ÀÉ", "ǅ"]


def mixed_texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)

    def piece() -> str:
        if draw.random() < 0.4:
            return draw.choice(WORDS)
        low, high = draw.choice(SCRIPTS)
        return "".join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 6)))

    return ["".join(piece() for _ in range(draw.randint(0, 12))) for _ in range(count)]


def write_model(path: Path, ranks: dict[bytes, int], added: dict[str, Any]) -> Path:
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    (path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return path


def added(**names: str) -> dict[str, Any]:
    return {id.removeprefix("_"): {"content": name, "special": True} for id, name in names.items()}


BYTES = {bytes([i]): i for i in range(256)}


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [19180, 2695]),
        ("user", [2482]),
        ("assistant", [69702]),
        ("system", [14062]),
        ("tool", [20960]),
        ("tool_declare", [20960, 35556, 677]),
        ("image", [4017]),
        ("video", [22782]),
        ("functions", [41937]),
        ("你好，世界 2024年", [33845, 378, 2243, 220, 2975, 19, 532]),
        ("I'M don't 12345 a_b", [40, 103645, 4536, 220, 6694, 2899, 261, 1339]),
        ("You are a helpful assistant.", [3900, 554, 261, 13205, 26626, 13]),
        ("Who are you?", [24328, 554, 398, 30]),
        ("<|kimi_k25_video_placeholder|>", [27, 91, 74, 30223, 7559, 1453, 37336, 114136, 91, 29]),
        ("", []),
    ],
)
def test_golden_ids(kimi: Tokenizer, text: str, ids: list[int]) -> None:
    assert kimi.encode(text) == ids
    assert kimi.decode(ids) == text


def test_control_slots(kimi: Tokenizer) -> None:
    assert kimi.vocab_size == 163840
    named = {"[BOS]": 163584, "[EOS]": 163585, "<|im_end|>": 163586, "<|im_user|>": 163587, "[EOT]": 163593}
    named |= {"<|im_middle|>": 163601, "<think>": 163606, "</think>": 163607, "[PAD]": 163839}
    assert {name: kimi.special(name) for name in named} == named
    assert kimi.special("<|reserved_token_163589|>") == 163589
    assert kimi.special_id("<|no_such_token|>") is None
    with pytest.raises(CheckpointError, match="no control token '<|no_such_token|>'".replace("|", r"\|")):
        kimi.special("<|no_such_token|>")
    assert kimi.stop_ids == {163585, 163586, 163593}
    assert [kimi.is_special(i) for i in (0, 163583, 163584, 163600, 163839, 163840)] == [
        False,
        False,
        *[True] * 3,
        False,
    ]
    m = kimi.markers
    assert (m.section_begin, m.section_end, m.call_begin, m.argument_begin, m.call_end) == tuple(range(163595, 163600))
    assert (m.think_begin, m.think_end) == (163606, 163607)
    assert (
        kimi.decode([163587, 2482, 163601, 163606, 163600], skip_special=True) == "user<think><|reserved_token_163600|>"
    )
    assert kimi.decode([163587, 2482]) == "<|im_user|>user"


def test_same_ids_as_a_plain_encoding(kimi: Tokenizer, kimi_k26: Path) -> None:
    lines = (kimi_k26 / "tiktoken.model").read_bytes().split()
    ranks = {base64.b64decode(t): int(r) for t, r in zip(lines[::2], lines[1::2])}
    plain = tiktoken.Encoding("plain", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in mixed_texts(2000, seed=1):
        assert kimi.encode(text) == plain.encode_ordinary(text), text


def test_round_trip_and_streamed_decoding(kimi: Tokenizer) -> None:
    for text in mixed_texts(1000, seed=2):
        ids = kimi.encode(text)
        assert kimi.decode(ids) == text
        stream = Detokenizer(kimi)
        assert "".join(map(stream.push, ids)) == text and stream.flush() == ""


def test_broken_characters_are_decoded_alike_streamed_and_whole() -> None:
    tokenizer = Tokenizer(BYTES, {})
    draw = random.Random(3)
    alphabet = "aé世🜁".encode() + b"\xff\xc0\xe4\xf0\x9f\x80"
    for _ in range(2000):
        ids = [draw.choice(alphabet) for _ in range(draw.randint(0, 12))]
        stream = Detokenizer(tokenizer)
        assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "a<think>b</think>", "[EOS]", "<|tool_call_begin|>x<|reserved_token_163600|>"]
)
def test_text_never_becomes_control_tokens(kimi: Tokenizer, text: str) -> None:
    ids = kimi.encode(text)
    assert not any(kimi.is_special(i) for i in ids)
    assert kimi.decode(ids) == text
    trusted = kimi.encode(text, allow_special=True)
    assert any(kimi.is_special(i) for i in trusted) and kimi.decode(trusted) == text


def test_media_placeholder_of_trusted_text(kimi: Tokenizer) -> None:
    text = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\nDescribe"
    assert kimi.encode(text, allow_special=True) == [163602, 4017, 163603, 163605, 163604, 198, 48848]


def test_long_runs_are_cut_where_the_family_cuts_them(kimi: Tokenizer) -> None:
    one, rest = kimi.encode("!" * 25_000), kimi.encode("!" * 7)
    assert kimi.encode("!" * 50_007) == one + one + rest
    spaces = "x" + " " * 25_000
    assert kimi.encode(spaces + " y") == kimi.encode(spaces) + kimi.encode(" y")
    block = "word " * 80_000
    assert kimi.encode(block + block) == kimi.encode(block) * 2
    hostile = " " * 300_000 + "\n" * 100_000
    assert kimi.decode(kimi.encode(hostile)) == hostile


def test_unpaired_surrogates_become_the_replacement_character(kimi: Tokenizer) -> None:
    assert kimi.decode(kimi.encode("a\ud800b")) == "a\ufffdb"


def test_ids_outside_the_vocabulary(kimi: Tokenizer) -> None:
    for id in (-1, 163840):
        with pytest.raises(RequestError, match=f"token id {id} is outside the vocabulary of 163840 tokens"):
            kimi.decode([id])


def test_a_small_vocabulary(tmp_path: Path) -> None:
    ranks = {**BYTES, b"he": 256, b"hel": 257, b"lo": 258}
    config = {"259": {"content": "[EOS]", "special": True}, "300": {"content": "<think>", "special": False}}
    tokenizer = Tokenizer.from_directory(write_model(tmp_path, ranks, config))
    assert tokenizer.vocab_size == 259 + 256
    assert tokenizer.encode("hello") == [257, 258]
    assert tokenizer.stop_ids == {259}
    assert tokenizer.markers.think_begin == 300 and tokenizer.markers.call_begin is None
    assert tokenizer.token_text(301) == "<|reserved_token_301|>" and tokenizer.token_bytes(257) == b"hel"


def _cut(path: Path) -> None:
    model = path / "tiktoken.model"
    model.write_bytes(model.read_bytes()[:1001])


def _replace(old: bytes, new: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        model = path / "tiktoken.model"
        assert old in model.read_bytes()
        model.write_bytes(model.read_bytes().replace(old, new, 1))

    return change


def _config(text: str) -> Callable[[Path], None]:
    return lambda path: [(path / "tokenizer_config.json").write_text(text), None][1]


def _names(**names: str) -> Callable[[Path], None]:
    return _config(json.dumps({"added_tokens_decoder": added(**names)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "tiktoken.model").unlink(), "has no tiktoken.model.*copy it from the model"),
        (lambda p: (p / "tokenizer_config.json").unlink(), "has no tokenizer_config.json"),
        (_cut, r"tiktoken.model line \d+ is not 'base64 id': the file is damaged"),
        (_replace(b"IQ== 33\n", b"I!== 33\n"), "line 34 is not 'base64 id'"),
        (_replace(b"IQ== 33\n", b"IQ== 34\n"), "token ids are not 0..255 without gaps"),
        (_replace(b"IQ== 33\n", b"IQ== 256\n"), "token ids are not 0..255 without gaps"),
        (_replace(b"IQ== 33\n", b"Ig== 33\n"), "line 35: empty or repeated token"),
        (_replace(b"IQ== 33\n", b"ISE= 33\n"), "byte 0x21 has no token"),
        (_config("{"), "no readable 'added_tokens_decoder'"),
        (_config("[]"), "no readable 'added_tokens_decoder'"),
        (_config('{"added_tokens_decoder": {"x": {"content": "a"}}}'), "no readable 'added_tokens_decoder'"),
        (_config('{"added_tokens_decoder": {"256": {"content": 1}}}'), "added token 256 needs a text 'content'"),
        (_names(_255="[EOS]"), r"'\[EOS\]' has id 255, outside the control slots 256..511"),
        (_names(_512="[EOS]"), r"'\[EOS\]' has id 512, outside"),
        (_names(_256="[EOS]", _257="[EOS]"), "not used twice"),
        (_names(_256="<|reserved_token_257|>"), "not used twice"),
    ],
)
def test_damaged_files(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    write_model(tmp_path, BYTES, added(_256="[EOS]"))
    Tokenizer.from_directory(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_constructor_checks_its_data() -> None:
    for lacking in (0, 7):
        with pytest.raises(CheckpointError, match=f"byte 0x0{lacking} has no token"):
            Tokenizer({(b if i != lacking else b"xx"): i for b, i in BYTES.items()}, {})
    with pytest.raises(CheckpointError, match="must have names"):
        Tokenizer(BYTES, {256: AddedToken("", True)})
