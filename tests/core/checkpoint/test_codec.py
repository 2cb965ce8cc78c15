"""`save_tree` and `load_tree`: what goes in comes out, bit for bit, and nothing in a file is ever executed."""

import collections
import json
import math
import os
import pickle
import struct

import numpy as np
import pytest
import torch

from posttrain.core.checkpoint.codec import load_tree, save_tree
from posttrain.core.config import Choice
from posttrain.core.errors import CheckpointError
from tests import programs

ODD_NAN = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]


def bits(value):
    """Something that two values share only if they have the same type, shape and bytes."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return ("tensor", value.dtype, tuple(value.shape), bytes(raw.tolist()))
    if isinstance(value, np.ndarray):
        return ("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return (type(value), value.dtype.str, value.tobytes())
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, dict):
        return (type(value), [(bits(key), bits(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple)):
        return (type(value), [bits(item) for item in value])
    return (type(value), value)


PLAIN = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**63, -(2**200)],
    "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308],
    "not finite": [math.nan, math.inf, -math.inf, ODD_NAN],
    "strings": ["", "añ🙂", '"\\\n\0', "\ud800"],
    "bytes": [b"", bytes(range(256))],
    "tuples": [(), (1,), ((1, [2]), {"a": (3,)})],
    "keys": {0: "int", "0": "str", 1.5: "float", None: 1, True: 2, (1, "a"): 3, b"x": 4, math.inf: 5},
    "reserved": {"$tensor": "not a tensor", "$tuple": [1]},
    "empty": [{}, [], {"a": {}}],
    "dtypes": [torch.bfloat16, torch.float32, torch.bool],
    "counter": collections.Counter({30: 1, 80: 2}),
}


@pytest.mark.parametrize("tree", PLAIN.values(), ids=PLAIN)
def test_plain_values_come_back_bit_for_bit(tree, tmp_path):
    save_tree(tree, tmp_path / "state")
    assert bits(load_tree(tmp_path / "state")) == bits(tree)
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


DTYPES = [dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)]
DENSE = sorted(
    {d for d in DTYPES if not str(d).startswith(("torch.q", "torch.bits", "torch.int", "torch.uint"))}, key=str
)
DENSE += [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_tensors_of_every_dtype_come_back_bit_for_bit(dtype, mmap, tmp_path):
    # Three bytes in front make the next tensor start at an odd place if nothing takes care of alignment.
    raw = torch.arange(7 * dtype.itemsize, dtype=torch.uint8)
    tensor = raw.view(torch.uint8).clone().view(dtype) if dtype is not torch.bool else raw % 2 == 0
    tree = {
        "a": torch.zeros(3, dtype=torch.uint8),
        "b": tensor,
        "scalar": tensor[2].clone(),
        "none": tensor[:0].view(0, 4),
    }
    save_tree(tree, tmp_path / "state")
    loaded = load_tree(tmp_path / "state", mmap=mmap)
    assert bits(loaded) == bits(tree)
    assert loaded["b"].data_ptr() % dtype.itemsize == 0  # some processors and kernels cannot read it elsewhere


def test_tensors_in_every_layout_come_back_with_their_values(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tree = [base.T, base[::2, 1:5:3], base[0, 0], torch.ones(1).expand(5), torch.complex(base, -base).conj()]
    tree += [torch.nn.Parameter(base[1]), torch.complex(base, base).conj().imag, torch.complex(base, base).T]
    tree += [base.T, base.reshape(2, 3, 4).permute(2, 0, 1), base[None].T]
    save_tree(tree, tmp_path / "state")
    for saved, loaded in zip(tree, load_tree(tmp_path / "state"), strict=True):
        assert type(loaded) is torch.Tensor
        assert bits(loaded) == bits(saved.detach().resolve_conj().resolve_neg())
        assert loaded.stride() == saved.clone(memory_format=torch.preserve_format).stride()


def test_tensors_that_are_one_are_saved_once_and_are_one_again(tmp_path):
    tied = torch.randn(1000)
    half = tied[:500]
    save_tree({"embed": tied, "head": tied.view(1000), "half": half}, tmp_path / "state")
    loaded = load_tree(tmp_path / "state")
    assert (tmp_path / "state.safetensors").stat().st_size < 1500 * 4 + 500
    assert loaded["embed"] is loaded["head"]
    assert torch.equal(loaded["half"], half)


ARRAYS = {
    "float64": np.linspace(0, 1, 5),
    "big endian": np.arange(6, dtype=">i4").reshape(2, 3),
    "fortran order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(10)[::3],
    "zero dimensions": np.array(3, dtype=np.uint16),
    "empty": np.zeros((0, 2), dtype=np.complex128),
    "strings": np.array(["a", "bcd"]),
    "times": np.array(["2024-01-01", "NaT"], dtype="datetime64[ns]"),
    "bools": np.array([True, False]),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays_come_back_bit_for_bit_and_writable(array, tmp_path):
    save_tree((array,), tmp_path / "state")
    (loaded,) = load_tree(tmp_path / "state")
    assert bits(loaded) == bits(array) and loaded.flags.writeable


@pytest.mark.parametrize(
    "scalar",
    [np.float32(0.1), np.float64("nan"), np.int64(-3), np.bool_(True), np.complex64(1 - 2j), np.float16("inf")],
)
def test_numpy_scalars_keep_their_type(scalar, tmp_path):
    save_tree([scalar], tmp_path / "state")
    assert bits(load_tree(tmp_path / "state")[0]) == bits(scalar)


def test_subclasses_of_plain_values_come_back_plain(tmp_path):
    import enum

    tree = [Choice("steps"), np.str_("x"), enum.IntEnum("E", "A").A, collections.OrderedDict(a=1)]
    save_tree(tree, tmp_path / "state")
    loaded = load_tree(tmp_path / "state")
    assert loaded == ["steps", "x", 1, {"a": 1}]
    assert [type(item) for item in loaded] == [str, str, int, dict]


def test_the_state_of_an_optimizer_and_its_schedulers_goes_round(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tree = {"optimizer": optimizer.state_dict(), "schedulers": [s.state_dict() for s in schedulers]}
    save_tree(tree, tmp_path / "state")
    loaded = load_tree(tmp_path / "state")
    assert bits(loaded) == bits(tree)
    torch.optim.AdamW(model.parameters()).load_state_dict(loaded["optimizer"])
    for scheduler, state in zip(schedulers, loaded["schedulers"], strict=True):
        scheduler.load_state_dict(state)


def test_writing_to_a_mapped_tensor_leaves_the_file_alone(tmp_path):
    save_tree({"w": torch.zeros(4096)}, tmp_path / "state")
    load_tree(tmp_path / "state")["w"].fill_(1)
    assert load_tree(tmp_path / "state")["w"].sum() == 0


@pytest.mark.parametrize("mmap", [True, False])
def test_a_tensor_outlives_the_file_it_came_from(mmap, tmp_path):
    save_tree({"w": torch.arange(5000)}, tmp_path / "state")
    loaded = load_tree(tmp_path / "state", mmap=mmap)
    (tmp_path / "state.safetensors").unlink()
    assert torch.equal(loaded["w"], torch.arange(5000))


def test_saving_again_without_tensors_leaves_no_old_ones(tmp_path):
    save_tree({"w": torch.zeros(2)}, tmp_path / "state")
    save_tree({"w": 1}, tmp_path / "state")
    assert load_tree(tmp_path / "state") == {"w": 1}
    assert not (tmp_path / "state.safetensors").exists()


def test_the_json_is_strict_and_the_tensors_are_read_by_safetensors(tmp_path):
    from safetensors.torch import load_file

    save_tree({"lr": math.nan, "__metadata__": torch.ones(2), 0: {"m": torch.zeros(1)}}, tmp_path / "state.v2")

    def refuse(constant):
        raise AssertionError(constant)

    json.loads((tmp_path / "state.v2.json").read_text(), parse_constant=refuse)
    assert set(load_file(tmp_path / "state.v2.safetensors")) == {"__metadata__#2", "0.m"}
    assert load_tree(tmp_path / "state.v2")[0]["m"].tolist() == [0.0]


class Other:
    pass


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Other(), "test_codec.Other"),
        (len, "builtin_function_or_method"),
        ({1, 2}, "builtins.set"),
        (collections.defaultdict(list), "defaultdict"),
        (np.array([object()]), "dtype object"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_saved_is_named_by_its_place(bad, why, tmp_path):
    with pytest.raises(TypeError) as error:
        save_tree({"state": [{0: (1, bad)}]}, tmp_path / "state")
    assert "tree['state'][0][0][1] is " in str(error.value) and why in str(error.value)


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('a pickle was run')",))


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("writer", ["pickle", "torch.save"])
def test_a_pickle_in_place_of_a_file_is_refused_and_not_run(suffix, writer, tmp_path):
    save_tree({"w": torch.zeros(2)}, tmp_path / "state")
    victim = tmp_path / f"state{suffix}"
    if writer == "pickle":
        victim.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save(Bomb(), victim)
    with pytest.raises(CheckpointError, match=f"state{suffix} is damaged"):
        load_tree(tmp_path / "state")


@pytest.mark.long
def test_nothing_is_unpickled():
    script = (
        "import pickle, torch, pathlib, tempfile, safetensors.torch\n"
        "from posttrain.core.checkpoint.codec import load_tree, save_tree\n"
        "def refuse(*args, **kwargs): raise AssertionError('unpickled')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = torch.load = refuse\n"
        "stem = pathlib.Path(tempfile.mkdtemp()) / 's'\n"
        "save_tree({'a': torch.ones(2), 1: b'x'}, stem)\n"
        "assert load_tree(stem)['a'].sum() == 2\n"
    )
    programs.run(["-c", script], check=True)


def _document(tree):
    return json.dumps({"format": "posttrain-tree", "version": 1, "tree": tree}).encode()


DAMAGED = {
    "empty": b"",
    "cut": _document({"a": [1, 2]})[:-3],
    "not utf-8": b"\xff\xfe",
    "a list": b"[]",
    "foreign": b'{"format": "other", "version": 1, "tree": 0}',
    "a later version": b'{"format": "posttrain-tree", "version": 99, "tree": 0}',
    "NaN": b'{"format": "posttrain-tree", "version": 1, "tree": NaN}',
    "an unknown kind": _document({"$pickle": "gASVAA=="}),
    "a wrong dtype": _document({"$dtype": "load"}),
    "an object dtype": _document({"$scalar": "00" * 8, "dtype": "|O"}),
    "a list as a key": _document({"$dict": [[[1], 2]]}),
    "a lost tensor": _document({"$tensor": "nowhere"}),
    "a wrong shape": _document({"$tensor": "w", "dtype": "complex128", "shape": [9]}),
    "nested too deep": b'{"format": "posttrain-tree", "version": 1, "tree": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_json_is_a_checkpoint_error_that_names_the_file(content, tmp_path):
    save_tree({"w": torch.zeros(16, dtype=torch.uint8)}, tmp_path / "state")
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="state.(json|safetensors)"):
        load_tree(tmp_path / "state")


@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("keep", [0, 7, 40, -1], ids=["empty", "no header", "cut header", "cut data"])
def test_a_cut_tensor_file_is_a_checkpoint_error_that_names_the_file(keep, mmap, tmp_path):
    save_tree({"w": torch.zeros(16)}, tmp_path / "state")
    path = tmp_path / "state.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="state.safetensors is damaged"):
        load_tree(tmp_path / "state", mmap)


def test_files_are_read_without_threads_where_the_system_has_no_preadv(tmp_path, monkeypatch):
    tree = {"w": torch.arange(5.0), "b": torch.tensor(True)}
    save_tree(tree, tmp_path / "state")
    monkeypatch.delattr(os, "preadv")
    assert bits(load_tree(tmp_path / "state", mmap=False)) == bits(tree)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_missing_file_is_a_checkpoint_error_that_names_it(suffix, tmp_path):
    save_tree({"w": torch.zeros(16)}, tmp_path / "state")
    (tmp_path / f"state{suffix}").unlink()
    with pytest.raises(CheckpointError, match=f"state{suffix} is missing"):
        load_tree(tmp_path / "state")
