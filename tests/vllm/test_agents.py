"""The page "Train an agent" against vLLM itself: its first agent, as it is written there, with the SDK of OpenAI."""

import pytest

from posttrain.rl import GRPOTrainer
from posttrain.rl.generation.vllm import VLLMServerGenerator
from tests import tiny
from tests.rl.agents.test_real_agents import runs
from tests.test_docs import ROOT, blocks
from tests.vllm import servers

LARGEST = 1e-5
"""Gap between vLLM's log-probabilities and the trainer's, in float32."""


@pytest.mark.parametrize("more", [{}, {"max_staleness": 1}], ids=["in turn", "ahead"])
def test_the_agent_of_the_page_learns_from_what_vllm_wrote(more, server, tmp_path, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    served = servers.save(tmp_path / "model")  # as the server was started
    tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS).save_pretrained(served)
    written, rollouts, trainers, generate = [], [], [], VLLMServerGenerator.generate

    def recorded(self, *asked, **options):
        done = generate(self, *asked, **options)
        written.extend(done.ids)
        return done

    class Kept(GRPOTrainer):
        def make_rollout(self, batches):
            trainers[:] = [self]
            if (rollout := super().make_rollout(batches)) is not None:
                rollouts.append(rollout)
            return rollout

    monkeypatch.setattr(VLLMServerGenerator, "generate", recorded)
    first, second = [one.code for one in blocks((ROOT / "docs/agents.md").read_text()) if one.language == "python"]
    more = more | dict(
        use_vllm=True, vllm_mode="server", vllm_server_base_url=server[0], vllm_weight_folder=str(tmp_path / "shared"),
        per_device_train_batch_size=4, num_generations=4, max_steps=3, logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, gradient_checkpointing=False, learning_rate=0.01,
    )  # fmt: skip
    found = {"more": more, "rows": [{"question": f"What is {i} and {i}?", "answer": "never"} for i in range(8)]}
    exec(first.replace("GRPOConfig(", "GRPOConfig(**more, ").replace("=1024", "=240"), found)
    exec(second.replace("Qwen/Qwen3-0.6B", str(served)), found | {"GRPOTrainer": Kept})
    logged = [record for record in trainers[0].state.log_history if "loss" in record]
    assert len(logged) == len(rollouts) == 3 and all(record["agent/failed"] == 0 for record in logged)
    learned = [
        one for rollout in rollouts for ids, learn in zip(rollout.completion_ids.tolist(), rollout.loss_mask.tolist(),
                                                          strict=True) for one in runs(ids, learn)
    ]  # fmt: skip
    written = list(map(list, written))
    assert all(written.count(one) >= learned.count(one) for one in learned)  # some were on their way at the end
    assert more.get("max_staleness") or sorted(learned) == sorted(written)
    exact = logged[:1] if "max_staleness" in more else logged
    assert max(record["sampling/sampling_logp_difference/max"] for record in exact) < LARGEST
