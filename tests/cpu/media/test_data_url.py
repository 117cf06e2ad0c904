"""Files in data: URLs, as clients write them."""

import base64
import tracemalloc

import pytest

from perilune.core.errors import RequestError
from perilune.media.data_url import CHUNK_CHARS, of_data_url

DATA = bytes(range(256)) * 4000 + b"\xfb\xff\xfe"  # longer than a chunk of base64; its letters include + and /
TEXT = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "head",
    [
        "data:image/png;base64,", "DATA:IMAGE/PNG;BASE64,", "data:;base64,", "data:image;base64,",
        "data:image/*;base64,", "data:application/octet-stream;base64,", "data:image/png;charset=utf-8;base64,",
        "data:image/png; base64, ",
        'data:image/png;name="a b.png";base64,', f"data:image/png;name={'%E6%88%91' * 60}.png;base64,",
    ],
)  # fmt: skip
def test_types_and_parameters_do_not_matter(head: str) -> None:
    assert of_data_url(head + TEXT) == DATA


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_base64_of_browsers_and_programs(count: int) -> None:
    data = DATA + b"\xff" * count
    text = base64.b64encode(data).decode()
    assert len(text) > CHUNK_CHARS
    for form in (
        text,
        text.rstrip("="),
        base64.urlsafe_b64encode(data).decode(),
        base64.encodebytes(data).decode(),
        text.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
        text[:9] + "\r\n\t \f%0d%0A%20" + text[9:] + "\n",
    ):
        assert of_data_url("data:image/png;base64," + form) == data


@pytest.mark.parametrize("piece", ["AB ", "%2B", "-\n"])
def test_memory_is_a_few_copies_of_the_text(piece: str) -> None:
    """A list of the pieces between spaces or escapes would take 20 to 70 times the text."""
    url = "data:image/png;base64," + piece * 500_000
    tracemalloc.start()
    try:
        of_data_url(url)
        assert tracemalloc.get_traced_memory()[1] < 5 * len(url)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png;base64,A", "is not base64"),
        ("data:image/png;base64,AA=A", "is not base64"),
        ("data:image/png;base64,AA\xa0AA", "is not base64"),
        ("data:image/png;base64,%zz%", "is not base64"),
        ("data:image/svg+xml;utf8,<svg/>", "its URL must be 'data:image/png;base64,...'"),
        ("data:image/png," + TEXT, "its URL must be"),
        ("data:base64," + TEXT, "its URL must be"),
        (f"data:image/png;name={'a' * 2000};base64,AAAA", "its URL must be"),
        ("data:video/mp4;base64,AAAA", "its URL says video/mp4: send it as a video part"),
    ],
)
def test_what_is_none_is_refused_in_one_line(url: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as e:
        of_data_url(url)
    assert (e.value.status, e.value.code) == (400, "invalid_image") and len(str(e.value)) < 200
