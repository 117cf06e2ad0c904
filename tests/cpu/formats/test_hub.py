"""What MODEL may be, and downloads from a stand-in for the hub: resumed, repeated, refused."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
from urllib.parse import urlsplit

import huggingface_hub
import pytest

from perilune.cli import doctor
from perilune.core.errors import CheckpointError, ConfigError
from perilune.formats import hub
from perilune.formats.hub import resolve_model
from perilune.model.config import KimiConfig

COMMIT = "a" * 40
DATA = ["chat_template.jinja", "config.json", "model.safetensors", "tiktoken.model"]


class Hub:
    """The calls of the hub's API that a download needs, for one repository `org/tiny`.

    `cut[name]` is how many bytes of a file are sent before the connection breaks, once; `fail[name]` is a status.
    """

    def __init__(self):
        self.files = {
            "config.json": b'{"model_type": "kimi_k2"}',
            "model.safetensors": bytes(i * 7 % 251 for i in range(300_000)),
            "tiktoken.model": b"IQ== 0\n",
            "modeling_deepseek.py": b"raise SystemExit",
            "chat_template.jinja": b"{{ x }}",
            "pytorch_model.bin": b"pickle",
        }
        self.cut, self.fail = {}, {}
        self.dropped = 0  # HEAD requests yet to be dropped without an answer
        self.requests = []  # (file, Range header)
        self.status = 200

    def answer(self, request):
        path = urlsplit(request.path).path
        if request.command == "HEAD" and self.dropped > 0:
            self.dropped -= 1
            request.close_connection = True
            return None
        if self.status != 200:
            return self.plain(request, self.status, b"{}", {"X-Error-Code": self.error_code()})
        if re.fullmatch(r"/api/models/org/tiny(/revision/(main|v1|" + COMMIT + "))?", path):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            return self.json(request, {"id": "org/tiny", "sha": COMMIT, "siblings": siblings})
        if path.startswith("/api/models/org/tiny/revision/"):
            return self.plain(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        if path == f"/api/models/org/tiny/tree/{COMMIT}":
            rows = [{"type": "file", "path": n, "size": len(b), "oid": self.tag(n)} for n, b in self.files.items()]
            return self.json(request, rows)
        if path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            return self.file(request, path.rsplit("/", 1)[1])
        return self.plain(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def error_code(self):
        return {404: "RepoNotFound", 403: "GatedRepo"}.get(self.status, "")

    def tag(self, name):
        return hashlib.sha1(self.files[name]).hexdigest()

    def file(self, request, name):
        data, spec = self.files[name], request.headers.get("Range")
        start, last = re.fullmatch(r"bytes=(\d+)-(\d*)", spec).groups() if spec else ("0", "")
        start, end = int(start), int(last) + 1 if last else len(data)
        head = {
            "ETag": f'"{self.tag(name)}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
            "Content-Length": str(end - start),
        }
        if spec:
            head["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        if request.command == "GET":
            head["Connection"] = "close"  # without it the client may send the next request to a socket about to close
            self.requests.append((name, spec))
            if name in self.fail:
                return self.plain(request, self.fail[name], b"", {})
        request.send_response(206 if spec else 200)
        for key, value in head.items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(data[start : self.cut.pop(name, end)])
            request.close_connection = True
        return None

    def json(self, request, value):
        self.plain(request, 200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def plain(self, request, status, body, headers):
        request.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            request.send_header(key, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)


@pytest.fixture
def served(tmp_path, monkeypatch):
    stand_in = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            with contextlib.suppress(ConnectionError):
                stand_in.answer(self)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield stand_in
    server.shutdown()
    thread.join()
    server.server_close()


def get(stand_in, name="org/tiny", **options):
    return resolve_model(name, endpoint=stand_in.url, progress=False, **options)


def refused(words, name, **options):
    with pytest.raises(ConfigError) as e:
        resolve_model(name, progress=False, **options)
    for word in words:
        assert word in str(e.value), str(e.value)
    assert "\n" not in str(e.value)


def test_downloads_data_only(served, capfd):
    path = get(served)
    assert sorted(p.name for p in path.iterdir()) == DATA
    for file in path.iterdir():
        assert file.read_bytes() == served.files[file.name]
    asked = len(served.requests)
    assert get(served) == path and get(served, revision="v1") == path
    assert len(served.requests) == asked == 4
    assert capfd.readouterr().out == ""


def test_broken_connection_is_resumed(served, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)  # what it keeps of a broken transfer
    served.cut["model.safetensors"] = 123_456
    path = get(served)
    assert (path / "model.safetensors").read_bytes() == served.files["model.safetensors"]
    ranges = [spec for name, spec in served.requests if name == "model.safetensors"]
    assert ranges == [None, "bytes=65536-"]


def test_lost_connections_are_repeated(served):
    served.dropped = 1 << 20
    refused(["repeat the command to go on"], "org/tiny", endpoint=served.url)
    served.dropped = 3
    assert (get(served) / "config.json").read_bytes() == served.files["config.json"]


def test_failed_download_goes_on(served):
    """What arrived is kept; a later call fetches only the rest."""
    served.fail["model.safetensors"] = 403
    refused(["download of org/tiny failed", "HTTP 403", "hf auth login"], "org/tiny", endpoint=served.url)
    served.fail.clear()
    done = {p.name for p in (hub.Path(huggingface_hub.constants.HF_HUB_CACHE)).rglob("snapshots/*/*")}
    served.requests.clear()
    path = get(served)
    assert {name for name, _ in served.requests} == set(DATA) - done
    assert (path / "model.safetensors").read_bytes() == served.files["model.safetensors"]


@pytest.mark.parametrize("first", [1 << 20, 100])
def test_headers_without_the_weights(served, monkeypatch, first):
    """Enough of a repository to check it, whether the first range of a shard holds its whole header or not."""
    monkeypatch.setattr(hub, "_FIRST_BYTES", first)
    nano = resolve_model(hub.BUNDLED)
    files = {p.name: p.read_bytes() for p in nano.iterdir() if p.is_file()}
    served.files = files | {"modeling_kimi.py": b"raise SystemExit"}
    shards = [name for name in served.files if name.endswith(".safetensors")]
    with hub.headers("org/tiny", endpoint=served.url) as path:
        assert not (path / "modeling_kimi.py").exists()
        for name in shards:
            whole, got = served.files[name], (path / name).read_bytes()
            length = 8 + int.from_bytes(whole[:8], "little")
            assert len(got) == len(whole) and got[:length] == whole[:length] and not any(got[length:])
        report = doctor.diagnose(path, "org/tiny", values=False)
        assert report.findings == [] and report.sound.startswith("888 tensors") and "values" not in report.sound
    assert not path.exists()
    assert all(spec for name, spec in served.requests if name in shards)
    served.files[shards[0]] = served.files[shards[0]][:5]
    with hub.headers("org/tiny", endpoint=served.url) as path:
        (finding,) = doctor.diagnose(path, "org/tiny", values=False).findings
        assert "truncated" in finding.text
    served.fail[shards[1]] = 403
    with pytest.raises(ConfigError, match="HTTP 403"), hub.headers("org/tiny", endpoint=served.url):
        pass
    with pytest.raises(ConfigError, match="no such repository"), hub.headers("org/absent", endpoint=served.url):
        pass


def test_hub_refusals(served):
    refused(["no directory 'org/absent'", "no such repository"], "org/absent", endpoint=served.url)
    refused(["org/tiny has no revision 'v2'"], "org/tiny", endpoint=served.url, revision="v2")
    served.status = 403
    refused(["org/tiny is gated"], "org/tiny", endpoint=served.url)
    served.status = 401
    refused(["hf auth login"], "org/tiny", endpoint=served.url)


def test_another_family_is_refused_before_its_weights_are_downloaded(served):
    served.files["config.json"] = b'{"architectures": ["Qwen2ForCausalLM"]}'
    with pytest.raises(CheckpointError, match="'Qwen2ForCausalLM' is not served"):
        get(served, check=KimiConfig.from_directory)
    assert "model.safetensors" not in [name for name, _ in served.requests]


def test_offline(served):
    dead = "http://127.0.0.1:9"  # the discard port: nothing listens
    refused(["the hub cannot be reached", "org/tiny", "check the network"], "org/tiny", endpoint=dead)
    path = get(served)
    assert resolve_model("org/tiny", endpoint=dead, progress=False) == path


def test_disk_full(served, monkeypatch):
    def full(*_, **__):
        raise OSError(hub.errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    refused(["download of org/tiny failed", "no space left in", "HF_HOME"], "org/tiny")


def test_directories_and_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert resolve_model("org/model") == hub.Path("org/model")
    refused(["belongs to a hub repository"], "org/model", revision="main")
    (tmp_path / "file.safetensors").touch()
    meaning = "MODEL is a directory, a Hugging Face repository id such as"
    refused(["'file.safetensors' is a file", meaning], "file.safetensors")
    for name in ("kimi", "./absent/dir", "/absent/dir", "a/b/c", "absent/", "https://huggingface.co/org/x"):
        refused([f"{name!r} does not exist", meaning], name)
    refused(["no model is named", meaning], "")


def test_bundled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "perilune" / "model" / "hub.py"))
    refused(["kimi-nano is not in this installation", "reinstall"], "kimi-nano")
    bundled = tmp_path / "perilune" / "bundled" / "kimi-nano"
    bundled.mkdir(parents=True)
    assert resolve_model("kimi-nano") == bundled
