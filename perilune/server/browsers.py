"""Which requests of web pages a server without keys answers.

The owner of a page can make its host name resolve to 127.0.0.1 (DNS rebinding). The browser then takes a server on the
user's own machine for the origin of the page, and lets the page's scripts read all answers. Such requests have the
page's host name in Host and Origin, and headers that browsers send. Other programs may send any Host.
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
# Only these origins are checked. Those of other schemes are extensions and programs that the user installed.
_WEB = re.compile(r"https?://", re.IGNORECASE)
_FORM = "multipart/"  # the only type of body read here that browsers send to another origin without a preflight
_REMEDY = "start it with --cors-origins SCHEME://HOST[:PORT] of that page, or with --api-key-file FILE"


class OwnPages:
    """Answers 403, as long as there are no keys, to requests that browsers send for pages of other host names.

    Own names are localhost and names below it, IP addresses, the host that the server listens on (if it listens on all
    addresses: the machine's name), and the hosts of `origins`.
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
    """Browsers send Origin with all methods but GET and HEAD, Sec-Fetch-* to trustworthy URLs only (http:// is one for
    localhost and loopback addresses), and Accept-Language always: a page can change it, but not remove it. fetch() of
    Node sends Accept-Language too, with Sec-Fetch-Mode, which no page can set."""
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
