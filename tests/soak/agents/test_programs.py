"""Coding agents as their users start them: each repairs a file by its own tools, through a server on this machine."""

import json
from pathlib import Path

import pytest

from tests.session_script import Call, Step
from tests.soak.agents.conftest import MODEL, REPORT, RIGHT, TASK, WRONG, Start
from tests.soak.agents.programs import Program

pytestmark = pytest.mark.timeout(0)
ASKED = f"Please {TASK}."
CHECK = "python3 check.py"
CLAUDE_CODE = Program(
    "claude-code",
    ["@anthropic-ai/claude-code@2.1.330"],
    npm=True,
    variables={
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
)
OPENCODE = Program(
    "opencode",
    ["opencode-ai@1.18.33"],
    npm=True,
    variables={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
)
KIMI_CLI = Program("kimi-cli", ["kimi-cli==1.30.0"], newer=True, variables={"KIMI_CLI_NO_AUTO_UPDATE": "1"})
KIMI_CODE = Program("kimi-code", ["node@22.23.3", "@moonshot-ai/kimi-code@2.1.0"], npm=True)
MINI = Program(
    "mini-swe-agent",
    ["mini-swe-agent==2.4.6", "mcp==2.3.0"],  # litellm in it imports mcp and does not require it
    variables={
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HOSTED_VLLM_API_KEY": "none",
    },
)


def steps(look: tuple[Call, ...], repair: Call, *between: Step, check: Call) -> tuple[Step, ...]:
    """`look` reads the file and runs the check, in one answer where a program has tools for both."""
    return (
        Step("First I look at the file and at what the check says.", "I read the program and run the check.", look),
        Step("The tax is multiplied, not added.", "", (repair,)),
        *between,
        Step("Now the check once more.", "I run the check again.", (check,)),
        Step("It passed.", REPORT),
    )


def test_claude_code_with_a_tool_that_it_loads_by_search(programs: Path, start: Start, tmp_path: Path) -> None:
    bin = CLAUDE_CODE.install(programs)
    file = str(tmp_path / "work" / "prices.py")
    check = ("Bash", {"command": CHECK, "description": "Run the check"})
    work = start(
        steps(
            (("Read", {"file_path": file}), check),
            ("Edit", {"file_path": file, "old_string": WRONG, "new_string": RIGHT}),
            Step("Is anything scheduled?", "", (("ToolSearch", {"query": "select:CronList", "max_results": 1}),)),
            Step("The tool is there now.", "", (("CronList", {}),)),
            check=check,
        )
    )
    asked = ["claude", "-p", ASKED, "--permission-mode", "acceptEdits", "--allowedTools", "Bash,Read,Edit,CronList"]
    out = CLAUDE_CODE.run(bin, asked, work.folder, work.home, ANTHROPIC_BASE_URL=work.server.url)
    work.finished(out)


def test_opencode(programs: Path, start: Start, tmp_path: Path) -> None:
    bin = OPENCODE.install(programs)
    file = str(tmp_path / "work" / "prices.py")
    check = ("bash", {"command": CHECK, "description": "Run the check"})
    work = start(
        steps(
            (("read", {"filePath": file}), check),
            ("edit", {"filePath": file, "oldString": WRONG, "newString": RIGHT}),
            check=check,
        )
    )
    model = {
        "name": "Kimi K2.6",
        "limit": {"context": 262144, "output": 32768},
        "reasoning": True,
        "tool_call": True,
        "interleaved": {"field": "reasoning_content"},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{work.server.url}/v1", "apiKey": "none"},
        "models": {MODEL: model},
    }
    config = {
        "model": f"perilune/{MODEL}",
        "small_model": f"perilune/{MODEL}",
        "permission": "allow",
        "provider": {"perilune": provider},
    }
    (work.folder / "opencode.json").write_text(json.dumps(config))
    work.finished(OPENCODE.run(bin, ["opencode", "run", ASKED], work.folder, work.home))


def kimi_config(url: str) -> str:
    return f"""default_model = "k26"
default_thinking = true

[models.k26]
provider = "perilune"
model = "{MODEL}"
max_context_size = 262144
capabilities = ["thinking", "tool_use"]

[providers.perilune]
type = "kimi"
base_url = "{url}/v1"
api_key = "none"
"""


def test_kimi_cli(programs: Path, start: Start) -> None:
    bin = KIMI_CLI.install(programs)
    check = ("Shell", {"command": CHECK})
    work = start(
        steps(
            (("ReadFile", {"path": "prices.py"}), check),
            ("StrReplaceFile", {"path": "prices.py", "edit": {"old": WRONG, "new": RIGHT}}),
            check=check,
        )
    )
    (work.home / ".kimi").mkdir()
    config = kimi_config(work.server.url).replace(', "tool_use"', "")
    (work.home / ".kimi" / "config.toml").write_text(config)
    asked = ["kimi", "--print", "--output-format", "stream-json", "-p", ASKED]
    work.finished(KIMI_CLI.run(bin, asked, work.folder, work.home))


def test_kimi_code(programs: Path, start: Start, tmp_path: Path) -> None:
    bin = KIMI_CODE.install(programs)
    file = str(tmp_path / "work" / "prices.py")
    check = ("Bash", {"command": CHECK, "description": "Run the check"})
    work = start(
        steps(
            (("Read", {"path": file}), check),
            ("Edit", {"path": file, "old_string": WRONG, "new_string": RIGHT}),
            check=check,
        )
    )
    (work.home / ".kimi-code").mkdir()
    (work.home / ".kimi-code" / "config.toml").write_text(kimi_config(work.server.url))
    work.finished(KIMI_CODE.run(bin, ["kimi", "-p", ASKED], work.folder, work.home))


def test_mini_swe_agent(programs: Path, start: Start) -> None:
    bin = MINI.install(programs)
    check = ("bash", {"command": CHECK})
    looked, repaired, checked, _ = steps(
        (("bash", {"command": "cat prices.py"}), check),
        ("bash", {"command": f"sed -i 's/{WRONG.replace('*', '[*]')}/{RIGHT}/' prices.py"}),
        check=check,
    )
    end = Step(
        "It passed.", "", (("bash", {"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo '{REPORT}'"}),)
    )
    work = start((looked, repaired, checked, end))
    trajectory = work.home / "trajectory.json"
    asked = ["mini", "-y", "--exit-immediately", "-m", f"hosted_vllm/{MODEL}", "-t", ASKED, "-o", str(trajectory)]
    MINI.run(bin, asked, work.folder, work.home, HOSTED_VLLM_API_BASE=f"{work.server.url}/v1")
    work.finished(json.loads(trajectory.read_text())["info"]["submission"])
