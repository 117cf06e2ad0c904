"""Which member of the family a model directory holds, by its files; and what an operator may say instead."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from perilune.cli.serve import command as serve
from perilune.core.errors import CheckpointError, ConfigError
from perilune.server.service import sampling_defaults
from perilune.text.chat import ChatTemplate, template_for
from perilune.text.family import MEMBERS, NotOfTheFamily, recognise

# What tells the vendor's templates apart, without the rest of them.
HELPFUL = "<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>"
KIMI = "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>"
THINK = "<think>{{ rc }}</think>"
DECLARED = "{%- if tools_ts_str -%}{{ tools_ts_str }}{%- endif -%}" + THINK
SWITCH = "{%- if thinking is defined and thinking is false -%}<think></think>{%- else -%}<think>{%- endif -%}"
KEEP = "{%- if preserve_thinking is defined and preserve_thinking is true -%}{%- endif -%}"


def added(*names: str) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(163584 + i): {"content": name} for i, name in enumerate(names)}}


def checkpoint(
    directory: Path, kind: str, *, template: str | None = None, tokenizer: Any = None, **config: Any
) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": kind, **config}))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    if tokenizer is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


@pytest.mark.parametrize(
    ("kind", "files", "name"),
    [
        ("kimi_k2", {}, "kimi-k2-instruct"),
        ("kimi_k2", {"tokenizer": added("[BOS]", "<|im_end|>")}, "kimi-k2-instruct"),
        ("kimi_k2", {"tokenizer": added("[BOS]", "<think>", "</think>")}, "kimi-k2-thinking"),
        ("deepseek_v3", {"tokenizer": added("<think>")}, "kimi-k2-thinking"),
        ("kimi_k2", {"template": HELPFUL}, "kimi-k2-instruct-first"),
        ("kimi_k2", {"template": KIMI}, "kimi-k2-instruct"),
        ("kimi_k2", {"tokenizer": {"chat_template": HELPFUL}}, "kimi-k2-instruct-first"),
        ("kimi_k2", {"tokenizer": {"chat_template": [{"template": HELPFUL}]}}, "kimi-k2-instruct-first"),
        # The file of its own is the newer place, and what it says outweighs the vocabulary.
        ("kimi_k2", {"template": KIMI, "tokenizer": {"chat_template": HELPFUL}}, "kimi-k2-instruct"),
        ("kimi_k2", {"template": KIMI, "tokenizer": added("<think>")}, "kimi-k2-instruct"),
        ("kimi_k2", {"template": KIMI + THINK}, "kimi-k2-thinking"),
        # A text-only cut of a later member still has its template.
        ("kimi_k2", {"template": DECLARED + SWITCH + KEEP}, "kimi-k2.6"),
        ("kimi_k25", {}, "kimi-k2.6"),
        ("kimi_k25", {"tokenizer": added("<think>")}, "kimi-k2.6"),
        ("kimi_k25", {"template": DECLARED + SWITCH}, "kimi-k2.5"),
        ("kimi_k25", {"template": DECLARED + SWITCH + KEEP}, "kimi-k2.6"),
        ("kimi_k25", {"template": DECLARED + KEEP}, "kimi-k2.7-code"),
        ("kimi_k25", {"template": DECLARED + "{%- set preserve_thinking = true -%}" + SWITCH}, "kimi-k2.7-code"),
        ("kimi_k25", {"template": DECLARED + SWITCH + "{{ raise_exception('no thinking=false') }}"}, "kimi-k2.7-code"),
        ("kimi_k25", {"template": "{{ messages }}"}, "kimi-k2.6"),  # somebody's own
        ("kimi_k25", {"_name_or_path": "moonshotai/Kimi-K2.7-Code"}, "kimi-k2.7-code"),
        ("kimi_k25", {"text_config": {"_name_or_path": "/data/kimi_k2_7"}}, "kimi-k2.7-code"),
        ("kimi_k25", {"tokenizer": {"name_or_path": "moonshotai/Kimi-K2.7-Code"}}, "kimi-k2.7-code"),
        ("kimi_k25", {"_name_or_path": "moonshotai/Kimi-K2.5", "text_config": None}, "kimi-k2.6"),
    ],
)  # fmt: skip
def test_a_checkpoint_is_recognised_by_its_files(tmp_path: Path, kind: str, files: Any, name: str) -> None:
    assert recognise(checkpoint(tmp_path, kind, **files)).name == name
    assert template_for(tmp_path).name == name


def test_the_directorys_name_says_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "Kimi-K2.7-Code"
    directory.mkdir()
    assert recognise(checkpoint(directory, "kimi_k2")).name == "kimi-k2-instruct"


def test_thinking_models_first_default_system_prompt(tmp_path: Path) -> None:
    member = recognise(checkpoint(tmp_path, "kimi_k2", template=HELPFUL + THINK))
    assert member.name == "kimi-k2-thinking" and member.default_system == "You are a helpful assistant"


def test_real_files(kimi_k26: Path) -> None:
    assert template_for(kimi_k26).name == "kimi-k2.6"


@pytest.mark.parametrize("name", MEMBERS)
def test_the_operator_may_name_a_template(tmp_path: Path, name: str) -> None:
    assert template_for(checkpoint(tmp_path, "kimi_k25"), name).name == name


def test_an_unknown_template_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        template_for(checkpoint(tmp_path, "kimi_k25"), "kimi-k3")
    assert str(caught.value) == (
        "unknown chat template 'kimi-k3'; known: kimi-k2-instruct-first, kimi-k2-instruct, kimi-k2-instruct-0905, "
        "kimi-k2-thinking, kimi-k2.5, kimi-k2.6, kimi-k2.7-code"
    )


@pytest.mark.parametrize("spelling", ["option", "file"])
def test_serve_refuses_an_unknown_template_before_it_looks_for_the_model(tmp_path: Path, spelling: str) -> None:
    arguments = ["--chat-template", "kimi-k3"]
    if spelling == "file":
        (tmp_path / "server.toml").write_text('[server]\nchat_template = "kimi-k3"\n')
        arguments = ["--config", str(tmp_path / "server.toml")]
    run = CliRunner().invoke(serve, [str(tmp_path / "absent"), *arguments])
    assert isinstance(run.exception, ConfigError) and "known: kimi-k2-instruct-first" in str(run.exception)


def test_sampling_of_requests_that_bring_none() -> None:
    def defaults(name: str, own: dict[str, float], thinking: bool | None) -> dict[str, float]:
        return sampling_defaults(own, ChatTemplate(MEMBERS[name]), thinking=thinking)

    assert defaults("kimi-k2-instruct", {}, False) == {"temperature": 0.6, "top_p": 1.0}
    assert defaults("kimi-k2-thinking", {}, True) == {"temperature": 1.0, "top_p": 1.0}
    assert defaults("kimi-k2.7-code", {}, True) == {"temperature": 1.0, "top_p": 0.95}
    assert defaults("kimi-k2.6", {}, False) == {"temperature": 0.6, "top_p": 0.95}
    # The checkpoint's own file comes first; raw completions get nothing else.
    assert defaults("kimi-k2.6", {"temperature": 0.0}, True) == {"temperature": 0.0, "top_p": 0.95}
    assert defaults("kimi-k2.6", {"min_p": 0.1}, None) == {"min_p": 0.1}


def test_other_families_have_no_chat_until_one_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    with pytest.raises(NotOfTheFamily):
        recognise(tmp_path)
    template = template_for(tmp_path)  # the model can still serve completions
    assert template.thinks(None) is True
    with pytest.raises(CheckpointError, match=r"model_type 'llama'.*use plain completions, or name a template"):
        template.render_text([{"role": "user", "content": "Hi"}])
    assert template_for(tmp_path, "kimi-k2.5").render_text([{"role": "user", "content": "Hi"}])


def test_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json: no such file"):
        template_for(tmp_path)
    config = tmp_path / "config.json"
    for text, said in (("{", "is not JSON"), ("[]", "must hold a JSON object"), ("{}", "no readable 'model_type'")):
        config.write_text(text)
        with pytest.raises(CheckpointError, match=said) as caught:
            template_for(tmp_path)
        assert str(config) in str(caught.value) and "\n" not in str(caught.value)
    checkpoint(tmp_path, "kimi_k2")
    (tmp_path / "tokenizer_config.json").write_text("no")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not JSON"):
        template_for(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": [3], "chat_template": {"a": 1}}')
    assert template_for(tmp_path).name == "kimi-k2-instruct"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(CheckpointError, match=r"cannot read .*chat_template\.jinja"):
        template_for(tmp_path)
