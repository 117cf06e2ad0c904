"""Uploaded files: the store, its bounds and leftovers, expiry, and the forms of uploads."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from perilune.core.errors import ConfigError, RequestError
from perilune.server.batches import files, multipart
from perilune.server.batches.files import FileStore
from tests.cpu.server.test_background import sdk
from tests.cpu.server.test_batches import answers, batched, begun, ended, line
from tests.serving import Served


@batched(files_gb=1e-5)
async def test_the_store_is_bounded(s: Served, tmp_path: Path) -> None:
    client = sdk(s)
    store: FileStore = s.client.app.state.batches.store
    file = await client.files.create(file=("a", b"x" * 6000), purpose="batch")
    with pytest.raises(openai.APIStatusError) as full:
        await client.files.create(file=("b", b"x" * 6000), purpose="batch")
    assert (full.value.status_code, full.value.code) == (413, "store_full") and store.size_bytes == 6000
    await client.files.delete(file.id)
    assert store.size_bytes == 0 and not [*(tmp_path / "files" / "key-").glob("file*")]
    made = await begun(client, [line(f"q{i}") for i in range(30)])
    done = await ended(client, made.id)
    assert done.status == "failed" and done.errors.data[0].code == "store_full" and done.output_file_id
    assert 0 < done.request_counts.completed < 30 and store.size_bytes <= 10_000
    assert len(await answers(client, done.output_file_id)) == done.request_counts.completed


# Files that fit: the upload, its record, the batch's. -1: nor does their folder; -2: too little of the disk is free.
@pytest.mark.parametrize("fit", range(-2, 3))
@batched()
async def test_a_full_disk_is_no_full_store(s: Served, fit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    room, client = iter(range(fit)), sdk(s).with_options(max_retries=0)

    def fails(*_: object) -> None:
        if next(room, None) is None:
            raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch, pytest.raises(openai.InternalServerError, match="disk is full") as full:
        patch.setattr(*((files, "FREE_BYTES", 1 << 62) if fit == -2 else (os, "mkdir" if fit < 0 else "fsync", fails)))
        file = await client.files.create(file=("a", b"x"), purpose="batch")
        await client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    store: FileStore = s.client.app.state.batches.store
    assert (full.value.status_code, full.value.code) == (507, "disk_full") and store.size_bytes == (fit == 2)
    assert len([*store.folder("").iterdir()]) == 2 * store.size_bytes


def test_one_key_leaves_room_for_others(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 1000)
    store.reserve("ann", 500)
    with pytest.raises(RequestError, match="no room for 1 more"):
        store.reserve("ann", 1)
    store.reserve("bob", 500)
    store.free("ann", 500)
    store.reserve("ann", 500)
    store.close()


@batched()
async def test_files_expire(s: Served) -> None:
    client = sdk(s)
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    file = await client.files.create(file=("a", b"x"), purpose="batch", expires_after=expiry)
    assert file.expires_at == file.created_at + 3600
    s.client.app.state.batches.store.get("", file.id)["expires_at"] = time.time()
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)
    with pytest.raises(openai.BadRequestError):
        await client.files.create(file=("a", b"x"), purpose="batch", expires_after={**expiry, "seconds": 5})
    made = await begun(client, [line("a")], output_expires_after={**expiry, "seconds": 7200})
    done = await ended(client, made.id)
    output = await client.files.retrieve(done.output_file_id)
    assert output.expires_at == output.created_at + 7200


@batched()
async def test_an_invalid_range_of_a_file_is_ignored(s: Served) -> None:
    file = await sdk(s).files.create(file=("a", b"01234567"), purpose="batch")
    valid = {"bytes=2-4": "234", "Bytes= -3 ": "567", "bytes=0-1, 1-3": "0123", "bytes=7-": "7"}
    wrong = ("bytes", "bytes=", "bytes=5-2", "lines=0-1", "bytes=1-2,x", f"bytes={'9' * 5000}-")
    for asked in (*valid, *wrong):
        s.client.headers["range"] = asked
        reply = await s.client.get(f"/v1/files/{file.id}/content")
        assert (reply.status, reply.text) == ((206, valid[asked]) if asked in valid else (200, "01234567")), asked


def test_one_server_uses_a_directory(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "f", 1000)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="another server uses"):
        FileStore(tmp_path / "f", 1000)
    store.close()
    FileStore(tmp_path / "f", 1000).close()
    (tmp_path / "plain").write_text("")
    with pytest.raises(ConfigError, match="cannot use"):
        FileStore(tmp_path / "plain", 1000)


def test_damaged_records_and_leftovers_are_left_out(tmp_path: Path) -> None:
    store = FileStore(tmp_path, 10**6)
    id = "file-" + "1" * 32
    store.keep("", id, store.write("", id, b"abc"), {"filename": "a", "purpose": "batch"})
    store.write("", "file-" + "2" * 32, b"cut off")
    folder = store.folder("")
    (folder / ("file-" + "3" * 32 + ".json")).write_text("{")
    (folder / ("file-" + "4" * 32 + ".json")).write_text('{"id": "../../x"}')
    (folder / ("file-" + "5" * 32 + ".data")).write_text("no record")
    os.mkfifo(folder / ("file-" + "6" * 32 + ".json"))
    store.close()
    store = FileStore(tmp_path, 10**6)
    assert [f["id"] for f in store.list("")] == [id] and store.size_bytes == 3
    assert not [p for p in folder.iterdir() if p.suffix == ".new" or "5" * 32 in p.name]
    assert (folder / f"{id}.data").stat().st_mode & 0o777 == 0o600
    store.close()


HEAD = b'--B\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'


@pytest.mark.parametrize("body", [
    b"", b"x", b"--B", b"--B\r\n", b"--B\r\n\r\n", HEAD % (b"a", b"1"), HEAD % (b"a", b"1") * 2 + b"--B--",
    b"--B\r\nContent-Type: x\r\n\r\na\r\n--B--",
    (HEAD % (b"a", b"1")).replace(b"\r\n\r\n", b"\r\n") + b"--B--",
    b"".join(HEAD % (b"%d" % i, b"1") for i in range(20)) + b"--B--", b"--B\r\n" + b"x" * 5000 + b"\r\n\r\n\r\n--B--",
])  # fmt: skip
def test_a_malformed_upload_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        multipart.parsed("multipart/form-data; boundary=B", bytearray(body))
    assert refused.value.status == 400 and "\n" not in str(refused.value)


def test_an_upload_is_taken_apart() -> None:
    file = b'--a b\r\ncontent-disposition: form-data; filename="\\"x\\".jsonl"; name="file"\r\n\r\n\r\n--a\r\n\x00\r\n'
    empty = b'--a b\r\nContent-Disposition: form-data; name="e"\r\n\r\n\r\n'
    found = multipart.parsed('Multipart/Form-Data; charset=x; boundary="a b"', bytearray(file + empty + b"--a b--\r\n"))
    assert found == {"file": multipart.Part('"x".jsonl', b"\r\n--a\r\n\x00"), "e": multipart.Part(None, b"")}
    for kind in ("", "application/json", "multipart/form-data"):
        with pytest.raises(RequestError) as refused:
            multipart.parsed(kind, bytearray())
        assert refused.value.status == 415


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"purpose": "batch"}, "file"),
        ({"purpose": "fine-tune", "file": ("a", b"x")}, "purpose"),
        ({"file": ("a", b"x")}, "purpose"),
        ({"purpose": "batch", "file": ("a" * 300, b"x")}, "file"),
        ({"purpose": "batch", "file": ("a", b"x"), "name": "y"}, "name"),
        ({"purpose": "batch", "file": ("a", b"x"), "expires_after[seconds]": "soon"}, "expires_after"),
        ({"purpose": "batch", "file": ("a", b"x"), "expires_after[anchor]": "last_active_at"}, "expires_after"),
    ],
)
@batched()
async def test_an_upload_that_cannot_be_is_refused(s: Served, given: dict[str, Any], param: str) -> None:
    body = b""
    for name, value in given.items():
        more, data = (f'; filename="{value[0]}"', value[1]) if isinstance(value, tuple) else ("", value.encode())
        body += f'--B\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + data + b"\r\n"
    s.client.headers["content-type"] = "multipart/form-data; boundary=B"
    reply = await s.client.post("/v1/files", body + b"--B--\r\n")
    assert reply.status == 400 and reply.error["param"] == param
    assert s.client.app.state.batches.store.size_bytes == 0
