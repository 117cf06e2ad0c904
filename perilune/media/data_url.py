"""Files in data: URLs."""

import binascii
import re
from urllib.parse import unquote

from perilune.media.decoder import MAX_FILE_BYTES
from perilune.media.refusal import refused

CHUNK_CHARS = 1 << 20  # of base64 decoded in one call, which holds the interpreter's lock
MAX_HEAD_CHARS = 1000  # of a data: URL before its comma; some clients put the file's name there
_PARTS = {"image": "an image part", "video": "a video part"}
_HEAD = re.compile(r"data:([^;,]*)[^,]*;\s*base64\s*,", re.IGNORECASE)


def of_data_url(url: str, is_video: bool = False) -> bytes:
    """The file in a data: URL; RequestError if it is not one. Of the type that the URL says only the first half counts:
    clients often say image/jpeg for every picture, and the bytes say what it is.

    Base64 is read as browsers read it, white space, missing padding and %2B included, and with - and _ for + and /.

    Takes 5 ms per MB: to be called on a thread if it is long.
    """
    what, example = ("video", "video/mp4") if is_video else ("image", "image/png")
    head = _HEAD.match(url[:MAX_HEAD_CHARS])
    if head is None:
        raise refused(f"its URL must be 'data:{example};base64,...', with the type of the file", what)
    data = bytearray()
    text = url[head.end() :]
    if "%" in text:
        text = unquote(text)
    if any(space in text for space in "\n\r\t "):  # as the command base64 writes lines
        text = "".join(text.split())
    if "-" in text or "_" in text:
        text = text.replace("-", "+").replace("_", "/")
    text += "=" * (-len(text) % 4)
    if len(text) * 3 // 4 > MAX_FILE_BYTES + 2:
        raise refused(f"the file has more than {MAX_FILE_BYTES >> 20} MB", what)
    for at in range(0, len(text), CHUNK_CHARS):
        try:
            data += binascii.a2b_base64(text[at : at + CHUNK_CHARS], strict_mode=True)
        except ValueError:  # of binascii, and of characters beyond ASCII
            raise refused("its data is not base64, of the letters A-Z a-z 0-9 + /", what) from None
    said = head[1].strip().lower()
    sort = said.partition("/")[0]
    if sort == ("image" if is_video else "video") and said != "image/gif":
        raise refused(f"its URL says {said}: send it as {_PARTS[sort]}", what)
    return bytes(data)
