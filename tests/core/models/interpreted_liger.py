"""Trains with and without Liger's kernels, which Triton's interpreter runs on the CPU; prints losses and gaps as JSON.

TRITON_INTERPRET=1 python -m tests.core.models.interpreted_liger sft dpo llama
TRITON_INTERPRET=1 torchrun --nproc_per_node 2 -m tests.core.models.interpreted_liger sft --fsdp
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any


def mend_interpreter() -> None:
    """In Triton 3.9 it gives floats and functions of CUDA's library to kernels as they are, unlike the compiler."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def with_floats(argument: Any) -> Any:
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(argument)

    interpreter._implicit_cvt = with_floats
    libdevice.rsqrt = lambda x: tl.rsqrt(x)
    libdevice.tanh = lambda x: 2 / (1 + tl.exp(-2 * x)) - 1


def run(name: str, liger: bool, folder: str, **changes: Any) -> tuple[list[float], dict[str, Any], int]:
    """(losses, trained weights, modules whose forward is Liger's) of two optimizer steps."""
    from tests import tiny
    from tests.contract.trainers import TRAINERS, causal_lm

    tiny.CORPUS[:] = [text[:40] for text in tiny.CORPUS]
    options = {"use_liger_kernel": liger, "max_steps": 2, "per_device_train_batch_size": 2, "bf16": False}
    trainer = (TRAINERS.get(name) or causal_lm(arch=name))(folder, **options, **changes)
    trainer.train()
    kernels = sum("Liger" in type(m).__name__ or "liger" in m.forward.__module__ for m in trainer.model.modules())
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    whole = trainer.dist.whole_state_dict(trainer.model)
    return losses, trainer.model.state_dict() if whole is None else whole, kernels


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("-")]
    changes = {"fsdp": "full_shard"} if "--fsdp" in sys.argv else {}
    mend_interpreter()
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            expected, before, none = run(name, False, folder, **changes)
            losses, after, kernels = run(name, True, folder, **changes)
        gaps = [float((after[key] - value).abs().max()) for key, value in before.items() if value.is_floating_point()]
        found[name] = {
            "expected": expected,
            "losses": losses,
            "gap": max(gaps, default=0.0),
            "kernels": [none, kernels],
        }
    if int(os.environ.get("RANK", 0)) == 0:
        print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
