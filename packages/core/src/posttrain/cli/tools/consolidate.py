"""The command ``posttrain consolidate``, which gathers sharded weights into one model."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from posttrain.core.checkpoint import Store, codec, sharded, weights
from posttrain.core.errors import CheckpointError, ConfigError

HELP = """posttrain consolidate CHECKPOINT FOLDER

Gather the weights of a sharded checkpoint (state_dict_type=SHARDED_STATE_DICT) and write them with the tokenizer into
FOLDER, in the format of from_pretrained.
"""


def run(words: list[str]) -> None:
    """Gather the weights of a checkpoint."""
    if len(words) != 2:
        raise ConfigError("consolidate", ["it takes a checkpoint and the folder to write: CHECKPOINT FOLDER"])
    consolidate(Path(words[0]), Path(words[1]))
    print(f"The model is in {words[1]}.")


def consolidate(checkpoint: Path, folder: Path) -> None:
    """Write the model of `checkpoint` into `folder`; `CheckpointError` where it is damaged or not sharded."""
    if problems := Store(checkpoint.parent).verify(checkpoint):
        raise CheckpointError(f"{checkpoint} cannot be read: {' '.join(problems)}")
    if not sharded.processes(checkpoint, weights.PARTS):
        raise CheckpointError(f"{checkpoint} is not sharded; from_pretrained reads it directly.")
    tensors = {name: tensor.whole() for name, tensor in sharded.load(checkpoint, weights.PARTS).items()}
    folder.mkdir(parents=True, exist_ok=True)
    if (checkpoint / "config.json").is_file():
        import transformers

        config = transformers.AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)  # else it asks
        with torch.device("meta"):
            model = getattr(transformers, config.architectures[0])(config)
        weights.save_weights(model, folder, tensors)
    else:
        codec.write_tensors(tensors, folder / weights.WEIGHTS)
    ours = ("weights-", "optimizer", "scheduler", "rank-", "trainer_state", "manifest", "engine-")
    for path in checkpoint.iterdir():
        if path.is_file() and not path.name.startswith(ours) and not (folder / path.name).exists():
            shutil.copy2(path, folder / path.name)
