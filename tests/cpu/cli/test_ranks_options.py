"""Options of several ranks: `--tp auto`, and verbs that torchrun starts."""

import pytest

from perilune.cli.shared import options
from perilune.core.config import EngineConfig, build
from perilune.core.errors import ConfigError


def under_torchrun(patch: pytest.MonkeyPatch, rank: int, ranks: int, here: int) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": here}.items():
        patch.setenv(name, str(value))
    patch.setenv("TORCHELASTIC_RUN_ID", "none")


def test_torchrun_says_how_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tp" not in options.engine_values({}, (), {})
    under_torchrun(monkeypatch, 0, 4, 4)
    assert options.engine_values({}, (), {})["tp"] == 4
    assert options.engine_values({"tp": 2}, (), {})["tp"] == 2
    under_torchrun(monkeypatch, 3, 4, 4)
    with pytest.raises(SystemExit) as found:
        options.engine_values({}, (), {})
    assert found.value.code == 0
    under_torchrun(monkeypatch, 0, 4, 2)
    with pytest.raises(ConfigError, match="one host"):
        options.engine_values({}, (), {})


@pytest.mark.parametrize("text, tp", [("auto", "auto"), ("2", 2)])
def test_tp_is_a_number_or_auto(text: str, tp: int | str) -> None:
    values = options.engine_values({}, (f"tp={text}",), {})
    assert build(EngineConfig, values).tp == tp


@pytest.mark.parametrize("values", [{"tp": 0}, {"tp": 2, "ep": 3}, {"gpus": "0,x"}, {"tp": "two"}])
def test_wrong_values_are_one_line(values: dict[str, int | str]) -> None:
    with pytest.raises(ConfigError) as found:
        build(EngineConfig, values)
    assert "\n" not in str(found.value)
