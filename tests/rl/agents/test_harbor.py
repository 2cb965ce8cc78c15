"""A task of Harbor with its own agent, Terminus 2, as a command; by hand, where Harbor and containers are.

Harbor needs Python 3.12, so it lives in an environment of its own: `POSTTRAIN_HARBOR` is the program that starts it,
`POSTTRAIN_HARBOR_ENV` its kind of containers (`docker`), `POSTTRAIN_HARBOR_IMAGE` their image (`debian:13`).
"""

import json
import os
import shutil

import pytest

from posttrain.rl import AgentCommand
from tests.rl.agents.scripted import ScriptedEngine
from tests.rl.agents.test_real_agents import TOKENIZER, trained_on

pytest.importorskip("uvicorn")

HARBOR = os.environ.get("POSTTRAIN_HARBOR") or shutil.which("harbor")
CONTAINERS = os.environ.get("POSTTRAIN_HARBOR_ENV", "docker")
IMAGE = os.environ.get("POSTTRAIN_HARBOR_IMAGE", "debian:13")

pytestmark = [pytest.mark.skipif(not HARBOR, reason="Harbor is not installed"), pytest.mark.long]

FILES = {
    "task.toml": 'schema_version = "1.4"\n[task]\nname = "local/hello"\n[verifier]\nenvironment_mode = "shared"\n',
    "instruction.md": "Write the word hello into /app/out.txt.\n",
    "environment/Dockerfile": f"FROM {IMAGE}\nRUN command -v tmux || (apt-get update && apt-get install -y tmux)\n"
    "RUN mkdir -p /app\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/bash\ngrep -qx hello /app/out.txt\necho $((1 - $?)) > /logs/verifier/reward.txt\n",
}
RUN = (
    f"{HARBOR} run -p {{task}} -a terminus-2 -m openai/$OPENAI_MODEL --ak api_base=$OPENAI_BASE_URL --ak max_turns=4"
    " --ak enable_summarize=false --ak record_terminal_session=false --ae OPENAI_API_KEY=$OPENAI_API_KEY"
    f" --env {CONTAINERS} -y -q -o jobs --job-name job"
)


def answer(prompt):
    """Writes the file in the terminal, then says twice that it is done, as Terminus 2 asks it to."""
    begins = prompt.count("<|im_start|>assistant") == 1
    commands = [{"keystrokes": "echo hello > /app/out.txt\n", "duration": 0.2}] if begins else []
    return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": not begins})


def test_terminus_is_trained_on_what_was_sampled_in_a_container(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    engine = ScriptedEngine(TOKENIZER, answer)
    agent = AgentCommand(["bash", "-c", RUN], verifier=["bash", "-c", "cat jobs/job/*/verifier/reward.txt"])
    run, learned = trained_on(tmp_path, agent, engine, {"task": str(tmp_path / "task")})
    assert learned == sorted(ids for _, ids in engine.written) and len(learned) == 6
    assert not run.old_logps.recomputes
    logged = run.state.log_history[0]
    assert logged["rewards/bash/mean"] == 1 and logged["agent/sequences"] == 1
