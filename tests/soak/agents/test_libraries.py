"""Agent libraries: each runs a small program of tests/soak/agents/drivers, with three tools, until the task is done."""

from pathlib import Path

import pytest

from tests.session_script import Step
from tests.soak.agents.conftest import MODEL, REPORT, RIGHT, TASK, WRONG, Start
from tests.soak.agents.programs import Program

pytestmark = pytest.mark.timeout(0)
DRIVERS = Path(__file__).parent / "drivers"
STEPS = (
    Step(
        "First I look at the file and at what the check says.",
        "I read the program and run the check.",
        (("read_file", {"path": "prices.py"}), ("run_check", {})),
    ),
    Step(
        "The tax is multiplied, not added.",
        "",
        (("replace_in_file", {"path": "prices.py", "old": WRONG, "new": RIGHT}),),
    ),
    Step("Now the check once more.", "I run the check again.", (("run_check", "{}"),)),
    Step("It passed.", REPORT),
)
PYDANTIC_AI = Program("pydantic-ai", ["pydantic-ai-slim[openai,anthropic]==2.68.0"])
OPENAI_AGENTS = Program("openai-agents", ["openai-agents==0.24.0"])
LANGCHAIN = Program("langchain", ["langchain==1.4.7", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7"])
LITELLM = Program(  # which imports mcp as soon as there are tools, and does not require it
    "litellm", ["litellm==1.106.2", "mcp==2.3.0"], variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
)
RUNS = [
    (PYDANTIC_AI, "pydantic_ai_driver.py", mode) for mode in ("chat", "chat-streamed", "responses", "messages-streamed")
]
RUNS += [(OPENAI_AGENTS, "openai_agents_driver.py", mode) for mode in ("chat", "chat-streamed", "responses-streamed")]
RUNS += [
    (LANGCHAIN, "langchain_driver.py", mode)
    for mode in ("chat", "chat-streamed", "responses", "messages", "messages-streamed")
]
RUNS += [(LITELLM, "litellm_driver.py", mode) for mode in ("chat", "chat-streamed", "messages", "messages-streamed")]


@pytest.mark.parametrize("program, driver, mode", RUNS, ids=[f"{p.name}-{mode}" for p, _, mode in RUNS])
def test_a_library_repairs_a_file(program: Program, driver: str, mode: str, programs: Path, start: Start) -> None:
    bin = program.install(programs)
    work = start(STEPS)
    arguments = ["python", str(DRIVERS / driver), work.server.url, MODEL, mode, f"Please {TASK}."]
    out = program.run(bin, arguments, work.folder, work.home, PYTHONPATH=str(DRIVERS))
    work.finished(out)
