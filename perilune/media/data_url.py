"""Files in data: URLs."""

import binascii

from perilune.media.decoder import MAX_FILE_BYTES
from perilune.media.refusal import refused

CHUNK_CHARS = 1 << 20  # base64 decoded per call, which holds the GIL
MAX_HEAD_CHARS = 1000  # of a data: URL up to its comma; some clients put the file's name there
_ESCAPED = {"%2B": "+", "%2F": "/", "%3D": "=", "%0A": "", "%0D": "", "%20": ""}
_ESCAPED |= {written.lower(): meant for written, meant in _ESCAPED.items()}
_READ_AS = {**dict.fromkeys("\n\r\t\f ", ""), "-": "+", "_": "/"}  # no line breaks; base64url
_PARTS = {"image": "an image part", "video": "a video part"}


def of_data_url(url: str, is_video: bool = False) -> bytes:
    """The file in a data: URL; RequestError for another URL. Only "image" or "video" of the URL's type is checked:
    clients often say image/jpeg for every picture, and the bytes show the real type.

    Base64 is read as browsers read it, white space, missing padding and %2B included, and with - and _ for + and /.

    Takes 5 ms per MB: call it on a thread for a long URL.
    """
    what, example = ("video", "video/mp4") if is_video else ("image", "image/png")
    head, comma, _ = url[:MAX_HEAD_CHARS].partition(",")
    said, *parameters = (word.strip().lower() for word in head.split(";"))
    if not comma or not said.startswith("data:") or parameters[-1:] != ["base64"]:
        raise refused(f"its URL must be 'data:{example};base64,...', with the type of the file", what)
    data = bytearray()
    text = url[len(head) + 1 :]
    # Replaced one after the other: splitting a hostile text would make a list of 2 GB.
    for written, meant in (_ESCAPED | _READ_AS if "%" in text else _READ_AS).items():
        if written in text:  # `in` takes 1 to 10 ms for 32 MB and `replace` 20 to 50, holding the GIL
            text = text.replace(written, meant)
    text += "=" * (-len(text) % 4)
    if len(text) * 3 // 4 > MAX_FILE_BYTES + 2:
        raise refused(f"the file has more than {MAX_FILE_BYTES >> 20} MB", what)
    for at in range(0, len(text), CHUNK_CHARS):
        try:
            data += binascii.a2b_base64(text[at : at + CHUNK_CHARS], strict_mode=True)
        except ValueError:  # of binascii, and of characters beyond ASCII
            raise refused("its data is not base64, of the letters A-Z a-z 0-9 + /", what) from None
    said = said.removeprefix("data:")
    sort = said.partition("/")[0]
    if sort == ("image" if is_video else "video") and said != "image/gif":
        raise refused(f"its URL says {said}: send it as {_PARTS[sort]}", what)
    return bytes(data)
