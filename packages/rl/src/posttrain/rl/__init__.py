"""Preference training, reward models, and online reinforcement learning of language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from posttrain.core import registry

if TYPE_CHECKING:
    from posttrain.cli.mixture import DatasetMixtureConfig, get_dataset
    from posttrain.cli.scripts import (
        ScriptArguments,
        TrlParser,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )
    from posttrain.lm.loading.arguments import ModelConfig
    from posttrain.rl.agents.agent import Agent
    from posttrain.rl.agents.command import AgentCommand
    from posttrain.rl.algorithms.a2po import A2POConfig, A2POTrainer
    from posttrain.rl.algorithms.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from posttrain.rl.algorithms.cpo import CPOConfig, CPOTrainer
    from posttrain.rl.algorithms.distillation import DistillationConfig, DistillationTrainer
    from posttrain.rl.algorithms.dpo import DPOConfig, DPOTrainer
    from posttrain.rl.algorithms.gkd import GKDConfig, GKDTrainer
    from posttrain.rl.algorithms.gmpo import GMPOConfig, GMPOTrainer
    from posttrain.rl.algorithms.gold import GOLDConfig, GOLDTrainer
    from posttrain.rl.algorithms.grpo import GRPOConfig, GRPOTrainer
    from posttrain.rl.algorithms.grpo_with_replay_buffer import (
        GRPOWithReplayBufferConfig,
        GRPOWithReplayBufferTrainer,
        ReplayBuffer,
    )
    from posttrain.rl.algorithms.iw_opd import IWOPDConfig, IWOPDTrainer
    from posttrain.rl.algorithms.kto import KTOConfig, KTOTrainer
    from posttrain.rl.algorithms.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
    from posttrain.rl.algorithms.orpo import ORPOConfig, ORPOTrainer
    from posttrain.rl.algorithms.reinforce import ReinforcePlusPlusConfig, ReinforcePlusPlusTrainer
    from posttrain.rl.algorithms.reward_model import RewardConfig, RewardTrainer
    from posttrain.rl.algorithms.rloo import RLOOConfig, RLOOTrainer
    from posttrain.rl.algorithms.sdft import SDFTConfig, SDFTTrainer
    from posttrain.rl.algorithms.sdpo import SDPOConfig, SDPOTrainer
    from posttrain.rl.algorithms.server_distillation import (
        AsyncDistillationConfig,
        AsyncDistillationTrainer,
        ServerDistillationConfig,
        ServerDistillationTrainer,
    )
    from posttrain.rl.algorithms.tpo import TPOConfig, TPOTrainer
    from posttrain.rl.losses.universal_logits import ULDLoss
    from posttrain.rl.policy.reference import BEMACallback, SyncRefModelCallback, create_reference_model
    from posttrain.rl.preference.rows import (
        extract_prompt,
        maybe_extract_prompt,
        maybe_unpair_preference_dataset,
        unpair_preference_dataset,
    )
    from posttrain.rl.rewards.functions import (
        accuracy_reward,
        get_cosine_scaled_reward,
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
        reasoning_accuracy_reward,
        think_format_reward,
    )
    from posttrain.rl.rewards.rubrics import RubricReward
    from posttrain.rl.samples.byte_offsets import (
        DataCollatorForChatML,
        DataCollatorForVisionLanguageChatML,
        build_teacher_inputs_from_texts,
        build_teacher_request_inputs,
        encode_with_byte_offsets,
        pad_byte_offsets,
    )
    from posttrain.rl.tools.protocol import parse_response
    from posttrain.rl.tools.response_templates import add_response_schema, supports_tool_calling

__all__, __getattr__, __dir__ = registry.face(__name__)
