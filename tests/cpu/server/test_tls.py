"""TLS: a certificate that is replaced while the server runs, and one-line errors."""

import asyncio
import logging
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from perilune.core.errors import ConfigError
from perilune.server.connection import READ_BYTES, Timeouts
from perilune.server.listener import Listener
from perilune.server.reload import Watched, watch
from perilune.server.tls import Certificate
from tests import certificates
from tests.certificates import needs_openssl
from tests.serving import HANG_SECONDS


async def served_name(port: int, authority: Path) -> str:
    """The name in the certificate that a new connection gets; ssl.SSLError if `authority` did not sign it."""
    context = ssl.create_default_context(cafile=str(authority))
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    cert: Any = writer.get_extra_info("peercert")
    assert writer.get_extra_info("ssl_object").version() in ("TLSv1.2", "TLSv1.3")
    writer.close()
    return str(cert["subject"][0][0][1])


@needs_openssl
def test_a_certificate_is_replaced_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("perilune.server.reload.POLL_SECONDS", 0.01)
    (tmp_path / "new").mkdir()
    cert, key = certificates.make(tmp_path, "first")
    new_cert, new_key = certificates.make(tmp_path / "new", "second")
    before = tmp_path / "before.pem"
    shutil.copy(cert, before)

    async def test() -> None:
        made = Certificate(str(cert), str(key))
        watched = Watched("TLS certificate", [cert, key], made.load)
        watching = asyncio.create_task(watch([watched]))
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0, ssl=made.context)
        port = server.sockets[0].getsockname()[1]
        assert await served_name(port, before) == "first"
        shutil.copy(new_cert, cert)  # for a moment the key is not its own
        while not any("was not read again" in r.getMessage() for r in caplog.records):
            await asyncio.sleep(0.001)
        assert await served_name(port, before) == "first"
        shutil.copy(new_key, key)
        while not any("was read again" in r.getMessage() for r in caplog.records):
            await asyncio.sleep(0.001)
        assert await served_name(port, new_cert) == "second"
        watching.cancel()
        server.close()

    with caplog.at_level(logging.INFO):
        asyncio.run(asyncio.wait_for(test(), HANG_SECONDS))
    said = [r.getMessage() for r in caplog.records if r.name == "perilune.server"]
    assert "does not belong to the certificate" in said[0] and said[-1] == "the TLS certificate was read again"
    assert len(said) == 2, said


@needs_openssl
def test_a_key_of_another_type_replaces_the_certificate_too(tmp_path: Path) -> None:
    """OpenSSL keeps a certificate of each type in a context, and clients that know both prefer EC."""
    for name in ("ec", "rsa"):
        (tmp_path / name).mkdir()
    ec, rsa = certificates.make(tmp_path / "ec", "ec"), certificates.make(tmp_path / "rsa", "rsa", rsa=True)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def use(pair: tuple[Path, Path]) -> None:
        shutil.copy(pair[0], cert)
        shutil.copy(pair[1], key)

    async def test() -> None:
        use(ec)
        made = Certificate(str(cert), str(key))
        server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0, ssl=made.context)
        port = server.sockets[0].getsockname()[1]
        for pair, name in ((ec, "ec"), (rsa, "rsa"), (ec, "ec")):
            use(pair)
            made.load()
            assert await served_name(port, pair[0]) == name
        server.close()

    asyncio.run(asyncio.wait_for(test(), HANG_SECONDS))


@needs_openssl
def test_what_is_wrong_with_a_certificate_is_named(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    cert, key = certificates.make(tmp_path / "a", "a")
    _, other = certificates.make(tmp_path / "b", "b")
    _, locked = certificates.make(tmp_path / "c", "c", passphrase="hunter2")
    (tmp_path / "text").write_text("hello")
    for wrong, words in (
        ((cert, other), "the key does not belong to the certificate"),
        ((tmp_path / "c" / "cert.pem", locked), "the key has a passphrase"),
        ((tmp_path / "text", key), "must be PEM files"),
        ((tmp_path / "absent", key), "No such file"),
    ):
        with pytest.raises(ConfigError, match=words) as refused:
            Certificate(str(wrong[0]), str(wrong[1]))
        assert "\n" not in str(refused.value)


@needs_openssl
def test_bodies_come_whole_and_handshakes_that_stop_are_ended(tmp_path: Path) -> None:
    cert, key = certificates.make(tmp_path, "first")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = bytearray(), True
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": bytes(body)})

    async def test() -> None:
        # Two listeners: one that gives a handshake 0.1 s would end that of the requests when the machine stops so long.
        with socket.create_server(("127.0.0.1", 0)) as hasty, socket.create_server(("127.0.0.1", 0)) as sock:
            ending, listener = Listener(app, timeouts=Timeouts(head_seconds=0.1)), Listener(app)
            for one, at in ((ending, hasty), (listener, sock)):
                await one.start(at, Certificate(str(cert), str(key)).context)
            silent, _ = await asyncio.open_connection(*hasty.getsockname())
            half, writing = await asyncio.open_connection(*hasty.getsockname())
            writing.write(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a TLS client's first message
            trusting = ssl.create_default_context(cafile=str(cert))
            reader, writer = await asyncio.open_connection(*sock.getsockname(), ssl=trusting)
            body = bytes(range(256)) * (READ_BYTES // 100)
            for _ in range(2):
                writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(len(body)) == body
            assert await silent.read() == b"" == await half.read()
            assert not ending.connections and len(listener.connections) == 1, "the one that has sent requests"
            writer.close()
            await ending.close(1.0)
            await listener.close(1.0)

    asyncio.run(asyncio.wait_for(test(), HANG_SECONDS))
