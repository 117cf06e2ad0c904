"""GET /: a page to talk with the model. One file, which loads nothing and calls this server only.

It is open to all: it holds no data, and the endpoints that it calls ask for the key.
"""

import base64
import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

HERE = Path(__file__).parent


def _text(*names: str) -> str:
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in names)


def _allowed(text: str) -> str:
    """The page's own inline `text`, for the policy: no other script or style runs."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


STYLE = "\n" + _text("style.css")
SCRIPT = '\n"use strict";\n' + _text("markdown.js", "pictures.js", "app.js")
HTML = (
    _text("page.html")
    .replace("<style></style>", f"<style>{STYLE}</style>")
    .replace("<script></script>", f"<script>{SCRIPT}</script>")
    .encode()
)
# Trusted types: the browser itself refuses to read a string as markup, whatever the script does.
HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": f"default-src 'none'; script-src {_allowed(SCRIPT)}; style-src {_allowed(STYLE)}; "
    "img-src data:; media-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    return Response(HTML, headers=HEADERS)
