"""`perilune serve`: the engine and the OpenAI-compatible server around it, until a signal ends both."""

import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import shlex
import signal
import socket
import stat
import sys
from collections.abc import Iterator
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
from perilune.engine.client import EngineClient
from perilune.formats.hub import resolve_model
from perilune.grammar.constrain import warm_up
from perilune.server.app import build_app
from perilune.server.service import Service, read_generation_config
from perilune.text.chat import template_for
from perilune.text.family import member_named
from perilune.text.tokenizer import Tokenizer

GRACE_SECONDS = 1  # for answers in flight to say that the server stops
# Longer than clients keep idle connections (httpx and the SDKs: 5 s, browsers a minute), so that they end them: a
# request on its way into a connection that the server is just closing would be lost.
KEEP_ALIVE_SECONDS = 75
QUESTION = "What is 347 + 589?"
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
)
@click.option(
    "--api-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File whose only line is the key that requests must carry as a bearer token.",
)
@options.engine_options(
    *options.COMMON, "log_rejected", "max_num_seqs", "memory_fraction", "kv_host_gb", "kv_disk", "kv_disk_gb",
    "kv_ttl_hours",
)  # fmt: skip
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
    api_key_file: Path | None,
    assignments: tuple[str, ...],
    config_file: Path | None,
    **engine_options: Any,
) -> None:
    """Serve MODEL over HTTP, compatible with the OpenAI API.

    Ctrl-C or SIGTERM ends the server and the engine within two seconds.
    """
    engine_base, server_base = options.file_values(config_file)
    engine = build(EngineConfig, options.engine_values(engine_options, assignments, engine_base))
    given = {
        "host": host,
        "port": port,
        "served_model_name": served_model_name,
        "max_waiting": max_waiting,
        "chat_template": chat_template,
        "vendor_strict": vendor_strict,
        "lenient_fields": lenient_fields,
        "cors_origins": cors_origins or None,
        "api_key": read_key(api_key_file) if api_key_file is not None else None,
    }
    server = build(ServerConfig, {**server_base, **{k: v for k, v in given.items() if v is not None}})
    if server.chat_template is not None:
        member_named(server.chat_template)  # a wrong name must not cost a download
    console = Console(stderr=True, highlight=False)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # The address is taken before the model is loaded: a taken port must not cost minutes of loading.
    with listen(server.host, server.port) as sock:
        path = resolve_model(model, progress=sys.stderr.isatty())
        if server.served_model_name is None:
            server = replace(server, served_model_name=path.name if Path(model).is_dir() else model)
        asyncio.run(run(path, engine, server, sock, console))


async def run(path: Path, engine: EngineConfig, server: ServerConfig, sock: socket.socket, console: Console) -> None:
    """Starts the engine, serves until a signal comes, closes the engine."""
    if not (path / "tiktoken.model").is_file():
        raise CheckpointError(f"{path} has no tiktoken.model: the server needs the tokenizer")
    tokenizer = Tokenizer.from_directory(path)
    template = template_for(path, server.chat_template)
    generation_config = read_generation_config(path)
    loop = asyncio.get_running_loop()
    starting = asyncio.create_task(EngineClient.start(path, engine, stop_token_ids=tokenizer.stop_ids))
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
        http = Http(
            uvicorn.Config(
                build_app(service),
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
        show_ready(console, client.info, service.model, sock, locked=server.api_key is not None)
        await http.serve(sockets=[sock])
    finally:
        await client.close()


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


def read_key(path: Path) -> str:
    try:
        with path.open() as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read the API key file {path}: {e}") from e
    if not key or any(c.isspace() for c in key):
        raise ConfigError(f"the API key file {path} must hold one key without spaces")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        click.echo(f"warning: the API key file {path} is readable by others: chmod 600 {path}", err=True)
    return key


def show_ready(console: Console, info: EngineInfo, name: str, sock: socket.socket, *, locked: bool) -> None:
    """Prints the automatic choices with their reasons, the address and a question to try, once."""
    for key, value, reason in info.choices:
        console.print(f"  {escape(key)} = [bold]{escape(value)}[/]  [dim]{escape(reason)}[/]", soft_wrap=True)
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": QUESTION}]})
    key = ' -H "Authorization: Bearer $(cat KEY_FILE)"' if locked else ""
    console.print(f"\n[bold]{escape(name)}[/] is served at [bold]{url}/v1[/]", soft_wrap=True)
    console.print(f"Talk with it at [bold]{url}/[/], or try\n", soft_wrap=True)
    # Not through the console, which would wrap the line: it is there to be copied.
    click.echo(
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}\n", err=True
    )
