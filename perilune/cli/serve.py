"""`perilune serve`: the engine and the OpenAI-compatible server around it, until a signal ends both."""

import asyncio
import contextlib
import errno
import gc
import json
import logging
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import uvicorn
from rich.console import Console
from rich.markup import escape

from perilune.cli.shared import options
from perilune.core.config import EngineConfig, ServerConfig, build
from perilune.core.errors import CheckpointError, ConfigError
from perilune.core.messages import EngineInfo
from perilune.engine.client import ENGINE_COMMAND, EngineClient
from perilune.formats.hub import resolve_model
from perilune.grammar.constrain import warm_up
from perilune.server import audit, logs, reload
from perilune.server.app import build_app
from perilune.server.audit import AuditLog
from perilune.server.keys import Keyring, readable_by_others
from perilune.server.reload import Watched
from perilune.server.service import Service, read_generation_config
from perilune.server.tls import Certificate
from perilune.server.tracing import Traces
from perilune.text.chat import template_for
from perilune.text.family import member_named
from perilune.text.tokenizer import Tokenizer

GRACE_SECONDS = 1  # for answers in flight to say that the server stops
# Longer than clients keep idle connections (httpx and the SDKs: 5 s, browsers a minute), so that they end them: a
# request on its way into a connection that the server is just closing would be lost.
KEEP_ALIVE_SECONDS = 75
QUESTION = "What is 347 + 589?"
ACCESS = ("api_key_file", "tls_cert", "tls_key")
OBSERVED = ("log_format", "log_level", "otlp_traces_endpoint", "audit_log", "audit_text", "audit_redact", "audit_mb")
log = logging.getLogger("perilune.server")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@click.command()
@click.argument("model", default="kimi-nano")
@options.field_options(
    ServerConfig,
    "host",
    "port",
    "served_model_name",
    "max_waiting",
    "chat_template",
    "vendor_strict",
    "lenient_fields",
    "cors_origins",
    *ACCESS,
    *OBSERVED,
)
@options.engine_options(*options.COMMON, "log_rejected", "max_num_seqs", "memory_fraction")
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="TOML file with the tables [engine] and [server]; options on the command line win over it.",
)
def command(
    model: str,
    host: str | None,
    port: int | None,
    served_model_name: str | None,
    max_waiting: int | None,
    chat_template: str | None,
    vendor_strict: bool | None,
    lenient_fields: bool | None,
    cors_origins: tuple[str, ...],
    assignments: tuple[str, ...],
    config_file: Path | None,
    **more: Any,
) -> None:
    """Serve MODEL over HTTP, compatible with the OpenAI API.

    Ctrl-C or SIGTERM ends the server and the engine within two seconds.
    """
    observed = {name: more.pop(name) for name in (*ACCESS, *OBSERVED)}
    observed["audit_redact"] = observed["audit_redact"] or None
    engine_base, server_base = options.file_values(config_file)
    engine = build(EngineConfig, options.engine_values(more, assignments, engine_base))
    given = {
        "host": host,
        "port": port,
        "served_model_name": served_model_name,
        "max_waiting": max_waiting,
        "chat_template": chat_template,
        "vendor_strict": vendor_strict,
        "lenient_fields": lenient_fields,
        "cors_origins": cors_origins or None,
        **observed,
    }
    server = build(ServerConfig, {**server_base, **{k: v for k, v in given.items() if v is not None}})
    if server.chat_template is not None:
        member_named(server.chat_template)  # a wrong name must not cost a download
    console = Console(stderr=True, highlight=False)
    logs.configure(server.log_format, server.log_level)
    # Like the address, what the server needs besides the model is looked at before minutes of loading.
    check_access(server)
    # The address is taken before the model is loaded: a taken port must not cost minutes of loading.
    with listen(server.host, server.port) as sock:
        path = resolve_model(model, progress=sys.stderr.isatty())
        if server.served_model_name is None:
            server = replace(server, served_model_name=path.name if Path(model).is_dir() else model)
        asyncio.run(run(path, engine, server, sock, console))


def check_access(server: ServerConfig) -> None:
    """ConfigError for keys, certificates or rules that cannot be used; a warning for keys that others can read."""
    Keyring(server.api_key, server.api_key_file)
    audit.compiled(server.audit_redact)
    if server.audit_log is not None:
        audit.prepare(Path(server.audit_log))
    if server.otlp_traces_endpoint is not None:
        Traces(server.otlp_traces_endpoint, "").close()
    if server.tls_cert is not None and server.tls_key is not None:
        Certificate(server.tls_cert, server.tls_key)
    for file in (server.api_key_file, server.tls_key):
        if file is not None and readable_by_others(Path(file)):
            log.warning("%s is readable by others: chmod 600 %s", file, file)


async def run(
    path: Path,
    engine: EngineConfig,
    server: ServerConfig,
    sock: socket.socket,
    console: Console,
    *,
    engine_command: Sequence[str] = ENGINE_COMMAND,
) -> None:
    """Starts the engine, serves until a signal comes, closes the engine."""
    if not (path / "tiktoken.model").is_file():
        raise CheckpointError(f"{path} has no tiktoken.model: the server needs the tokenizer")
    tokenizer = Tokenizer.from_directory(path)
    template = template_for(path, server.chat_template)
    generation_config = read_generation_config(path)
    loop = asyncio.get_running_loop()
    starting = asyncio.create_task(
        EngineClient.start(path, engine, stop_token_ids=tokenizer.stop_ids, command=engine_command)
    )
    for number in SIGNALS:
        loop.add_signal_handler(number, starting.cancel)
    # Seconds for a large vocabulary, hidden behind the engine's start; without it the first tool call would pay.
    warming = asyncio.create_task(asyncio.to_thread(warm_up, tokenizer))
    try:
        client = await starting
    except asyncio.CancelledError as e:
        raise click.exceptions.Abort from e
    try:
        await warming
        # What exists now lives as long as the server: a full garbage collection need not walk through it again, which
        # would add some 50 ms to each pause that a large request causes.
        gc.collect()
        gc.freeze()
        service = Service(client, tokenizer, template, server, generation_config)
        watched, certificate = reloadable(service)
        observing = observers(service)
        service.observers += [one.record for one in observing]
        http = Http(
            uvicorn.Config(
                build_app(service),
                ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )

        def stop() -> None:
            service.stop()
            http.should_exit = True

        for number in SIGNALS:
            loop.add_signal_handler(number, stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: reload.again(watched))
        watching = asyncio.create_task(reload.watch(watched))
        url = address(sock, https=certificate is not None)
        if server.log_format == "json":
            chosen = {key: {"value": value, "reason": reason} for key, value, reason in client.info.choices}
            log.info("ready", extra={"fields": {"url": url, "model": service.model, "choices": chosen}})
        else:
            show_ready(console, client.info, service.model, url, locked=service.keys.locked)
        await http.serve(sockets=[sock])
        watching.cancel()
        for one in observing:
            await asyncio.to_thread(one.close)
    finally:
        await client.close()


def observers(service: Service) -> list[AuditLog | Traces]:
    """What is said about each request besides the log and the metrics; to be closed after the last one."""
    server, made = service.config, list[AuditLog | Traces]()
    if server.audit_log is not None:
        audit_log = AuditLog(
            Path(server.audit_log),
            service.model,
            service.text.tokenizer.decode,
            service.metrics.audit_lost.inc,
            patterns=audit.compiled(server.audit_redact),
            limit_bytes=server.audit_mb << 20,
        )
        made.append(audit_log)
    if server.otlp_traces_endpoint is not None:
        made.append(Traces(server.otlp_traces_endpoint, service.model))
    return made


def reloadable(service: Service) -> tuple[list[Watched], Certificate | None]:
    """The files of a service that are read again when they change, and its certificate."""
    keys, server = service.keys, service.config
    watched = [] if keys.file is None else [Watched("API key file", [keys.file], keys.load)]
    certificate = None
    if server.tls_cert is not None and server.tls_key is not None:
        certificate = Certificate(server.tls_cert, server.tls_key)
        watched.append(Watched("TLS certificate", [certificate.cert, certificate.key], certificate.load))
    return watched, certificate


class Http(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by `run`, which has the engine to end as well."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; ConfigError naming the remedy when the address cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as e:
        raise ConfigError(f"cannot resolve host {host!r}: {e.strerror}; use an address of this machine") from e
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Listening is what claims the port: two sockets with SO_REUSEADDR may both bind it.
        sock.listen(2048)
    except OSError as e:
        sock.close()
        if e.errno == errno.EADDRINUSE:
            remedy = "choose another with --port, or --port 0 for a free one"
            raise ConfigError(f"port {port} on {host} is in use: {remedy}") from e
        raise ConfigError(f"cannot listen on {host} port {port}: {e.strerror}; choose --host and --port") from e
    return sock


def address(sock: socket.socket, *, https: bool) -> str:
    """The URL that reaches the socket from this machine."""
    scheme = "https" if https else "http"
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def show_ready(console: Console, info: EngineInfo, name: str, url: str, *, locked: bool) -> None:
    """Prints the automatic choices with their reasons, the address and a question to try, once."""
    for key, value, reason in info.choices:
        console.print(f"  {escape(key)} = [bold]{escape(value)}[/]  [dim]{escape(reason)}[/]", soft_wrap=True)
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": QUESTION}]})
    key = ' -H "Authorization: Bearer $(cat KEY_FILE)"' if locked else ""
    console.print(f"\n[bold]{escape(name)}[/] is served at [bold]{url}/v1[/]", soft_wrap=True)
    console.print(f"Talk with it at [bold]{url}/[/], or try\n", soft_wrap=True)
    # Not through the console, which would wrap the line: it is there to be copied.
    click.echo(
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}\n", err=True
    )
