"""A run whose output goes to a url: checkpoints are copied there whole, fetched from there, and rotated there."""

import json
import logging
import shutil
import zlib

import fsspec
import pytest
import torch

from posttrain.core import TrainingArguments
from posttrain.core.checkpoint import remote
from posttrain.core.checkpoint.codec import save_tree
from posttrain.core.checkpoint.remote import Remote
from posttrain.core.checkpoint.store import Store
from posttrain.core.errors import CheckpointError, ConfigError
from tests.contract.test_resume import ARGS, assert_same_run, cut
from tests.contract.trainers import TRAINERS

MAKE = TRAINERS["causal-lm"]


@pytest.fixture(scope="module")
def s3():
    """A server that answers as S3 does, which s3fs asks over HTTP: `pip install s3fs "moto[server]"`."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "nobody")
        yield fsspec.filesystem("s3")
    server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def url(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the folder to work in is below this one
    if request.param == "s3":
        bucket = f"bucket-{zlib.crc32(str(tmp_path).encode())}"
        request.getfixturevalue("s3").mkdir(bucket)
        return f"s3://{bucket}/run"
    if request.param == "file":
        return f"file://{tmp_path}/there/run"
    fsspec.filesystem("memory").store.clear()
    fsspec.filesystem("memory").pseudo_dirs[:] = [""]
    return "memory://bucket/run"


def save(store, step):
    temp = store.begin(step)
    save_tree({"w": torch.full((64,), float(step))}, temp / "state")
    (temp / "nested").mkdir()
    (temp / "nested" / "notes.txt").write_text(f"step {step}")
    path = store.commit(temp)
    store.push(store.remote)
    return path


def here(tmp_path, name, url):
    return Store(tmp_path / name, Remote(url))


# ---- the place ----


def test_a_checkpoint_is_there_once_its_manifest_is(url, tmp_path, monkeypatch):
    store = here(tmp_path, "a", url)
    uploaded, put = [], Remote._put
    monkeypatch.setattr(Remote, "_put", lambda self, file, place: (uploaded.append(file.name), put(self, file, place)))
    save(store, 3)
    assert uploaded[-1] == "manifest.json" and sorted(uploaded[:-1]) == ["notes.txt", "state.json", "state.safetensors"]
    assert Remote(url).whole() == ["checkpoint-3"]


def test_an_upload_that_breaks_off_is_no_checkpoint_and_is_made_up_for(url, tmp_path, monkeypatch, caplog):
    store, put = here(tmp_path, "a", url), Remote._put

    def fail(self, file, place):
        if file.name == "state.safetensors":
            raise ConnectionError("the network is down")
        put(self, file, place)

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "_put", fail)
        path = save(store, 1)
    assert store.verify(path) == [] and Remote(url).whole() == []
    assert "was not copied" in caplog.text and "the network is down" in caplog.text and url in caplog.text
    save(store, 2)
    assert Remote(url).whole() == ["checkpoint-1", "checkpoint-2"]


def test_what_this_machine_lacks_is_fetched(url, tmp_path):
    save(here(tmp_path, "a", url), 3), save(here(tmp_path, "a", url), 12)
    path = here(tmp_path, "b", url).resolve(True)
    assert path == tmp_path / "b" / "checkpoint-12" and Store(tmp_path / "b").verify(path, kind="sha256") == []
    assert (path / "nested" / "notes.txt").read_text() == "step 12"
    named = Store(tmp_path / "c").resolve(f"{url}/checkpoint-3")
    assert named == tmp_path / "c" / "checkpoint-3" and (named / "nested" / "notes.txt").read_text() == "step 3"
    with pytest.raises(CheckpointError, match="checkpoint-7.*There are checkpoint-3, checkpoint-12"):
        Store(tmp_path / "c").resolve(f"{url}/checkpoint-7")


def test_a_damaged_one_here_is_fetched_again_and_a_damaged_one_there_is_passed_over(url, tmp_path, caplog):
    store = here(tmp_path, "a", url)
    save(store, 1), save(store, 2)
    (tmp_path / "a" / "checkpoint-2" / "nested" / "notes.txt").write_text("step 9")
    assert store.resolve(True) == store.path(2) and store.verify(store.path(2)) == []
    fs, root = store.remote.fs, store.remote.root
    fs.pipe_file(f"{root}/checkpoint-2/nested/notes.txt", b"step 7")
    with caplog.at_level(logging.WARNING):
        assert here(tmp_path, "b", url).resolve(True) == tmp_path / "b" / "checkpoint-1"
    assert "Passing over" in caplog.text and "notes.txt" in caplog.text and "SHA-256" in caplog.text
    assert [p.name for p in (tmp_path / "b").iterdir()] == ["checkpoint-1"]


@pytest.mark.parametrize("name", ["../outside.txt", "/tmp/outside.txt", "a/../../x", "C:\\x", "..\\x"])
def test_a_manifest_there_leads_no_download_out_of_its_folder(name, url, tmp_path):
    from posttrain.core.checkpoint import manifest

    store = here(tmp_path, "a", url)
    path = save(store, 1)
    body = json.loads((path / "manifest.json").read_text())
    del body["sha256"]
    body["files"][name] = body["files"]["nested/notes.txt"]
    text = json.dumps(body | {"sha256": manifest._seal(body)})
    store.remote.fs.pipe_file(f"{store.remote.root}/checkpoint-1/manifest.json", text.encode())
    with pytest.raises(CheckpointError, match="is outside of it"):
        Store(tmp_path / "b").resolve(f"{url}/checkpoint-1")
    assert list((tmp_path / "b").iterdir()) == []


def test_rotation_there_keeps_the_newest_and_what_it_is_told_to(url, tmp_path):
    store = here(tmp_path, "a", url)
    for step in (1, 2, 3, 10):
        save(store, step)
    store.rotate(2, keep=[store.path(1)])
    assert Remote(url).whole() == ["checkpoint-1", "checkpoint-10"]
    assert [path.name for path in store.checkpoints()] == ["checkpoint-1", "checkpoint-10"]


# ---- the run ----


@pytest.mark.parametrize("later", [False, True])
def test_a_run_goes_on_from_there_on_another_machine_to_the_same_bits(later, url, tmp_path):
    changes = ARGS | dict(save_async=later, save_total_limit=2, load_best_model_at_end=True, eval_steps=1)
    straight = MAKE(tmp_path / "straight", **changes)
    straight.train()
    from tests.contract.test_resume import PowerCut, Stop

    first = MAKE(url, callbacks=[Stop(5, cut)], **changes)
    assert first.args.remote_dir == url and first.args.output_dir == remote.working_folder(url)
    with pytest.raises(PowerCut):
        first.train()
    shutil.rmtree(tmp_path / "trainer_output")
    assert "checkpoint-4" in Remote(url).whole()
    resumed = MAKE(url, **changes)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, straight)
    there = Remote(url)
    assert there.fs.exists(f"{there.root}/log.jsonl") and len(there.whole()) == 2
    resumed.save_model()
    assert there.fs.exists(f"{there.root}/model.safetensors")


def test_a_url_is_known_from_a_folder_and_two_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = TrainingArguments("s3://bucket/runs/one")
    assert (args.remote_dir, args.output_dir) == ("s3://bucket/runs/one", "trainer_output/s3-bucket-runs-one")
    args.validate()
    assert args.output_dir == "trainer_output/s3-bucket-runs-one"
    assert TrainingArguments("out", remote_dir="gs://b/x").output_dir == "out"
    with pytest.raises(ConfigError, match="remote_dir='out' is no url"):
        TrainingArguments(remote_dir="out")
    with pytest.raises(ConfigError, match="two urls"):
        TrainingArguments("s3://a/b", remote_dir="s3://a/c")


def test_a_kind_of_url_without_its_package_says_which():
    with pytest.raises((ImportError, ValueError), match="rotocol"):
        Remote("nosuch://a/b")
