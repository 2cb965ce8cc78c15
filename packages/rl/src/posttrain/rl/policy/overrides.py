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
    "override policy_loss": """
        _compute_loss _compute_policy_loss compute_liger_loss get_gamma_weights _get_last_hidden_state
    """,
    "override compute_loss": """
        _compute_iw_opd_loss _compute_local_sparse_top_1_divergence_loss _compute_self_distillation_loss
        _compute_server_distillation_loss _compute_server_forward_kl_loss _compute_server_sparse_top_1_divergence_loss
        _compute_sparse_top_1_divergence_loss _compute_teacher_student_logits _reduce_divergence_loss
        _get_reverse_kl_top_1_tokens _compute_prompt_length _get_completion_lengths _get_model_forward_kwargs
    """,
    "override generate": """
        _generate _generate_single_turn _tool_call_loop _tokenize_prompts _get_tool_suffix_ids tokenize_row
        process_vision_row sample_rollouts _build_sequence_batch _fill_buffer _generate_student_completions
        _generate_transformers _generate_with_model _get_completion_ids_list _prepare_training_batch
        _store_completions_in_buffer _tokenize_prompts_untruncated _generate_non_vllm_for_slices
        _generate_on_policy_for_slices _generate_on_policy_vlm_raw _generate_on_policy_vlm_slice
        _process_completions_to_buffer _materialize_vlm_slice _streaming_iter
    """,
    "override logps": """
        _get_per_token_logps _get_per_token_logps_and_entropies _compute_rollout_logps _forward_logits
        _get_sequence_logps
    """,
    "override log": """
        _log_metric _log_completion_extra _log_self_distillation_metric _record_completion_metrics
        _log_step_metrics _record_reward_diagnostics _warn_on_degenerate_diagnostics _warn_on_inactive_self_distillation
    """,
    "pass teacher_model": """
        _get_teacher_logits _get_teacher_context_for_self_distillation _get_teacher_token_logprobs_from_server
        _local_teacher_tokenizers_match _raise_if_local_teacher_tokenizer_mismatch _setup_teacher_model
        _use_peft_ema_teacher_adapter _build_teacher_vlm_inputs
    """,
    "pass callbacks": "_dispatch_self_distillation_callback",
    "set num_value_samples": "_estimate_optimal_values",
    "pass a generator": """
        _move_model_to_vllm _move_model_to_vllm_inner _generate_vllm _generate_vllm_colocate _generate_vllm_server
        _fix_param_name_to_vllm _sync_fsdp1_params_to_vllm _sync_fsdp2_params_to_vllm _init_lora_sync _sync_weight
        _sync_weight_lora _sync_weight_merged
    """,
    "pass rows of messages": """
        _prepare_dataset _prepare_dataset_with_original_text _ensure_original_text_fields _extract_images_and_prompts
        _decode_completion_texts_from_labels _get_prompt_sequence_key _maybe_add_completion_byte_offsets
    """,
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
