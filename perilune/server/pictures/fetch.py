"""Fetches pictures and videos from http(s) addresses that clients choose: only from hosts that the operator allows,
never from an address of a private network, and within bounds of size and time.

A name is resolved once. What it resolves to is checked, and the connection goes to the checked address: a second
answer of the name's server (DNS rebinding) has no effect. Redirects are followed by the same steps.
"""

import asyncio
import functools
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from perilune.core.errors import RequestError
from perilune.media.decoder import MAX_FILE_BYTES
from perilune.server.pictures.parts import is_address

FETCH_SECONDS = 20.0  # for one picture, redirects included
CONNECT_SECONDS = 5.0
MAX_REDIRECTS = 3
MAX_URL_CHARS = 8192
RESOLVERS = 8  # threads that resolve names
MAX_ADDRESSES = 3  # addresses of one name that are tried
DEFAULT_PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
NAT64 = ipaddress.ip_network("64:ff9b::/96")
UNICAST = ipaddress.ip_network("2000::/3")  # assigned addresses of IPv6; others are local or contain an IPv4 address
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Resolver:
    """The system's resolver on its own threads: a DNS server may take 10 s or more, and a client may run it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVERS, "resolver")

    async def __call__(self, host: str, port: int) -> list[str]:
        """The addresses of a name; OSError if it has none."""
        ask = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        infos = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        return list(dict.fromkeys(str(info[4][0]) for info in infos))


def public(address: str) -> bool:
    """Whether the address is one of the public internet, and so is the IPv4 address inside it, if it has one."""
    try:
        found: Address = ipaddress.ip_address(address)
    except ValueError:  # an IPv6 address with a zone: valid on one link only
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo and found.teredo[1])
        if inner is None and found in NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is None:
            return found.is_global and found in UNICAST
        found = inner
    return found.is_global and not found.is_multicast


class Fetcher:
    """Belongs to one event loop. `hosts`: names, `*.example.org` for all below a name, `*` for all; with `:PORT` for
    another port than the scheme's."""

    def __init__(
        self, hosts: Sequence[str], *, resolve: Resolve | None = None, is_public: Callable[[str], bool] = public
    ) -> None:
        self._hosts = [host.lower() for host in hosts]
        self._resolve, self._is_public = resolve or Resolver(), is_public
        # No keep-alive: several hosts may share an address, and the certificate of each must be checked.
        self._http = httpx.AsyncClient(
            trust_env=False,  # a proxy would resolve the name again
            timeout=httpx.Timeout(FETCH_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_keepalive_connections=0),
            # No cookies: those of one client's host would be sent to all hosts at its address, for every client.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            headers={"user-agent": "perilune", "accept": "image/*, video/*", "accept-encoding": "identity"},
        )

    async def fetch(self, url: str) -> bytes:
        """The bytes at `url`; RequestError 400, in one line, if they may not or cannot be had."""
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._get(url)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except TimeoutError:
            raise refused(f"fetching it takes longer than {FETCH_SECONDS:g} s") from None
        raise refused(f"its address redirects more than {MAX_REDIRECTS} times")

    async def close(self) -> None:
        await self._http.aclose()

    async def _get(self, text: str) -> bytes | str:
        """The bytes at an address, or the address that it redirects to."""
        url = self._checked(text)
        host, port = url.raw_host.decode(), url.port or DEFAULT_PORTS[url.scheme]
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            raise refused(f"its host {host[:100]!r} cannot be resolved") from None
        if not addresses or not all(self._is_public(address) for address in addresses):
            raise refused(f"its host {host[:100]!r} is not on the public internet")
        for address in addresses[:MAX_ADDRESSES]:
            try:
                return await self._ask(url, address)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
            except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as e:  # the last two: malformed redirects
                raise refused(f"fetching it failed ({type(e).__name__})") from None
        raise refused(f"its host {host[:100]!r} cannot be reached")

    async def _ask(self, url: httpx.URL, address: str) -> bytes | str:
        name = {"sni_hostname": url.raw_host.decode()}  # the certificate must match it
        request = self._http.build_request(
            "GET", url.copy_with(host=address), headers={"host": url.netloc.decode()}, extensions=name
        )
        response = await self._http.send(request, stream=True)
        try:
            if response.status_code in REDIRECTS and (target := response.headers.get("location")):
                return str(url.join(target))
            if response.status_code != 200:
                raise refused(f"its server answered {response.status_code}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise refused("its server sent it compressed, which was not asked for")
            length = response.headers.get("content-length", "")
            if length.isdecimal() and int(length) > MAX_FILE_BYTES:
                raise _too_large()
            data = bytearray()
            async for piece in response.aiter_raw():
                data += piece
                if len(data) > MAX_FILE_BYTES:
                    raise _too_large()
            return bytes(data)
        finally:
            await response.aclose()

    def _checked(self, text: str) -> httpx.URL:
        """The parsed address; RequestError unless this server may fetch from its host."""
        if not is_address(text):
            raise refused("its address must begin with data:, https:// or http://")
        if len(text) > MAX_URL_CHARS:
            raise refused(f"its address has more than {MAX_URL_CHARS} characters")
        try:
            url = httpx.URL(text)
        except (httpx.InvalidURL, ValueError):
            raise refused("its address is no URL") from None
        if url.scheme not in DEFAULT_PORTS or not url.raw_host:  # `host` fails for some that begin with xn--
            raise refused("its address must begin with https:// or http:// and a host")
        if url.userinfo:
            raise refused("its address must not have a user name or a password")
        if not self._allowed(url):
            host = url.netloc.decode()[:100]
            raise refused(f"its host {host!r} is not one that this server fetches from: send it as a data: URL")
        return url

    def _allowed(self, url: httpx.URL) -> bool:
        host = url.raw_host.decode().rstrip(".").lower()
        port = "" if url.port in (None, DEFAULT_PORTS[url.scheme]) else f":{url.port}"
        parents = [f"*.{rest}" for i, c in enumerate(host) if c == "." and (rest := host[i + 1 :])]
        return any(name + port in self._hosts for name in (host, *parents, "*"))


def refused(why: str) -> RequestError:
    return RequestError(f"it cannot be fetched: {why}", code="invalid_image_url")


def _too_large() -> RequestError:
    return refused(f"it has more than {MAX_FILE_BYTES >> 20} MB")
