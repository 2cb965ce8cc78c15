"""Inner methods of trl's trainers that are never called here, and what to override instead."""

from __future__ import annotations

_OF_PREFERENCES = {
    "override preference_loss or compute_loss": """
        _compute_loss dpo_loss kto_loss cpo_loss odds_ratio_loss get_batch_loss_metrics
    """,
    "override score": "concatenated_forward concatenated_inputs get_batch_logps",
    "pass rows of tokens": "_prepare_dataset tokenize_row build_tokenized_answer",
    "pass ref_model": "_precompute_ref_logps",
    "override reference_logp": "compute_reference_log_probs",
    "override compute_ref_log_probs": "_compute_kl_logps",
    "set num_eval_samples": "generate_from_model",
}
_OF_ROLLOUTS = {
    "override generate, score or compute_advantages": "_generate_and_score_completions",
    "override score": "_calculate_rewards _calculate_rewards_from_functions",
    "override policy_loss": "_compute_loss compute_liger_loss get_gamma_weights _get_last_hidden_state",
    "override generate": """
        _generate _generate_single_turn _tool_call_loop _tokenize_prompts _get_tool_suffix_ids tokenize_row
        process_vision_row
    """,
    "override logps": "_get_per_token_logps _get_per_token_logps_and_entropies",
    "override log": "_log_metric _log_completion_extra",
    "pass a generator": """
        _move_model_to_vllm _move_model_to_vllm_inner _generate_vllm _generate_vllm_colocate _generate_vllm_server
        _fix_param_name_to_vllm _sync_fsdp1_params_to_vllm _sync_fsdp2_params_to_vllm
    """,
    "pass rows of messages": "_prepare_dataset",
    "set gradient_checkpointing": "_enable_gradient_checkpointing",
}
PREFERENCE_METHODS, ROLLOUT_METHODS = (
    {name: instead for instead, names in table.items() for name in names.split()}
    for table in (_OF_PREFERENCES, _OF_ROLLOUTS)
)


def has_own_loss(kind: type) -> bool:
    """Whether a user overrides `compute_loss`, which then gets a row for each completion."""
    owner = next(one for one in kind.__mro__ if "compute_loss" in vars(one))
    return not owner.__module__.startswith("posttrain.rl.")
