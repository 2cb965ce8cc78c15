"""The command ``posttrain serve-training``: LoRA training on one base model, for programs with the SDK ``tinker``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from posttrain.cli import parse
from posttrain.cli.tools import load
from posttrain.core.errors import CheckpointError, ConfigError, require
from posttrain.core.models.wrapping import is_peft_model

LOCAL = ("127.0.0.1", "localhost", "::1")
_, _, _FLAGS = load.FLAGS.partition("\n")  # without that of a base of adapters
HELP = f"""posttrain serve-training MODEL [--port N] [--output FOLDER] ...

Answer the training API that the SDK tinker speaks, on http://127.0.0.1:PORT: gradients, optimizer steps and samples of
LoRA models on MODEL, for one user. Programs find it by TINKER_BASE_URL, and TINKER_API_KEY may be any that begins with
tml-; where it is set here, it must be the same.

  --port N             [default 8000]
  --output FOLDER      of the checkpoints [default out/serve-training]
  --host HOST          listen at this address, for other machines; needs TINKER_API_KEY [default 127.0.0.1]
  --batch_tokens N     tokens that are read in one forward; fewer need less memory [default 4096]
{_FLAGS.replace("by default that of the checkpoint", "by default float32")}"""
KINDS = {name: kind for name, kind in load.KINDS.items() if name != "base"}
KINDS |= {"port": int, "output": str, "host": str, "batch_tokens": int}


def run(words: list[str]) -> None:
    """Serve training until Ctrl-C."""
    [name], given = parse.typed_flags("serve-training", words, KINDS, 1, what="a model: its folder or its name")
    host, port = given.pop("host", LOCAL[0]), given.pop("port", 8000)
    output, most = Path(given.pop("output", "out/serve-training")), given.pop("batch_tokens", 4096)
    key = os.environ.get("TINKER_API_KEY") or None
    if host not in LOCAL and not key:
        why = f"--host={host} lets other machines train here: set TINKER_API_KEY to a secret that begins with tml-"
        raise ConfigError("serve-training", [why])
    server: Any = require("posttrain.rl.training_server.server", "posttrain-rl[agents]", "posttrain serve-training")
    model, tokenizer = load.of_command("serve-training", name, {"dtype": "float32"} | given)
    if is_peft_model(model):
        raise CheckpointError(f"{name} is an adapter, and new ones are trained here. Merge it: posttrain merge")
    base = server.Base(model, tokenizer, name, most)
    try:
        server.TrainingServer(base, output, key, host in LOCAL).serve(host, port)
    except OSError as error:
        raise ConfigError("serve-training", [f"port {port} cannot be used ({error}); set another --port"]) from error
