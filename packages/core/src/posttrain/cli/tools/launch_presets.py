"""What ``--accelerate_config NAME`` stands for: the kinds of runs that need no file.

The number of processes is not part of them: there is one for each GPU, unless a flag says otherwise.
"""

from __future__ import annotations

from typing import Any

_FSDP = {
    "fsdp_activation_checkpointing": False, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False, "fsdp_state_dict_type": "FULL_STATE_DICT",
}  # fmt: skip
_FSDP1 = {
    "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": True, "fsdp_reshard_after_forward": "FULL_SHARD",
    "fsdp_sync_module_states": True, "fsdp_use_orig_params": True, "fsdp_version": 1,
}  # fmt: skip
_ZERO = {"deepspeed_multinode_launcher": "standard", "zero3_init_flag": False}
_STAYS = {"offload_optimizer_device": "none", "offload_param_device": "none"}


def _run(kind: str, **options: Any) -> dict[str, Any]:
    return {"distributed_type": kind, "mixed_precision": "bf16", **options}


PRESETS: dict[str, dict[str, Any]] = {
    "single_gpu": _run("NO", gpu_ids="all", num_processes=1),
    "multi_gpu": _run("MULTI_GPU", gpu_ids="all"),
    "fsdp1": _run("FSDP", fsdp_config=_FSDP | _FSDP1),
    "fsdp2": _run("FSDP", fsdp_config=_FSDP | {"fsdp_reshard_after_forward": True, "fsdp_version": 2}),
    "zero1": _run("DEEPSPEED", deepspeed_config=_ZERO | {"gradient_accumulation_steps": 1, "zero_stage": 1}),
    "zero2": _run("DEEPSPEED", deepspeed_config=_ZERO | _STAYS | {"zero_stage": 2}),
    "zero3": _run("DEEPSPEED", deepspeed_config=_ZERO | _STAYS | {
        "zero3_init_flag": True, "zero3_save_16bit_model": True, "zero_stage": 3,
    }),
}  # fmt: skip
