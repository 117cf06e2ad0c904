"""A server of two ranks: a question, then a rank that is killed under load."""

import os
import signal
import threading
import time
from pathlib import Path

import openai
import pytest

from tests.e2e.server import HANG_SECONDS, QUESTION, Server, held_engines, needs_nano

pytestmark = needs_nano


def test_two_ranks_answer_and_a_killed_one_ends_every_request_with_one_error(
    tmp_path: Path,
) -> None:
    hold, env = held_engines(tmp_path)
    options = ("--tp", "2", "--draft", "suffix", "--draft-tokens", "2", "--max-model-len", "1024")
    server = Server(*options, env=env)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answer = client.chat.completions.create(model="kimi-nano", messages=QUESTION, max_tokens=60, temperature=0)
        assert answer.choices[0].message.content or answer.choices[0].message.model_extra
        engine = server.engine_pid()
        (rank,) = map(int, Path(f"/proc/{engine}/task/{engine}/children").read_text().split())
        errors: list[str] = []

        def ask() -> None:
            with pytest.raises(openai.APIStatusError) as found:
                client.completions.create(
                    model="kimi-nano", prompt="A", max_tokens=900, extra_body={"ignore_eos": True}
                )
            errors.append(str(found.value))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        while server.metric("perilune_num_requests_running") < len(threads):
            time.sleep(0.02)
        # A request without a token would run again on the engine that is held back. Two steps are in flight at most;
        # each brings a request one token and two drafts at most. 18 tokens take at least one step with all three.
        tokens = server.metric("perilune_generation_tokens_total")
        while server.metric("perilune_generation_tokens_total") < tokens + 18:
            time.sleep(0.02)
        hold.touch()
        os.kill(rank, signal.SIGKILL)
        for thread in threads:
            thread.join(HANG_SECONDS)
        assert len(errors) == 3 and all(f"rank 1 of 2 (process {rank}) ended by SIGKILL" in e for e in errors)
        assert all("send the request again" in e and "start it again" not in e for e in errors), "it does so by itself"
        assert not any(Path(f"/proc/{pid}/exe").exists() for pid in (rank, engine))
        assert server.get("/health").status_code == 503
    finally:
        server.stop(signal.SIGTERM)
