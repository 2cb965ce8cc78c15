"""The arguments of KTO and of reward models that say what becomes of rows, and processes that prepare them."""

import datasets
import pytest

from posttrain.core.errors import DataError
from posttrain.rl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from tests import tiny
from tests.contract.trainers import arguments, preference_rows

PAIRS = [
    {"prompt": "the cat sat", "chosen": " on the old red mat today", "rejected": " on a dog"},
    {"prompt": "a dog ran", "chosen": " home", "rejected": " home"},  # equal
    {"prompt": "who sold", "chosen": " clips in May", "rejected": " half as many in April, and then some more in May"},
]
VERDICTS = [
    {"prompt": "the cat sat", "completion": " on the old red mat today", "label": True},
    {"prompt": "a dog ran", "completion": " ", "label": False},  # empty
    {"prompt": "who sold", "completion": " clips in May", "label": False},
]
KINDS = {"kto": (KTOTrainer, KTOConfig, VERDICTS), "reward": (RewardTrainer, RewardConfig, PAIRS)}


def trainer_of(kind, folder, rows=None, **options):
    trainer, config, own = KINDS[kind]
    model = tiny.reward_model() if kind == "reward" else tiny.causal_lm()
    args = arguments(config, folder, **options)
    return trainer(model=model, args=args, train_dataset=rows or own, processing_class=tiny.tokenizer())


def lengths(trainer, kind):
    """Tokens of each row with its longest text."""
    rows = trainer.train_dataset
    if kind == "reward":
        return [max(len(row["chosen_ids"]), len(row["rejected_ids"])) for row in rows]
    return [len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_cut_dropped_or_refused_beyond_the_maximum(kind, tmp_path):
    whole = lengths(trainer_of(kind, tmp_path, max_length=None), kind)
    most = max(whole) - 3
    assert min(whole) <= most
    cut = trainer_of(kind, tmp_path, max_length=most, long_rows="truncate")
    assert lengths(cut, kind) == [min(length, most) for length in whole]
    assert cut.data_reports["train"].truncated == sum(length > most for length in whole)
    dropped = trainer_of(kind, tmp_path, max_length=most, long_rows="drop")
    assert lengths(dropped, kind) == [length for length in whole if length <= most]
    with pytest.raises(DataError, match=f"more than max_length={most}"):
        trainer_of(kind, tmp_path, max_length=most, long_rows="error")


def test_completions_or_prompts_are_cut_as_asked_for(tmp_path):
    whole = trainer_of("kto", tmp_path, max_length=None).train_dataset[0]
    most = len(whole["completion_ids"]) + 3
    assert len(whole["prompt_ids"]) > 3
    start = trainer_of("kto", tmp_path, max_length=most, truncation_mode="keep_start").train_dataset[0]
    end = trainer_of("kto", tmp_path, max_length=most, truncation_mode="keep_end").train_dataset[0]
    room = most - len(whole["prompt_ids"])
    assert (start["prompt_ids"], start["completion_ids"]) == (whole["prompt_ids"], whole["completion_ids"][:room])
    joined = whole["prompt_ids"] + whole["completion_ids"]
    assert end["prompt_ids"] + end["completion_ids"] == joined[-most:]
    ids = trainer_of("kto", tmp_path, max_length=most).data_collator([start] * 2)["kl"]["attention_mask"].sum(1)
    assert ids.max() <= most  # also beside another's completion


@pytest.mark.parametrize("kind", KINDS)
def test_faulty_rows_are_dropped_kept_or_refused(kind, tmp_path):
    assert len(trainer_of(kind, tmp_path).train_dataset) == 2
    assert len(trainer_of(kind, tmp_path, faulty_rows="keep").train_dataset) == 3
    with pytest.raises(DataError, match="Row 1: .*equal" if kind == "reward" else "Row 1: completion is empty"):
        trainer_of(kind, tmp_path, faulty_rows="error")


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_those_that_are_named(kind, tmp_path):
    named = trainer_of(kind, tmp_path, pad_token="<|im_end|>")
    pad = tiny.tokenizer().convert_tokens_to_ids("<|im_end|>")
    batch = named.data_collator([named.train_dataset[i] for i in range(2)])
    ids, mask = (batch[name] for name in ("input_ids", "attention_mask")) if kind == "reward" else (None, None)
    assert named.processing_class.pad_token_id == named.data_collator.pad_token_id == pad
    if kind == "reward":
        assert (mask == 0).any() and (ids[mask == 0] == pad).all()
        ended = trainer_of(kind, tmp_path, eos_token="<|im_start|>").train_dataset[0]["chosen_ids"]
        assert ended[-1] == tiny.tokenizer().convert_tokens_to_ids("<|im_start|>")


def test_a_chat_template_from_a_file_is_that_of_the_rows_of_a_reward_model(tmp_path):
    (tmp_path / "shout.jinja").write_text(tiny.CHATML.replace("message['content'] }}", "message['content'].upper() }}"))
    chat = [{"role": "user", "content": "a cat"}]
    rows = [{"prompt": chat, **{s: [{"role": "assistant", "content": s}] for s in ("chosen", "rejected")}}] * 2
    trainer = trainer_of("reward", tmp_path, rows, chat_template_path=str(tmp_path / "shout.jinja"))
    said = trainer.processing_class.decode(trainer.train_dataset[0]["chosen_ids"])
    assert "A CAT" in said and "CHOSEN" in said


@pytest.mark.parametrize("kind", ["dpo", *KINDS])
def test_several_processes_prepare_what_one_does(kind, tmp_path, monkeypatch):
    asked, map_rows = [], datasets.Dataset.map

    def recorded(self, *args, **kwargs):
        asked.append(kwargs.get("num_proc"))
        return map_rows(self, *args, **kwargs)

    monkeypatch.setattr(datasets.Dataset, "map", recorded)
    rows = preference_rows(12)
    found = []
    for processes in (None, 2):
        asked.clear()
        if kind == "dpo":
            args = arguments(DPOConfig, tmp_path, dataset_num_proc=processes)
            trainer = DPOTrainer(tiny.causal_lm(), None, args, None, rows, None, tiny.tokenizer())
        else:
            trainer = trainer_of(kind, tmp_path, rows, dataset_num_proc=processes)
        assert asked[0] == processes
        found.append(trainer.train_dataset[:])
    assert found[0] == found[1]
