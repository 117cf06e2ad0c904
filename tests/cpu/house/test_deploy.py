"""The container recipes, the compose file and the systemd unit, checked without running them: paths and options exist,
ports agree, nothing runs as root. Each fault has a copy of the files that has it, to see that the check finds it."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from perilune.cli.main import cli
from perilune.core.config import ServerConfig
from perilune.server.app import build_app
from tests.serving import BYTES, TEMPLATE, FakeEngine, Service

ROOT = Path(__file__).parents[3]
DOCKERFILES = ("Dockerfile", "deploy/cpu.Dockerfile")
COMPOSE = "deploy/compose.yaml"
UNIT = "deploy/perilune.service"
PORT = ServerConfig().port
PINNED = re.compile(r"[\w./-]+:[\w.-]*\d[\w.-]*")
INSTRUCTION = re.compile(r"([A-Z]+)\s+(.*)", re.DOTALL)
# What hadolint warns of, by its numbers; without DL3008 (Debian's mirrors keep no old versions) and DL3059.
SHELL_FAULTS = {
    r"\bsudo\b": "DL3004: no sudo",
    r"\bapt (install|update)": "DL3027: apt-get, not apt",
    r"apt-get install (?!.*-y\b)": "DL3014: apt-get install asks",
    r"apt-get install (?!.*--no-install-recommends)": "DL3015: more packages than named",
    r"pip install (?!.*--no-cache-dir)": "DL3042: pip keeps its downloads",
    r"(^|&& )cd ": "DL3003: WORKDIR, not cd",
    r"\|(?!\|)": "DL4006: a pipe hides what fails before it",
    r"chmod .*777": "everyone may write",
}
SERVICE_KEYS = {
    "image",
    "build",
    "command",
    "ports",
    "volumes",
    "environment",
    "cap_drop",
    "security_opt",
    "init",
    "shm_size",
    "stop_grace_period",
    "restart",
    "depends_on",
    "deploy",
}
HARDENED = {"NoNewPrivileges": "true", "ProtectSystem": "strict", "ProtectHome": "true", "PrivateTmp": "true"}


def faults(root: Path) -> list[str]:
    return [*docker(root), *compose(root), *unit(root)]


# ---- what a command line may have


def unknown_options(words: list[str]) -> Iterator[str]:
    """What is wrong with the arguments of `perilune`."""
    verb = cli.get_command(click.Context(cli), words[0])
    if verb is None:
        yield f"no verb {words[0]}"
        return
    known = {name for p in verb.params for name in (*p.opts, *p.secondary_opts)}
    yield from (f"{words[0]} has no option {w}" for w in words if w.startswith("--") and w.split("=")[0] not in known)


def routes() -> set[str]:
    app = build_app(Service(FakeEngine(), BYTES, TEMPLATE, ServerConfig(served_model_name="m")))
    return {route.path for route in app.routes}  # type: ignore[attr-defined]


def value(words: list[str], option: str) -> str | None:
    return words[words.index(option) + 1] if option in words else None


# ---- Dockerfiles


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instruction and arguments of a Dockerfile, continued lines joined, comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(m[1], m[2].strip()) for line in text.splitlines() if (m := INSTRUCTION.match(line))]


def programs(given: dict[str, list[str]]) -> set[str]:
    """What an image has, as far as its recipe says."""
    installed = " ".join(run for run in given["RUN"] if "apt-get install" in run)
    found = set(re.findall(r"(?<=\s)(curl|wget)(?=\s)", installed))
    if given["FROM"][-1].startswith("python:") or "python3-venv" in installed:
        found.add("python3")
    if any("pip install --no-cache-dir ." in run for run in given["RUN"]):
        found.add("perilune")
    return found


def docker(root: Path) -> Iterator[str]:
    requirement = re.search(r'"(torch[^"]*)"', (root / "pyproject.toml").read_text())
    shown = set(re.findall(r"^!(\S+)$", (root / ".dockerignore").read_text(), re.MULTILINE))
    for name in DOCKERFILES:
        found = instructions(root / name)
        given: dict[str, list[str]] = {}
        for kind, rest in found:
            given.setdefault(kind, []).append(rest)
        for image in given["FROM"]:
            if not PINNED.fullmatch(image):
                yield f"{name}: {image} is not pinned"
        for copied in given.get("COPY", []):
            for source in [w for w in copied.split() if not w.startswith("--")][:-1]:
                if source not in shown or not (root / source).exists():
                    yield f"{name}: {source} is not in the build's context"
        if not re.fullmatch(r"[1-9]\d*", user := given.get("USER", ["root"])[-1]):
            yield f"{name}: runs as root" if user in ("root", "0") else f"{name}: {user} is no number"
        made = [w for run in given["RUN"] for w in re.findall(r"useradd .*--uid (\d+)", run)]
        if user.isdecimal() and made != [user]:
            yield f"{name}: no user {user} is made"
        yield from (f"{name}: {kind} is deprecated or fetches" for kind in ("ADD", "MAINTAINER") if kind in given)
        yield from (f"{name}: WORKDIR {path} is not absolute" for path in given["WORKDIR"] if not path.startswith("/"))
        for kind in ("ENV", "ARG"):
            for text in given.get(kind, []):
                if re.search(r"(?i)(key|token|secret|password)\w*=", text):
                    yield f"{name}: {kind} has a secret, which the image keeps"
        for run in given["RUN"]:
            yield from (f"{name}: {fault}" for pattern, fault in SHELL_FAULTS.items() if re.search(pattern, run))
        for kind in ("ENTRYPOINT", "HEALTHCHECK"):
            program = re.search(r'\["([^"]+)"', " ".join(given.get(kind, [])))
            if program is None or program[1] not in programs(given):
                yield f"{name}: {kind} runs what the image does not have"
        for kind in ("ENTRYPOINT", "CMD"):
            if not given.get(kind, [""])[-1].startswith("["):
                yield f"{name}: {kind} goes through a shell, which keeps signals"
                return
        words = json.loads(given["ENTRYPOINT"][-1])[1:] + json.loads(given["CMD"][-1])
        yield from (f"{name}: {fault}" for fault in unknown_options(words))
        if value(words, "--host") != "0.0.0.0":
            yield f"{name}: the server listens inside of the container only"
        port = int(value(words, "--port") or PORT)
        if given.get("EXPOSE") != [str(port)]:
            yield f"{name}: exposes {given.get('EXPOSE')}, but the server listens on {port}"
        check = re.search(r"http://127\.0\.0\.1:(\d+)(/[\w/]*)", " ".join(given.get("HEALTHCHECK", [])))
        if check is None or int(check[1]) != port or check[2] not in routes():
            yield f"{name}: no health check of a route of the server"
        for run in given["RUN"]:
            if "apt-get install" in run and "rm -rf /var/lib/apt/lists" not in run:
                yield f"{name}: keeps the package lists"
            for command in re.findall(r"\bperilune (\w+[^&]*)", run.split("useradd")[0]):
                yield from (f"{name}: {fault}" for fault in unknown_options(shlex.split(command)))
            if (torch := re.search(r"'(torch[^']*)'", run)) and (requirement is None or torch[1] != requirement[1]):
                yield f"{name}: {torch[1]} is not what pyproject.toml requires"
        if not any("perilune ops --build" in run for run in given["RUN"]):
            yield f"{name}: kernels are not built ahead"


# ---- compose, Prometheus, Grafana


def compose(root: Path) -> Iterator[str]:
    deploy = root / "deploy"
    data = yaml.safe_load((root / COMPOSE).read_text())
    services: dict[str, dict[str, Any]] = data["services"]
    listening = {"perilune": PORT, "prometheus": 9090, "grafana": 3000}  # the other two by their images' defaults
    mounted: dict[str, dict[str, str]] = {}  # service: path in the container to path here
    for name, service in services.items():
        yield from (f"{name}: no key {key} of a service" for key in service.keys() - SERVICE_KEYS)
        built = service.get("build")
        if built is not None:
            context = (deploy / built["context"]).resolve()
            if context != root.resolve() or not (context / built["dockerfile"]).is_file():
                yield f"{name}: {built['dockerfile']} is not there"
        elif not PINNED.fullmatch(service["image"]):
            yield f"{name}: {service['image']} is not pinned"
        if service.get("cap_drop") != ["ALL"] or "no-new-privileges:true" not in service.get("security_opt", []):
            yield f"{name}: keeps privileges"
        for port in service.get("ports", []):
            address, outside, inside = port.rpartition(":")[0].rpartition(":")[0], *port.split(":")[-2:]
            if address != "127.0.0.1":
                yield f"{name}: port {outside} is open to the network"
            if int(inside) != listening[name]:
                yield f"{name}: publishes {inside}, but listens on {listening[name]}"
        for volume in service.get("volumes", []):
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                mounted.setdefault(name, {})[target] = source
                if not (deploy / source).exists():
                    yield f"{name}: {source} is not there"
            elif source not in data["volumes"]:
                yield f"{name}: the volume {source} is not declared"
        yield from (f"{name}: depends on {other}" for other in service.get("depends_on", []) if other not in services)
    server = services["perilune"]
    yield from (f"perilune: {fault}" for fault in unknown_options(server["command"]))
    if int(value(server["command"], "--port") or PORT) != PORT or value(server["command"], "--host") != "0.0.0.0":
        yield "perilune: listens elsewhere than its port says"
    if not re.fullmatch(r"[34]\ds|[1-9]m", server["stop_grace_period"]):
        yield "perilune: is killed before answers in flight may end"
    for job in yaml.safe_load((deploy / "prometheus.yml").read_text())["scrape_configs"]:
        if job["metrics_path"] not in routes():
            yield f"prometheus: {job['metrics_path']} is no route of the server"
        for target in (t for config in job["static_configs"] for t in config["targets"]):
            host, _, port = target.partition(":")
            if listening.get(host) != int(port):
                yield f"prometheus: nothing listens on {target}"
    for source in yaml.safe_load((deploy / "grafana/provisioning/datasources/perilune.yaml").read_text())[
        "datasources"
    ]:
        if source["url"] != f"http://prometheus:{listening['prometheus']}":
            yield f"grafana: nothing listens on {source['url']}"
    for provider in yaml.safe_load((deploy / "grafana/provisioning/dashboards/perilune.yaml").read_text())["providers"]:
        if provider["options"]["path"] not in mounted["grafana"]:
            yield f"grafana: {provider['options']['path']} is not mounted"
    cuda = yaml.safe_load((deploy / "compose.cuda.yaml").read_text())["services"]
    if set(cuda) - set(services) or not (root / cuda["perilune"]["build"]["dockerfile"]).is_file():
        yield "compose.cuda.yaml: changes what is not there"


# ---- systemd


def unit(root: Path) -> Iterator[str]:
    sections: dict[str, dict[str, str]] = {}
    keys: dict[str, str] = {}
    for line in (root / UNIT).read_text().splitlines():
        if line.startswith("["):
            keys = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, text = line.partition("=")
            keys[name] = text
    service = sections["Service"]
    binary, *words = shlex.split(service["ExecStart"])
    if not binary.endswith("/bin/perilune") or not binary.startswith("/"):
        yield f"{UNIT}: {binary} is no absolute path of perilune"
    yield from (f"{UNIT}: {fault}" for fault in unknown_options(words))
    credential = value(words, "--api-key-file") or ""
    if credential.removeprefix("%d/") not in [c.split(":")[0] for c in service.get("LoadCredential", "").split()]:
        yield f"{UNIT}: {credential} is not loaded"
    if service.get("User", "root") == "root":
        yield f"{UNIT}: runs as root"
    if int(service.get("TimeoutStopSec", "0")) <= 30:
        yield f"{UNIT}: is killed before answers in flight may end"
    yield from (f"{UNIT}: {k} is not {v}" for k, v in HARDENED.items() if service.get(k) != v)
    if set(sections) != {"Unit", "Service", "Install"} or sections["Install"].get("WantedBy") != "multi-user.target":
        yield f"{UNIT}: cannot be enabled"


# ---- the tests


def test_nothing_is_wrong() -> None:
    assert faults(ROOT) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        (
            "Dockerfile",
            "COPY perilune perilune",
            "COPY docs docs",
            "docs is not in the build's context",
        ),
        ("Dockerfile", "USER 10001", "", "runs as root"),
        ("Dockerfile", "USER 10001", "USER perilune", "perilune is no number"),
        ("Dockerfile", "--uid 10001", "--uid 1000", "no user 10001 is made"),
        ("Dockerfile", "COPY pyproject.toml", "ADD pyproject.toml", "ADD is deprecated or fetches"),
        ("Dockerfile", "WORKDIR /opt", "WORKDIR opt", "is not absolute"),
        ("Dockerfile", "ENV PATH=", "ENV HF_TOKEN=x PATH=", "ENV has a secret"),
        ("Dockerfile", " --no-install-recommends", "", "DL3015"),
        ("Dockerfile", "install -y --no", "install --no", "DL3014"),
        ("Dockerfile", "--no-cache-dir .", ".", "DL3042"),
        ("Dockerfile", "useradd --uid", "curl x | sh && useradd --uid", "DL4006"),
        ("Dockerfile", 'CMD ["python3"', 'CMD ["curl"', "HEALTHCHECK runs what the image does not have"),
        ("deploy/cpu.Dockerfile", 'ENTRYPOINT ["perilune"]', 'ENTRYPOINT ["vllm"]', "ENTRYPOINT runs what"),
        (COMPOSE, "shm_size", "shmsize", "no key shmsize of a service"),
        ("Dockerfile", "EXPOSE 8000", "EXPOSE 8080", "listens on 8000"),
        ("Dockerfile", "8000/health", "8000/healthz", "no health check"),
        ("Dockerfile", "perilune ops --build", "perilune ops --compile", "ops has no option --compile"),
        ("Dockerfile", '"--host", "0.0.0.0"', '"--hosts", "0.0.0.0"', "serve has no option --hosts"),
        ("Dockerfile", 'CMD ["serve", "kimi-nano", "--host", "0.0.0.0"]', "CMD perilune serve", "through a shell"),
        ("deploy/cpu.Dockerfile", "python:3.12-slim-bookworm", "python:latest", "is not pinned"),
        ("deploy/cpu.Dockerfile", "torch>=2.11,<2.14", "torch", "is not what pyproject.toml requires"),
        (COMPOSE, "127.0.0.1:8000:8000", "8000:8000", "open to the network"),
        (COMPOSE, "127.0.0.1:3000:3000", "127.0.0.1:3000:3001", "listens on 3000"),
        (COMPOSE, "./prometheus.yml", "./prometheus.yaml", "./prometheus.yaml is not there"),
        (COMPOSE, '"--port"', '"--ports"', "serve has no option --ports"),
        (COMPOSE, "grafana/grafana:12.1.1", "grafana/grafana", "is not pinned"),
        (COMPOSE, "stop_grace_period: 40s", "stop_grace_period: 10s", "is killed before"),
        (COMPOSE, "cap_drop: [ALL]", "cap_drop: []", "keeps privileges"),
        ("deploy/prometheus.yml", "perilune:8000", "perilune:8001", "nothing listens on perilune:8001"),
        ("deploy/prometheus.yml", "/metrics", "/metric", "/metric is no route"),
        ("deploy/grafana/provisioning/dashboards/perilune.yaml", "/dashboards", "/boards", "is not mounted"),
        (UNIT, "--config", "--configuration", "serve has no option --configuration"),
        (UNIT, "LoadCredential=api-keys", "LoadCredential=keys", "is not loaded"),
        (UNIT, "User=perilune", "User=root", "runs as root"),
        (UNIT, "TimeoutStopSec=45", "TimeoutStopSec=5", "is killed before"),
        (UNIT, "ProtectHome=true", "ProtectHome=false", "ProtectHome is not true"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, file: str, old: str, new: str, fault: str) -> None:
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    (tmp_path / "perilune").mkdir()
    assert faults(tmp_path) == []
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    assert any(fault in found for found in faults(tmp_path)), faults(tmp_path)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    """With programs that this machine has; a wrong key and a wrong value are found, so that silence says something."""
    text = re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", (ROOT / UNIT).read_text())

    def said(unit: str) -> str:
        path = tmp_path / "perilune.service"
        path.write_text(unit)
        done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, timeout=60)
        return done.stderr

    assert said(text) == ""
    assert "UMasks" in said(text.replace("UMask=", "UMasks="))
    assert "kill mode" in said(text.replace("KillMode=mixed", "KillMode=most"))
