"""Web pages that reach a server without keys: of foreign names (DNS rebinding), of own ones, and what is no page."""

import socket

import pytest

from tests.serving import CHAT, HELLO, Served, serve, served

PAGE = {"accept-language": "en-US,en;q=0.9", "user-agent": "Mozilla/5.0"}  # of every request of a browser
FETCH = {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}  # besides, to an address it trusts


async def asks(s: Served, headers: dict[str, str], path: str = CHAT) -> int:
    s.client.headers = headers
    seen = len(s.engine.seen)
    reply = await (s.client.post(path, {"messages": HELLO}) if path == CHAT else s.client.get(path))
    if reply.status == 403:
        assert len(s.engine.seen) == seen
        assert reply.error["code"] == "foreign_page" and reply.error["type"] == "permission_error"
        assert "--cors-origins" in reply.error["message"] and "--api-key-file" in reply.error["message"]
    return reply.status


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:8000", "origin": "http://evil.example:8000", **PAGE},  # a POST of a rebound page
        {"host": "evil.example:8000", **PAGE},  # its GET: no Origin, and Sec-Fetch-* to trustworthy addresses only
        {"host": "evil.example:8000", "accept-language": "*", "user-agent": "curl/8"},  # what its script may change
        {"host": "evil.example", **PAGE, **FETCH},
        {"host": "EVIL.example.", "origin": "null"},
        {"host": "localhost.evil.example", "origin": "http://localhost.evil.example"},
        {"host": "127.0.0.1.evil.example", **PAGE},
        {"host": "127.0.0.1:8000", "origin": "https://evil.example"},  # another page, behind a proxy or not
        {"host": "127.0.0.1:8000", "origin": "HTTP://evil.example"},
        {"host": "[::1", **PAGE},
    ],
)
@served()
async def test_foreign_pages_are_refused(s: Served, headers: dict[str, str]) -> None:
    assert await asks(s, headers) == 403
    for path in ("/", "/health", "/metrics", "/v1/models", "/v1/files", "/v1/responses/resp_1"):
        assert await asks(s, headers, path) == 403, path
    s.client.headers = {**headers, "access-control-request-method": "POST"}
    assert (await s.client.request("OPTIONS", CHAT, [b""])).status == 403
    s.client.headers = headers
    reply = await s.client.post("/v1/messages", {"messages": HELLO, "max_tokens": 9})
    assert reply.status == 403 and reply.json["type"] == "error", "the form of that API"
    s.client.headers = {}
    assert (await s.client.post(CHAT, {"messages": HELLO})).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000", **PAGE, **FETCH},
        {"host": "localhost:8000", "origin": "http://localhost:8000", **PAGE, **FETCH},
        {"host": "localhost:9000", **PAGE, **FETCH},  # an SSH tunnel
        {"host": "model.localhost", "origin": "http://model.localhost", **PAGE},
        {"host": "LocalHost.", **PAGE},
        {"host": "[::1]:8000", "origin": "http://[::1]:8000", **PAGE, **FETCH},
        {"host": "192.168.1.9:8000", "origin": "http://192.168.1.9:8000", **PAGE},
        {"host": "127.0.0.1:8000", "origin": "null", **PAGE},  # a file
        {"host": "127.0.0.1:8000", "origin": "chrome-extension://abcdef", **PAGE},
        {"host": "perilune:8000"},  # other programs: any Host
        {"host": "evil.example", "user-agent": "OpenAI/Python 3.0", "accept": "application/json"},
        {"host": "perilune:8000", "accept-language": "*", "sec-fetch-mode": "cors", "user-agent": "node"},
        {"host": ""},
        {"origin": "http://localhost"},  # HTTP/1.0
        {},
    ],
)
@served()
async def test_own_pages_and_other_programs_are_answered(s: Served, headers: dict[str, str]) -> None:
    assert await asks(s, headers) == 200
    assert await asks(s, headers, "/v1/models") == 200
    assert await asks(s, headers, "/") == 200


def test_names_of_the_configuration_are_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = "box.lan"
    monkeypatch.setattr(socket, "gethostname", lambda: here)

    async def test(s: Served) -> None:
        for host, status in (("llm.example:8000", 200), ("evil.example", 403), (here, 403)):
            assert await asks(s, {"host": host, "origin": f"http://{host}"}) == status

    async def everywhere(s: Served) -> None:
        for host, status in ((here, 200), ("box.local:8000", 200), ("evil.example", 403)):
            assert await asks(s, {"host": host, "origin": f"http://{host}"}) == status

    async def allowed(s: Served) -> None:
        assert await asks(s, {"host": "chat.example", "origin": "https://chat.example"}) == 200
        assert await asks(s, {"host": "chat.example", **PAGE}) == 200
        assert await asks(s, {"host": "llm.example", "origin": "https://chat.example"}) == 200, (
            "a page that may call it"
        )
        assert await asks(s, {"host": "llm.example", "origin": "https://llm.example"}) == 403

    async def all_of_them(s: Served) -> None:
        assert await asks(s, {"host": "evil.example", "origin": "http://evil.example"}) == 200

    async def with_keys(s: Served) -> None:  # a page does not have them
        assert await asks(s, {"host": "evil.example", "origin": "http://evil.example"}) == 401
        assert await asks(s, {"host": "evil.example", **PAGE, "authorization": "Bearer k"}) == 200
        assert await asks(s, {"host": "evil.example", **PAGE}, "/") == 200

    serve(test, host="llm.example")
    serve(everywhere, host="0.0.0.0")
    serve(allowed, cors_origins=("https://chat.example",))
    serve(all_of_them, cors_origins=("*",))
    serve(with_keys, api_key="k")


@pytest.mark.parametrize("origin", ["null", "http://192.0.2.66", "http://localhost:3000"])
@served()
async def test_forms_of_other_origins_are_refused(s: Served, origin: str) -> None:
    """A browser sends these to another origin without asking, so that nothing else keeps files of any page out."""
    form = {"content-type": "multipart/form-data; boundary=b", "host": "localhost:8000"}
    for page, status in ((origin, 403), ("http://localhost:8000", 404), (None, 404)):  # 404: without --files-dir
        s.client.headers = {**form, **({} if page is None else {"origin": page})}
        assert (await s.client.post("/v1/files", b"--b--")).status == status
