"""GET /: a page to talk with the model. One file, which loads nothing and calls this server only.

It is open to all, as it holds nothing but itself; what it calls asks for the key.
"""

import base64
import hashlib
import re
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

HTML = Path(__file__).with_suffix(".html").read_bytes()


def _allowed(tag: str) -> str:
    """The page's own inline `tag`, for the policy: no other script or style runs."""
    (text,) = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), HTML, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": f"default-src 'none'; script-src {_allowed('script')}; style-src {_allowed('style')}; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    return Response(HTML, headers=HEADERS)
