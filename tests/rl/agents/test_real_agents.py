"""Agents of others, unchanged, as programs of an environment of their own: `make test-agents` makes it.

The policy is a stand-in that can call tools, see `scripted`. What is checked is what the trainer learns from.
"""

from pathlib import Path

import pytest

from posttrain.rl import AgentCommand, GRPOConfig, GRPOTrainer
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.local_steps import Call
from tests import tiny
from tests.rl.agents.scripted import ScriptedEngine, call

pytest.importorskip("uvicorn")

PYTHON = Path(__file__).parents[3] / ".venv-agents" / "bin" / "python"
PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
# Two conversations; or a history that the agent writes anew.
SEQUENCES = {"openai_agents": 2, "pydantic_ai_agent": 2, "smolagents_agent": 2, "openai_branches": 6}
OF_NPM = {"pi_coding_agent": "pi", "opencode_agent": "opencode"}
QUIET = {"NO_PROXY": "*", "OTEL_SDK_DISABLED": "true", "LANGSMITH_TRACING": "false"}
TOKENIZER = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-agents: run make test-agents"),
    pytest.mark.long,
]


def adds(prompt):
    """Calls the tool with the numbers of the question, then says what it answered; through a tool, if there is one."""
    last = prompt.rpartition("<|im_start|>user\n")[2]
    if not ("<tool_response>" in last or "Observation:" in last):  # smolagents writes answers of tools as texts
        path = "filePath" if "filePath" in prompt else "path"  # of opencode, of pi
        return call("write", **{path: "sum.txt"}, content="5\n") if "sum.txt" in last else call("add", a=2, b=3)
    return call("final_answer", answer="5") if "final_answer" in prompt else "It is 5."


def command(program):
    """A program of the environment, as an agent."""
    return AgentCommand([str(PYTHON), str(program)], environment=QUIET | {"HOME": "{folder}"})


def trained_on(tmp_path, agent, engine, row=None):
    """(a trainer after one step of two episodes of `agent` on `row`, runs of tokens that it has learned from)."""
    args = GRPOConfig(
        str(tmp_path), max_steps=1, per_device_train_batch_size=2, num_generations=2, max_completion_length=8000,
        beta=0.1, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    model = tiny.causal_lm(max_position_embeddings=32768)
    run = GRPOTrainer(model, None, args, [row or {}] * 2, processing_class=TOKENIZER, generator=engine, agent=agent)
    rollouts, make = [], run.make_rollout
    run.make_rollout = lambda batches: rollouts.append(make(batches)) or rollouts[-1]
    run.train()
    (rollout,) = rollouts
    pairs = zip(rollout.completion_ids.tolist(), rollout.loss_mask.tolist(), strict=True)
    return run, sorted(one for ids, learn in pairs for one in runs(ids, learn))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_it_is_trained_on_what_was_sampled(tmp_path, program):
    name = OF_NPM.get(program.stem)
    if name is not None and not (PYTHON.parents[1] / "node_modules" / ".bin" / name).exists():
        pytest.skip(f"{name} is not installed: run make test-agents where there is npm")
    engine = ScriptedEngine(TOKENIZER, adds)
    run, learned = trained_on(tmp_path, command(program), engine)
    assert learned == sorted(ids for _, ids in engine.written)
    assert not run.old_logps.recomputes  # its log-probabilities are those of a forward of the whole conversation
    logged = run.state.log_history[0]
    assert logged[f"rewards/{program.stem}/mean"] == 1
    assert logged["agent/sequences"] == SEQUENCES.get(program.stem, 1)


def test_so_it_is_with_the_trainers_own_engine(tmp_path, monkeypatch):
    written, engine = [], LocalGenerator(TOKENIZER)

    class Recorded(Call):
        def completion(self, row):
            done = super().completion(row)
            written.extend(done.ids)
            return done

    monkeypatch.setattr("posttrain.rl.generation.local_steps.Call", Recorded)
    run, learned = trained_on(tmp_path, command(PROGRAMS[0].with_name("openai_turns.py")), engine)
    assert learned == sorted(written) and len(written) == 4 and not run.old_logps.recomputes


def runs(ids, learn):
    """The runs of `ids` that are learned from."""
    found = []
    for place, (token, learned) in enumerate(zip(ids, learn, strict=True)):
        if learned and not (place and learn[place - 1]):
            found.append([])
        if learned:
            found[-1].append(token)
    return found
