"""What becomes of image files: pixels of every mode and format, and one error for every bad one."""

import io
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from perilune.core.errors import RequestError
from perilune.media import patches as under_test
from perilune.media.limits import Limits
from perilune.media.patches import digest, patches_of
from tests.cpu.media.pictures import chunk, file, gray_tiff, png, scene

LIMITS = Limits()


def pixels(data: bytes, limits: Limits = LIMITS) -> np.ndarray:
    """[rows * P, columns * P, 3]: the patches put together again, one by one."""
    patches, (frames, rows, columns) = patches_of(data, limits)
    side = limits.patch_size
    assert frames == 1 and patches.shape == (rows * columns, 3, side, side) and patches.dtype == np.uint8
    whole = np.zeros((rows * side, columns * side, 3), np.uint8)
    for i, patch in enumerate(patches):
        top, left = i // columns * side, i % columns * side
        whole[top : top + side, left : left + side] = patch.transpose(1, 2, 0)
    return whole


@pytest.mark.parametrize("size", [(1, 1), (28, 28), (30, 45), (640, 480), (1, 900), (57, 13)])
def test_small_pictures_keep_every_pixel_and_are_padded_with_black(size: tuple[int, int]) -> None:
    image = scene(*size)
    whole = pixels(file(image))
    assert whole.shape == (-(-size[1] // 28) * 28, -(-size[0] // 28) * 28, 3)
    assert np.array_equal(whole[: size[1], : size[0]], np.asarray(image))
    assert not whole[size[1] :].any() and not whole[:, size[0] :].any()


@pytest.mark.parametrize(
    ("size", "fitted"), [((2000, 1900), (1848, 1756)), ((1, 8000), (1, 7168)), ((9000, 500), (7168, 398))]
)
def test_large_ones_are_shrunk_bicubically(size: tuple[int, int], fitted: tuple[int, int]) -> None:
    fit = LIMITS.fit(*size)
    assert (fit.width, fit.height) == fitted
    whole = pixels(file(scene(*size)))
    expected = np.asarray(scene(*size).resize(fitted, Image.Resampling.BICUBIC))
    assert np.array_equal(whole[: fitted[1], : fitted[0]], expected)
    # Of a smooth scene the shrunk one is nearly the scene made small.
    assert np.abs(expected.astype(int) - np.asarray(scene(*fitted)).astype(int)).mean() < 3


def near(data: bytes, expected: Image.Image, tolerance: float = 0) -> None:
    whole = pixels(data)[: expected.height, : expected.width].astype(int)
    assert np.abs(whole - np.asarray(expected).astype(int)).max() <= tolerance


def test_every_format_is_read() -> None:
    image = scene(60, 40)
    for form, how in (("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True})):
        near(file(image, form, **how), image)
    near(file(image, "JPEG", quality=95, subsampling=0), image, 6)
    near(file(image, "JPEG", quality=95, subsampling=0, progressive=True), image, 6)
    near(file(image, "GIF"), image, 40)
    near(file(image.quantize(16)), image.quantize(16).convert("RGB"))


def test_every_mode_becomes_rgb() -> None:
    image = scene(60, 40)
    alpha = image.copy()
    alpha.putalpha(Image.linear_gradient("L").resize(image.size))
    near(file(alpha), image)  # transparency is dropped, not blended
    palette = image.quantize(16)
    near(file(palette, transparency=3), palette.convert("RGB"))
    near(file(image.convert("CMYK"), "JPEG", quality=95), image, 12)
    near(file(image.convert("CMYK"), "TIFF"), image, 2)
    near(file(image.convert("L")), image.convert("L").convert("RGB"))
    near(file(image.convert("LA")), image.convert("L").convert("RGB"))
    near(file(image.convert("1")), image.convert("1").convert("RGB"))


def test_sixteen_bits_are_scaled_not_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "STRIP_PIXELS", 5 * 28 + 1)  # the last of six strips has 3 rows
    values = np.linspace(0, 65535, 28 * 28).reshape(28, 28).astype(np.uint16)
    expected = np.repeat((values >> 8).astype(np.uint8)[..., None], 3, 2)
    assert np.array_equal(pixels(file(Image.fromarray(values))), expected)
    assert np.array_equal(pixels(file(Image.fromarray(values), "TIFF")), expected)
    assert np.array_equal(pixels(file(Image.fromarray(values.astype(">u2")), "TIFF")), expected)
    rows = b"".join(b"\0" + np.repeat(row[:, None], 3, 1).astype(">u2").tobytes() for row in values)
    assert np.array_equal(pixels(png(28, 28, rows, depth=16)), expected)  # 48 bits a pixel


def test_gray_of_12_bits_and_with_0_for_white() -> None:
    values = np.linspace(0, 4095, 28 * 28).reshape(28, 28).astype(np.uint16)
    expected = np.repeat((values >> 4).astype(np.uint8)[..., None], 3, 2)
    first, second = values.reshape(-1, 2).T
    packed = np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], 1).astype(np.uint8)
    assert np.array_equal(pixels(gray_tiff(28, 28, 12, 1, packed.tobytes())), expected)
    wide = (values << 4).astype("<u2").tobytes()
    assert np.array_equal(pixels(gray_tiff(28, 28, 16, 1, wide)), expected)
    assert np.array_equal(pixels(gray_tiff(28, 28, 16, 0, wide)), 255 - expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_picture_upright(orientation: int) -> None:
    """All eight orientations, as cameras write them, and their token counts: 56 x 28 pixels become 28 x 56 of some."""
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Image.Transpose that makes the stored from the upright
    image = scene(56, 30)
    stored = image.transpose(Image.Transpose(undo[orientation])) if orientation > 1 else image
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file(stored, exif=exif)
    if orientation > 4:
        assert stored.size == (30, 56)
    assert np.array_equal(np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data)))), np.asarray(image))
    near(data, image)
    assert patches_of(data, LIMITS)[1] == (1, 4, 4)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # by Pillow; the worker's go nowhere
def test_damaged_exif_does_not_matter() -> None:
    near(png(28, 28, (b"\0" + b"\7" * 84) * 28, chunk(b"eXIf", b"Exif\0\0MM\0*\xff\xff\xff\xff")), scene(28, 28), 255)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_frame_counts(form: str) -> None:
    frames = [scene(40, 40).rotate(90 * i) for i in range(4)]
    how = {"lossless": True} if form == "WEBP" else {}
    near(file(frames[0], form, save_all=True, append_images=frames[1:], **how), frames[0], 40 if form == "GIF" else 0)


JPEG = file(scene(300, 200), "JPEG")
BAD = {
    "text": (b"hello" * 100, "none of PNG, JPEG"),
    "svg": (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "SVG is not read"),
    "html": (b"\n<!DOCTYPE html><p>404", "it is a web page"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of PNG"),
    "pdf": (b"%PDF-1.7\n", "none of PNG"),
    "avif": (b"\0\0\0\x18ftypavif\0\0\0\0avif", "it is AVIF, none of PNG, .*: send it as PNG or JPEG"),
    "heic": (b"\0\0\0\x18ftypmif1\0\0\0\0heic", "it is HEIC"),
    "jpeg 2000": (b"\0\0\0\x0cjP  \r\n\x87\n", "it is JPEG 2000"),
    "icon": (file(scene(9, 9), "ICO"), "it is ICO"),
    "mp4": (b"\0\0\0\x18ftypmp42\0\0\0\0", "it is a video, none of PNG, .*: send it as a video part"),
    "only a signature": (b"\x89PNG\r\n\x1a\n", "its header is damaged; it begins as PNG"),
    "a GIF without pixels, which is no video": (b"GIF89a\0\0\0\0\0\0\0;", "its header is damaged; it begins as GIF"),
    "half a JPEG": (JPEG[: len(JPEG) // 2], "damaged or truncated"),
    "half a PNG": (file(scene(300, 200))[:900], "damaged or truncated"),
    "half a WebP": (file(scene(300, 200), "WEBP")[:500], "damaged or truncated"),
    "half a GIF": (file(scene(300, 200), "GIF")[:900], "damaged or truncated"),
    "half a TIFF": (file(scene(300, 200), "TIFF")[:900], "damaged or truncated|none of PNG"),
    "a header that lies about the size": (png(3000, 3000, b"\0" * 4000), "damaged or truncated"),
    "a bomb of 900 megapixels": (png(30000, 30000, b"", colour=0, depth=1), "30,000 x 30,000 pixels"),
    "more pixels than there can be": (png(2**31 - 1, 2**31 - 1, b""), "pixels"),
    "no pixels": (png(0, 5, b""), "its header is damaged; it begins as PNG"),
    "a bomb in the text": (
        png(28, 28, b"", chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * 80_000_000))), "damaged or truncated",
    ),
    "a bomb in the colour profile": (
        png(28, 28, b"", chunk(b"iCCP", b"a\0\0" + zlib.compress(b"x" * 80_000_000))), "damaged or truncated",
    ),
    "floats": (file(Image.fromarray(np.ones((9, 9), np.float32)), "TIFF"), "mode F"),
    "32-bit numbers": (file(Image.fromarray(np.ones((9, 9), np.int32)), "TIFF"), "mode I"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_refused_in_one_line(kind: str) -> None:
    data, says = BAD[kind]
    with pytest.raises(RequestError, match=says) as e:
        patches_of(data, LIMITS)
    assert e.value.status == 400 and e.value.code == "invalid_image"
    assert str(e.value).startswith("the image cannot be used: ") and "\n" not in str(e.value)


def test_the_digest_is_of_what_the_model_sees() -> None:
    image = scene(60, 40)
    same = {digest(*patches_of(file(image, form, **how), LIMITS)) for form, how in (
        ("PNG", {}), ("PNG", {"compress_level": 1}), ("BMP", {}), ("WEBP", {"lossless": True}),
    )}  # fmt: skip
    assert len(same) == 1 and len(same.pop()) == 32
    other = image.copy()
    other.putpixel((59, 39), (255, 254, 0))
    assert digest(*patches_of(file(other), LIMITS)) != digest(*patches_of(file(image), LIMITS))
    black = np.zeros((8, 3, 14, 14), np.uint8)
    assert digest(black, (1, 2, 4)) != digest(black, (1, 4, 2))


def test_a_large_picture_is_held_once_and_twice_only_while_it_is_turned_or_converted(tmp_path: Path) -> None:
    """Peak memory of a process that decodes 6 megapixels, in units of the picture as RGB, which Pillow keeps in 4 bytes
    a pixel. Each copy that is made without need adds one."""
    size = (3000, 2000)
    plain, whole = Image.new("RGB", size, (30, 200, 90)), 3000 * 2000 * 4
    turned = Image.Exif()
    turned[0x112] = 6
    kinds = {
        "RGB": (file(plain, compress_level=1), 1.0),
        "gray of 16 bits, converted": (file(Image.new("I;16", size), compress_level=1), 1.25),
        "JPEG, turned": (file(plain, "JPEG", exif=turned), 2.0),
        "RGBA, converted": (file(Image.new("RGBA", size), compress_level=1), 2.0),
    }
    for name, (data, _) in kinds.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "small").write_bytes(file(Image.new("RGB", (9, 9))))  # imports what decoding imports
    code = """
import sys
from perilune.media.limits import Limits
from perilune.media.patches import patches_of
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        patches_of(file.read(), Limits(in_patch_limit=64))
    with open("/proc/self/status") as file:
        print(next(line.split()[1] for line in file if line.startswith("VmHWM")))
"""
    command = [sys.executable, "-c", code, *(str(tmp_path / name) for name in ("small", *kinds))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    first, *peaks = (int(line) << 10 for line in done.stdout.split())
    for (name, (_, most)), peak in zip(kinds.items(), peaks, strict=True):  # a peak holds for what follows, too
        assert peak - first < (most + 0.3) * whole, f"{name}: {(peak - first) / whole:.2f} pictures"
