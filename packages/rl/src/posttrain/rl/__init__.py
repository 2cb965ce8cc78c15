"""Preference training, reward models, and online reinforcement learning of language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.rl.cpo import CPOConfig, CPOTrainer
    from posttrain.rl.distillation import DistillationConfig, DistillationTrainer
    from posttrain.rl.dpo import DPOConfig, DPOTrainer
    from posttrain.rl.gkd import GKDConfig, GKDTrainer
    from posttrain.rl.grpo import GRPOConfig, GRPOTrainer
    from posttrain.rl.kto import KTOConfig, KTOTrainer
    from posttrain.rl.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
    from posttrain.rl.orpo import ORPOConfig, ORPOTrainer
    from posttrain.rl.reference import SyncRefModelCallback, create_reference_model
    from posttrain.rl.reinforce import ReinforcePlusPlusConfig, ReinforcePlusPlusTrainer
    from posttrain.rl.response_templates import add_response_schema, supports_tool_calling
    from posttrain.rl.reward_functions import (
        accuracy_reward,
        get_cosine_scaled_reward,
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
        reasoning_accuracy_reward,
        think_format_reward,
    )
    from posttrain.rl.reward_model import RewardConfig, RewardTrainer
    from posttrain.rl.rloo import RLOOConfig, RLOOTrainer
    from posttrain.rl.row_formats import (
        extract_prompt,
        maybe_extract_prompt,
        maybe_unpair_preference_dataset,
        unpair_preference_dataset,
    )
    from posttrain.rl.tool_protocol import parse_response
    from posttrain.rl.tpo import TPOConfig, TPOTrainer

_HOMES = {
    "cpo": ("CPOConfig", "CPOTrainer"),
    "distillation": ("DistillationConfig", "DistillationTrainer"),
    "dpo": ("DPOConfig", "DPOTrainer"),
    "gkd": ("GKDConfig", "GKDTrainer"),
    "grpo": ("GRPOConfig", "GRPOTrainer"),
    "kto": ("KTOConfig", "KTOTrainer"),
    "online_dpo": ("OnlineDPOConfig", "OnlineDPOTrainer"),
    "orpo": ("ORPOConfig", "ORPOTrainer"),
    "reference": ("SyncRefModelCallback", "create_reference_model"),
    "reinforce": ("ReinforcePlusPlusConfig", "ReinforcePlusPlusTrainer"),
    "response_templates": ("add_response_schema", "supports_tool_calling"),
    "reward_functions": (
        "accuracy_reward",
        "get_cosine_scaled_reward",
        "get_repetition_penalty_reward",
        "get_soft_overlong_punishment",
        "reasoning_accuracy_reward",
        "think_format_reward",
    ),
    "reward_model": ("RewardConfig", "RewardTrainer"),
    "rloo": ("RLOOConfig", "RLOOTrainer"),
    "row_formats": (
        "extract_prompt",
        "maybe_extract_prompt",
        "maybe_unpair_preference_dataset",
        "unpair_preference_dataset",
    ),
    "tool_protocol": ("parse_response",),
    "tpo": ("TPOConfig", "TPOTrainer"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        if name.startswith("__"):
            raise AttributeError(f"module 'posttrain.rl' has no attribute {name!r}")
        from posttrain.core.tools.absent_names import missing_name

        raise missing_name("posttrain.rl", name, __all__)
    return getattr(importlib.import_module(f"posttrain.rl.{_HOME_OF[name]}"), name)
