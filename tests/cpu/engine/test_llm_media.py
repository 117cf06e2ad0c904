"""Pictures and videos given to `LLM.chat` and `LLM.generate`, against transformers on the same weights."""

import base64
import io
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perilune import LLM, SamplingParams
from perilune.core.errors import RequestError
from perilune.core.messages import Video, pictures_of
from perilune.engine.vision.given import _bytes
from perilune.formats.hub import resolve_model
from perilune.media.decoder import Decoder
from perilune.media.limits import Limits
from perilune.media.patches import patches_of
from perilune.text.chat import VIDEO_PLACEHOLDER
from perilune.text.tokenizer import Tokenizer
from tests import seeing
from tests.cpu.media.pictures import chunk, file, gray_tiff, png, scene
from tests.cpu.media.videos import colours, video
from tests.seeing import Seeing, picture

CONFIG: dict[str, Any] = dict(
    dtype="float32", device="cpu", max_model_len=512, max_num_seqs=4, threads=1, draft="off", vision_cache_gb=0.001,
    qk_norm_eps=1e-6,  # as transformers
)  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
HEAD, TAIL = (
    "<|im_user|>user<|im_middle|>",
    "What is this?<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>",
)
ASK = {"type": "text", "text": "What is this?"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """With the vocabulary of kimi-nano."""
    nano = Path(resolve_model("kimi-nano"))
    pad = Tokenizer.from_directory(nano).special("<|media_pad|>")
    path = tmp_path_factory.mktemp("seeing") / "model"
    found = seeing.make(path, patch_limit=160, pad=pad, vocab_size=4096, num_hidden_layers=2)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(nano / name, path / name)
    return found


@pytest.fixture(scope="module")
def llm(checkpoint: Seeing) -> Iterator[LLM]:
    with LLM(checkpoint.path, **CONFIG) as llm:
        yield llm


def said(llm: LLM, *parts: Any) -> tuple[int, ...]:
    return llm.chat([{"role": "user", "content": list(parts)}], GREEDY, thinking=False).token_ids


def prompt(llm: LLM, shown: str) -> list[int]:
    assert llm.tokenizer is not None
    text = HEAD + shown + TAIL
    return llm.tokenizer.encode(text, allow_special=True)


def pads(tokens: int, word: str = "image") -> str:
    return f"<|media_begin|>{word}<|media_content|>{'<|media_pad|>' * tokens}<|media_end|>"


@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_a_chunk_of_frames_against_transformers(checkpoint: Seeing, llm: LLM, frames: int) -> None:
    chunk = picture(4, 6, 7, frames)
    ids = [5, 6, *[checkpoint.pad] * chunk.tokens, 9]
    (found,) = llm.generate(ids, GREEDY, pictures=[chunk])
    assert list(found.token_ids) == checkpoint.greedy(ids, [chunk], 5)
    with pytest.raises(RequestError, match="up to 4 frames"):
        llm.generate(ids, GREEDY, pictures=[picture(4, 6, 7, 5)])


def test_a_picture_in_every_form(checkpoint: Seeing, llm: LLM, tmp_path: Path) -> None:
    data, path = file(scene(130, 50)), tmp_path / "a b.png"
    path.write_bytes(data)
    with Decoder(Limits.from_directory(checkpoint.path)) as decoder:
        decoded = decoder.decode(data)
    ids = prompt(llm, pads(decoded.tokens) + "\n")
    wanted = tuple(checkpoint.greedy(ids, [decoded], 5))
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    for given in (
        path,
        str(path),
        f"file://{path}",
        path.as_uri(),
        data,
        url,
        scene(130, 50),
        scene(130, 50).convert("RGBA"),
        decoded,
    ):
        assert said(llm, {"type": "image", "image": given}, ASK) == wanted, given
    assert said(llm, {"type": "image_url", "image_url": {"url": url, "detail": "high"}}, ASK) == wanted
    turned = scene(130, 50).transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[0x0112] = 6  # lies on its side, as cameras write
    assert said(llm, {"type": "image", "image": turned}, ASK) == wanted
    assert said(llm, ASK) != wanted
    raw = llm.generate(
        ids[: ids.index(checkpoint.pad) + 1] + ids[ids.index(checkpoint.pad) + decoded.tokens :],
        GREEDY,
        pictures=[path],
    )
    assert raw[0].token_ids == wanted


@pytest.mark.parametrize("order", ["<u2", ">u2"])
def test_gray_of_16_bits_of_either_byte_order(order: str) -> None:
    """As Pillow opens TIFF files."""
    image = Image.open(io.BytesIO(file(Image.fromarray(np.full((28, 28), 0x4000, order)), "TIFF")))
    patches, _ = patches_of(_bytes(image, False), Limits())
    assert (patches == 0x40).all(), image.mode


def test_gray_of_12_bits_as_pil_opens_it() -> None:
    """As the file itself is read: 0x800 of 12 bits is mid gray."""
    data = gray_tiff(28, 28, 12, 1, b"\x80\x08\x00" * (28 * 14))
    patches, _ = patches_of(_bytes(Image.open(io.BytesIO(data)), False), Limits())
    assert (patches == 0x80).all()


@pytest.mark.parametrize("exif", [b"Exif\0\0xx", b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x04\0\0\0abc\0\0\0\0\0"])
def test_damaged_exif_of_a_pil_image_does_not_matter(exif: bytes) -> None:
    data = png(28, 28, (b"\0" + b"\x40" * 84) * 28, chunk(b"eXIf", exif))
    patches, _ = patches_of(_bytes(Image.open(io.BytesIO(data)), False), Limits())
    assert (patches == 0x40).all()


@pytest.mark.parametrize("form", ["TIFF", "JPEG", "PNG", "WEBP"])
def test_a_pil_image_is_turned_as_its_file_is(form: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = file(scene(84, 28), form, exif=exif)
    patches, grid = patches_of(data, Limits())
    given, same = patches_of(_bytes(Image.open(io.BytesIO(data)), False), Limits())
    assert grid == same == (1, 6, 2) and np.array_equal(patches, given)


def test_a_video(checkpoint: Seeing, llm: LLM, tmp_path: Path) -> None:
    data, path = video(colours(12, (84, 56))), tmp_path / "a.mp4"
    path.write_bytes(data)
    with Decoder(Limits.from_directory(checkpoint.path)) as decoder:
        decoded = decoder.decode_video(data)
    first, second = decoded.chunks
    assert isinstance(decoded, Video) and (first.grid[0], second.grid[0]) == (4, 2) and first.tokens == 6
    shown = f"00:00:00.000{pads(6, 'video')}00:00:02.250{pads(6, 'video')}"
    ids = prompt(llm, shown + "\n")
    wanted = tuple(checkpoint.greedy(ids, [first, second], 5))
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    for given in (path, data, url, decoded):
        assert said(llm, {"type": "video", "video": given}, ASK) == wanted
    assert said(llm, {"type": "video_url", "video_url": {"url": url}}, ASK) == wanted
    assert said(llm, {"type": "input_video", "video_url": url}, ASK) == wanted
    assert said(llm, ASK, {"type": "video", "video": path}, {"type": "image", "image": scene(30, 30)}) != wanted
    part = {"type": "video", "video": path}
    (raw,) = llm.generate(HEAD + VIDEO_PLACEHOLDER + "\n" + TAIL, GREEDY, pictures=[part])
    assert raw.token_ids == wanted and raw.cached_tokens > 0
    with pytest.raises(RequestError, match=r"the prompt has 0 times .* and videos are 1"):
        llm.generate(HEAD + TAIL, GREEDY, pictures=[part])
    assert pictures_of([decoded]) == [first, second]


def test_the_example(
    checkpoint: Seeing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene(40, 40).save(tmp_path / "a.png")
    (tmp_path / "b.mp4").write_bytes(video(colours(2)))
    asked = []
    chat = LLM.chat
    monkeypatch.setattr(LLM, "chat", lambda llm, *args: asked.append(chat(llm, *args)) or asked[0])
    monkeypatch.setattr(sys, "argv", ["", str(checkpoint.path), str(tmp_path / "a.png"), str(tmp_path / "b.mp4")])
    runpy.run_path(str(Path(__file__).parents[3] / "examples/pictures.py"))
    assert asked and capsys.readouterr().out == asked[0].content + "\n"


def test_what_cannot_be_used_is_one_line(llm: LLM, tiny: Path, tmp_path: Path) -> None:
    where = r"^messages\[0\].content\[0\]: "
    for part, says in (
        ({"type": "image", "image": tmp_path / "no.png"}, "cannot read the picture .*: No such file"),
        ({"type": "image", "image": "~nobody.png"}, "cannot read the picture ~nobody.png: No such file"),
        ({"type": "image", "image": 3}, "a picture is given as bytes, a path, a data: URL or a PIL image, not"),
        ({"type": "video", "video": scene(3, 3)}, "a video is given as bytes, a path or a data: URL, not"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "LLM fetches no picture: download"),
        ({"type": "image", "image": b"no picture"}, "none of PNG"),
        ({"type": "image_url"}, "a picture is given as"),
        ({"type": "image", "image": Image.new("F", (9, 9))}, "pixels are 32-bit"),
        (
            {"type": "image", "image": Image.open(io.BytesIO(file(scene(300, 300))[:2000]))},
            "cannot be read: .*truncated",
        ),
        ({"type": "image", "image": tmp_path}, "cannot read the picture .*: it is a directory, not a regular file$"),
        ({"type": "image", "image": "a\0.png"}, r"cannot read the picture 'a\\x00.png': embedded null byte"),
    ):
        with pytest.raises(RequestError, match=where + f".*{says}") as e:
            said(llm, part, ASK)
        assert "\n" not in str(e.value)
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\].type: must be|must be 'text', not"):
        said(llm, {"type": "audio"}, ASK)
    for given in ("shot.png", b"x", tmp_path, scene(9, 9), {"type": "image"}):
        with pytest.raises(RequestError, match="pictures must be a list, also of one picture, not "):
            llm.generate("Hi", GREEDY, pictures=given)  # type: ignore[arg-type]  # what is wrong with it is said
    for messages in (None, "Hi", [], [None]):
        with pytest.raises(RequestError, match=r"^messages"):
            llm.chat(messages)  # type: ignore[arg-type]  # what is wrong with it is said
    big = tmp_path / "big.png"
    with big.open("wb") as f:
        f.truncate((32 << 20) + 1)
    with pytest.raises(RequestError, match="more than 32 MB: make it smaller"):
        said(llm, {"type": "image", "image": big})
    with LLM("kimi-nano", device="cpu", threads=1, max_model_len=256, draft="off", vision="off") as blind:
        with pytest.raises(RequestError, match="does not see pictures") as e:
            said(blind, {"type": "image", "image": tmp_path / "no.png"})
        assert e.value.code == "unsupported_media"
