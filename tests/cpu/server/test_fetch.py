"""Pictures at addresses that clients choose: what is fetched, from where, and what never is."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from perilune.core.errors import RequestError
from perilune.server.pictures import fetch as module
from perilune.server.pictures import reader
from perilune.server.pictures.fetch import Fetcher, public
from tests import certificates
from tests.cpu.media.pictures import file, scene
from tests.cpu.server.test_pictures import SEES, chat, check_refused
from tests.serving import CHAT, HANG_SECONDS, Served, served

PNG = file(scene(100, 30))


def answer(body: bytes = PNG, status: str = "200 OK", *headers: str, length: bool = True) -> bytes:
    lines = [f"HTTP/1.1 {status}", "connection: close", *headers, *([f"content-length: {len(body)}"] if length else [])]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


ANSWERS = {
    "/a.png": answer(),
    "/unsized.png": answer(length=False),
    "/missing.png": answer(b"", "404 Not Found"),
    "/moved.png": answer(b"", "302 Found", "location: /a.png"),
    "/circle.png": answer(b"", "302 Found", "location: /circle.png"),
    "/inside.png": answer(b"", "302 Found", "location: http://inside.example:{port}/a.png"),
    "/other.png": answer(b"", "302 Found", "location: http://other.test:{port}/a.png"),
    "/local.png": answer(b"", "302 Found", "location: file:///etc/passwd"),
    "/inline.png": answer(b"", "302 Found", "location: data:image/png;base64,AAAA"),
    "/odd-name.png": answer(b"", "302 Found", "location: http://xn--/"),
    "/packed.png": answer(PNG, "200 OK", "content-encoding: gzip"),
    "/large.png": answer(b"x", "200 OK", f"content-length: {33 << 20}", length=False),
    "/endless.png": answer(bytes(33 << 20), length=False),
    "/broken.png": b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\nshort",
    "/odd.png": b"SSH-2.0\r\n\r\n",
    "/cookie.png": answer(PNG, "200 OK", "set-cookie: id=1; path=/"),
    "/cookie-moved.png": answer(b"", "302 Found", "set-cookie: id=2; path=/", "location: /a.png"),
}


class Web:
    """A web server of this machine, under the names that tests resolve to it."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []  # (path, Host header)
        self.heads: list[str] = []
        self.names: dict[str, list[str]] = {
            "a.example": ["127.0.0.1"],
            "sub.a.example": ["127.0.0.1"],
            "inside.example": ["10.0.0.7"],
            "half.example": ["127.0.0.1", "10.0.0.7"],
            "other.test": ["127.0.0.1"],
        }
        self.resolved: list[str] = []
        self.port = 0
        self.fetcher: Fetcher

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        path = head.split()[1]
        host = next(line for line in head.lower().splitlines() if line.startswith("host:"))
        self.asked.append((path, host.removeprefix("host: ")))
        if path == "/slow.png":
            await asyncio.sleep(HANG_SECONDS)
        if path == "/drip.png":
            while not writer.is_closing():
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                await asyncio.sleep(0.05)
        writer.write(ANSWERS[path].replace(b"{port}", b"%d" % self.port))
        writer.close()

    async def resolve(self, host: str, port: int) -> list[str]:
        self.resolved.append(host)
        if host not in self.names:
            raise OSError("no such name")
        return self.names[host]

    def url(self, path: str, host: str = "a.example") -> str:
        return f"http://{host}:{self.port}/{path}"


@asynccontextmanager
async def web(context: ssl.SSLContext | None = None) -> AsyncIterator[Web]:
    found = Web()
    server = await asyncio.start_server(found.handle, "127.0.0.1", 0, ssl=context)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()


def with_web(test: Callable[[Web], Coroutine[Any, Any, None]], *hosts: str) -> None:
    """127.0.0.1 counts as public here, as the tests' server has no other address."""

    async def main() -> None:
        async with web() as w:
            names = [f"{host}:{w.port}" for host in hosts or ("a.example", "*.example")]
            w.fetcher = Fetcher(names, resolve=w.resolve, is_public=lambda a: a == "127.0.0.1" or public(a))
            await asyncio.wait_for(test(w), HANG_SECONDS)
            await w.fetcher.close()

    asyncio.run(main())


@served(by=with_web)
async def test_a_picture_is_fetched_from_the_resolved_address(w: Web) -> None:
    for path in ("a.png", "moved.png", "unsized.png"):
        assert await w.fetcher.fetch(w.url(path)) == PNG
    assert {host for _, host in w.asked} == {f"a.example:{w.port}"}
    assert await w.fetcher.fetch(w.url("a.png", "SUB.A.example")) == PNG
    # A name that resolves differently the second time is asked for once, and the checked address is used.
    w.resolved.clear()
    w.names["a.example"] = ["127.0.0.1"]
    await w.fetcher.fetch(w.url("a.png"))
    assert w.resolved == ["a.example"]
    w.resolved.clear()
    await w.fetcher.fetch(w.url("moved.png"))
    assert w.resolved == ["a.example", "a.example"], "a redirect is resolved and checked again"


@served(by=with_web)
async def test_a_cookie_is_not_sent_back_to_any_host(w: Web) -> None:
    for path, host in (("cookie.png", "a.example"), ("cookie-moved.png", "a.example"), ("a.png", "sub.a.example")):
        assert await w.fetcher.fetch(w.url(path, host)) == PNG
    assert len(w.heads) == 4 and not any("cookie:" in head.lower() for head in w.heads)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing.png", "its server answered 404"),
        ("circle.png", "redirects more than 3 times"),
        ("inside.png", "'inside.example' is not on the public internet"),
        ("other.png", "is not one that this server fetches from"),
        ("local.png", "must begin with data:, https:// or http://"),
        ("inline.png", r"failed \(InvalidURL\)"),
        ("odd-name.png", r"failed \(IDNAError\)"),
        ("packed.png", "compressed"),
        ("large.png", "more than 32 MB"),
        ("endless.png", "more than 32 MB"),
        ("broken.png", r"failed \(RemoteProtocolError\)"),
        ("odd.png", r"failed \(RemoteProtocolError\)"),
    ],
)
@served(by=with_web)
async def test_what_servers_answer_is_bounded(w: Web, path: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as e:
        await w.fetcher.fetch(w.url(path))
    assert (e.value.status, e.value.code) == (400, "invalid_image_url") and "127.0.0.1" not in str(e.value)


@served(by=with_web)
async def test_addresses_that_are_never_asked(w: Web) -> None:
    refused = {
        "http://a.example/a.png": "not one that this server fetches from",  # another port
        w.url("a.png", "b.test"): "not one that this server fetches from",
        w.url("a.png", "127.0.0.1"): "not one that this server fetches from",
        w.url("a.png", "example"): "not one that this server fetches from",
        w.url("a.png", "notexample"): "not one that this server fetches from",
        w.url("a.png", "inside.example"): "not on the public internet",
        w.url("a.png", "half.example"): "not on the public internet",
        w.url("a.png", "gone.example"): "cannot be resolved",
        w.url("a.png", "u:p@a.example"): "must not have a user name",
        f"ftp://a.example:{w.port}/a.png": "must begin with data:, https:// or http://",
        "http:///a.png": "must begin with",
        "http://[::1/": "is no URL",
        "http://xn--/": "not one that this server fetches from",
        f"http://a.example:{w.port}/{'a' * 9000}": "more than 8192 characters",
    }
    for url, words in refused.items():
        with pytest.raises(RequestError, match=words):
            await w.fetcher.fetch(url)
    assert w.asked == []


@served("*", by=with_web)
async def test_all_public_hosts_can_be_allowed_but_no_private_one(w: Web) -> None:
    assert await w.fetcher.fetch(w.url("a.png", "other.test")) == PNG
    # Spellings of 127.0.0.1 and of the link-local address of cloud metadata, resolved by the system itself.
    everywhere = Fetcher(["*", f"*:{w.port}"])
    for host in (
        "localhost",
        "127.0.0.1",
        "2130706433",
        "0x7f.1",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "169.254.169.254",
    ):
        with pytest.raises(RequestError, match=r"not on the public internet|cannot be resolved"):
            await everywhere.fetch(w.url("a.png", host))
    await everywhere.close()
    assert len(w.asked) == 1


def test_public_addresses() -> None:
    for address in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        assert public(address), address
    for address in (
        "0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1", "192.168.1.1", "224.0.0.1",
        "240.0.0.1", "255.255.255.255", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1",
        "::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b:1::7f00:1", "fec0::1",
        "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2001:0:a00:1::f5ff:fffe", "x",
    ):  # fmt: skip
        assert not public(address), address


@served(by=with_web)
async def test_a_slow_server_is_given_up(w: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FETCH_SECONDS", 0.2)
    for path in ("slow.png", "drip.png"):
        with pytest.raises(RequestError, match=r"takes longer than 0.2 s"):
            await w.fetcher.fetch(w.url(path))


def test_a_certificate_is_checked_for_the_name(tmp_path: Path) -> None:
    cert, key = certificates.make(tmp_path, "a.example")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)

    async def main() -> None:
        async with web(context) as w:
            fetcher = Fetcher([f"*:{w.port}"], resolve=w.resolve, is_public=lambda a: True)
            with pytest.raises(RequestError, match="cannot be reached"):
                await fetcher.fetch(w.url("a.png").replace("http:", "https:"))
            await fetcher.close()
            fetcher._http = httpx.AsyncClient(verify=ssl.create_default_context(cafile=cert), trust_env=False)
            assert await fetcher.fetch(w.url("a.png").replace("http:", "https:")) == PNG
            with pytest.raises(RequestError, match="cannot be reached"):
                await fetcher.fetch(w.url("a.png", "other.test").replace("http:", "https:"))
            await fetcher.close()

    asyncio.run(main())


@served(**SEES, media_allow_host=("a.example",))
async def test_a_request_with_an_address(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async with web() as w:
        s.service.pictures._fetcher = Fetcher(
            [f"a.example:{w.port}"], resolve=w.resolve, is_public=lambda a: a == "127.0.0.1"
        )
        part = {"type": "image_url", "image_url": {"url": w.url("a.png")}}
        assert (await s.client.post(CHAT, chat(part, part))).status == 200
        assert [p.tokens for p in s.engine.pictures[-1]] == [8, 8]
        source = {"type": "url", "url": w.url("missing.png")}
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
        check_refused(await s.client.post("/v1/messages", body), "messages[0].content[0]", "answered 404")
        # A response that is continued fetches again; an error there says that the fault is in the earlier request.
        gone = {"type": "input_image", "image_url": w.url("a.png")}
        kept = (await s.client.post("/v1/responses", {"input": [{"role": "user", "content": [gone]}]})).json["id"]
        monkeypatch.setitem(ANSWERS, "/a.png", ANSWERS["/missing.png"])
        again = await s.client.post("/v1/responses", {"input": "B", "previous_response_id": kept})
        check_refused(again, "previous_response_id.input[0].content[0]", "answered 404", "invalid_image_url")
        film = {"type": "video_url", "video_url": {"url": w.url("missing.png")}}
        error = (await s.client.post(CHAT, chat(film))).error
        assert "answered 404" in error["message"] and error["code"] == "invalid_video_url"
        assert s.service.pictures.budget.held == 0


@served(**SEES, media_allow_host=("a.example",))
async def test_a_request_that_waits_for_slow_fetches_of_others(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be sent again: its own pictures are not too many."""
    async with web() as w:
        pictures = s.service.pictures
        pictures._fetcher = Fetcher([f"a.example:{w.port}"], resolve=w.resolve, is_public=lambda a: True)
        monkeypatch.setattr(pictures, "_fetches", asyncio.Semaphore(1))
        monkeypatch.setattr(reader, "TURN_SECONDS", 0.2)
        part = {"type": "image_url", "image_url": {"url": w.url("slow.png")}}
        slow = asyncio.create_task(s.client.post(CHAT, chat(part)))
        while not w.asked:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(reader, "REQUEST_SECONDS", 2.0)
        reply = await s.client.post(CHAT, chat({"type": "image_url", "image_url": {"url": w.url("a.png")}}))
        assert (reply.status, reply.error["code"]) == (503, "server_busy"), reply.text
        assert reply.headers["retry-after"] == "5" and "too many pictures are being fetched" in reply.error["message"]
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
