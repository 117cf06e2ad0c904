"""Command-line options: names, types, defaults and help come from the fields of the configuration."""

import dataclasses
import functools
import math
import os
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from click.core import ParameterSource

from perilune.core import config
from perilune.core.config import EngineConfig, ServerConfig
from perilune.core.errors import ConfigError


class NamedPath(click.Path):
    """click's path that also refuses "", which would be the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty: name a path", param, ctx)
        return super().convert(value, param, ctx)


class OutFile(NamedPath):
    """A file that is written after the work; that its directory exists is checked before."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"{path.parent} is no directory", param, ctx)
        return path


class FloatRange(click.FloatRange):
    """click's range that also refuses NaN, which is neither below its start nor above its end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("NaN is no number", param, ctx)
        return number


F = TypeVar("F", bound=Callable[..., Any])
Config = type[EngineConfig] | type[ServerConfig]
DRAFT = ("draft", "draft_tokens", "drafter", "draft_dtype")
# Options of most verbs that run a model.
COMMON: tuple[str, ...] = ("device", "tp", "ep", "gpus", "kv_shards", "dtype", "max_model_len", "expert_scales")
COMMON += ("rest_dtype", "fp8_activations", *DRAFT)
FILE = NamedPath(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
OUT_FILE = OutFile(dir_okay=False)
OUT_FOLDER = NamedPath(path_type=Path, file_okay=False)
device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    help="Where to compute; auto: on a GPU if there is one.",
)


def field_option(kind: Config, name: str) -> Callable[[F], F]:
    """The option `--some-name` for the field `some_name`: repeatable for a tuple, with `--no-some-name` for a bool.

    Its value is None when not given (empty for a tuple), so that the config file's value applies.
    """
    field = {f.name: f for f in dataclasses.fields(kind)}[name]
    text = str(field.metadata["help"])
    hint, flag = typing.get_type_hints(kind)[name], name.replace("_", "-")
    if hint is bool:
        return click.option(f"--{flag}/--no-{flag}", default=None, help=f"{text}  [default: {field.default}]")
    if typing.get_origin(hint) is tuple:
        return click.option(f"--{flag}", type=typing.get_args(hint)[0], multiple=True, help=f"{text}; repeatable")
    if field.default is not None:
        text += f"  [default: {field.default}]"
    return click.option(f"--{flag}", type=_type(hint), help=text)


def together(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """Several options, in this order on the help page."""
    return lambda function: functools.reduce(lambda f, option: option(f), reversed(options), function)


# Of verbs that answer in the terminal.
sampling_options = together(
    click.option("--max-tokens", type=int, help="Tokens of an answer, at most.  [default: until the context is full]"),
    click.option("--temperature", type=float, help="Temperature; 0 is greedy.  [default: the checkpoint's]"),
    click.option("--top-p", type=float, help="Sample from the likeliest tokens that sum to this probability."),
    click.option("--seed", type=int, help="Makes answers reproducible."),
)


def field_options(kind: Config, *names: str) -> Callable[[F], F]:
    return together(*(field_option(kind, name) for name in names))


def engine_options(*names: str) -> Callable[[F], F]:
    """Options of these engine keys, then `--set KEY=VALUE` for keys without an option, taken as `assignments`."""
    keys = ", ".join(f.name for f in dataclasses.fields(EngineConfig))
    assign = click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="KEY=VALUE",
        help=f"Set an engine key (docs/configuration.md), or ops.NAME=IMPL; repeatable. Keys: {keys}.",
    )
    return together(field_options(EngineConfig, *names), assign)


def engine_values(given: Mapping[str, Any], assignments: Sequence[str], base: Mapping[str, Any]) -> dict[str, Any]:
    """Values for core.config.build: `base` (the config file), then options that were given, then --set."""
    values = {**_started_by_torchrun(), **base, **{k: v for k, v in given.items() if v is not None}}
    hints = typing.get_type_hints(EngineConfig)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment}: write KEY=VALUE")
        if key.startswith("ops."):
            values["ops"] = {**values.get("ops", {}), key.removeprefix("ops."): text}
            continue
        if key == "ops":
            raise ConfigError(f"--set {assignment}: write ops.NAME=IMPL")
        if key not in hints:
            known = f"known: {', '.join(sorted(hints))}, with ops.NAME for ops"
            raise ConfigError(f"--set {key}: unknown key{config.near(key, hints)}; {known}")
        values[key] = _value(key, text, hints[key])
    return values


def _started_by_torchrun() -> dict[str, Any]:
    """`tp` = the number of processes that torchrun started; {} without torchrun. Rank 0 starts the other ranks itself,
    as without torchrun, because it plans their steps and watches them. torchrun's other processes end here."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return {}
    rank, ranks, here = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if here != ranks:
        raise ConfigError(f"torchrun started {ranks} processes on several hosts: the ranks of an engine share one host")
    if rank:
        raise SystemExit(0)
    return {"tp": ranks}


def engine_config(given: Mapping[str, Any], assignments: Sequence[str], base: Mapping[str, Any]) -> EngineConfig:
    """`engine_values`, built. ConfigError also for a key that was given without effect."""
    made = config.build(EngineConfig, engine_values(given, assignments, base))
    require_effect(
        ("kv_ttl_hours", made.kv_host_gb or made.kv_disk, "without kv_host_gb or kv_disk"),
        ("log_rejected_share log_rejected_mb", made.log_rejected, "without log_rejected"),
        ("draft_tokens log_rejected", made.draft != "off", "with draft=off"),
        ("drafter draft_dtype", made.draft not in ("off", "suffix"), f"with draft={made.draft}"),
        ("vision_cache_gb", made.vision != "off", "with vision=off"),
        ("prompt_patience", made.decode_stretch, "with decode_stretch=0"),
    )
    return made


def require_effect(*rules: tuple[str, object, str]) -> None:
    """ConfigError for an option on the command line without effect; a configuration file may have such keys.
    rules: names of options, whether they have an effect, why not."""
    for names, works, why in rules:
        if not works and (idle := given_of(*names.split())):
            raise ConfigError(f"{idle[0]} has no effect {why}: leave it out")


def given_of(*names: str) -> list[str]:
    """The options and keys of these names that the command line has, as they are written there."""
    context = click.get_current_context()
    found = {text.partition("=")[0]: f"--set {text}" for text in context.params.get("assignments", ())}
    for p in context.command.params:
        if p.name and context.get_parameter_source(p.name) is ParameterSource.COMMANDLINE:
            found[p.name] = p.opts[0]
    return [found[name] for name in names if name in found]


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(engine values, others) of a command that takes both kinds of options."""
    names = {f.name for f in dataclasses.fields(EngineConfig)}
    return {k: v for k, v in values.items() if k in names}, {k: v for k, v in values.items() if k not in names}


def file_values(path: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(engine values, server values) of the config file, both empty without one."""
    return config.from_file(path) if path is not None else ({}, {})


def _members(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) is Literal:
        return (hint,)
    return typing.get_args(hint) or (hint,)


def _type(hint: Any) -> Any:
    member, *words = (m for m in _members(hint) if m is not type(None))
    if words:  # a number or one of some words
        return NumberOr(typing.get_args(words[0]))
    if typing.get_origin(member) is Literal:
        return click.Choice(typing.get_args(member))
    return member


class NumberOr(click.ParamType[Any]):
    """A whole number or a word."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = words
        self.name = f"integer or {' or '.join(words)}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self._words or isinstance(value, int):
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number nor {' or '.join(self._words)}", param, ctx)


def _value(key: str, text: str, hint: Any) -> Any:
    members = _members(hint)
    if type(None) in members and text.lower() in ("none", "auto"):
        return None
    member, *words = (m for m in members if m is not type(None))
    if words and text in typing.get_args(words[0]):
        return text
    if member is bool:
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"--set {key}: must be true or false, not {text!r}")
        return text.lower() == "true"
    if member in (int, float):
        try:
            return member(text)
        except ValueError as e:
            kind = "a whole number" if member is int else "a number"
            raise ConfigError(f"--set {key}: must be {kind}, not {text!r}") from e
    return text
