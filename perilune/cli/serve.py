"""`perilune serve`: the engine and the OpenAI-compatible server around it, until a signal ends both."""

import asyncio
import contextlib
import errno
import functools
import gc
import importlib
import json
import logging
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.markup import escape

from perilune.cli.shared import options
from perilune.cli.shared.synthetic import directory
from perilune.core.config import EngineConfig, ServerConfig, build
from perilune.core.errors import CheckpointError, ConfigError
from perilune.core.messages import EngineInfo
from perilune.engine.client import ENGINE_COMMAND, EngineClient
from perilune.formats.hub import BUNDLED, resolve_model
from perilune.model.config import KimiConfig
from perilune.server import logs, reload
from perilune.server.keys import Keyring, readable_by_others
from perilune.server.limits import BACKLOG_CONNECTIONS, Proxies, keep_bodies_apart
from perilune.server.reload import Watched
from perilune.server.tls import Certificate
from perilune.text.family import member_named

if TYPE_CHECKING:
    from perilune.server.audit import AuditLog
    from perilune.server.batches.batch import Batches
    from perilune.server.listener import Listener
    from perilune.server.service import Service
    from perilune.server.tracing import Traces

# After this time a thread must hand the GIL to another one (Python's default: 5 ms). The event loop needs the GIL back
# after each socket call, so a thread that parses a body of megabytes delays each piece of each stream by this time.
# Smaller: more switches.
SWITCH_SECONDS = 0.0005
GRACE_SECONDS = 1.0  # for answers in flight to end with an error, and for threads to end
QUESTION = "What is 347 + 589?"
DRAIN_POLL_SECONDS = 0.02
SIGNALS = (signal.SIGINT, signal.SIGTERM)


log = logging.getLogger("perilune.server")
T = TypeVar("T")


@click.command()
@click.argument("model", required=False)
@options.field_options(ServerConfig, *(f.name for f in fields(ServerConfig) if not f.metadata.get("secret")))
@click.option(
    "--synthetic", metavar="SHAPE", help="Serve random weights of a shape instead of MODEL: kimi-k2.5 or tiny."
)
@click.option("--layers", type=click.IntRange(1), help="Layers of --synthetic.  [default: all]")
@options.engine_options(
    *options.COMMON, "declared_acceptance", "log_rejected", "max_num_seqs", "decode_stretch", "memory_fraction",
    "kv_host_gb", "kv_disk", "kv_disk_gb", "kv_ttl_hours",
)  # fmt: skip
@click.option(
    "--config",
    "config_file",
    type=options.FILE,
    help="TOML file with the tables [engine] and [server]; options on the command line win over it.",
)
def command(
    model: str | None,
    synthetic: str | None,
    layers: int | None,
    assignments: tuple[str, ...],
    config_file: Path | None,
    **given: Any,
) -> None:
    """Serve MODEL (default: kimi-nano) over HTTP, compatible with the OpenAI API.

    SIGTERM lets answers in flight end (--drain-seconds); Ctrl-C, or a second signal, ends the server and the engine
    within two seconds.
    """
    if synthetic is not None and model is not None:
        raise click.UsageError("give MODEL or --synthetic SHAPE, not both")
    if layers is not None and synthetic is None:
        raise click.UsageError("--layers belongs to --synthetic")
    engine_base, server_base = options.file_values(config_file)
    engine_given, server_given = options.split(given)
    engine = options.engine_config(engine_given, assignments, engine_base)
    server = build(ServerConfig, {**server_base, **{k: v for k, v in server_given.items() if v not in (None, ())}})
    options.require_effect(
        ("host port", server.uds is None, "with uds"),
        ("files_gb", server.files_dir, "without files_dir"),
        ("audit_mb", server.audit_log, "without audit_log"),
    )
    proxies = Proxies(server.trusted_proxies)
    if server.chat_template is not None:
        member_named(server.chat_template)  # a wrong name must not cost a download
    console = Console(stderr=True, highlight=False)
    logs.configure(server.log_format, server.log_level)
    # Files are checked and the address is bound first: an error must not come after minutes of loading.
    check_access(server)
    with listening(server) as sock, contextlib.ExitStack() as made:
        if synthetic is not None:
            path = made.enter_context(directory(synthetic, layers))
            name = path.name
        else:
            model = BUNDLED if model is None else model
            path = resolve_model(model, progress=sys.stderr.isatty(), check=KimiConfig.from_directory)
            name = path.name if Path(model).is_dir() else model
        if server.served_model_name is None:
            server = replace(server, served_model_name=name)
        with ending_in_time():
            asyncio.run(run(path, engine, server, sock, proxies, console))


@contextlib.contextmanager
def ending_in_time() -> Iterator[None]:
    """Ends the process at most GRACE_SECONDS after the wrapped code, with the exit code that main() has for its error:
    the interpreter's end waits for threads, and one may compile a grammar for minutes."""
    code = 1
    try:
        yield
        code = 0
    except (click.exceptions.Abort, KeyboardInterrupt) as e:
        code = 128 + int(*e.args or (signal.SIGINT,))
        raise
    finally:
        last = threading.Timer(GRACE_SECONDS, os._exit, (code,))
        last.daemon = True
        last.start()


def check_access(server: ServerConfig) -> None:
    """ConfigError for keys, certificates or rules that cannot be used; a warning for keys that others can read."""
    Keyring(server.api_key, server.api_key_file)
    if server.audit_log is not None:
        from perilune.server import audit

        audit.compiled(server.audit_redact)
        audit.prepare(Path(server.audit_log))
    if server.files_dir is not None:
        from perilune.server.batches.files import FileStore

        FileStore(Path(server.files_dir), 0).close()
    if server.otlp_traces_endpoint is not None:
        from perilune.server.tracing import Traces

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
    proxies: Proxies,
    console: Console,
    *,
    engine_command: Sequence[str] = ENGINE_COMMAND,
) -> None:
    """Starts the engine, serves until a signal comes, closes the engine."""
    if not (path / "tiktoken.model").is_file():
        raise CheckpointError(f"{path} has no tiktoken.model: the server needs the tokenizer")
    loop = asyncio.get_running_loop()
    logged = server.log_format == "json"  # every line is an object then, also the engine's
    starting = asyncio.create_task(
        EngineClient.start(path, engine, supervised=True, command=engine_command, logged=logged)
    )
    this = asyncio.current_task()
    assert this is not None
    for number in SIGNALS:
        loop.add_signal_handler(number, this.cancel, number)
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # no reload yet: the files are read later
    try:
        # The engine's process imports torch while this one imports the rest. Work that takes seconds on a busy machine
        # runs on threads, so that signals are handled meanwhile.
        await aside(lambda: importlib.import_module("perilune.server.app"))
        from perilune.grammar.constrain import warm_up
        from perilune.media.limits import Limits
        from perilune.server.app import build_app
        from perilune.server.listener import Listener
        from perilune.server.service import Service, read_generation_config
        from perilune.text.chat import template_for
        from perilune.text.tokenizer import Tokenizer

        tokenizer = await aside(lambda: Tokenizer.from_directory(path))
        tokenizer.require_size(KimiConfig.from_directory(path).vocab_size, path)
        template = template_for(path, server.chat_template)
        generation_config, limits = read_generation_config(path), Limits.from_directory(path)
        # Takes seconds for a large vocabulary: done while the engine starts, not at the first tool call.
        await aside(lambda: warm_up(tokenizer))
        client = await starting
    except BaseException as e:
        for number in SIGNALS:  # further signals are ignored: cleaning up takes two seconds at most
            loop.add_signal_handler(number, lambda: None)
        starting.cancel()
        for started in await asyncio.gather(starting, return_exceptions=True):
            if isinstance(started, EngineClient):
                await started.close()
        if isinstance(e, asyncio.CancelledError):
            raise click.exceptions.Abort(*e.args) from e
        raise
    try:
        client.end_tokens |= tokenizer.stop_ids
        # Objects that exist now live as long as the server. Full garbage collections skip them: walking through them
        # would add some 50 ms to each pause that a large request causes.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(SWITCH_SECONDS)
        keep_bodies_apart()
        service = Service(client, tokenizer, template, server, generation_config, limits)
        watched, certificate = reloadable(service)
        observing = observers(service)
        service.observers += [one.record for one in observing]
        app = build_app(service)
        listener = Listener(app, proxies=proxies, refuse=app.state.refuse)
        batches: Batches | None = app.state.batches
        if batches is not None:
            batches.resume()
        end = Ending(service, listener, server.drain_seconds)
        for number in SIGNALS:
            loop.add_signal_handler(number, end.signalled, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: reload.again(watched))
        watching = asyncio.create_task(reload.watch(watched))
        await listener.start(sock, None if certificate is None else certificate.context)
        https = certificate is not None
        if server.log_format == "json":
            chosen = {key: {"value": value, "reason": reason} for key, value, reason in client.info.choices}
            ready = {"url": address(sock, https=https), "model": service.model, "choices": chosen}
            log.info("ready", extra={"fields": ready})
        else:
            show_ready(console, client.info, service.model, sock, locked=service.keys.locked, https=https)
        await end.reached()
        service.stop()
        await listener.close(GRACE_SECONDS)
        watching.cancel()
        if batches is not None:
            await batches.close()
        await service.pictures.close()
        for one in observing:
            await asyncio.to_thread(one.close)
    finally:
        await client.close()
        loop.set_default_executor(ThreadPoolExecutor())  # The end of the loop would wait for threads of the first one.


async def aside(work: Callable[[], T]) -> T:
    """Runs `work` on a daemon thread and returns its result. After a cancellation nothing waits for the thread, not
    even the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def end(settle: Callable[[], None]) -> None:
        if not done.done():
            settle()

    def run() -> None:
        try:
            result = work()
        except Exception as e:
            settle = functools.partial(done.set_exception, e)
        else:
            settle = functools.partial(done.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end, settle)

    threading.Thread(target=run, daemon=True).start()
    return await done


def observers(service: "Service") -> "list[AuditLog | Traces]":
    """The audit log and the traces, if configured; the caller closes them after the last request."""
    from perilune.server import audit
    from perilune.server.audit import AuditLog
    from perilune.server.tracing import Traces

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


def reloadable(service: "Service") -> tuple[list[Watched], Certificate | None]:
    """The files of a service that are read again when they change, and its certificate."""
    keys, server = service.keys, service.config
    watched = [] if keys.file is None else [Watched("API key file", [keys.file], keys.load)]
    certificate = None
    if server.tls_cert is not None and server.tls_key is not None:
        certificate = Certificate(server.tls_cert, server.tls_key)
        watched.append(Watched("TLS certificate", [certificate.cert, certificate.key], certificate.load))
    return watched, certificate


class Ending:
    """Decides when the server ends: at once after SIGINT or a second signal; after SIGTERM when no answer is in flight
    or drain_seconds have passed. Meanwhile the server answers probes and refuses other requests."""

    def __init__(self, service: "Service", listener: "Listener", drain_seconds: float) -> None:
        self._service, self._listener, self._drain_seconds = service, listener, drain_seconds
        self._draining, self._now = asyncio.Event(), asyncio.Event()

    def signalled(self, number: int) -> None:
        if number == signal.SIGINT or self._draining.is_set():
            self._now.set()
        self._draining.set()

    async def reached(self) -> None:
        """Returns when the server may end."""
        await self._draining.wait()
        self._service.drain()
        self._listener.drain()
        if (left := self._service.admission.in_flight) and not self._now.is_set():
            seconds = self._drain_seconds
            log.info("draining: %d answers in flight get %g s; a second signal ends them at once", left, seconds)
        ended = asyncio.get_running_loop().time() + self._drain_seconds
        while self._service.admission.in_flight and asyncio.get_running_loop().time() < ended:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._now.wait(), DRAIN_POLL_SECONDS)
                return


@contextlib.contextmanager
def listening(server: ServerConfig) -> Iterator[socket.socket]:
    """The bound socket of the configuration; a Unix socket's path is removed at the end."""
    if server.uds is None:
        with listen(server.host, server.port) as sock:
            yield sock
        return
    path = Path(server.uds)
    with listen_unix(path) as sock:
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


def listen_unix(path: Path) -> socket.socket:
    """A socket at `path` that this user and group may connect to. A socket that no process serves any more is replaced;
    ConfigError for anything else at that path."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as other, contextlib.suppress(ConnectionRefusedError):
                other.connect(str(path))
                raise ConfigError(f"another process serves {path}: choose another path with --uds")
            path.unlink()
        before = os.umask(0o117)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        sock.listen(BACKLOG_CONNECTIONS)
    except OSError as e:
        sock.close()
        why = "it exists and is no socket" if e.errno == errno.EADDRINUSE else e.strerror or e
        raise ConfigError(f"cannot listen on {path}: {why}; choose another path with --uds") from e
    except ConfigError:
        sock.close()
        raise
    return sock


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError with the remedy if the address is not available."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as e:
        raise ConfigError(f"cannot resolve host {host!r}: {e.strerror}; use an address of this machine") from e
    except UnicodeError as e:  # a part of the name is empty or has more than 63 characters
        raise ConfigError(f"{host!r} is no name of a host: use an address of this machine") from e
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        # Listening is what claims the port: two sockets with SO_REUSEADDR may both bind it.
        sock.listen(BACKLOG_CONNECTIONS)
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
    if sock.family == socket.AF_UNIX:
        return f"{scheme}://localhost"
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def show_ready(
    console: Console, info: EngineInfo, name: str, sock: socket.socket, *, locked: bool, https: bool
) -> None:
    """Prints the automatic choices with their reasons, the address and a request to try."""
    for key, value, reason in info.choices:
        console.print(f"  {escape(key)} = [bold]{escape(value)}[/]  [dim]{escape(reason)}[/]", soft_wrap=True)
    url = address(sock, https=https)
    reach = f" --unix-socket {shlex.quote(sock.getsockname())}" if sock.family == socket.AF_UNIX else ""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": QUESTION}]})
    key = ' -H "Authorization: Bearer $(cat KEY_FILE)"' if locked else ""
    where = f"[bold]{url}/v1[/]" if not reach else f"the Unix socket [bold]{escape(sock.getsockname())}[/]"
    console.print(f"\n[bold]{escape(name)}[/] is served at {where}", soft_wrap=True)
    console.print(f"Talk with it at [bold]{url}/[/], or try\n" if not reach else "Try\n", soft_wrap=True)
    # Not through the console, which would wrap the line: users copy it.
    click.echo(
        f"curl{reach} {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}\n",
        err=True,
    )
