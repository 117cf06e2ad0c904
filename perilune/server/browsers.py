"""What web pages may ask of a server without keys.

A page can give its own name the address 127.0.0.1 (DNS rebinding): its scripts then reach a server there through the
browser of that machine, which lets them read the answers. Such requests have the page's name as Host and as Origin, and
the headers of a browser; other programs may send any Host.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from perilune.core.errors import RequestError, quoted
from perilune.server import errors
from perilune.server.keys import Keyring

_LOCAL = "localhost"
_WEB = re.compile(r"https?://", re.IGNORECASE)  # other schemes are of what a user has installed: extensions, programs
_FORM = "multipart/"  # the only body read here that a page may send to another origin without asking for leave
_REMEDY = "start it with --cors-origins SCHEME://HOST[:PORT] of that page, or with --api-key-file FILE"


class OwnPages:
    """Refuses, with 403 while there are no keys, what a browser sends for a page of a foreign name.

    Own names are localhost and names below it, addresses, the host that the server listens on (of a server that listens
    on all addresses: the machine's name), and the hosts of `origins`.
    """

    def __init__(self, app: ASGIApp, keys: Keyring, host: str, origins: Iterable[str]) -> None:
        self.app = app
        self.keys = keys
        self.origins = frozenset(origins)
        self.names = {_LOCAL, host.lower(), *(_host(origin) for origin in self.origins)}
        if (address := _address(host)) is not None and address.is_unspecified:
            name = socket.gethostname().lower()
            self.names |= {name, f"{name.partition('.')[0]}.local"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self.keys.locked and "*" not in self.origins:
            try:
                self._check(Headers(scope=scope))
            except RequestError as error:
                await errors.response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        origin, host = headers.get("origin", ""), headers.get("host", "")
        if not _from_browser(headers) or origin in self.origins:
            return
        why = ""
        if host and not self._own(f"http://{host}"):
            why = f"does not answer web pages of {quoted(host)}"
        elif _WEB.match(origin) and not self._own(origin):
            why = f"does not answer web pages of {quoted(origin)}"
        elif origin and origin.partition("://")[2] != host and _has_form(headers):
            why = f"takes no files from web pages of another origin, which is {quoted(origin)}"
        if why:
            raise RequestError(f"a server without API keys {why}: {_REMEDY}", code="foreign_page", status=403)

    def _own(self, url: str) -> bool:
        name = _host(url)
        return name in self.names or name.endswith(f".{_LOCAL}") or _address(name) is not None


def _from_browser(headers: Headers) -> bool:
    """Browsers send Origin with what may change something, Sec-Fetch-* to trustworthy addresses, which http:// of a
    foreign name is not, and Accept-Language always: a page cannot remove it. fetch() of Node sends Accept-Language
    too, with Sec-Fetch-Mode, which no page can set."""
    if "origin" in headers or "sec-fetch-site" in headers:
        return True
    return "accept-language" in headers and "sec-fetch-mode" not in headers


def _has_form(headers: Headers) -> bool:
    return headers.get("content-type", "").lower().startswith(_FORM)


def _host(url: str) -> str:
    """The host of a URL, in lower case and without brackets; "" where there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
