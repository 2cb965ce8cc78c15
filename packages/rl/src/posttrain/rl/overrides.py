"""Inner methods of trl's trainers that are never called here, and what to override instead."""

from __future__ import annotations

PREFERENCE_METHODS = dict.fromkeys(
    ("_compute_loss", "dpo_loss", "kto_loss", "get_batch_loss_metrics"), "override preference_loss or compute_loss"
) | dict.fromkeys(("concatenated_forward", "concatenated_inputs", "get_batch_logps"), "override score") | {
    "_prepare_dataset": "pass rows of tokens", "tokenize_row": "pass rows of tokens",
    "_precompute_ref_logps": "pass ref_model",
    "compute_reference_log_probs": "override reference_logp",
}  # fmt: skip

ROLLOUT_METHODS = {
    "_generate_and_score_completions": "override generate, score or compute_advantages",
    "_calculate_rewards": "override score",
    "_compute_loss": "override policy_loss", "compute_liger_loss": "override policy_loss",
    "_generate": "override generate",
    "_generate_single_turn": "override generate", "_tool_call_loop": "override generate",
    "_tokenize_prompts": "override generate",
    "_get_per_token_logps": "override logps", "_get_per_token_logps_and_entropies": "override logps",
    "get_gamma_weights": "override policy_loss", "_move_model_to_vllm": "pass a generator",
}  # fmt: skip


def has_own_loss(kind: type) -> bool:
    """Whether a user overrides `compute_loss`, which then gets a row for each completion."""
    owner = next(one for one in kind.__mro__ if "compute_loss" in vars(one))
    return not owner.__module__.startswith("posttrain.rl.")
