"""The commands of preference and reinforcement learning: ``posttrain dpo``, ``posttrain grpo`` and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.cli.source import made, sets_for, train
from posttrain.core.registry import Method, Run, load


def _sets(run: Run, reads_prompts: bool) -> tuple[Any, Any]:
    train_rows, eval_rows = sets_for(run)
    if reads_prompts:
        return _prompts(run, train_rows, "train"), _prompts(run, eval_rows, "eval")
    return train_rows, eval_rows


def _prompts(run: Run, rows: Any, name: str) -> Any:
    """`rows` with their prompts in the column ``prompt``, as messages where the model has a chat template."""
    from posttrain.lm.images.images import has_images
    from posttrain.lm.loading import loading
    from posttrain.lm.text import layouts

    if rows is None or has_images(rows):
        return rows
    where = {"trust_remote_code": run.config.trust_remote_code, "revision": run.model.model_revision}
    tokenizer = loading.load_tokenizer(run.model.model_name_or_path, **where)
    return layouts.canonical(rows, tokenizer, ("prompt_only",), name)


def of_preferences(sides: int, reference: bool = False, loss: str = "logps") -> Callable[[Run, int | None], Any]:
    """A method's `workload`: `sides` completions of each row, behind one copy of the prompt where they can share it."""

    def workload(run: Run, length: int | None) -> Any:
        from posttrain.cli.tools.workload import Workload, longest_row, rows_of
        from posttrain.rl.rewards.score_heads import new_reward_model

        config = run.config
        longest = longest_row(length, config.max_length)
        return Workload(
            rows_of(config, longest, sides),
            longest,
            loss,
            reference=reference and not config.precompute_ref_log_probs,
            group=sides if loss == "logps" and _may_share(run, config.shared_prefix) else 1,
            make=new_reward_model if loss == "score" else None,
        )

    return workload


def of_rollouts(run: Run, length: int | None) -> Any:
    """The shape of a micro-batch of completions; without `length`, the prompts' own lengths count."""
    from posttrain.cli.tools.workload import Workload, longest_row, size_of
    from posttrain.rl.algorithms.distillation import DistillationConfig
    from posttrain.rl.rewards import score_heads, scorers

    config = run.config
    models = [name for name in scorers.functions_by_name(config) or () if not scorers.is_function_name(name)]
    keeps = config.use_vllm and config.vllm_mode == "colocate" and not config.vllm_enable_sleep_mode
    beside: dict[str, Any] = {
        "reference": bool(config.beta),
        "others": sum(size_of(name, run, make=score_heads.new_reward_model) for name in models),
        "engine": config.vllm_gpu_memory_utilization if keeps else 0.0,
    }
    if isinstance(config, DistillationConfig):
        teacher, options = config.teacher_model_name_or_path, config.teacher_model_init_kwargs or {}
        beside |= {"reference": not config.teacher_urls}
        beside |= {"teacher": size_of(teacher, run, options.get("dtype")) if teacher else 0}
    size = longest_row(length, config.max_completion_length and 2 * config.max_completion_length)
    rows, generated = config.per_device_train_batch_size, _cached_tokens(config, size)
    group = min(config.num_generations, rows) if _may_share(run, config.share_prompts) else 1
    prompt = max(size - config.max_completion_length, 0) if group > 1 else 0
    return Workload(rows, size, "logps", generated=generated, group=group, prompt=prompt, **beside)


def _may_share(run: Run, wanted: bool | None) -> bool:
    """Whether completions of a prompt are trained on behind one copy of it, if the attention of the model can."""
    from posttrain.cli.tools.workload import load_config

    if wanted is False or run.config.torch_compile:
        return False
    balance = run.config.router_aux_loss_coef
    if balance is None:  # of a mixture, whose config has it
        balance = load_config(run).to_dict().get("router_aux_loss_coef")
    return not balance


def _cached_tokens(config: Any, size: int) -> int:
    """Tokens in the cache of the engine in this process at most, for prompts and completions of `size` together."""
    from posttrain.rl.generation.engines import shares_prompts

    rows, group = config.per_device_train_batch_size * config.steps_per_generation, config.num_generations
    if not shares_prompts(config):
        return 0 if config.use_vllm else rows * size
    new = min(config.max_completion_length, size)
    each = size - new + group * new  # of a prompt with all its completions
    groups = max(min(rows, config.generation_max_rows) // group, 1)
    if config.generation_cache_tokens is not None:
        groups = max(min(groups, config.generation_cache_tokens // each), 1)
    return groups * each


def _lazily(function: str, *more: Any) -> Callable[..., Any]:
    """A function of this package, ``"module:name"``, which is imported when called. `more`: its last arguments."""
    return lambda *given: load(f"posttrain.rl.{function}")(*given, *more)


def _named(name: str, trainer: str, help: str, reads_prompts: bool = False, **others: Any) -> Method:
    """The method `name`, by ``"module:Prefix"`` of its config and its trainer. If it `reads_prompts`, its rows need a
    prompt alone, which may be in a column of another name.
    """
    path = f"posttrain.rl.algorithms.{trainer}"

    def run(run: Run) -> None:
        train(run, load(f"{path}Trainer"), *_sets(run, reads_prompts))

    return Method(name=name, help=help, config=f"{path}Config", run=run, **others)


def _preference(
    name: str, trainer: str, help: str, rows: str = "preference", reference: bool = False, loss: str = "logps"
) -> Method:
    """A method that reads preferences, `rows` of that kind (see `posttrain.rl.preview`); `reference` and `loss` as for
    `of_preferences`.
    """
    workload = of_preferences(2 if rows == "preference" else 1, reference, loss)
    return _named(name, trainer, help, workload=workload, preview=_lazily("preview:of_preferences", rows))


def _online(name: str, trainer: str, help: str, needs: str, reads_prompts: bool = True) -> Method:
    """A method that samples, and is taught by what it `needs` (see `posttrain.core.registry.Method.needs`)."""

    def replay(run: Run, trajectory: dict[str, Any]) -> str:
        from posttrain.rl.online.trajectories import replayed

        made_by = load(f"posttrain.rl.algorithms.{trainer}Trainer")
        return replayed(made(run, made_by, *_sets(run, reads_prompts)), trajectory)

    others = {"workload": of_rollouts, "preview": _lazily("preview:of_prompts"), "replay": replay}
    return _named(
        name, trainer, help, reads_prompts, needs=("model_name_or_path", "dataset_name|datasets", needs), **others
    )


REWARDS = "reward_funcs|reward_model_name_or_path"
TEACHER = "teacher_model_name_or_path|teacher_model_server_url"

DPO = _preference(
    "dpo",
    "dpo:DPO",
    "Train on pairs of a better and a worse completion, with the initial model as the reference.",
    reference=True,
)
GRPO = _online(
    "grpo",
    "grpo:GRPO",
    "Train on the policy's own completions, scored by reward functions and compared within their group.",
    REWARDS,
)
RLOO = _online(
    "rloo",
    "rloo:RLOO",
    "REINFORCE on the policy's own completions, with the rest of the group as the baseline.",
    REWARDS,
)
DISTILLATION = _online(
    "distillation",
    "distillation:Distillation",
    "Train a student to predict what a teacher predicts, on the student's own completions.",
    TEACHER,
    reads_prompts=False,
)
KTO = _preference(
    "kto",
    "kto:KTO",
    "Train on single completions labelled good or bad, with the initial model as the reference.",
    "unpaired_preference",
    reference=True,
)
ORPO = _preference(
    "orpo", "orpo:ORPO", "Fine-tune on the better completion of each pair and away from the worse, without a reference."
)
CPO = _preference("cpo", "cpo:CPO", "Train on pairs without a reference: CPO and SimPO.")
REWARD = _preference(
    "reward", "reward_model:Reward", "Train a reward model on pairs of a better and a worse completion.", loss="score"
)
