"""Scores of lm-eval's tasks for a model served here: the `lm_eval` command, a program of its own, asks the server.

It may live in another environment than this one: only the command has to be on the PATH. Where it needs the tokenizer,
for tasks that compare log-probabilities, it asks the server for that too.
"""

import asyncio
import json
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

from perilune.client.target import serving
from perilune.core.errors import ConfigError, EngineError

COMMAND = "lm_eval"
AT_ONCE = 16  # requests
CHAT = "--apply_chat_template"


def require() -> str:
    """The command's path; ConfigError if it is not installed."""
    found = shutil.which(COMMAND)
    if found is None:
        raise ConfigError(f"{COMMAND} is not on the PATH: pip install 'lm-eval[api]', in any environment")
    return found


def scores(model: Path, tasks: str, more: str = "", *, device: str = "auto") -> dict[str, float]:
    """Every metric of every task, by "task/metric".

    more  further arguments of the command; with --apply_chat_template the model is asked by chat completions

    ConfigError if the arguments cannot be split, EngineError with the command's last line if it fails.
    """
    try:
        extra = shlex.split(more)
    except ValueError as e:
        raise ConfigError(f"--lm-eval-args {more!r}: {e}") from e
    with tempfile.TemporaryDirectory(prefix="perilune-lm-eval-") as folder:
        asyncio.run(_ask(require(), model, tasks, extra, device, folder))
        files = sorted(Path(folder).rglob("results*.json"))
        if not files:
            raise EngineError(f"{COMMAND} left no results")
        return read(json.loads(files[-1].read_text()))


def read(results: Any) -> dict[str, float]:
    """The numbers of one of lm-eval's result files, without their standard errors."""
    found = {}
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, _, rule = name.partition(",")
            if isinstance(value, int | float) and not metric.endswith("_stderr") and metric != "sample_len":
                found[f"{task}/{metric}" + (f"/{rule}" if rule not in ("", "none") else "")] = float(value)
    return found


async def _ask(command: str, model: Path, tasks: str, extra: list[str], device: str, folder: str) -> None:
    async with serving(str(model), ["--device", device, "--served-model-name", "model"]) as url:
        chat = CHAT in extra
        about = {
            "model": "model",
            "base_url": f"{url}/v1/{'chat/' if chat else ''}completions",
            "num_concurrent": AT_ONCE,
            "max_retries": 1,
            "tokenizer_backend": "none" if chat else "remote",
        }
        process = await asyncio.create_subprocess_exec(
            command,
            "--model", "local-chat-completions" if chat else "local-completions",
            "--model_args", ",".join(f"{key}={value}" for key, value in about.items()),
            "--tasks", tasks,
            "--output_path", folder,
            *extra,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            _, said = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode:
        last = said.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise EngineError(f"{COMMAND} failed: {last[0]}")
