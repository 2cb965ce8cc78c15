"""Datasets joined one behind another, as files for trl list them."""

import json

import pytest

from posttrain.cli.mixture import CommandSource
from posttrain.core import DatasetConfig, DatasetMixtureConfig, ModelConfig, ScriptParser, get_dataset
from posttrain.core.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")


@pytest.fixture
def files(tmp_path):
    """Two files, of 8 and of 4 rows, the second with one column more."""
    paths = {"long": tmp_path / "long.jsonl", "short": tmp_path / "short.jsonl"}
    paths["long"].write_text("".join(json.dumps({"text": f"l{i}"}) + "\n" for i in range(8)))
    paths["short"].write_text("".join(json.dumps({"text": f"s{i}", "id": i}) + "\n" for i in range(4)))
    return {name: str(path) for name, path in paths.items()}


def short(files, **more):
    return {"path": files["short"], "columns": ["text"]} | more


def texts(rows):
    return [row["text"] for row in rows]


def test_datasets_are_joined_in_their_order(files):
    rows = get_dataset(DatasetMixtureConfig(datasets=[short(files), DatasetConfig(path=files["long"])]))
    assert isinstance(rows, datasets.DatasetDict) and list(rows) == ["train"]
    assert texts(rows["train"]) == [f"s{i}" for i in range(4)] + [f"l{i}" for i in range(8)]
    assert rows["train"].column_names == ["text"]


@pytest.mark.parametrize(
    ("fractions", "counts"),
    [((1, 1), (4, 4)), ((0.25, 0.75), (1, 4)), ((0.75, 0.25), (8, 3)), ((2, 1), (8, 4)), ((30, 10), (8, 3))],
)
def test_fractions_are_shares_of_the_joined_rows_and_repeat_none(files, fractions, counts):
    """Of 8 and 4 rows, as 0.75 : 0.25: all 8, and 8 / 3 = 2.67, to the row."""
    asked = [{"path": files["long"], "fraction": fractions[0]}, short(files, fraction=fractions[1])]
    found = texts(get_dataset(DatasetMixtureConfig(datasets=asked))["train"])
    assert found == [f"l{i}" for i in range(counts[0])] + [f"s{i}" for i in range(counts[1])]


def test_a_part_of_a_split_readers_of_files_and_saved_folders(files, tmp_path):
    datasets.load_dataset("json", data_files=files["long"]).save_to_disk(tmp_path / "saved")
    asked = [
        {"path": files["long"], "split": "train[:25%]"},
        {"path": "json", "data_files": files["short"], "columns": ["text"], "split": "train[3:]"},
        {"path": str(tmp_path / "saved")},
    ]
    found = texts(get_dataset(DatasetMixtureConfig(datasets=asked))["train"])
    assert found == ["l0", "l1", "s3", *(f"l{i}" for i in range(8))]


def test_a_stream_is_joined_as_a_stream(files):
    rows = get_dataset(DatasetMixtureConfig(datasets=[{"path": files["long"]}, short(files)], streaming=True))["train"]
    assert isinstance(rows, datasets.IterableDataset) and len(list(rows)) == 12


@pytest.mark.parametrize("size", [2, 0.25])
def test_a_test_split_is_held_out_and_the_same_each_time(files, size):
    config = DatasetMixtureConfig(datasets=[{"path": files["long"]}], test_split_size=size)
    rows, again = get_dataset(config), get_dataset(config)
    assert sorted(texts(rows["train"]) + texts(rows["test"])) == [f"l{i}" for i in range(8)]
    assert len(rows["test"]) == 2 and texts(rows["test"]) == texts(again["test"])


@pytest.mark.parametrize(
    ("asked", "settings", "message"),
    [
        ([], {}, "datasets is empty"),
        ([{"name": "x"}], {}, r"datasets\[0\] has no path"),
        ([{"path": "x", "colums": ["a"]}], {}, "unknown key 'colums', did you mean 'columns'"),
        (["x"], {}, r"datasets\[0\]='x' must be a mapping of path, name"),
        ({"path": "x"}, {}, "must be a list of mappings"),
        ([{"path": "x", "fraction": 1}, {"path": "y"}], {}, r"datasets\[1\] has no fraction"),
        ([{"path": "x", "fraction": 0}], {}, "the fraction 0 must be a number above 0"),
        ([{"path": "x", "fraction": 1}], {"streaming": True}, "which a stream does not have"),
        ([{"path": "LONG"}], {"streaming": True, "test_split_size": 2}, "cannot be taken from a stream"),
        ([{"path": "LONG"}], {"test_split_size": 8}, "test_split_size=8 leaves no row .* there are 8"),
        ([{"path": "LONG", "split": "test"}], {}, "has no split 'test'; it has train. Set its split"),
        ([{"path": "LONG", "data_dir": "x"}], {}, "is read whole; leave out data_dir"),
        ([{"path": "json", "data_files": "/none.jsonl"}], {}, "json cannot be read: Unable to find '/none.jsonl'"),
    ],
)
def test_what_cannot_be_joined_is_named(files, asked, settings, message):
    for value in asked if isinstance(asked, list) else []:
        if isinstance(value, dict) and value.get("path") == "LONG":
            value["path"] = files["long"]
    with pytest.raises(DataError, match=message):
        get_dataset(DatasetMixtureConfig(datasets=asked, **settings))


def test_a_saved_folder_gives_no_part_of_a_split(files, tmp_path):
    datasets.load_dataset("json", data_files=files["long"]).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"save_to_disk, which can only be read whole; name a split, not 'train\[:1\]'"):
        get_dataset(DatasetMixtureConfig(datasets=[{"path": str(tmp_path / "saved"), "split": "train[:1]"}]))


def test_a_script_reads_a_mixture_from_a_file(files, tmp_path):
    (tmp_path / "run.yaml").write_text(
        f"model_name_or_path: m\ndatasets:\n- path: {files['long']}\n- path: {files['short']}\n  columns:\n  - text\n"
        "test_split_size: 3\n"
    )
    words = ["--config", str(tmp_path / "run.yaml")]
    model, mixture = ScriptParser((ModelConfig, DatasetMixtureConfig)).parse_args_and_config(words)
    assert model.model_name_or_path == "m" and mixture.datasets[1].columns == ["text"]
    assert {name: len(rows) for name, rows in get_dataset(mixture).items()} == {"train": 9, "test": 3}


def test_a_command_joins_them_too(files):
    asked = [{"path": files["long"], "fraction": 3}, short(files, fraction=1)]
    train, held_out = CommandSource(datasets=asked, rename_columns={"text": "prompt"}).load()
    assert [row["prompt"] for row in train] == [f"l{i}" for i in range(8)] + ["s0", "s1", "s2"] and held_out is None
    with pytest.warns(FutureWarning, match="test_split_size=0.25 is now eval_share=0.25"):
        source = CommandSource(datasets=[{"path": files["long"]}], test_split_size=0.25)
    assert [len(rows) for rows in source.load()] == [6, 2]
    train, held_out = CommandSource(datasets=[{"path": files["long"]}], eval_dataset_name=files["short"]).load()
    assert (len(train), texts(held_out)) == (8, [f"s{i}" for i in range(4)])
    with pytest.warns(FutureWarning, match="streaming=True is now dataset_streaming=True"):
        source = CommandSource(datasets=[{"path": files["long"]}], streaming=True)
    assert isinstance(source.load()[0], datasets.IterableDataset)
    with pytest.warns(FutureWarning, match="ignore_bias_buffers has no effect: .* ddp_broadcast_buffers=False"):
        CommandSource(dataset_name=files["short"], ignore_bias_buffers=True)


def test_a_command_reports_every_problem_before_it_reads(files):
    with pytest.raises(ConfigError) as raised:
        CommandSource(datasets=[{"path": "x", "fraction": -1}, {"path": "y"}], dataset_name=files["long"])
    for part in ("dataset_name and datasets are both set", "fraction -1", "datasets[1] has no fraction"):
        assert part in str(raised.value)
