"""Files of KV are read only by an engine that would compute the same KV: also of constants and of pictures."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from perilune import LLM, SamplingParams
from tests import oracle, seeing
from tests.cpu.engine.test_kv_tiers import CONFIG, SMALL, gb, hits, play
from tests.cpu.engine.test_kv_tiers import waited as waited
from tests.seeing import PAD, picture

pytestmark = pytest.mark.usefixtures("worth_it", "waited")


def copied(source: Path, target: Path, file: str, edit: Any) -> Path:
    """A copy of a checkpoint with `edit` done to one of its JSON files."""
    shutil.copytree(source, target)
    held = json.loads((target / file).read_text()) if (target / file).exists() else {}
    edit(held)
    (target / file).write_text(json.dumps(held))
    return target


def found(llm: LLM) -> str:
    (why,) = [why for key, _, why in llm.info.choices if key == "kv_disk"]
    return why


def test_the_same_weights_with_other_constants_compute_what_they_read(tiny: Path, tmp_path: Path) -> None:
    disk = dict(kv_host_gb=gb(10), kv_disk=str(tmp_path / "kv"), kv_disk_gb=0.1, draft="off")
    with LLM(tiny, **CONFIG, **SMALL, **disk) as llm:
        play(llm)
    with LLM(tiny, **CONFIG, **SMALL, **disk) as llm:
        assert not found(llm).startswith("0 blocks")

    def stretched(config: dict[str, Any]) -> None:
        config["rope_parameters"]["factor"] = 4.0  # longer contexts by an edit of one number

    other = copied(tiny, tmp_path / "stretched", "config.json", stretched)
    with LLM(other, **CONFIG, **SMALL, draft="off") as llm:
        expected = play(llm)
    with LLM(other, **CONFIG, **SMALL, **disk) as llm:
        assert found(llm).startswith("0 blocks")
        assert play(llm) == expected
    experts = copied(tiny, tmp_path / "experts", "config.json", lambda c: c.update(routed_scaling_factor=1.0))
    with LLM(experts, **CONFIG, **SMALL, **disk) as llm:
        assert found(llm).startswith("0 blocks")


def test_another_tower_computes_the_pictures_it_reads(tmp_path: Path) -> None:
    checkpoint = seeing.make(tmp_path / "model", patch_limit=72)
    shown = [picture(8, 8, 1)]
    prompt = [*[PAD] * shown[0].tokens, *oracle.random_prompts(1, [40], vocab=PAD)[0]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    sizes: dict[str, Any] = CONFIG | SMALL | dict(draft="off", vision_cache_gb=0.001)
    disk = dict(kv_host_gb=gb(6), kv_disk=str(tmp_path / "kv"), kv_disk_gb=0.1)

    def answer(llm: LLM) -> tuple[int, ...]:
        return llm.generate(prompt, params, pictures=shown)[0].token_ids

    with LLM(checkpoint.path, **sizes, **disk) as llm:
        first = answer(llm)
        play(llm)  # so that the blocks of the picture leave the pages, and then host memory
    with LLM(checkpoint.path, **sizes, **disk) as llm:
        assert answer(llm) == first and hits(llm)["disk"] > 0, llm._engine.stats()  # type: ignore[union-attr]
    other = tmp_path / "other"
    shutil.copytree(checkpoint.path, other)
    weights = load_file(other / "model.safetensors")
    weights["mm_projector.proj.2.weight"] *= -1.0
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    darker = copied(
        checkpoint.path,
        tmp_path / "darker",
        "preprocessor_config.json",
        lambda c: c["media_proc_cfg"].update(image_mean=[0.9, 0.9, 0.9]),
    )
    for path in (other, darker):
        with LLM(path, **sizes) as llm:
            expected = answer(llm)
        with LLM(path, **sizes, **disk) as llm:
            assert answer(llm) == expected != first and not hits(llm)["disk"]
