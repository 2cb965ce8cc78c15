"""What scripts for trl call to bring preferences into another format."""

import pytest
from datasets import Dataset, DatasetDict

from posttrain.rl import (
    extract_prompt,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    unpair_preference_dataset,
)

PAIRS = {
    "prompt": ["The sky is", "The sun is"],
    "chosen": [" blue.", " in the sky."],
    "rejected": [" green.", " in the sea."],
    "extra": [1, 2],
}
SINGLE = {
    "prompt": PAIRS["prompt"] * 2,
    "extra": [1, 2, 1, 2],
    "completion": PAIRS["chosen"] + PAIRS["rejected"],
    "label": [True, True, False, False],
}


@pytest.mark.parametrize("kind", ["dataset", "stream", "dict"])
def test_pairs_become_single_completions(kind):
    dataset = Dataset.from_dict(PAIRS)
    given = {"dataset": dataset, "stream": dataset.to_iterable_dataset(), "dict": DatasetDict(train=dataset)}[kind]
    for function in (unpair_preference_dataset, maybe_unpair_preference_dataset):
        made = function(given, num_proc=None, desc="Unpairing")
        made = list(made["train"] if kind == "dict" else made)
        assert made == [dict(zip(SINGLE, values, strict=True)) for values in zip(*SINGLE.values(), strict=True)]


def test_pairs_are_taken_apart_with_other_arguments_of_map():
    made = unpair_preference_dataset(Dataset.from_dict(PAIRS), batch_size=1)
    assert made["label"] == [True, False] * len(PAIRS["chosen"])


def test_single_completions_stay_as_they_are():
    single = Dataset.from_dict(SINGLE)
    assert maybe_unpair_preference_dataset(single) is single


def test_a_prompt_is_found_where_there_is_none():
    pair = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    expected = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
    assert extract_prompt(pair) == maybe_extract_prompt(pair) == expected
    assert maybe_extract_prompt(expected) is expected
    made = unpair_preference_dataset(Dataset.from_dict({name: [text] for name, text in pair.items()}))
    assert made.to_dict() == {"prompt": ["The sky is"] * 2, "completion": [" blue.", " green."], "label": [True, False]}
