"""CPU decode speed beside transformers: the same weights, the same prompts, the same threads, in the same run.

The checkpoint is dequantised, exactly, to a plain float32 deepseek_v3 directory, which transformers loads as float32
and as bfloat16; the better of the two counts. Rounds are interleaved: a machine that slows down slows all sides.
llama.cpp takes part if it has been built (runs/llama-cpp.sh), as processes of its own that wait while others run.
"""

import gc
import importlib.metadata
import importlib.util
import json
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from perilune.bench import ledger
from perilune.bench.decode import footprint, read_rate
from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError, sized
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.engine.engine import Engine
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.writer import Writer
from perilune.loading.survey import read_linear, survey
from perilune.model.config import KimiConfig
from perilune.model.names import expected

MAX_PARAMETERS = 4_000_000_000  # More do not fit a usual CPU machine: a float32 copy and three models are in memory.
NORM_EPS = 1e-6  # epsilon of the q and kv norms in transformers, which ignores the config's
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LLAMA_FILES = ("f32", "q8_0", "q4_0")


class Llama:
    """llama.cpp with one GGUF file, in a process of its own."""

    def __init__(self, directory: Path, kind: str, threads: int) -> None:
        """`directory` is what runs/llama-cpp.sh made. Raises ConfigError if it lacks something."""
        python, file = directory / "venv" / "bin" / "python", directory / f"{kind}.gguf"
        for needed in (python, file):
            if not needed.exists():
                raise ConfigError(f"{needed} does not exist: run runs/llama-cpp.sh {directory}")
        script = Path(__file__).with_name("rival_llama.py")
        self._process = subprocess.Popen(
            [python, script, "serve", file, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def time(self, prompt: Sequence[int], output: int) -> tuple[float, list[int]]:
        """(tokens/s after the first token, the tokens), greedy."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompt": list(prompt), "output": output}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(
                f"llama.cpp ended with code {self._process.wait()}: build it again with runs/llama-cpp.sh"
            )
        answer = json.loads(line)
        return answer["tokens_per_s"], answer["tokens"]

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


def require_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("the comparison needs transformers: pip install 'transformers==5.24.0'")


def export(model_dir: Path, out: Path) -> KimiConfig:
    """Writes the text model of `model_dir` to `out` as a float32 deepseek_v3 checkpoint with the very same weights."""
    config = KimiConfig.from_directory(model_dir)
    total = config.parameters().total
    if total > MAX_PARAMETERS:
        raise ConfigError(
            f"{model_dir} has {total / 1e9:.0f} G parameters: the comparison is for models a CPU can hold"
        )
    if shutil.disk_usage(out.parent).free < 4.2 * total:
        raise ConfigError(f"the float32 copy of {model_dir} needs {sized(4.2 * total)} free in {out.parent}")
    with Checkpoint.open(model_dir) as checkpoint:
        found = survey(checkpoint, config)
        with Writer(out) as writer:
            for name in expected(config):
                stem = name.removesuffix(".weight")
                if stem in found.formats:
                    writer.add(name, read_linear(checkpoint, found, stem, torch.float32))
                else:
                    writer.add(name, checkpoint.read(found.tensors[name].name).float())
    (out / "config.json").write_text(json.dumps(_plain_config(config)))
    return config


def measure(
    model_dir: Path,
    *,
    threads: int,
    prompt_tokens: int,
    output_tokens: int,
    batch: int,
    rounds: int,
    llama_cpp: Path | None,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """One row: tokens/s of transformers and of the engine alone, and of the engine with `batch` users."""
    require_transformers()
    torch.set_num_threads(threads)
    config = EngineConfig(
        device="cpu",
        threads=threads,
        max_num_seqs=batch,
        max_model_len=prompt_tokens + output_tokens + 1,
        prefix_cache=False,  # every prompt must be computed
        draft="off",  # the others do not draft either
        vision="off",  # random prompts may hold the placeholder token of pictures
        qk_norm_eps=NORM_EPS,
    )
    llamas = {f"llama.cpp {kind}": Llama(llama_cpp, kind, threads) for kind in LLAMA_FILES} if llama_cpp else {}
    engine = Engine(model_dir, config)
    try:
        with tempfile.TemporaryDirectory(prefix="perilune-rivals-") as temporary:
            shape = export(model_dir, Path(temporary) / "model")
            rivals = {name: _load(Path(temporary) / "model", dtype) for name, dtype in DTYPES.items()}
        prompts = _prompts(batch, prompt_tokens, shape.vocab_size)
        speeds: dict[str, list[float]] = {name: [] for name in (*rivals, *llamas, "alone", "batch")}
        tokens: dict[str, list[int]] = {}
        for number in range(rounds + 1):  # the first round warms everything up
            turns: Iterator[tuple[str, tuple[float, list[int]]]] = _round(
                engine, rivals, llamas, prompts, output_tokens
            )
            for name, (speed, ids) in turns:
                tokens[name] = ids
                if number:
                    speeds[name].append(speed)
            if number:
                line = ", ".join(f"{name} {values[-1]:.1f}" for name, values in speeds.items())
                report(f"round {number}/{rounds}, tok/s: {line}")
        foot = footprint(engine.runner.model, engine.runner.pages.data)
        middle = prompt_tokens + output_tokens // 2
        rate = read_rate(int(foot.step_bytes(1, middle)), engine.runner.pages.data.device)
        info, dtype = engine.info, engine.config.dtype
    finally:
        engine.close()
        for llama in llamas.values():
            llama.close()
        gc.collect()
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    best = max(rivals, key=lambda name: medians[name])
    return {
        "bench": "rivals",
        "model": info.model,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "batch": batch,
        "rounds": rounds,
        "dtype": dtype,
        "tokens_per_s": round(medians["alone"], 1),
        "batch_tokens_per_s": round(medians["batch"], 1),
        "batch_ratio": round(medians["batch"] / medians["alone"], 2),
        "ceiling_tokens_per_s": round(rate / foot.step_bytes(1, middle), 1),
        "fraction": round(medians["alone"] * foot.step_bytes(1, middle) / rate, 4),
        "batch_ceiling_tokens_per_s": round(batch * rate / foot.step_bytes(batch, middle), 1),
        "batch_fraction": round(medians["batch"] / batch * foot.step_bytes(batch, middle) / rate, 4),
        "read_gb_per_s": round(rate / 1e9, 2),
        "transformers": importlib.metadata.version("transformers"),
        "transformers_dtype": best,
        **{f"transformers_{name}_tokens_per_s": round(medians[name], 1) for name in rivals},
        "transformers_ratio": round(medians["alone"] / medians[best], 2),
        **{f"{name.replace('.', '_').replace(' ', '_')}_tokens_per_s": round(medians[name], 1) for name in llamas},
        "llama_cpp_ratio": round(medians["alone"] / max(medians[name] for name in llamas), 2) if llamas else None,
        "llama_cpp_same_tokens": _common(tokens["alone"], tokens["llama.cpp f32"]) if llamas else None,
        # Number of first tokens that the engine and float32 transformers share, greedy on the same prompt.
        "same_tokens": _common(tokens["alone"], tokens["float32"]),
        "method": f"median of {rounds} interleaved rounds; decode only, from the first token of all requests on",
        **ledger.circumstances(),
    }


def _round(
    engine: Engine, rivals: dict[str, Any], llamas: dict[str, Llama], prompts: Sequence[Sequence[int]], output: int
) -> Iterator[tuple[str, tuple[float, list[int]]]]:
    for name, model in rivals.items():
        yield name, time_transformers(model, prompts[0], output)
    for name, llama in llamas.items():
        yield name, llama.time(prompts[0], output)
    yield "alone", time_engine(engine, prompts[:1], output)
    yield "batch", time_engine(engine, prompts, output)


def time_engine(engine: Engine, prompts: Sequence[Sequence[int]], output: int) -> tuple[float, list[int]]:
    """(tokens/s while all requests decode, the first one's tokens), greedy."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    for rid, prompt in enumerate(prompts):
        engine.submit(Submit(rid, tuple(prompt), params))
    waiting = set(range(len(prompts)))
    first: list[int] = []
    began = ended = 0.0
    tokens, all_run = 0, True
    while engine.busy:
        deltas = engine.step()
        now = time.perf_counter()
        if waiting:
            waiting -= {d.rid for d in deltas if d.tokens}
            began = now
        elif all_run:
            tokens += sum(len(d.tokens) for d in deltas)
            ended = now
        all_run = all_run and not any(d.finish_reason for d in deltas)
        first += [t for d in deltas if d.rid == 0 for t in d.tokens]
    if not tokens:
        raise ConfigError("the first user was done before the last began: raise --output-tokens")
    return tokens / (ended - began), first


def time_transformers(model: Any, prompt: Sequence[int], output: int) -> tuple[float, list[int]]:
    """(tokens/s after the first token, the tokens) of `generate`, greedy, its defaults otherwise."""
    stamps: list[float] = []

    def stamp(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        stamps.append(time.perf_counter())
        return scores

    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        done = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=output,
            min_new_tokens=output,
            logits_processor=[stamp],
            pad_token_id=0,
        )
    return (output - 1) / (stamps[-1] - stamps[0]), done[0, len(prompt) :].tolist()


def _load(path: Path, dtype: torch.dtype) -> Any:
    from transformers import DeepseekV3ForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers has no types here
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no types here
    model = DeepseekV3ForCausalLM.from_pretrained(path, dtype=dtype)
    return model.eval()  # type: ignore[no-untyped-call]  # transformers has no types here


def _plain_config(c: KimiConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.yarn is not None:
        names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        rope |= {"rope_type": "yarn"} | {name: getattr(c.yarn, name) for name in names}
    same = (
        "hidden_size num_hidden_layers vocab_size num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim "
        "qk_rope_head_dim v_head_dim intermediate_size moe_intermediate_size n_routed_experts num_experts_per_tok "
        "n_shared_experts first_k_dense_replace n_group topk_group routed_scaling_factor norm_topk_prob rms_norm_eps "
        "max_position_embeddings"
    )
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": c.num_attention_heads,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "rope_interleave": True,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": None,  # no token may end a run early
        "pad_token_id": None,
        **{name: getattr(c, name) for name in same.split()},
    }


def _prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    rng = random.Random(20_000 + length)
    return [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(count)]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
