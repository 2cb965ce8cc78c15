"""Environments of others with several turns and tools, in their own harnesses and with their own clients, unchanged:
as commands, where `pip install 'posttrain-rl[environments]'` was called. verifiers' program has packages that `uv`
installs.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from posttrain.rl import AgentCommand
from tests.rl.agents.scripted import ScriptedEngine, call
from tests.rl.agents.test_real_agents import TOKENIZER, trained_on

pytest.importorskip("uvicorn")

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[3]


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
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install 'posttrain-rl[environments]'")
    words, answer, turns = HARNESSES[name]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    engine = ScriptedEngine(TOKENIZER, answer)
    agent = AgentCommand([sys.executable, *words], environment={"PYTHONPATH": paths, "NO_PROXY": "127.0.0.1"})
    run, learned = trained_on(tmp_path, agent, engine)
    assert learned == sorted(ids for _, ids in engine.written) and len(learned) == 2 * turns
    assert not run.old_logps.recomputes
    logged = run.state.log_history[0]
    assert logged[f"rewards/{Path(sys.executable).name}/mean"] == 1 and logged["agent/sequences"] == 1
