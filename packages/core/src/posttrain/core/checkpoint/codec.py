"""Saves and loads nested state without pickle: tensors as safetensors, the rest as strict JSON.

The safetensors layout (https://huggingface.co/docs/safetensors) is written here rather than by its library, so that
tensors are copied from a device one at a time, without a second copy of the state.
"""

from __future__ import annotations

import base64
import collections
import functools
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.core.checkpoint.blocks import Source, bytes_of, write_file
from posttrain.core.errors import CheckpointError
from posttrain.core.files import lfs_pointer

FORMAT, VERSION = "posttrain-tree", 1

# The dtypes of every safetensors reader. Other dtypes are stored as bytes, with the name in the JSON.
NATIVE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_tree(tree: Any, stem: str | Path) -> None:
    """Write `tree` to ``<stem>.json`` and, if it holds tensors or arrays, ``<stem>.safetensors``. Raises a `TypeError`
    where something else is in the tree; the message names the place.

    Args:
        tree: dicts (with any scalar keys), lists and tuples, nested, of None, bool, int, float, str, bytes,
            `torch.dtype`, numpy arrays and scalars and dense tensors of any dtype on any device. Comes back bit for
            bit, on the CPU, with four simplifications: a `Parameter` is read back as a tensor, an `OrderedDict` as a
            dict, a subclass of str, bytes, int or float as the plain type, and gaps between elements are closed.
        stem: the path without a suffix.
    """
    encoder = _Encoder()
    document = {"format": FORMAT, "version": VERSION, "tree": encoder.encode(tree, "tree", ())}
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    Path(f"{stem}.json").write_text(text + "\n", encoding="ascii")
    if encoder.tensors:
        write_tensors(encoder.tensors, f"{stem}.safetensors")
    else:
        Path(f"{stem}.safetensors").unlink(missing_ok=True)


def check_tree(tree: Any, name: str) -> None:
    """Raise a `TypeError` where `save_tree` cannot write `tree`, without copying from a device; the message names the
    tree by `name`, the object and its place.
    """
    _Encoder().encode(tree, name, ())


def load_tree(stem: str | Path, mmap: bool = True) -> Any:
    """Read what `save_tree` wrote. Nothing in the files is ever executed. Raises a `CheckpointError` where a file is
    missing or is not what `save_tree` writes; the message names it.

    Args:
        stem: the path without a suffix.
        mmap: map tensors from the file instead of reading them. They are private: writing to one does not change the
            file. Keep them for copying from, since they hold the file's disk space for as long as they live.
    """
    path = Path(f"{stem}.json")
    document = read_document(path, FORMAT, VERSION, "was not written by posttrain")
    try:
        return _Decoder(Path(f"{stem}.safetensors"), mmap).decode(document["tree"])
    except CheckpointError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def read_document(path: Path, format: str, version: int, otherwise: str) -> dict[str, Any]:
    """The content of a JSON file that names its `format` and `version`. Raises a `CheckpointError` as `read_json`, and
    where they are others; `otherwise` says what is wrong with a file of another format.
    """
    document = read_json(path)
    if not isinstance(document, dict) or document.get("format") != format:
        raise CheckpointError(f"{path} {otherwise}: it does not hold the format {format!r}.")
    if document.get("version") != version:
        raise CheckpointError(
            f"{path} has version {document.get('version')!r} of its format, and this posttrain reads version "
            f"{version}. Install the posttrain that wrote it."
        )
    return document


def read_json(path: Path) -> Any:
    """The content of a JSON file; NaN and the like, which JSON does not have, are refused. Raises a `CheckpointError`
    where the file is missing or is not JSON.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(path.read_bytes().decode("utf-8"), parse_constant=refuse)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON ({error}).") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def write_tensors(tensors: dict[str, torch.Tensor], path: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Write dense `tensors` of dtypes that safetensors has as one file, fetching one at a time from its device; they
    need not be contiguous or own their memory. The header keeps `metadata`.

    While a checkpoint is saved in the background this only copies them: the file follows.
    """
    # The largest elements first: every tensor then starts at a multiple of its element size.
    names = [name for _, name in sorted((-tensor.element_size(), name) for name, tensor in tensors.items())]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"} | (metadata or {})}
    offset = 0
    for name in names:
        end = offset + tensors[name].numel() * tensors[name].element_size()
        shape, dtype = list(tensors[name].shape), NATIVE[tensors[name].dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_file(Path(path), Source(struct.pack("<Q", len(text)) + text, [tensors[name] for name in names]))


class _Encoder:
    """Converts a tree to JSON values and collects its tensors. A value that JSON lacks is an object with one key that
    starts with ``$``; a dict whose keys are not all plain strings becomes a list of pairs.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, where: str, path: tuple[Any, ...]) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            return self._tensor(value, where, path)
        if type(value) is np.ndarray or (isinstance(value, np.generic) and not isinstance(value, (np.str_, np.bytes_))):
            return self._numpy(value, where, path)
        if isinstance(value, float):  # NaN has many bit patterns
            return float(value) if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
        if isinstance(value, (str, int)):
            return str.__str__(value) if isinstance(value, str) else int(value)
        if type(value) in (list, tuple):
            items = [self.encode(item, f"{where}[{i}]", (*path, i)) for i, item in enumerate(value)]
            return items if type(value) is list else {"$tuple": items}
        if type(value) in (dict, collections.OrderedDict, collections.Counter):
            inner = [self.encode(item, f"{where}[{key!r}]", (*path, key)) for key, item in value.items()]
            is_counter = type(value) is collections.Counter  # the milestones of torch's MultiStepLR
            if not is_counter and all(type(key) is str and not key.startswith("$") for key in value):
                return dict(zip(value, inner, strict=True))
            keys = [self.encode(key, f"the key {key!r} of {where}", path) for key in value]
            return {"$counter" if is_counter else "$dict": [*zip(keys, inner, strict=True)]}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if type(value) is torch.dtype:
            return {"$dtype": str(value).removeprefix("torch.")}
        raise TypeError(
            f"{where} is of type {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: "
            "only dicts, lists, tuples, numbers, strings, bytes, numpy arrays and tensors are saved, never pickles. "
            "Return one of those from state_dict() and rebuild the object in load_state_dict()."
        )

    def _tensor(self, tensor: torch.Tensor, where: str, path: tuple[Any, ...]) -> dict[str, Any]:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "quantized" if tensor.is_quantized else "on the meta device" if tensor.is_meta else tensor.layout
            raise TypeError(f"{where} is a tensor that a checkpoint cannot hold ({kind}); make it dense first.")
        shape = tuple(tensor.shape)
        # Two identical views of the same memory are saved once and loaded as one tensor.
        flags = tensor.is_conj(), tensor.is_neg()
        view = (tensor.data_ptr(), tensor.device, tensor.dtype, shape, tensor.stride(), flags)
        native = tensor.dtype in NATIVE
        name = self._names.get(view) if tensor.numel() else None
        if name is None:
            name = self._names[view] = self._new_name(path)
            self.tensors[name] = tensor if native else bytes_of(tensor)
        described = {} if native else {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(shape)}
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)  # products are rounded by it
        if not tensor.is_contiguous() and tensor.permute(order).is_contiguous():
            described["order"] = order
        return {"$tensor": name} | described

    def _numpy(self, value: Any, where: str, path: tuple[Any, ...]) -> dict[str, Any]:
        if value.dtype.hasobject or value.dtype.fields:
            raise TypeError(f"{where} is a numpy value of dtype {value.dtype}, which a checkpoint cannot hold.")
        if isinstance(value, np.generic):
            return {"$scalar": value.tobytes().hex(), "dtype": value.dtype.str}
        name = self._new_name(path)
        self.tensors[name] = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), dtype=np.uint8))
        return {"$array": name, "dtype": value.dtype.str, "shape": list(value.shape)}

    def _new_name(self, path: tuple[Any, ...]) -> str:
        plain = ".".join(str(part) for part in path).encode("utf-8", "replace").decode() or "tensor"
        name, copies = plain, 1
        while name in self.tensors or name == "__metadata__":  # 0 and "0" are different keys, and that word is taken
            copies += 1
            name = f"{plain}#{copies}"
        return name


class _Decoder:
    def __init__(self, path: Path, mmap: bool) -> None:
        self.path, self.mmap = path, mmap
        self._others: dict[str, torch.Tensor] = {}  # those that are not read as they lie in the file

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next((key for key in value if key.startswith("$")), None)
        if tag is None:
            return {key: self.decode(item) for key, item in value.items()}
        content = value[tag]
        if tag == "$tuple":
            return tuple(self.decode(item) for item in content)
        if tag in ("$dict", "$counter"):
            pairs = {self.decode(key): self.decode(item) for key, item in content}
            return pairs if tag == "$dict" else collections.Counter(pairs)
        if tag == "$float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        if tag == "$bytes":
            return base64.b64decode(content, validate=True)
        if tag == "$dtype":
            return dtype_named(content)
        if tag == "$scalar":
            return np.frombuffer(bytes.fromhex(content), dtype=np.dtype(value["dtype"]))[0]
        if tag == "$array":
            raw = bytearray(self._tensor(content).numpy())
            return np.frombuffer(raw, dtype=np.dtype(value["dtype"])).reshape(value["shape"])
        if tag != "$tensor":
            raise ValueError(f"{tag!r} is not a kind of value")
        if "dtype" not in value and "order" not in value:
            return self._tensor(content)
        if content not in self._others:
            found = self._tensor(content)
            if "dtype" in value:  # cloned: in the file, bytes need not start where an element of this dtype may
                found = found.clone().view(dtype_named(value["dtype"])).reshape(value["shape"])
            if order := value.get("order"):
                found = found.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
            self._others[content] = found
        return self._others[content]

    @functools.cached_property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return read_tensors(self.path, self.mmap)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path} lacks the tensor {name!r}.")
        return self._tensors[name]


def read_tensors(path: str | Path, mmap: bool = True) -> dict[str, torch.Tensor]:
    """Every tensor of one safetensors file, on the CPU; see `load_tree` for `mmap`. Raises a `CheckpointError` where
    the file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not os.path.isfile(path):
        raise CheckpointError(f"{path} is missing.")
    try:
        tensors = load_file(str(path))
    except (SafetensorError, ValueError) as error:
        raise _not_safetensors(path, error) from error
    return tensors if mmap else {name: tensor.clone() for name, tensor in tensors.items()}


def check_tensors(path: str | Path) -> None:
    """Read the header of a safetensors file and nothing else. Raises a `CheckpointError` where it cannot be read, or
    does not match the file, as after a download that broke off.
    """
    from safetensors import SafetensorError, safe_open

    try:
        open(path, "rb").close()  # safetensors says of a file without permission that it does not exist
        with safe_open(str(path), "pt"):
            pass
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except SafetensorError as error:
        raise _not_safetensors(path, error) from error


def _not_safetensors(path: str | Path, error: Exception) -> CheckpointError:
    return CheckpointError(lfs_pointer(path) or f"{path} is damaged: it is not a safetensors file ({error}).")


def dtype_named(name: str) -> torch.dtype:
    """The type that torch calls `name`. Raises a ValueError where there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return dtype
