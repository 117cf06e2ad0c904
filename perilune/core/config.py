"""The configuration tree: frozen, resolved once, printed once with the reason of every automatic choice.

Keys have one spelling everywhere: `LLM(model, max_num_seqs=8)`, `--max-num-seqs 8`, `max_num_seqs = 8` in a TOML file.
"""

import dataclasses
import difflib
import math
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from perilune.core.errors import ConfigError
from perilune.core.step import MAX_DRAFTS

MAX_THREADS = 1024  # far more end in "can't start new thread" after the weights are read
MAX_SEQS = 1 << 20  # their slots take 50 MB, those of 10**9 all memory there is
MAX_GB = 1e9  # of a cache: above 1e299 its bytes are no finite number
MAX_NUMBER = 1 << 63  # a configuration crosses to the engine's process as msgpack, which has no larger integers
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_HOST = re.compile(r"(\*|(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?)(:[0-9]{1,5})?")


def _doc(text: str, default: Any) -> Any:
    return field(default=default, metadata={"help": text})


def _secret(text: str, default: Any) -> Any:
    """A field with a value that no error or log line may show."""
    return field(default=default, repr=False, metadata={"help": text, "secret": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine needs besides the model. "auto" and None are resolved by the engine when it starts."""

    device: str = _doc("auto, cpu or cuda", "auto")
    dtype: Literal["auto", "float32", "bfloat16"] = _doc(
        "type of activations and unquantised weights; auto: bfloat16 on GPUs, float32 on CPU", "auto"
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "fp8"] = _doc(
        "type of the KV cache; auto: same as dtype; fp8: latents in e4m3, rope keys in bfloat16", "auto"
    )
    rest_dtype: Literal["dtype", "fp8"] = _doc(
        "weights besides the routed experts: as dtype says, or fp8 (e4m3 with a scale per row, made at load)", "dtype"
    )
    fp8_activations: bool = _doc(
        "with rest_dtype=fp8: steps of more than 128 tokens round inputs of these layers to e4m3 too (a scale per "
        "token and 128 columns), and on Hopper GPUs prompts attend in 8 bits: faster, answers differ slightly",
        False,
    )
    expert_scales: Literal["auto", "checkpoint", "compact"] = _doc(
        "scales of INT4 experts: as stored, or made a byte each while they are read, which saves 5 % of the model; "
        "auto: as stored if that leaves room for 32,768 tokens",
        "auto",
    )
    qk_norm_eps: float | None = _doc(
        "epsilon of the q and kv norms inside MLA; default: the checkpoint's rms_norm_eps", None
    )
    max_model_len: int | None = _doc(
        "longest prompt + answer in tokens; default: what the checkpoint allows and memory holds", None
    )
    max_num_seqs: int = _doc("requests computed together in a step, at most", 64)
    max_step_tokens: int | None = _doc(
        "tokens computed in a step, at most; longer prompts are split. Default: 512 on CPU, 8192 on GPUs", None
    )
    decode_stretch: float = _doc(
        "while prompts of other requests are computed, 99 of 100 intervals between tokens take at most this many times "
        "the median: prompts come in smaller parts. 0: no bound, the shortest time to a first token",
        2.0,
    )
    prompt_patience: float = _doc(
        "seconds that a prompt of max_step_tokens waits at most so that decode_stretch is kept; shorter ones wait in "
        "proportion. Larger: the bound holds under more load, first tokens come later",
        2.0,
    )
    memory_fraction: float = _doc(
        "share of the memory that weights leave free, for KV cache and work memory of steps", 0.9
    )
    kv_blocks: int | None = _doc("KV blocks, instead of deriving them from memory_fraction", None)
    block_size: int | None = _doc(
        "tokens in a KV block; default: 64 on GPUs, 16 on CPU, times kv_shards, as each rank has its part of a block",
        None,
    )
    kv_shards: int | Literal["auto"] = _doc(
        "1: every rank has the whole KV cache; the number of ranks: each has its part of every request's tokens, so "
        "that the cache holds as many times more; auto: sharded where contexts are long or memory is short",
        "auto",
    )
    prefix_cache: bool = _doc("keep KV of finished requests for prompts that begin alike", True)
    kv_host_gb: float | None = _doc(
        "gigabytes of host memory for KV that the cache has no room for; default: none, or 1 with kv_disk", None
    )
    kv_disk: str | None = _doc(
        "directory for KV that host memory has no room for: one engine's alone, kept over restarts. It is users' text; "
        "`perilune kv clear` deletes it",
        None,
    )
    kv_disk_gb: float | None = _doc("gigabytes that kv_disk may take; default: half of what is free there", None)
    kv_ttl_hours: float = _doc("hours after which KV that is not used is deleted from host memory and disk", 24.0)
    vision: Literal["auto", "off"] = _doc("auto: pictures are seen where the checkpoint has a vision tower", "auto")
    vision_cache_gb: float | None = _doc(
        "gigabytes of pictures' embeddings that are kept on the device; default: 1 on GPUs, 0.25 on a CPU", None
    )
    absorb_limit: int = _doc(
        "a request advancing by at most this many tokens uses absorbed MLA, a longer one the plain form", 16
    )
    threads: int | None = _doc("CPU threads of the engine; default: torch's choice", None)
    seed: int | None = _doc("seed of requests that bring none; default: the system's random numbers", None)
    tp: int | Literal["auto"] = _doc(
        "ranks, one process and GPU each, that share the model; auto: the fewest GPUs that hold it (1 on a CPU)", 1
    )
    ep: int = _doc("1, or the number of ranks: each has some routed experts whole instead of a slice of all", 1)
    gpus: str | None = _doc(
        "GPUs of the ranks, numbers separated by commas; auto: the first ones, and with tp=1 as many as hold the "
        "model; default: the first ones",
        None,
    )
    draft: Literal["auto", "off", "eagle3", "suffix", "hybrid"] = _doc(
        "source of draft tokens, which never change an answer: eagle3 (a draft model), suffix (matches with earlier "
        "text) or hybrid (both); auto: hybrid if there is a draft model, else suffix",
        "auto",
    )
    draft_tokens: int | None = _doc("drafts per request and step, 1 to 8; default: as many as save time", None)
    drafter: str | None = _doc(
        "directory or Hugging Face id of an EAGLE-3 draft model; default: drafter/ in the model's directory", None
    )
    declared_acceptance: float | None = _doc(
        "with random weights: tokens that a step with drafts yields on average, whatever would be accepted", None
    )
    draft_dtype: Literal["auto", "dtype", "fp8"] = _doc(
        "weights of the draft model: as dtype says, or fp8; auto: fp8 on Hopper GPUs and where rest_dtype is fp8. "
        "No answer depends on it",
        "auto",
    )
    log_rejected: str | None = _doc(
        "directory for rejected drafts, with the text before, for `draft mine`; default: none is kept", None
    )
    log_rejected_share: float = _doc("share of the requests that are logged, chosen at random", 0.1)
    log_rejected_mb: int = _doc("megabytes of that log; the oldest files are deleted", 64)
    self_test: bool = _doc(
        "replay each CUDA graph once when it is captured, and compare it with the step without it", True
    )
    ops: Mapping[str, str] = field(
        default_factory=dict, metadata={"help": 'implementation by op name, e.g. {"mla_absorbed": "reference"}'}
    )

    def __post_init__(self) -> None:
        if self.gpus == "auto":
            object.__setattr__(self, "gpus", None)
            if self.ranks == 1:
                object.__setattr__(self, "tp", "auto")
        for name, low in (
            ("tp", 1), ("ep", 1), ("max_model_len", 2), ("max_num_seqs", 1), ("max_step_tokens", 1), ("kv_blocks", 2),
            ("block_size", 1), ("absorb_limit", 0), ("threads", 1), ("draft_tokens", 1), ("log_rejected_mb", 1),
        ):  # fmt: skip
            if isinstance(value := getattr(self, name), int) and value < low:
                raise ConfigError(f"{name} must be at least {low}, not {value}")
        for name, high in (("threads", MAX_THREADS), ("max_num_seqs", MAX_SEQS), ("draft_tokens", MAX_DRAFTS)):
            if (value := getattr(self, name)) is not None and value > high:
                raise ConfigError(f"{name} must be at most {high}, not {value}")
        if self.fp8_activations and self.rest_dtype != "fp8":
            raise ConfigError("fp8_activations needs FP8 weights: give rest_dtype=fp8 as well")
        if not (self.decode_stretch == 0 or 1.0 < self.decode_stretch < math.inf):
            raise ConfigError(f"decode_stretch must be above 1, or 0 for no bound, not {self.decode_stretch}")
        if not 0.0 <= self.prompt_patience < math.inf:
            raise ConfigError(f"prompt_patience must be 0 or more seconds, not {self.prompt_patience}")
        for name in ("memory_fraction", "log_rejected_share"):
            if not 0.0 < (value := getattr(self, name)) <= 1.0:
                raise ConfigError(f"{name} must be in (0, 1], not {value}")
        for name in ("kv_host_gb", "kv_disk_gb", "kv_ttl_hours", "vision_cache_gb"):
            if (value := getattr(self, name)) is None:
                continue
            if not 0.0 < value < math.inf:
                raise ConfigError(f"{name} must be above 0 and finite, not {value}")
            if name.endswith("_gb") and value > MAX_GB:
                raise ConfigError(f"{name} must be at most {MAX_GB:g}, not {value:g}")
        if self.kv_disk_gb is not None and self.kv_disk is None:
            raise ConfigError("kv_disk_gb needs a directory: give kv_disk as well")
        if (self.kv_host_gb or self.kv_disk) and not self.prefix_cache:
            raise ConfigError("kv_host_gb and kv_disk keep cached prefixes: they need prefix_cache=true")
        if self.qk_norm_eps is not None and not 0.0 < self.qk_norm_eps < 1.0:
            raise ConfigError(f"qk_norm_eps must be in (0, 1), not {self.qk_norm_eps}")
        if (declared := self.declared_acceptance) is not None:
            most = 1 + (self.draft_tokens or MAX_DRAFTS)
            if not 1.0 <= declared <= most:
                raise ConfigError(f"declared_acceptance must be 1 to {most}, one more than drafts, not {declared}")
        if self.ep > 1 and self.tp not in (1, self.ep):
            raise ConfigError(f"ep={self.ep} with tp={self.tp}: experts are shared out over all ranks; give one number")
        if self.kv_shards not in ("auto", 1) and self.tp != "auto" and self.kv_shards != self.ranks:
            ranks, remedy = "1 rank", "leave it out, or run more with tp"
            if self.ranks > 1:
                ranks, remedy = f"{self.ranks} ranks", f"give 1, {self.ranks} or auto"
            raise ConfigError(f"kv_shards={self.kv_shards} with {ranks}: each has all KV, or one part of it: {remedy}")
        if self.gpus is not None and not re.fullmatch(r"\d+(,\d+)*", self.gpus):
            raise ConfigError(f"gpus must be auto, or numbers separated by commas, such as 0,1, not {self.gpus!r}")

    @property
    def ranks(self) -> int:
        """Number of processes that compute together. While tp is still "auto": ep."""
        return self.ep if self.tp == "auto" else max(self.tp, self.ep)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = _doc("address to listen on", "127.0.0.1")
    port: int = _doc("port to listen on; 0 takes a free one", 8000)
    served_model_name: str | None = _doc("name clients use; default: the model's own", None)
    api_key: str | None = _secret("if set, requests must carry it as a bearer token", None)
    api_key_file: str | None = _doc(
        "file with the key that requests must carry as a bearer token, or with several keys and their limits: read "
        "again when it changes",
        None,
    )
    chat_template: str | None = _doc(
        "model whose prompt format is used, e.g. kimi-k2-thinking; default: the one the checkpoint's files show", None
    )
    uds: str | None = _doc("path of a Unix socket to listen on, instead of host and port", None)
    drain_seconds: float = _doc(
        "seconds that answers in flight get to end after SIGTERM; a second signal ends at once", 30.0
    )
    max_body_mb: int = _doc("megabytes (2^20 bytes) that the body of a request may have; more is answered 413", 32)
    body_memory_mb: int = _doc(
        "megabytes that the bodies of all connections may take in memory; a body beyond is answered 503, unread", 128
    )
    trusted_proxies: tuple[str, ...] = _doc(
        "addresses or networks of proxies that name the client in X-Forwarded-For, e.g. 10.0.0.0/8, or unix for uds", ()
    )
    client_concurrency: int | None = _doc(
        "requests that a client address may have in flight; more are answered 429", None
    )
    client_requests_per_minute: int | None = _doc("requests per minute that a client address may send; more: 429", None)
    media_allow_host: tuple[str, ...] = _doc(
        "host from which pictures are fetched if a client sends their http(s) address, e.g. images.example.org, "
        "*.example.org, or * for every public one; with :PORT if not 443 or 80. None: only data: URLs are read",
        (),
    )
    max_pictures: int = _doc("pictures of one request, at most; more are answered 400", 64)
    media_memory_mb: int = _doc(
        "megabytes (2^20 bytes) that the pictures of all requests may take in memory until their answers have ended; "
        "a request beyond is answered 503. One picture takes up to 10",
        1024,
    )
    default_max_tokens: int | None = _doc(
        "tokens of a chat answer to a request without max_tokens; default: as many as the context has room for", None
    )
    max_waiting: int = _doc("requests waiting for the engine, at most; more are answered 429", 1024)
    vendor_strict: bool = _doc(
        "refuse sampling other than the vendor recommends for the model (temperature, top_p, penalties, n), as its "
        "verifier expects",
        False,
    )
    lenient_fields: bool = _doc(
        "ignore request fields that no API has, with one warning per name, instead of refusing them", False
    )
    cors_origins: tuple[str, ...] = _doc(
        "origins of web pages with scripts that may call the server, e.g. https://chat.example.org; * allows all", ()
    )

    tls_cert: str | None = _doc("certificate chain (PEM) for HTTPS; read again when it changes", None)
    tls_key: str | None = _doc("private key (PEM) of tls_cert, without a passphrase", None)
    log_format: Literal["text", "json"] = _doc("form of the log's lines on standard error", "text")
    log_level: Literal["debug", "info", "warning", "error"] = _doc("lowest level that is logged", "info")
    otlp_traces_endpoint: str | None = _doc(
        "URL of an OpenTelemetry collector that gets a span per request by OTLP over HTTP, e.g. "
        "http://127.0.0.1:4318/v1/traces",
        None,
    )
    audit_log: str | None = _doc("directory for a log of who asked when, for what and how much", None)
    audit_text: bool = _doc("the audit log has prompts and answers too, with secrets in them redacted", False)
    audit_redact: tuple[str, ...] = _doc("regular expressions of text that the audit log replaces, besides secrets", ())
    files_dir: str | None = _doc(
        "directory for /v1/files and /v1/batches, kept over restarts, one server's alone. It is users' text. Default: "
        "both are not served",
        None,
    )
    files_gb: float = _doc("gigabytes that files_dir may take", 10.0)
    audit_mb: int = _doc("megabytes that the audit log may take; the oldest files are deleted", 1024)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together: set both")
        if not 0.0 < self.files_gb < math.inf:
            raise ConfigError(f"files_gb must be above 0, not {self.files_gb}")
        if (self.audit_text or self.audit_redact) and self.audit_log is None:
            raise ConfigError("audit_text and audit_redact need audit_log, the directory")
        for name in ("audit_redact", "media_allow_host", "trusted_proxies", "cors_origins"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError("api_key and api_key_file are both set: keep one")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, not {self.port}")
        for name in (
            "default_max_tokens", "max_waiting", "max_pictures", "media_memory_mb", "max_body_mb", "body_memory_mb",
            "client_concurrency", "client_requests_per_minute", "audit_mb",
        ):  # fmt: skip
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.max_body_mb > self.body_memory_mb:
            sizes = f"max_body_mb={self.max_body_mb} is above body_memory_mb={self.body_memory_mb}"
            raise ConfigError(f"{sizes}: raise the latter")
        if not 0 <= self.drain_seconds <= 86400:
            raise ConfigError(f"drain_seconds must be between 0 and 86400, not {self.drain_seconds:g}")
        if bad := [host for host in self.media_allow_host if not _HOST.fullmatch(host)]:
            raise ConfigError(
                f"media_allow_host: {bad[0]!r} is not a host: write images.example.org, *.example.org or HOST:PORT"
            )
        if bad := [origin for origin in self.cors_origins if origin != "*" and not _ORIGIN.fullmatch(origin)]:
            raise ConfigError(f"cors_origins: {bad[0]!r} is not an origin: write SCHEME://HOST or SCHEME://HOST:PORT")


T = typing.TypeVar("T", EngineConfig, ServerConfig)


def near(key: str, known: Iterable[str]) -> str:
    """The ending of an error about an unknown key: a known one that it resembles; "" if there is none."""
    found = difflib.get_close_matches(key, known, 1)
    return f", did you mean {found[0]!r}?" if found else ""


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """A config from plain values (CLI, keyword arguments, TOML); unknown keys and wrong types raise ConfigError."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"unknown config key {key!r}{near(key, fields)}; known: {', '.join(sorted(fields))}")
        if not _fits(value, hints[key]):
            given = f"not {type(value).__name__}" if fields[key].metadata.get("secret") else f"not {value!r}"
            raise ConfigError(f"{key} must be {spelled(hints[key])}, {given}")
        if isinstance(value, str) and not value.strip():  # as a path, "" is the working directory
            raise ConfigError(f"{key} is empty: give a value, or leave it out")
        if isinstance(value, int) and abs(value) >= MAX_NUMBER:
            raise ConfigError(f"{key} must have at most 63 bits, not {value}")
    return kind(**values)


def from_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(engine values, server values) of a TOML file with the tables [engine] and [server], each optional."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as e:
        raise ConfigError(f"cannot read config file {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"config file {path} is not valid TOML: {e}") from e
    kinds = {"engine": EngineConfig, "server": ServerConfig}
    if extra := sorted(set(data) - set(kinds)):
        hint = near(extra[0], kinds)
        for name, kind in kinds.items():
            if extra[0] in kind.__annotations__:
                hint = f", write it below [{name}]"
        raise ConfigError(f"config file {path}: unknown table {extra[0]!r}{hint}; known: engine, server")
    if other := [name for name, table in data.items() if not isinstance(table, dict)]:
        raise ConfigError(f"config file {path}: {other[0]} must be a table: begin it with [{other[0]}]")
    return data.get("engine", {}), data.get("server", {})


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(v, args[0]) for v in value)
    if origin is not None and args and origin is not Mapping and not _is_mapping(origin):
        return any(_fits(value, a) for a in args)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if _is_mapping(origin):
        return isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items())
    return isinstance(value, hint)


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def spelled(hint: Any) -> str:
    """The values that a field of this type takes, in words, for errors and for docs/configuration.md."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if _is_mapping(origin):
        return "a table of strings"
    if origin is tuple:
        return "a list of strings"
    if args:
        return " or ".join(spelled(a) for a in args if a is not type(None))
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
    return names.get(hint, str(hint))
