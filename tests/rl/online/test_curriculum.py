"""Prompts by their pass rate: which ones are sampled, and that a run which is resumed samples the same."""

import json
from collections import Counter

import pytest
import torch

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.online.curriculum import Curriculum, CurriculumArguments
from tests import tiny

TOKENIZER = tiny.tokenizer()
ROWS = [{"prompt": f"Question {i}", "kind": i % 4} for i in range(16)]


def curriculum(rates, **options):
    made = Curriculum(range(len(rates)), CurriculumArguments(curriculum=True, **options), 0)
    made.rates = torch.tensor(rates, dtype=torch.float64)
    return made


def drawn(made, number, times=2000):
    return Counter(made.choice(number, seed) for seed in range(times))


def test_prompts_that_are_half_right_are_kept_and_others_give_way_to_them():
    made = curriculum([0.5, 1.0, 0.0, 0.25, float("nan")], curriculum_explore=0.0)
    assert drawn(made, 0) == {0: 2000} and drawn(made, 4) == {4: 2000}
    for solved_or_hopeless in (1, 2):
        found = drawn(made, solved_or_hopeless)
        assert set(found) == {0, 3} and found[0] / 2000 == pytest.approx(0.25 / (0.25 + 0.1875), abs=0.03)
    # kept with 4p(1-p) = 3/4, and drawn again with 3/7 else
    assert drawn(made, 3)[3] / 2000 == pytest.approx(0.75 + 0.25 * 3 / 7, abs=0.03)


def test_some_are_tried_again_and_all_are_where_there_is_nothing_better():
    assert drawn(curriculum([0.5, 1.0], curriculum_explore=0.2), 1)[1] / 2000 == pytest.approx(0.2, abs=0.03)
    assert drawn(curriculum([0.0, 1.0], curriculum_explore=0.0), 1) == {1: 2000}


def test_pass_rates_follow_the_newest_completions():
    made = curriculum([float("nan")] * 3, curriculum_update=0.5)
    made.update([(0, 1.0), (0, 0.0), (1, float("nan"))])
    made.update([(0, 1.0), (0, 1.0), (2, 0.0)])
    torch.testing.assert_close(made.rates, torch.tensor([0.75, float("nan"), 0.0]).double(), equal_nan=True)
    assert made.metrics() == {"curriculum/solved": 0.0, "curriculum/hopeless": 0.5, "curriculum/known": 2 / 3}


def test_pass_rates_of_other_prompts_are_not_taken_from_a_checkpoint(caplog):
    made = curriculum([0.5, 0.25, 1.0])
    made.load_state_dict({"rates": torch.zeros(2, dtype=torch.float64)})
    assert made.rates.tolist() == [0.5, 0.25, 1.0] and "pass rates of 2 prompts, and there are 3" in caplog.text


def right(kind, completion_ids, **_):
    """Kind 0 is always right, kind 1 never, the others sometimes."""
    return [
        1.0 if k == 0 else 0.0 if k == 1 else float(sum(ids) % 2) for k, ids in zip(kind, completion_ids, strict=True)
    ]


def trainer(folder, rewards=right, **options):
    args = GRPOConfig(output_dir=str(folder), per_device_train_batch_size=8, num_generations=4,
                      max_steps=options.pop("max_steps", 24), max_completion_length=4, curriculum=True,
                      curriculum_explore=0.0, sample_ledger=True, save_strategy="no", report_to="none", use_cpu=True,
                      disable_tqdm=True, logging_steps=1, learning_rate=1e-3, **options)  # fmt: skip
    return GRPOTrainer(tiny.causal_lm(), rewards, args, train_dataset=ROWS, processing_class=TOKENIZER)


def learned(folder):
    lines = [json.loads(line) for line in (folder / "samples-0.jsonl").read_text().splitlines()]
    return [(line["step"], line["prompt"], line["reward"]) for line in lines if "prompt" in line]


def test_solved_and_hopeless_prompts_are_dropped_from_the_second_pass_on(tmp_path):
    run = trainer(tmp_path)
    counted, seen = run.rewards.of, []
    run.rewards.of = lambda samples, state: seen.append([s.row for s in samples]) or counted(samples, state)
    run.train()
    kinds = [Counter(row["kind"] for rows in part for row in rows) for part in (seen[:8], seen[8:])]
    assert kinds[0] == {0: 16, 1: 16, 2: 16, 3: 16}
    assert not kinds[1][0] and not kinds[1][1]
    assert all(len({row["prompt"] for row in rows[start : start + 4]}) == 1 for rows in seen for start in (0, 4))
    assert all(set(row) == {"prompt", "kind"} for rows in seen for row in rows)
    last = run.state.log_history[-2]
    assert last["curriculum/known"] == 1 and last["curriculum/solved"] >= 0.25 <= last["curriculum/hopeless"]


def test_a_completion_passes_by_the_first_reward_function_alone(tmp_path):
    def wrong(kind, **_):
        return [3.0 * (one == 1) for one in kind]

    run = trainer(tmp_path, [right, wrong], max_steps=8)
    run.train()
    assert run.rollout_maker.curriculum.rates.view(-1, 4)[:, :2].tolist() == [[1.0, 0.0]] * 4


@pytest.mark.parametrize("options", [{}, {"dynamic_sampling": True, "dynamic_sampling_rounds": 2}], ids=["", "dynamic"])
def test_a_resumed_run_samples_the_same_prompts(tmp_path, options):
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    first = trainer(
        tmp_path / "cut",
        **options,
    )
    first.args.save_strategy, first.args.save_steps = "steps", 13
    first.train()
    again = trainer(tmp_path / "again", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-13"))
    assert torch.equal(whole.rollout_maker.curriculum.rates, again.rollout_maker.curriculum.rates)
    expected = [line for line in learned(tmp_path / "whole") if line[0] is None or line[0] > 13]
    assert learned(tmp_path / "again") == expected[-len(learned(tmp_path / "again")) :]
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_stream_is_refused(tmp_path):
    import datasets

    stream = datasets.IterableDataset.from_generator(lambda: iter(ROWS))
    args = GRPOConfig(output_dir=str(tmp_path), curriculum=True, max_steps=1, use_cpu=True)
    with pytest.raises(ValueError, match="curriculum=True chooses prompts by their number"):
        GRPOTrainer(tiny.causal_lm(), right, args, train_dataset=stream, processing_class=TOKENIZER)
