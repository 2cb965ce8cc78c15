"""Environments of others with several turns and tools, in their own harnesses and with their own clients, unchanged:
as programs of an environment of their own, since they need other SDKs than the agents; `make test-agents` makes it.
verifiers' program has packages that `uv` installs.
"""

import os
from pathlib import Path

import pytest

from posttrain.rl import AgentCommand
from tests.rl.agents.scripted import ScriptedEngine, call
from tests.rl.agents.test_real_agents import TOKENIZER, trained_on

pytest.importorskip("uvicorn")

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-harnesses" / "bin" / "python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-harnesses: run make test-agents"),
    pytest.mark.long,
]


def of_verifiers(prompt):
    return "It is 5." if "<tool_response>\n5\n" in prompt else call("sum_tools_add", a=2, b=3)


def of_openenv(prompt):
    if "<tool_response>\n10\n" in prompt:
        return "It is 10."
    return call("double", a=5) if "<tool_response>\n5\n" in prompt else call("add", a=2, b=3)


HARNESSES = {
    "verifiers": (
        ["-c", "import asyncio; from tests.rl.agents.verifiers_sums import main; asyncio.run(main())"],
        of_verifiers, 2,
    ),
    "openenv": (["-m", "tests.rl.agents.openenv_sums"], of_openenv, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_is_trained_on_what_was_sampled(tmp_path, name):
    words, answer, turns = HARNESSES[name]
    engine = ScriptedEngine(TOKENIZER, answer)
    paths = {"PYTHONPATH": str(ROOT), "PATH": os.pathsep.join([str(PYTHON.parent), os.environ["PATH"]])}
    agent = AgentCommand([str(PYTHON), *words], environment=paths)
    run, learned = trained_on(tmp_path, agent, engine)
    assert learned == sorted(ids for _, ids in engine.written) and len(learned) == 2 * turns
    assert not run.old_logps.recomputes
    logged = run.state.log_history[0]
    assert logged[f"rewards/{PYTHON.name}/mean"] == 1 and logged["agent/sequences"] == 1
