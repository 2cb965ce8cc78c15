"""``posttrain merge``: an adapter becomes a model of its own."""

from __future__ import annotations

from posttrain.core.errors import CheckpointError, ConfigError, did_you_mean

HELP = """posttrain merge ADAPTER FOLDER [--base MODEL] [--dtype TYPE] [--tolerance SHARE] [--trust_remote_code]

Add an adapter (LoRA and kin) into the weights it was trained on, and write the model with its tokenizer into FOLDER, as
from_pretrained reads it. An adapter trained on 4 or 8 bits is added to the weights that these were made of. The logits of the
merged model are compared with those of base and adapter, and a merge that loses too much is refused.

  --base MODEL         folder or name of the weights; by default those that the adapter names
  --dtype TYPE         of the merged weights: float32, bfloat16 or float16; by default that of the base
  --tolerance SHARE    how much of what the adapter changes may be lost [default 0.1]
  --trust_remote_code  run code that comes with the model
"""


def run(words: list[str]) -> None:
    """The command.

    Raises:
        ConfigError: the words are not those of `HELP`. CheckpointError: the adapter cannot be merged.
    """
    from posttrain.core.cli import parse

    if {"-h", "--help"} & set(words):
        print(HELP.rstrip())
        return
    problems: list[str] = []
    folders, flags = parse.read_flags(words)
    kinds = {"base": str, "dtype": str, "tolerance": float, "trust_remote_code": bool}
    given = {}
    for name, setting in flags.items():
        if name not in kinds:
            problems.append(f"unknown flag --{name}{did_you_mean(name, kinds)}")
            continue
        try:
            given[name] = parse.convert(setting.value, (kinds[name],))
        except ValueError as error:
            problems.append(f"--{name} {error}")
    if len(folders) != 2:
        problems.append("it takes the folder of the adapter and the folder to write: ADAPTER FOLDER, before any flag")
    if given.get("dtype", "float32") not in ("float32", "bfloat16", "float16"):
        problems.append(f"--dtype={given['dtype']} is not one of float32, bfloat16, float16")
    if not given.get("tolerance", 0.0) >= 0:
        problems.append(f"--tolerance={given['tolerance']} must be >= 0")
    if problems:
        raise ConfigError("merge", problems)
    from posttrain.core.models.merging import merge

    try:
        print(merge(folders[0], folders[1], **given))
    except (FileExistsError, FileNotFoundError) as error:
        raise CheckpointError(str(error)) from error
    print(f"The model is in {folders[1]}.")
