"""Saves and loads a model's weights in the format of ``from_pretrained``, including shards and adapters."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from posttrain.core.checkpoint import codec, sharded
from posttrain.core.errors import CheckpointError
from posttrain.core.models import wrapping

logger = logging.getLogger(__name__)

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # of weights in several files
ENCODER = "prompt_encoder.safetensors"
PARTS = "weights"  # the tree of weights that every process writes its part of
REFERENCE = "reference"  # the adapter that is a reference policy
_REFERENCES = (REFERENCE, "ref")  # the second is trl's
#: Fields of an adapter's config that say where it came from, and nothing of what it computes.
_OF_ADAPTERS_BEGINNING = {"base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "task_type"}
_OF_ADAPTERS_BEGINNING |= {"peft_version", "init_lora_weights", "init_weights", "parent_library"}
_Write = Callable[..., None]  # of tensors, a path and metadata
_save_file = safetensors.torch.save_file  # as it is where `write_file` is not in its place


def save_weights(
    model: nn.Module,
    directory: str | Path,
    state_dict: dict[str, torch.Tensor] | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Write `model` (not wrapped) into `directory`: with its config where it has one, the adapters alone of a PEFT
    model.

    Args:
        state_dict: the weights to write, if they were gathered or picked; None: the model's own.
        max_shard_size: the largest file, in bytes or such as "5GB"; None: as transformers sets. Adapters, and modules
            without ``save_pretrained``, are one file.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if wrapping.is_pretrained(model):
        return _save_pretrained(model, directory, state_dict, max_shard_size, write_file)
    about = {"format": "pt", "class": type(model).__name__}
    if state_dict is not None:
        codec.write_tensors(state_dict, directory / WEIGHTS, about)
    else:
        with wrapping.replaced(safetensors.torch, "save_file", write_file):
            safetensors.torch.save_model(model, str(directory / WEIGHTS), metadata=about)


def _save_pretrained(model: Any, directory: Path, state_dict: Any, max_shard_size: Any, write: _Write) -> None:
    given: dict[str, Any] = {} if state_dict is None else {"state_dict": state_dict}
    if max_shard_size is not None and not wrapping.adapters_of(model):
        given["max_shard_size"] = max_shard_size
    # One function of theirs both chooses the names of the files and writes them. transformers saves on rank 0 alone,
    # and peft writes a model card: its template has no facts, and would change the metadata of ours.
    modeling = sys.modules.get("transformers.modeling_utils")
    patches: list[tuple[Any, str, Any]] = [(safetensors.torch, "save_file", write), (modeling, "safe_save_file", write)]
    patches += [(model, "should_save_on_this_rank", bool), (model, "create_or_update_model_card", lambda folder: None)]
    with quiet(), wrapping.plain_classes(model), contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            if hasattr(owner, name):
                stack.enter_context(wrapping.replaced(owner, name, value))
        model.save_pretrained(str(directory), **given)


def files(
    model: Any,
    directory: str | Path | None,
    state_dict: dict[str, torch.Tensor],
    max_shard_size: int | str | None = None,
) -> list[dict[str, torch.Tensor]]:
    """The tensors of each file that transformers would write of `state_dict`, a part of `model`'s, for `write_file`.
    Config and code of the model are written into `directory`; None: nowhere.
    """
    found: list[dict[str, torch.Tensor]] = []
    with tempfile.TemporaryDirectory() as nowhere:
        folder = Path(nowhere if directory is None else directory)
        _save_pretrained(model, folder, state_dict, max_shard_size, lambda tensors, *_, **__: found.append(tensors))
    return found


def write_file(tensors: dict[str, torch.Tensor], path: str | Path, metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` as one safetensors file: by the codec, which hashes it and can write later, if it has their
    types.
    """
    if all(tensor.dtype in codec.NATIVE for tensor in tensors.values()):
        codec.write_tensors(tensors, path, metadata)
    else:
        Path(path).touch()  # with the permissions that others' files have: safetensors 0.8 lets its user alone read
        mode = Path(path).stat().st_mode
        _save_file(tensors, path, metadata)
        Path(path).chmod(mode)


def save_description(model: nn.Module, directory: str | Path) -> None:
    """Write the files that ``from_pretrained`` needs in addition to the weights."""
    if (config := wrapping.config_of(model)) is not None:
        config.architectures = [wrapping.plain_class(model).__name__]
        config.save_pretrained(str(directory))
    if (generation := wrapping.generation_config(model)) is not None:
        generation.save_pretrained(str(directory))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Disables transformers' progress bar and its table of mismatches, which we report in a sentence."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


def load_weights(model: nn.Module, directory: str | Path) -> None:
    """Copy the weights in `directory` into `model` (not wrapped), in place. Raises a `CheckpointError` where there are
    none, or where they are those of another model; the message names the tensors.
    """
    directory = Path(directory)
    if wrapping.adapters_of(model):
        return _load_adapters(model, directory)
    in_parts = sharded.processes(directory, PARTS) > 0
    tensors = sharded.load(directory, PARTS) if in_parts else read_tensors(directory)
    own = model.state_dict()
    kind: Any = wrapping.plain_class(model)
    misfits = [name for name in tensors if name in own and tensors[name].shape != own[name].shape]
    if kind.load_state_dict is not nn.Module.load_state_dict and not wrapping.is_pretrained(model):
        misfits = []  # a module with its own loading may resize first
    missing = _really_missing(model, [name for name in own if name not in tensors], tensors)
    unexpected = [name for name in tensors if name not in own]
    if (misfits or missing or unexpected) and wrapping.is_pretrained(model) and not in_parts:
        # transformers renames the tensors of some architectures when it saves: it alone can read them back.
        same = {"config": copy.deepcopy(model.config), "dtype": next(model.parameters()).dtype}
        with quiet(), contextlib.suppress(RuntimeError, ValueError):  # a shape mismatch: reported below
            twin, loaded = kind.from_pretrained(str(directory), **same, output_loading_info=True)
            tensors = twin.state_dict()
            misfits, missing, unexpected = (
                sorted(map(str, loaded[f"{kind}_keys"])) for kind in ("mismatched", "missing", "unexpected")
            )
    _refuse(f"this {kind.__name__}", directory, misfits, missing, unexpected)
    model.load_state_dict(sharded.fitted_to(tensors, own), strict=False)
    remedy = "Load the model with the rope_parameters of that run to go on with it."
    if wrapping.is_of_transformers(model) and (file := directory / "config.json").is_file():
        now = wrapping.config_of(model)
        then = type(now).from_dict(codec.read_json(file))  # the file holds no defaults of parts
        _tell_other_config(f"The {kind.__name__}", file, _angles(then.to_dict()), _angles(now.to_dict()), remedy)


def _angles(config: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The ``rope_parameters`` in `config` and in those of its parts, by their path."""
    parts = [(f"{path}{name}", part) for name, part in config.items() if isinstance(part, dict)]
    own = {name: part for name, part in parts if name.endswith("rope_parameters")}
    return own | {name: of for at, part in parts if at not in own for name, of in _angles(part, f"{at}.").items()}


def _refuse(whose: str, where: Path, misfits: list[str], missing: list[str], unexpected: list[str]) -> None:
    found = {"of another shape": misfits, "missing": missing, "not in the model": unexpected}
    faults = [f"{what} {names[:5]} ({len(names)} in all)" for what, names in found.items() if names]
    if faults:
        raise CheckpointError(
            f"The weights in {where} are not those of {whose}: {'; '.join(faults)}. Make the model as it was when "
            "they were saved, or name another checkpoint."
        )


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the weights in `directory`, mapped from disk rather than read."""
    if (directory / WEIGHTS).is_file():
        return codec.read_tensors(directory / WEIGHTS)
    index = directory / INDEX
    if not index.is_file():
        adapter = ""
        if (directory / ADAPTER).is_file():
            adapter = " It holds an adapter, of a run with peft_config: pass that peft_config to resume it."
        raise CheckpointError(f"There are no weights in {directory}: neither {WEIGHTS} nor {INDEX} is there.{adapter}")
    tensors: dict[str, torch.Tensor] = {}
    for name in files_of_index(index):
        tensors |= codec.read_tensors(directory / name)
    return tensors


def files_of_index(index: Path) -> list[str]:
    """The files in an index of shards. Raises a `CheckpointError` where it is damaged, or names a file in another
    folder.
    """
    document = codec.read_json(index)
    names = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{index} is damaged: it has no weight_map of tensors and files.")
    files = sorted(set(names.values()))
    for name in files:
        if name in ("", ".", "..") or re.search(r"[/\\:]", name):
            raise CheckpointError(f"{index} names {name!r}, which is not a file in its own folder; it is not read.")
    return files


def check_files(folder: str | Path) -> None:
    """Reject a model folder whose index names files outside of it or missing ones, or with a damaged file, before
    anything is loaded: raises a `CheckpointError`, as `files_of_index` and `codec.check_tensors`.
    """
    for index in sorted(Path(folder).glob("*.index*.json")):
        absent = [name for name in files_of_index(index) if not (index.parent / name).exists()]
        if absent and index.name == INDEX and not (index.parent / WEIGHTS).exists():  # an index that is read
            raise CheckpointError(f"{index} names {', '.join(absent)}, which the folder lacks. Copy the model again.")
    for file in sorted(Path(folder).glob("*.safetensors")):
        codec.check_tensors(file)


def _load_adapters(model: nn.Module, directory: Path) -> None:
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

    for adapter, config in wrapping.adapters_of(model).items():
        if (file := _file_of_adapter(directory, adapter)) is None:
            if adapter in _REFERENCES:  # it stays as the run began
                continue
            whole = ""
            if any((directory / name).is_file() for name in (WEIGHTS, INDEX)):
                whole = (
                    " It holds a whole model, of a run without peft_config: leave peft_config out to resume it, or "
                    f"load the model from {directory} and begin a new run."
                )
            raise CheckpointError(f"There is no adapter {adapter!r} in {directory}: {ADAPTER} is missing.{whole}")
        now = {name: value for name, value in config.to_dict().items() if name not in _OF_ADAPTERS_BEGINNING}
        remedy = "Pass the peft_config of that run to go on with it."
        if (settings := file.parent / "adapter_config.json").is_file():
            _tell_other_config(f"The adapter {adapter!r}", settings, codec.read_json(settings), now, remedy)
        tensors = codec.read_tensors(file)
        own = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
        misfits = [name for name in own if name in tensors and own[name].shape != tensors[name].shape]
        _refuse(f"the adapter {adapter!r}", file, misfits, [name for name in own if name not in tensors], [])
        if (file.parent / ENCODER).is_file():
            trained = codec.read_tensors(file.parent / ENCODER)
            model.load_state_dict(sharded.fitted_to(trained, model.state_dict()), strict=False)
            continue
        outcome = set_peft_model_state_dict(model, sharded.fitted_to(tensors, own), adapter_name=adapter)
        unknown = getattr(outcome, "unexpected_keys", None) or ()  # peft counts the virtual tokens that it has just set
        _refuse(f"the adapter {adapter!r}", file, [], [], [name for name in unknown if name not in own])


def _tell_other_config(what: str, path: Path, then: dict[str, Any], now: dict[str, Any], remedy: str) -> None:
    """Warn where the config of `what` is `now`, and was `then` in `path`: with the same weights it is another model."""
    then, now = (
        {name: sorted(value, key=repr) if isinstance(value, list) else value for name, value in config.items()}
        for config in (json.loads(json.dumps(each, default=list)) for each in (then, now))
    )
    if changed := [name for name in now if name in then and then[name] != now[name]]:
        listed = "; ".join(f"{name}: {then[name]!r} -> {now[name]!r}" for name in changed)
        logger.warning(
            f"{what} in {path.parent} was trained with another config ({listed}), so this is not the model that was "
            f"saved. {remedy}"
        )


def _file_of_adapter(directory: Path, adapter: str) -> Path | None:
    # peft writes the adapter "default" into the folder itself and every other into a subfolder.
    folders = [directory / name for name in (_REFERENCES if adapter in _REFERENCES else (adapter, ""))]
    return next((folder / ADAPTER for folder in folders if (folder / ADAPTER).is_file()), None)


def _trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def has_encoder(model: nn.Module) -> bool:
    """Whether a trained network produces the virtual tokens of `model`, as in p-tuning and projected prefixes. The
    adapter file holds only the tokens, from which training cannot resume.
    """
    return any(n.startswith("prompt_encoder.") and not n.endswith(".embedding.weight") for n in _trained(model))


def save_encoder(model: nn.Module, directory: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
    """Write the state that a run with `has_encoder` needs to resume, next to the adapter; `state_dict` holds the
    gathered weights, if `model` is sharded.
    """
    state_dict = model.state_dict() if state_dict is None else state_dict
    codec.write_tensors({name: state_dict[name] for name in _trained(model)}, Path(directory) / ENCODER)


def _really_missing(model: nn.Module, missing: list[str], loaded: dict[str, torch.Tensor]) -> list[str]:
    """Of the keys that were not in the file, those that no tied, loaded tensor fills, and that are saved at all."""
    state = model.state_dict()
    filled = {wrapping.local_part(state[name]).data_ptr() for name in loaded if name in state}
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return [n for n in missing if wrapping.local_part(state[n]).data_ptr() not in filled and n not in ignored]


def is_saved(model: nn.Module) -> Callable[[str], bool]:
    """Which entries of the state dict `save_weights` may write: those of the adapters alone of a PEFT model."""
    adapters = tuple(wrapping.adapters_of(model))
    if not adapters:
        return lambda name: True
    trained, ends = set(_trained(model)), (wrapping.input_embedding(model), wrapping.output_embedding(model))
    embeddings = {name for name, module in model.named_modules() if any(module is end for end in ends)}
    return lambda name: (
        name in trained or bool(set(adapters) & set(name.split("."))) or name.rpartition(".")[0] in embeddings
    )


def check_adapters(model: nn.Module, directory: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
    """Read the adapters in `directory` back and compare all values with those of `model`, or with its gathered weights
    (`state_dict`). Raises a `CheckpointError` where a tensor is missing, has another shape, or other values.
    """
    from peft.utils import get_peft_model_state_dict

    trained = set(_trained(model))
    # Without values: of split matrices peft would gather them, and this process is here alone.
    empty = {name: torch.empty(()).expand(tensor.shape) for name, tensor in model.state_dict().items()}
    for adapter in wrapping.adapters_of(model):
        if (file := _file_of_adapter(Path(directory), adapter)) is None:
            raise CheckpointError(f"The adapter {adapter!r} was not written into {directory}.")
        saved = codec.read_tensors(file)
        own = get_peft_model_state_dict(model, state_dict=state_dict, adapter_name=adapter, save_embedding_layers=False)
        described = get_peft_model_state_dict(model, empty, adapter_name=adapter, save_embedding_layers=False)
        written = {id(tensor) for tensor in described.values()}
        trained -= {name for name in trained if name in saved or id(empty.get(name)) in written}
        shapes = {name: tensor.shape for name, tensor in described.items()}
        wrong = [
            name
            for name, tensor in own.items()
            if name not in saved
            or saved[name].shape != shapes.get(name, tensor.shape)
            or not torch.equal(saved[name], tensor.detach().to(device="cpu", dtype=saved[name].dtype))
        ]
        if wrong or not own:
            raise CheckpointError(
                f"{file} does not hold what the adapter {adapter!r} holds in memory: {wrong[:5]} ({len(wrong)} in all)."
            )
    if lost := [] if wrapping.has_virtual_tokens(model) else sorted(trained):
        raise CheckpointError(
            f"{directory} lacks what is trained outside of the adapter: {lost[:5]} ({len(lost)} in all). peft writes "
            "the adapter alone: freeze these, or name their modules in modules_to_save of its config."
        )
