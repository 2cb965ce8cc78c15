"""Online training: prompts -> generate -> score -> advantages -> windows of micro-batches -> loss.

A `Rollout` is immutable, in training and in checkpoints. An algorithm is a subclass that overrides `compute_advantages`
and `policy_loss`; override `generate` and `score` to sample or score differently.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.data import pipeline
from posttrain.core.data.samplers import mix
from posttrain.core.errors import DataError, checked_args
from posttrain.core.evaluation.eval_loop import eval_mode
from posttrain.core.logging import terminal
from posttrain.core.logging.metrics import Clock, Metrics, num_tokens_in
from posttrain.core.models import wrapping
from posttrain.core.state import EvalLoopOutput, TrainOutput
from posttrain.core.training.argument_attributes import reads_from_arguments
from posttrain.core.training.plan import Plan, make_plan
from posttrain.core.training.preflight import Parts, Problem
from posttrain.lm.attention import router_replay, varlen_attention
from posttrain.lm.images.images import IMAGE_COLUMNS, VIDEO_COLUMNS, ImageReader, has_images
from posttrain.lm.images.vision import Shown
from posttrain.lm.loading import loading
from posttrain.lm.loading.preflight import model_problems, tokenizer_problems
from posttrain.rl.agents.environments import Environments, complete_in_room, context_length, take_rollout
from posttrain.rl.generation import Completions, Generator, Sampling
from posttrain.rl.generation.engines import cause_of_gap, folded, make_generator, settings_of
from posttrain.rl.generation.protocol import has_own_weights, reads_images, session
from posttrain.rl.generation.transformers import generation_config, is_float32
from posttrain.rl.losses import policy_losses
from posttrain.rl.losses.advantages import equal_groups, total_rewards
from posttrain.rl.online import asynchronous
from posttrain.rl.online import reporting as records
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.asynchronous import Background, PerThread, Turns
from posttrain.rl.online.ledger import Ledger
from posttrain.rl.policy.loading import load_policy, router_coefficient
from posttrain.rl.policy.logprobs import CompletionLogps, completion_logps, logp_gaps
from posttrain.rl.policy.overrides import ROLLOUT_METHODS
from posttrain.rl.policy.reference import (
    FrozenReference,
    MovableReference,
    SyncReference,
    check_start,
    make_reference,
    sync_problem,
)
from posttrain.rl.policy.shared_prefix import sharing_problem
from posttrain.rl.rewards.scoring import (
    RewardModel,
    Rewards,
    Scores,
    functions_by_name,
    reward_functions,
    reward_problems,
)
from posttrain.rl.samples.images import ImagePrompts, RolloutImages, can_see, pictured, refuse_images, same_images
from posttrain.rl.samples.prompts import (
    OF_TEXT_ALONE,
    GroupedStream,
    GroupSampler,
    Layout,
    PromptCodec,
    check_prompts,
    image_problems,
    prompt_problems,
    runs,
    with_room,
)  # fmt: skip
from posttrain.rl.samples.samples import Rollout, Sample

if TYPE_CHECKING:
    from transformers import GenerationConfig

logger = logging.getLogger(__name__)


@reads_from_arguments(
    "chat_template_kwargs", "generation_kwargs", "log_completions", "log_multimodal", "log_unique_prompts",
    "mask_truncated_completions", "max_completion_length", "max_tool_calling_iterations", "num_completions_to_print",
    "pad_to_multiple_of", "shuffle_dataset", "use_transformers_continuous_batching", "vllm_gpu_memory_utilization",
    "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_tensor_parallel_size", epsilon_low="epsilon",
)  # fmt: skip
class RolloutTrainer(Trainer):
    """Trains a policy on completions that it samples itself.

    Args:
        model: a causal language model, or the name or folder of one to load.
        reward_funcs: functions (see `rewards.scoring.Rewards`), and reward models by name or loaded; one or a
            list.
        args: a `RolloutConfig`.
        train_dataset: rows with a `prompt`: a text, or messages. Other columns are for the reward functions. Without
            it, prompts come from the ``reset()`` of environments, and ``args.max_steps`` must be set.
        eval_dataset: such rows, or a dict of several sets by name.
        processing_class: the tokenizer; by default the one that belongs to the model.
        reward_processing_classes: the tokenizers of reward models; None: the model's own.
        quantization_config: loads a model given by name in 4 or 8 bits.
        peft_config: train adapters (LoRA and others) instead of the model's own weights.
        tools: functions that the policy may call, see `posttrain.rl.agents.environments`.
        rollout_func: ``(prompts, trainer) -> dict``, instead of `generate`; see
            `posttrain.rl.agents.environments.take_rollout`.
        environment_factory: makes environments, see `posttrain.rl.agents.environments`.
        generator: the generation engine; by default as `args` set.

    The other arguments are those of `Trainer`.
    """

    config_class: type[RolloutConfig] = RolloutConfig
    args: RolloutConfig
    evaluation_metrics = None
    signature_columns: tuple[str, ...] | None = ("prompt", *IMAGE_COLUMNS, *VIDEO_COLUMNS)
    fixed_at_construction: tuple[str, ...] = ("num_generations", "beta", "reward_weights", "chat_template_kwargs")
    #: Whether prompts may have images.
    reads_images = True
    #: Whether there must be reward functions. Elsewhere they are metrics.
    learns_from_rewards = True
    #: The reference; None: the weights that the policy begins with.
    given_reference: nn.Module | str | None = None
    INSTEAD = ROLLOUT_METHODS
    metrics = PerThread[Metrics]()
    clock = PerThread[Clock]()
    _shown: list[dict[str, Any]]  # samples of the current evaluation
    _rollout: Rollout | None  # the one whose micro-batches are being trained on
    _synced_at: int | None  # the optimizer step whose weights the generator has
    _background: Background | None = None  # what samples while this trains
    _ledger: Ledger | None = None
    _looked = True  # whether this run has compared the engine's log-probabilities with the policy's
    _recomputes = False  # because they were others
    _starts_at_reference = False  # what is left to be compared too
    _version = 0  # the optimizer step of the weights that the engine was sent last

    def __init__(
        self,
        model: nn.Module | str,
        reward_funcs: Any = None,
        args: RolloutConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Callable[[list[Any], Any], dict[str, Any]] | None = None,
        environment_factory: Any = None,
        generator: Generator | None = None,
        **others: Any,
    ) -> None:
        args = self.config_class() if args is None else checked_args(args, self.config_class)
        reads_parts = can_see(model, processing_class) and not any(getattr(args, name) for name in OF_TEXT_ALONE)
        sees = any(map(has_images, (train_dataset, eval_dataset))) or (self.reads_images and reads_parts)
        given = functions_by_name(args) if reward_funcs is None else reward_funcs
        parts = Parts.of(
            others, model=model, train_dataset=train_dataset, eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=others.get("compute_metrics"), callbacks=callbacks, optimizers=optimizers,
            optimizer_cls_and_kwargs=others.get("optimizer_cls_and_kwargs"), quantization_config=quantization_config,
            peft_config=peft_config, ref_model=self.given_reference, datasets={},
            auto_class="AutoProcessor" if sees else "AutoTokenizer",
            others={
                "reward_funcs": given, "environment_factory": environment_factory, "tools": tools,
                "rollout_func": rollout_func,
            },
        )  # fmt: skip
        self.run_preflight(args, parts)
        if train_dataset is None and environment_factory is not None:
            rollouts = asynchronous.rollouts_of(args) if args.max_staleness else 1
            train_dataset = [{}] * (
                rollouts * args.generation_batch_size // args.num_generations
            )  # the prompt is the output of reset()
        self.environments = Environments(tools, environment_factory, args.max_tool_calling_iterations)
        self._generating, self._scoring = Turns(), Turns(args.reward_concurrency)
        self.rollout_func = rollout_func
        functions = reward_functions(given, reward_processing_classes, args.trust_remote_code)
        own = self.environments.reward_functions
        functions += own
        if not functions and self.learns_from_rewards:
            raise ValueError(
                "No reward source provided: pass reward_funcs, or an environment_factory whose class has get_reward()."
            )
        self.rewards = Rewards(functions, args, len(own))
        pipeline.set_seed(args.seed)  # adapters begin with random numbers
        given_tokenizer = parts.processing_class
        model, tokenizer = load_policy(model, given_tokenizer, args, quantization_config, peft_config, sees)
        super().__init__(
            model=model,
            args=args,
            data_collator=as_they_are,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=callbacks,
            optimizers=optimizers,
            **others,
        )
        for function in functions:
            if isinstance(function, RewardModel):
                self.dist.place(function.model)
        self.reward_funcs, self.reward_func_names = functions, self.rewards.names
        self.reward_processing_classes = [getattr(function, "tokenizer", None) for function in functions]
        self.num_generations, self.num_iterations = args.num_generations, args.num_iterations
        self.use_vllm, self.vllm_mode = args.use_vllm, args.vllm_mode
        self.top_p, self.top_k, self.min_p = args.top_p, args.top_k, args.min_p
        self.repetition_penalty = args.repetition_penalty
        self.num_generations_eval = args.num_generations_eval or args.num_generations
        self.beta, self.temperature = args.beta, args.temperature
        self.image_prompts = ImagePrompts(tokenizer, model, ImageReader.of(args), args) if sees else None
        kwargs = self.image_prompts.vision.template_kwargs(args.chat_template_kwargs) if self.image_prompts else None
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor's
        self.codec = PromptCodec(tokenizer, kwargs or args.chat_template_kwargs)
        if pipeline.is_stream(train_dataset):  # each process reads its own part, as trl notes in the same place
            accelerator_config: Any = args.accelerator_config
            accelerator_config.dispatch_batches = False
        self._ends_of_calls = self._check_tools()
        self._leave_room()
        example = None if self.image_prompts is None else self.image_prompts.example
        self.generator = generator or make_generator(tokenizer, args, example)
        if args.max_staleness and (problem := asynchronous.engine_problem(self.generator)):
            raise ValueError(problem)
        self.reference = self._make_reference(peft_config is not None and not loading.is_adapter(parts.model))
        self.ref_model = self.reference.model if isinstance(self.reference, FrozenReference) else None
        if self.reference is not None and args.sync_ref_model:
            self.add_callback(SyncReference(self.reference, args.ref_model_mixup_alpha, args.ref_model_sync_steps))
        self.router_aux_loss_coef = router_coefficient(self.model, args.router_aux_loss_coef)
        self.aux_loss_enabled = self.router_aux_loss_coef != 0
        self._share_prompts = self._can_share_prompts()
        if args.router_replay:
            problem = "rows with images are not laid out with their routes." if sees else None
            if problem := problem or router_replay.problem_of(self.model):
                raise ValueError(f"router_replay=True: {problem} Set it to False.")
            router_replay.enable(self.model)
        self._forget_rollout()

    # ------------------------------------------------------------------------------------------------ to override

    @classmethod
    def preflight(cls, args: TrainingArguments, parts: Parts) -> Iterator[Problem]:
        """Adds problems with prompts and reward functions."""
        args = checked_args(args, RolloutConfig)
        yield from model_problems(args, parts, "pass a causal language model, or the name of one.")
        yield from super().preflight(args, parts)
        yield from prompt_problems(args, parts)
        yield from image_problems(args, parts, cls.reads_images)
        names = ("rollout_func", "tools", "environment_factory")
        yield from _turn_problems(args, [name for name in names if parts.others.get(name)])
        if parts.compute_metrics is not None:
            yield (
                f"compute_metrics is never called by {cls.__name__}: its evaluations sample and score completions, "
                "and log the rewards. Use a reward function as a metric, or add to the record in a callback's "
                "on_evaluate"
            )
        given = parts.others["reward_funcs"]
        if cls.learns_from_rewards or given is not None:
            yield from reward_problems(given, args.reward_weights, parts.others["environment_factory"])
        yield from tokenizer_problems(args, parts)

    def generate(self, samples: list[Sample], sampling: Sampling) -> list[Sample]:
        """The `samples` completed, in their order: by `rollout_func`, or by turns of the policy and of its tools."""
        if self.rollout_func is not None:
            output = self.rollout_func([sample.prompt for sample in samples], self)
            return take_rollout(samples, output, self.codec)
        context = self._context

        def first_turn(some: list[Sample], tokens: int) -> list[Sample]:
            return self._generate_turn(some, replace(sampling, max_new_tokens=tokens))

        samples = complete_in_room(samples, sampling.max_new_tokens, context, first_turn)
        if self.environments:

            def next_turn(some: list[Sample], turn: int, tokens: int) -> list[Sample]:
                return first_turn([replace(sample, seed=mix(sample.seed, turn)) for sample in some], tokens)

            samples = self.environments.converse(samples, self.codec, next_turn, sampling.max_new_tokens, context)
            calls, failures = self.environments.counts["calls"], self.environments.counts["failures"]
            self.environments.counts.update(calls=0, failures=0)
            self.metrics.add_sum("tools/call_frequency", calls, len(samples))
            if calls:
                self.metrics.add_sum("tools/failure_frequency", failures, calls)
        return samples

    def _generate_turn(self, samples: list[Sample], sampling: Sampling) -> list[Sample]:
        """`samples` after one turn of the policy. Adjacent ones with the same prompt are generated together."""
        found = list(samples)
        for size, places in runs([(sample.prompt_ids, id(sample.shown)) for sample in samples]):
            prompts, version = [samples[first].prompt_ids for first in places], self._version
            rows = [first + offset for first in places for offset in range(size)]
            shown = [samples[first].shown for first in places]
            seeds = [samples[row].seed for row in rows]
            ask = functools.partial(self._ask_engine, prompts, shown, size, sampling, seeds)
            # Processes that split a row each have the whole model, and must not differ by a rounding.
            done = self.dist.on_first(ask) if self.dist.cp_size > 1 else ask()
            is_exact = done.is_exact and sampling.temperature == self.logps_temperature
            for number, row in enumerate(rows):
                sample, ids = samples[row], done.ids[number]
                schemas = self.environments.schemas_of(sample)
                found[row] = replace(
                    sample,
                    ids=ids,
                    finished=done.finished[number],
                    is_exact=is_exact,
                    logps=None if done.logps is None else done.logps[number],
                    routes=None if done.routes is None else done.routes[number],
                    versions=done.versions[number] if done.versions else [version] * len(ids),
                    completion=self.codec.decode(sample.prompt, ids, sample.prompt_ids, schemas),
                )
        return found

    def _ask_engine(
        self, prompts: list[list[int]], shown: list[Shown | None], size: int, sampling: Sampling, seeds: list[int]
    ) -> Completions:
        if reads_images(self.generator):
            given: Any = list(map(pictured, prompts, shown))
            return self.generator.generate(given, size, sampling, seeds)
        images = RolloutImages.of(shown, prompts, self._image_token_id)
        more = {} if images is None else {"images": images}
        return self.generator.generate(prompts, size, sampling, seeds, **more)

    def score(self, samples: list[Sample]) -> Scores:
        """What the reward functions make of `samples`."""
        names = {name for sample in samples for name in (*sample.row, *sample.extra)} - RESERVED
        columns = {name: [sample.extra.get(name, sample.row.get(name)) for sample in samples] for name in sorted(names)}
        return self.rewards(
            [sample.prompt for sample in samples],
            [sample.completion for sample in samples],
            [sample.ids for sample in samples],
            columns,
            {"trainer_state": self.state, "environments": [sample.environment for sample in samples]},
        )

    def compute_advantages(self, rewards: torch.Tensor, group_size: int, kl: torch.Tensor | None) -> torch.Tensor:
        """How much better each completion is than others.

        Args:
            rewards: (N, F) of all processes, groups of `group_size` next to each other; NaN where a function does not
                apply.
            kl: (N,) log-ratio of the policy that sampled to the reference, summed over tokens; None without a
                reference, or where `needs_kl_of_samples` is False.

        Returns:
            (N,).
        """
        raise TypeError(f"{type(self).__name__} must override compute_advantages.")

    def policy_loss(self, policy: CompletionLogps, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss of each token (N, C) or completion (N, 1) of a micro-batch; see `Rollout.micro_batches`."""
        raise TypeError(f"{type(self).__name__} must override policy_loss.")

    @property
    def needs_old_logps(self) -> bool:
        """Whether the policy may have moved since it sampled, when its completions are learned from."""
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) != 0

    @property
    def uses_reference(self) -> bool:
        """Whether the loss reads the reference's log-probabilities of the completions."""
        return bool(self.beta)

    def complete_rollout(self, rollout: Rollout, samples: list[Sample]) -> Rollout:
        """`rollout` with whatever else the loss needs of it; adds the reference's log-probabilities."""
        if not self.uses_reference or self.reference is None:
            return rollout
        with self.reference.use() as policy:  # which chooses its own experts
            return replace(rollout, ref_logps=self._logps_of(policy, replace(rollout, routes=None))[0])

    #: Whether advantages depend on the divergence of the policy that sampled from the reference.
    needs_kl_of_samples = False

    @property
    def average(self) -> str:
        """What the summed loss is divided by, a name in `posttrain.rl.losses.policy_losses.AVERAGES`."""
        return "sequences"

    @property
    def top_entropy_quantile(self) -> float:
        """The share of most uncertain tokens that are learned from."""
        return 1.0

    # ---------------------------------------------------------------------------------- overridable methods of the loop

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """As the core's; with ``max_staleness`` above 0, completions are sampled in the background."""
        self._synced_at = None  # the weights may have changed since an evaluation
        self._looked = self._recomputes = False
        self._background, self._ledger = self._new_background() if self.args.max_staleness else None, self._new_ledger()
        self.environments.overlaps = self._background is not None
        try:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        finally:
            if self._background is not None:
                self._background.close()
            self._background, self.environments.overlaps = None, False

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        """The prompts of `steps_per_generation` micro-batches at once, each `num_generations` times in a row."""
        if self.train_dataset is None:
            raise ValueError(f"{type(self).__name__}: training requires a train_dataset.")
        dataset = self.train_dataset
        if pipeline.is_stream(dataset):
            shuffles = self.args.shuffle_dataset and hasattr(dataset, "shuffle")
            dataset = dataset.shuffle(seed=self.data_seed) if shuffles else dataset
            dataset = GroupedStream(dataset, self.layout)
        size = self.train_batch_size * self.args.steps_per_generation
        return self.make_dataloader(dataset, "Training", size, is_training=True)

    def train_sampler(self, dataset: Any) -> torch.utils.data.Sampler | None:
        """Groups of completions next to each other; None for a stream, whose rows come grouped."""
        if pipeline.is_stream(dataset):
            return None
        return GroupSampler(len(dataset), self.layout, self.data_seed, bool(self.args.shuffle_dataset))

    @property
    def eval_batch_size(self) -> int:
        """Prompts of an evaluation batch on each process: the size that is set counts their completions."""
        return max(self.args.eval_batch_size // self.num_generations_eval, 1)

    def make_plan(self, loader: Any) -> Plan:
        """As the core's; each batch of prompts is a rollout, gone through `num_iterations` times."""
        args, parts = self.args, self.args.steps_per_generation * self.num_iterations
        length = len(loader) * parts if pipeline.has_length(loader) else None
        epochs = args.num_train_epochs
        return make_plan(length, args.gradient_accumulation_steps, epochs, args.max_steps, args.epochs_of_stream)

    def windows(self, plan: Plan, loader: Any) -> Iterator[tuple[list[Any], torch.Tensor | None]]:
        """Micro-batches of rollouts, which are made on demand."""
        if self.run.progress.batches == 0:  # the rest of an epoch that ended early is skipped
            self._forget_rollout(keep_count=self.state.global_step > 0)
            if self._ledger is not None and self.state.global_step == 0:
                self._ledger.began(self.args.max_staleness)
        batches = iter(loader) if self._background is None else self._background.read(self.run.progress.epoch, loader)
        self.restore_rng()
        yield from self._windows_of(plan, batches)

    def windows_left(self, plan: Plan, loader: Any, epoch: int) -> Iterator[tuple[list[Any], torch.Tensor | None]]:
        if loader.epoch == epoch or self._rollout is None or self.run.epoch_stopped:
            return super().windows_left(plan, loader, epoch)
        self.restore_rng()  # the prompts were used up, the last rollout was not
        if self._background is not None:
            self._background.read(epoch, loader, iter(()))
        return self._windows_of(plan, iter(()))

    def _windows_of(
        self, plan: Plan, batches: Iterator[list[dict[str, Any]]]
    ) -> Iterator[tuple[list[Any], torch.Tensor | None]]:
        stream = self._micro_batches(batches)
        while self.state.global_step < plan.max_steps and not self.control.should_training_stop:
            if self._background is not None:
                self._background.fill(plan, self.state.global_step, self._micro_batches_left())
            if not (window := list(islice(stream, plan.accumulation))):
                return
            yield window, self.count_window(window)

    def _micro_batches(self, batches: Iterator[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
        while True:
            if self._rollout is None:
                self._rollout, self._used = self.make_rollout(batches), 0
                if self._rollout is None:
                    return
            parts = self._parts_of(self._rollout)
            while self._used < len(parts) * self.num_iterations:
                self._used += 1  # before it is yielded: a checkpoint may be saved at the yield
                yield parts[(self._used - 1) % len(parts)]
            self._rollout = None

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The policy loss, shape (); the outputs are the log-probabilities and entropies of the completions."""
        policy = self.logps(model, inputs, with_entropy=True, training=True)
        of_tokens = self.policy_loss(policy, inputs)
        if "correction" in inputs and not self.corrects_itself:
            of_tokens = of_tokens * inputs["correction"]
        loss = policy_losses.summed(of_tokens, inputs["loss_mask"], self.average)
        loss = self.mean_loss(loss, inputs, num_items_in_batch, policy.aux_loss)
        tokens = inputs["loss_mask"].sum()
        if policy.entropies is not None:
            self.metrics.add_sum("entropy", (policy.entropies.detach() * inputs["loss_mask"]).sum(), tokens)
        return (loss, policy._asdict()) if return_outputs else loss

    def mean_loss(
        self,
        summed: torch.Tensor,
        inputs: dict[str, Any],
        num_items: torch.Tensor | None,
        aux_loss: torch.Tensor | None,
    ) -> torch.Tensor:
        """The share of a micro-batch, whose losses are `summed`, in the mean over the window: shape ()."""
        items = self.count_items(inputs)
        total = items if num_items is None else num_items
        loss = summed / torch.where(total > 0, total, 1)
        if aux_loss is None:
            return loss
        self.log_metric("aux_loss", aux_loss)
        return loss + self.router_aux_loss_coef * aux_loss * (items / total.clamp(min=1))

    def _log_clipping(self, ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> None:
        """Shares of tokens, or of completions where `ratio` is (N, 1), that a clipped loss holds back."""
        args = self.args
        marks = policy_losses.clipping(ratio, advantages, args.epsilon, self.epsilon_high)
        for name, held in {"low": marks.low, "high": marks.high, "region": marks.low + marks.high}.items():
            self.metrics.add_sum(f"clip_ratio/{name}_mean", (held * mask).sum(), mask.sum())
        rows = policy_losses.share_of_rows
        self.metrics.add_extreme("clip_ratio/low_min", _least(rows(marks.low, mask)), "min")
        self.metrics.add_extreme("clip_ratio/high_max", -_least(-rows(marks.high, mask)), "max")

    @overload
    def count_items(self, inputs: dict[str, Any]) -> torch.Tensor: ...
    @overload
    def count_items(self, inputs: list[Any]) -> int: ...
    def count_items(self, inputs: Any) -> torch.Tensor | int:
        """The divisor of the loss for `average`; for a batch of prompts, their number."""
        if isinstance(inputs, list):
            return len(inputs)
        longest, per_row = self.args.max_completion_length, inputs["tokens_per_row"]
        return policy_losses.count(inputs["loss_mask"], self.average, longest, per_row)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[None, None, None]:
        """Complete and score prompts; logs rewards, ``pass@k`` and the policy loss."""
        samples = [] if pipeline.is_filler(inputs) else self._eval_samples(inputs)
        with self._weights_to_generate():
            samples = self._sample(samples, self.args.eval_temperature)
            # Processes have other numbers of prompts and of tokens, so they cannot keep in step.
            models = [model for model in (self.model, self.ref_model) if isinstance(model, nn.Module)]
            with self.dist.gathered(*models):
                if samples:
                    self._log_evaluation(samples, self._timed_score(samples))
        return None, None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs; warns if a record shows that nothing was learned."""
        if "perf/step_seconds" in logs:
            logs["step_time"] = logs["perf/step_seconds"]  # as trl calls it
        if (name := num_tokens_in(logs)) == "eval_num_tokens":
            logs[name] = self._num_tokens
        super().log(logs, start_time)
        problem = records.learning_problem(logs, self.learns_from_rewards)
        if problem is not None and self.dist.is_main:
            logger.warning("Step %d: %s", self.state.global_step, problem)

    def state_dict(self) -> dict[str, Any]:
        """As the core's, with the rollout that is being gone through, and a reference that has moved."""
        state = super().state_dict() | {"rollouts": self._num_rollouts, "dealt": self._how_dealt()}
        state["num_tokens"] = self._num_tokens
        state |= {"recomputes": True} if self._recomputes else {}
        state |= {} if self._background is None else self._background.position()
        if self._rollout is not None and self._used < len(self._parts_of(self._rollout)) * self.num_iterations:
            state |= {"rollout": self._rollout.state_dict(), "used": self._used}
        if self.reference is not None:
            state["reference"] = self.reference.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        super().load_state_dict(state)
        self._forget_rollout()
        if self._ledger is not None:
            self._ledger.resumed(self.state.global_step, self.args.max_staleness)
        self._num_tokens, self._recomputes = state["num_tokens"], state.get("recomputes", False)
        self._num_rollouts = state["rollouts"]
        if "rollout" in state and state["dealt"] == self._how_dealt():
            self._rollout, self._used = Rollout.from_state(state["rollout"]), state["used"]
        elif "rollout" in state:
            logger.warning(
                "The checkpoint's rollout was distributed differently (%s completions on each of %s processes, %s in "
                "a micro-batch): the rest of it is skipped, and the next prompts are sampled.",
                *state["dealt"],
            )  # fmt: skip
        if self.reference is not None and "reference" in state:
            self.reference.load_state_dict(state["reference"], self.args.output_dir)

    def loss_is_scaled(self) -> bool:
        return True

    def _how_dealt(self) -> list[int]:
        return [self.layout.per_process, self.dist.world_size, self.train_batch_size]

    def batches_left(self, loader: Any, saved: dict[str, Any]) -> int:
        """As the core's, with those left of the present rollout, which goes on if it is distributed as before."""
        each = self.args.steps_per_generation * self.num_iterations
        goes_on = "rollout" in saved and saved["dealt"] == self._how_dealt()
        return super().batches_left(loader, saved) * each + (each - saved["used"] if goes_on else 0)

    # ------------------------------------------------------------------------------------------------ a rollout

    def make_rollout(self, batches: Iterator[list[dict[str, Any]]]) -> Rollout | None:
        """The next rollout; None where the epoch has no more prompts."""
        if (found := self._sample_and_score(batches)) is None:
            return None
        samples, scores = found
        rollout = self._rollout_of(samples)
        rollout, kl = self._with_logps(rollout, samples)
        mine = records.Summary.of(samples, scores, None if kl is None else torch.stack([kl, rollout.loss_mask.sum(1)]))
        everyone = records.Summary.join(self.dist.gather_object(mine), self.layout.dealt().argsort())
        self._num_tokens += everyone.num_tokens
        self.metrics.add_extreme("num_tokens", self._num_tokens, "max")  # the same everywhere, and it only grows
        advantages = self.compute_advantages(
            everyone.rewards, self.num_generations, None if everyone.kl is None else everyone.kl[0]
        )
        if self.dist.rank == 0:  # the same on every process
            metrics = everyone.metrics(self.reward_func_names, self.rewards.weights, self.num_generations)
            for name, value in metrics.items():
                self.log_metric(name, value)
            self.metrics.update(everyone.extremes())
        advantages = advantages[self.layout.numbers(self.dist.rank)]
        if self._background is not None:
            asynchronous.log_staleness(self.metrics, rollout, self.state.global_step)
        self._log_used(samples, scores.rewards, self.state.global_step + 1)
        self._report_rollout(samples, scores, advantages)
        return replace(rollout, advantages=advantages)

    def new_samples(self, rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
        """A sample without a completion for each row."""
        samples = self.environments.begin([Sample(dict(row), row.get("prompt"), []) for row in rows])
        found = []
        read: Any = None
        before: dict[str, Any] = {}
        ids: list[int] = []
        shown: Shown | None = None
        for sample in samples:  # those of one prompt are adjacent, and it is tokenised once
            asked = sample.prompt, self.environments.schemas_of(sample)
            is_new = asked != read or (self.image_prompts is not None and not same_images(sample.row, before))
            read, before = asked, sample.row
            if is_new:
                ids, shown = self._encode(sample, *asked)
            found.append(replace(sample, prompt_ids=ids, shown=shown))
            if is_new and self.rollout_func is None:
                self.environments.check_prompt(found[-1], asked[1], self.codec)
        return found

    def _encode(self, sample: Sample, prompt: Any, tools: list[Any] | None) -> tuple[list[int], Shown | None]:
        try:
            if self.image_prompts is None:
                refuse_images(prompt)
                return self.codec.encode(prompt, tools), None
            again = reads_images(self.generator)
            return self.image_prompts.encode(self.codec, sample.row, prompt, tools, keeps_images=again)
        except DataError as error:
            raise DataError(f"{str(error).rstrip('.')}. The row is {reprlib.repr(sample.row)}.") from error

    @property
    def _image_token_id(self) -> int | None:
        return None if self.image_prompts is None else self.image_prompts.vision.image_token_id

    def _rollout_of(self, samples: list[Sample]) -> Rollout:
        known = [sample.routes is not None and len(sample.routes) >= sample.num_read for sample in samples]
        if self.args.router_replay and not all(known):
            raise ValueError(
                f"router_replay=True replays the experts chosen in sampling, and {type(self.generator).__name__} "
                "returned none. Use the local engine without generation_kwargs that it does not know, or vLLM in this "
                "process (use_vllm=True, vllm_mode='colocate'), or set router_replay=False."
            )
        return Rollout.of(samples, self.args.mask_truncated_completions, self._image_token_id)

    def sampling(self, temperature: float | None = None) -> Sampling:
        """How tokens are drawn: as the arguments say, and ``generation_kwargs``, which replace them."""
        args, settings = self.args, self.args.generation_kwargs or {}
        stop = settings.get("stop") or settings.get("stop_strings") or ()
        own = getattr(getattr(wrapping.base_model(self.model), "generation_config", None), "eos_token_id", None)
        ends = [*_listed(own), self.codec.tokenizer.eos_token_id]
        ends = _listed(settings.get("eos_token_id")) or ends
        ends = [*ends, *_listed(settings.get("stop_token_ids")), *self._ends_of_calls]
        sampling = Sampling(
            max_new_tokens=args.max_completion_length,
            temperature=self.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            repetition_penalty=args.repetition_penalty,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
            never=() if self.image_prompts is None else tuple(sorted(self.image_prompts.vision.placeholders)),
        )
        sampling = folded(sampling, settings)
        return sampling if temperature is None else replace(sampling, temperature=temperature)

    @property
    def logps_temperature(self) -> float:
        """What logits are divided by in the loss: by default what they are in sampling."""
        return self.temperature

    def logps(self, model: nn.Module, batch: dict[str, Any], with_entropy: bool, training: bool) -> CompletionLogps:
        """Log-probabilities of the completions of a micro-batch."""
        router = training and bool(self.router_aux_loss_coef)
        return completion_logps(model, batch, self.logps_temperature, with_entropy, router_logits=router)

    def _sample_and_score(self, batches: Iterator[list[dict[str, Any]]]) -> tuple[list[Sample], Scores] | None:
        found = self._next_scored(batches)
        if found is None or not self.args.dynamic_sampling:
            return found
        samples, scores = found
        size, wanted = self.num_generations, len(samples) * self.dist.world_size
        kept: list[Triple] = []
        spare: list[Triple] = []
        for number in range(1, self.args.dynamic_sampling_rounds + 1):
            dealt = [triple for part in self.dist.gather_object(_triples(samples, scores)) for triple in part]
            everyone = [dealt[place] for place in self.layout.dealt().argsort()]
            total = total_rewards(torch.stack([rewards for _, rewards, _ in everyone]), self.rewards.weights)
            for group, is_equal in enumerate(equal_groups(total, size).tolist()):
                (spare if is_equal else kept).extend(everyone[group * size : (group + 1) * size])
            self.log_metric("dynamic_sampling/kept", len(kept) / (len(kept) + len(spare)))
            more = None
            if len(kept) < wanted and number < self.args.dynamic_sampling_rounds:
                more = self._next_scored(batches)
            if more is None:
                break
            samples, scores = more
        if self.dist.is_main and (rest := (kept + spare)[wanted:]):
            self._log_used([sample for sample, *_ in rest], torch.stack([rewards for _, rewards, _ in rest]), None)
        mine = [(kept + spare)[number] for number in self.layout.numbers(self.dist.rank)]
        rewards, failed = torch.stack([r for _, r, _ in mine]), torch.stack([f for *_, f in mine])
        return [sample for sample, *_ in mine], replace(scores, rewards=rewards, failed=failed, columns={})

    def _next_scored(self, batches: Iterator[list[dict[str, Any]]]) -> tuple[list[Sample], Scores] | None:
        """Completions of the next batch of prompts; None where the epoch has no more."""
        if self._background is not None:
            return self._take(self._background)
        if (rows := next(batches, None)) is None:
            return None
        samples = self._sample_with_attempts(rows, self._new_number())
        return samples, self._timed_score(samples)

    def _sample_with_attempts(self, rows: list[dict[str, Any]], number: int) -> list[Sample]:
        """Completed samples of `rows`, from an engine that may be lost and come back meanwhile."""
        for _ in range(asynchronous.ATTEMPTS - 1 if has_own_weights(self.generator) else 0):
            samples, lost = self._begin(rows, number), None
            self._sync_weights()  # an engine that stays away ends the run
            try:
                samples = self._sample(samples)
            except ConnectionError as error:
                lost = error
            if not self._is_lost(lost):
                return samples
        return self._sample(self._begin(rows, number))

    def _is_lost(self, error: BaseException | None) -> bool:
        """Whether the engine of any process is gone; then its weights must be sent again, by all processes."""
        lost = any(self.dist.gather_object(isinstance(error, ConnectionError)))
        if lost:
            logger.warning("The engine was lost, and is waited for: %s", error or "another process says so.")
            self._synced_at = None
        return lost

    def _new_background(self) -> Background:
        return Background(
            self._sample_ahead, self._timed_score, self._sync_weights, self._new_number, self._log_dropped,
            self._is_lost, self.args.max_staleness, self.args.steps_per_generation * self.num_iterations,
            self.args.reward_concurrency,
        )  # fmt: skip

    def _take(self, background: Background) -> tuple[list[Sample], Scores] | None:
        with self.clock("wait"):
            job = background.take()
        if job is None:
            return None
        job.log_into(self.metrics, self.clock)
        return job.scored.result()

    def _new_number(self) -> int:
        """The number of a new rollout."""
        self._num_rollouts += 1
        return self._num_rollouts - 1

    def _begin(self, rows: list[dict[str, Any]], number: int) -> list[Sample]:
        """Samples of rollout `number`, without completions."""
        places, seed = self.layout.numbers(self.dist.rank).tolist(), self.args.seed
        return [
            replace(sample, seed=mix(seed, number, place), rollout=number, place=place)
            for sample, place in zip(self.new_samples(rows), places, strict=True)
        ]

    def _log_used(self, samples: list[Sample], rewards: torch.Tensor, step: int | None) -> None:
        if self._ledger is not None:
            totals = total_rewards(rewards, self.rewards.weights).tolist()
            self._ledger.used(samples, totals, self._version, step)

    def _log_dropped(self, number: int, why: str) -> None:
        if self._ledger is not None:
            self._ledger.dropped(number, why)

    def _new_ledger(self) -> Ledger | None:
        """The ledger of a run that begins, if one is wanted."""
        wanted = self.args.max_staleness > 0 if self.args.sample_ledger is None else self.args.sample_ledger
        engine = getattr(self.generator, "name", type(self.generator).__name__)
        return Ledger(self.args.output_dir, self.dist.rank, engine) if wanted and not self.dist.peer_rank else None

    def _sample_ahead(self, rows: list[dict[str, Any]], number: int) -> list[Sample]:
        return self._complete(self._begin(rows, number))

    def _sample(self, samples: list[Sample], temperature: float | None = None) -> list[Sample]:
        """The `samples` completed. Every process must call it, also one that has none."""
        with self._weights_to_generate():
            self._sync_weights()
            return self._complete(samples, temperature)

    def _sync_weights(self) -> None:
        """Send the weights to the engine, if they have changed."""
        if self._synced_at == self.state.global_step:
            return
        if hasattr(self.generator, "version"):
            self.generator.version = self.state.global_step
        with self.clock("sync"), asynchronous.waits_for_generation(self.generator, self._generating):
            self.generator.sync_weights(self.model)
            self._synced_at = self._version = self.state.global_step

    def _complete(self, samples: list[Sample], temperature: float | None = None) -> list[Sample]:
        with self._generating, session(self.generator), self.clock("generate"), self.compute_loss_context_manager():
            version = self._version
            found = self.generate(samples, self.sampling(temperature)) if samples else []
            if found is None:
                raise TypeError(f"{type(self).__name__}.generate returned None; return the completed samples.")
            return asynchronous.with_versions(found, version if self._background is not None else None)

    def _micro_batches_left(self) -> int:
        """Those of the present rollout."""
        return 0 if self._rollout is None else self.args.steps_per_generation * self.num_iterations - self._used

    def _weights_to_generate(self) -> contextlib.AbstractContextManager:
        """The context in which the engine generates: with gathered weights, because completions differ in length
        between processes; or with the engine's own copy, without gathering.
        """
        return contextlib.nullcontext() if has_own_weights(self.generator) else self.dist.gathered(self.model)

    def _timed_score(self, samples: list[Sample]) -> Scores:
        with self._scoring, self.clock("score"):
            scores = self.dist.on_first(lambda: self.score(samples))
        self.environments.give_back(samples)
        for name, seconds in zip(self.reward_func_names, scores.seconds, strict=True):
            self.clock.add(f"reward_{name}", seconds)
        for name, values in scores.metrics.items():
            self.metrics.add_sum(name, sum(values), len(values))
        return scores

    def _with_logps(self, rollout: Rollout, samples: list[Sample]) -> tuple[Rollout, torch.Tensor | None]:
        """(`rollout` with log-probabilities of the old and the reference policy, their KL if requested).

        At the first rollout of a run, what would be taken as given is recomputed and compared: the engine's
        log-probabilities, and a reference that begins as the policy.
        """
        sampled, stale = rollout.sampling_logps, rollout.versions is not None
        declared = all(sample.is_exact for sample in samples) and sampled is not None and self.dist.precision == "no"
        exact = declared and not stale and not self._recomputes
        corrects = not exact and sampled is not None and self._corrects_engine and not self._recomputes
        if stale and self._corrects_engine and not corrects and not self._recomputes:
            raise ValueError(asynchronous.NO_LOGPS.format(type(self.generator).__name__))
        by_entropy, reads = self.top_entropy_quantile < 1, self.needs_old_logps or self.needs_kl_of_samples
        first, self._looked = not self._looked, True
        starts, self._starts_at_reference = first and self._starts_at_reference and self.state.global_step == 0, False
        old = sampled if exact else None
        if by_entropy or corrects or starts or (reads and (first or old is None)):
            found = self._logps_of(self.model, rollout, with_entropy=by_entropy)
            if first and declared and self._misses(found[0], rollout):
                exact = corrects = False
            old = sampled if exact and not by_entropy else found[0]
            if by_entropy:
                entropies, mask = (values.to(self.dist.device) for values in (found[1], rollout.loss_mask))
                mask = self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
                rollout = replace(rollout, entropy_mask=mask.cpu())
            if sampled is not None and old is not None and corrects:
                rollout = replace(rollout, correction=self._correction(old, sampled, rollout.loss_mask))
        rollout, kl = self.complete_rollout(rollout, samples), None
        if starts and rollout.ref_logps is not None and rollout.routes is None:
            half = self.dist.precision != "no" or not is_float32(self.model)
            check_start(found[0], rollout.ref_logps, rollout.loss_mask, half)
        if self.needs_kl_of_samples and old is not None and rollout.ref_logps is not None:
            kl = ((old - rollout.ref_logps) * rollout.loss_mask).sum(1)
        return replace(rollout, old_logps=old if self.needs_old_logps or corrects else None), kl

    def _misses(self, found: torch.Tensor, rollout: Rollout) -> bool:
        """Whether log-probabilities that an engine declared exact are not those `found`, in any process; then they are
        recomputed from now on, with one warning.
        """
        sampled, mask, why = rollout.sampling_logps, rollout.loss_mask, None
        same_weights = rollout.versions is None or bool((rollout.versions == self.state.global_step)[mask].all())
        if sampled is not None and same_weights:
            gaps, limit = logp_gaps(found, sampled, mask, bool(self.args.tf32))
            if not gaps.max() <= limit:
                why = f"they differ by {float(gaps.max()):.2g}, and rounding explains {limit:.2g}. "
                why += cause_of_gap(self.model, settings_of(self.args), rollout.prompt_lengths, gaps > limit)
        whys = [one for one in self.dist.gather_object(why) if one is not None]
        self._recomputes = bool(whys)
        if whys and self.dist.is_main:
            logger.warning(NOT_THE_POLICYS, type(self.generator).__name__, whys[0])
        return self._recomputes

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
        """The tokens of `mask` whose entropy is at least the quantile `threshold` of all processes' tokens: (N, C)."""
        local = entropies[mask.bool()].float()
        everyone = self.accelerator.gather(self.accelerator.pad_across_processes(local, dim=0, pad_index=-1))
        if self.accelerator.num_processes > 1:  # of processes that read the same rows, one
            everyone = everyone.view(self.accelerator.num_processes, -1)[:: self.dist.peers]
        least = policy_losses.entropy_threshold(everyone[everyone >= 0], 1 - threshold)  # no entropy is below 0
        return (entropies >= least) & mask.bool()

    #: Whether `policy_loss` multiplies by ``inputs["correction"]`` itself.
    corrects_itself = False

    @property
    def _corrects_engine(self) -> bool:
        """Whether completions of weights that are not quite the policy are weighted, by `_correction`."""
        return self.args.max_staleness > 0 and self.args.vllm_importance_sampling_correction

    def _correction(self, old_logps: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Weights (N, C) or (N, 1), from log-probabilities (N, C) of the policy and of the engine."""
        gap = (old_logps - sampled).abs()[mask]
        gap = gap[~gap.isnan()]
        self.metrics.add_sum("sampling/sampling_logp_difference/mean", float(gap.sum()), len(gap))
        self._add_range("sampling/sampling_logp_difference", gap, ("max",))
        mode, least = self.args.vllm_importance_sampling_mode, self.args.vllm_importance_sampling_clip_min
        most = self.args.vllm_importance_sampling_clip_max
        weights = policy_losses.engine_correction(old_logps, sampled, mask.float(), mode, least, most)
        counted = weights.flatten() if weights.shape[1] == 1 else weights[mask]
        self.metrics.add_sum("sampling/importance_sampling_ratio/mean", float(counted.sum()), len(counted))
        self._add_range("sampling/importance_sampling_ratio", counted, ("min", "max"))
        return weights

    def _add_range(self, name: str, values: torch.Tensor, which: tuple[str, ...]) -> None:
        for end in which if values.numel() else ():
            self.metrics.add_extreme(f"{name}/{end}", getattr(values, end)().item(), end)

    def _logps_of(self, model: nn.Module, rollout: Rollout, with_entropy: bool = False) -> list[torch.Tensor]:
        """[(N, C) log-probabilities, (N, C) entropies] under the current `model`, without dropout; on the CPU."""
        found: list[list[torch.Tensor]] = [[], []]
        with eval_mode(model), torch.no_grad(), self.clock("logps"):
            for part in self._parts_of(rollout):
                with self.compute_loss_context_manager():
                    values = self.logps(model, self.prepare_inputs(part), with_entropy, training=False)
                found[0].append(values.logps)
                found[1] += [values.entropies] if values.entropies is not None else []
        width = rollout.loss_mask.shape[1]  # read back once, not with each part
        whole = [torch.cat([nn.functional.pad(v, (0, width - v.shape[1])) for v in kind]) for kind in found if kind]
        return [values.cpu() for values in whole]

    def _parts_of(self, rollout: Rollout) -> list[dict[str, Any]]:
        multiple = self.args.pad_to_multiple_of
        multiple = None if multiple == "auto" else multiple
        share, pad = self._share_prompts, self.codec.tokenizer.pad_token_id
        positions = None if self.image_prompts is None else self.image_prompts.positions
        return rollout.micro_batches(self.train_batch_size, share, pad, multiple, positions)

    def _eval_samples(self, rows: list[dict[str, Any]]) -> list[Sample]:
        size = self.num_generations_eval
        samples = self.new_samples([row for row in rows for _ in range(size)])
        return [  # seeds are of the prompt, so that no batch size and no order changes them
            replace(sample, seed=mix(self.args.seed, i % size, *sample.prompt_ids), is_evaluated=True)
            for i, sample in enumerate(samples)
        ]

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        """Evaluates, then shows the completions if ``log_completions`` is set."""
        self._shown = []
        if not self.is_in_train:
            self._synced_at = None  # the weights may have changed
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self.args.log_completions:
            title = f"{description} at step {self.state.global_step}"
            self._show(self._shown, title, f"{metric_key_prefix}_completions")
        return output

    def _log_evaluation(self, samples: list[Sample], scores: Scores) -> None:
        size, weights = self.num_generations_eval, self.rewards.weights
        summary = records.Summary.of(samples, scores)
        self.metrics.update(summary.sums(self.reward_func_names, weights, size, self.args.pass_threshold))
        self.metrics.update(summary.extremes())
        rollout = self._rollout_of(samples)
        # Each prompt separately, so that normalization does not depend on the batch size.
        advantages = torch.cat([self.compute_advantages(group, size, None) for group in scores.rewards.split(size)])
        self._shown += self._shown_rows(samples, scores, advantages)
        rollout = self.complete_rollout(replace(rollout, advantages=advantages), samples)
        for part in self._parts_of(rollout):
            part = self.prepare_inputs(part)
            items = self.count_items(part)
            with torch.no_grad(), self.compute_loss_context_manager():
                loss, _ = self.compute_loss(self.model, part, True, items)
                self.metrics.add_sum("loss", loss * items, items)

    def _report_rollout(self, samples: list[Sample], scores: Scores, advantages: torch.Tensor) -> None:
        """Show the completions of a rollout if ``log_completions`` is set."""
        if self.args.log_completions:
            self._show(self._shown_rows(samples, scores, advantages), f"Step {self.state.global_step}", "completions")

    def _shown_rows(self, samples: list[Sample], scores: Scores, advantages: torch.Tensor) -> list[dict[str, Any]]:
        rows = records.rows(samples, self.reward_func_names, scores, advantages, self.state.global_step)
        if self.image_prompts is not None and self.args.log_multimodal:
            for row, sample in zip(rows, samples, strict=True):
                row["images"] = self.image_prompts.pictures(sample.row, sample.prompt)
        return rows

    def _show(self, rows: list[dict[str, Any]], title: str, stem: str) -> None:
        """Print, write and track `rows` of all processes."""
        rows = [row for part in self.dist.gather_object(rows) for row in part]
        if not (rows and self.dist.is_main):
            return
        args = self.args
        seen = {records.plain_text(row["prompt"]): row for row in reversed(rows)}
        shown = list(seen.values())[::-1] if args.log_unique_prompts else rows
        terminal.write(records.table(shown, title, args.num_completions_to_print))
        path = Path(args.output_dir) / "completions" / f"{stem}_{self.state.global_step:05d}"
        path = records.write(rows, path, args.log_multimodal)
        records.track(shown, stem, args.report_to)
        if repo := getattr(args, "log_completions_hub_repo", None):
            records.upload(path, repo, args.hub_token)

    # ------------------------------------------------------------------------------------------------ set-up

    def _make_reference(self, fresh_adapter: bool) -> MovableReference | None:
        """The current policy's log-probabilities, if the loss needs them."""
        if not self.uses_reference:
            return None
        given = self.given_reference if isinstance(self.given_reference, nn.Module) else None
        alpha = self.args.ref_model_mixup_alpha
        if self.args.sync_ref_model and (problem := sync_problem(self.model, given, alpha)):
            raise ValueError(problem)
        reference = make_reference(self.model, given, fresh_adapter, moves=self.args.sync_ref_model)
        self._starts_at_reference = given is None
        if isinstance(reference, FrozenReference):
            reference.place(self.dist)
        return reference

    def _can_share_prompts(self) -> bool:
        """Whether completions go behind one copy of their prompt in training."""
        wanted = self.args.share_prompts
        if wanted is False or self.num_generations == 1 or (wanted is None and self.train_batch_size == 1):
            return False
        example = None if self.image_prompts is None else self.image_prompts.example
        both = [model for model in (self.model, self.ref_model) if model is not None]
        problem = sharing_problem(both, example, self.router_aux_loss_coef, self.args.torch_compile)
        if problem is None:
            for model in both:
                varlen_attention.enable_segments(model, example)
            return True
        if wanted:
            raise ValueError(f"share_prompts=True cannot be had: {problem}")
        logger.info("The prompt is read once for each completion: %s", problem)
        return False

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """What the policy may call, the tools of every kind of environment included. Others can be set between two
        rollouts; environments keep theirs.
        """
        return self.environments.all_tools()

    @tools.setter
    def tools(self, tools: list[Callable[..., Any]] | None) -> None:
        for problem in _turn_problems(self.args, ["tools"] if tools else []):
            raise ValueError(f"{problem}.")
        before = list(self.environments.tools.values())
        self.environments.set_tools(tools)
        try:
            self._ends_of_calls = self._check_tools()
        except ValueError:
            self.environments.set_tools(before)
            raise

    @property
    def _context(self) -> int | None:
        config = getattr(wrapping.base_model(self.model), "config", None)
        return context_length(config, self.args.vllm_max_model_length if self.args.use_vllm else None)

    def _leave_room(self) -> None:
        """Find the prompts of texts that are too long before any is sampled from; see `with_room`."""
        if self.rollout_func is not None or self.environments.factories or self.image_prompts is not None:
            return

        def count(row: dict[str, Any]) -> int:
            sample = Sample(row, row["prompt"], [])
            return len(self._encode(sample, sample.prompt, self.environments.schemas_of(sample))[0])

        def fitting(dataset: Any, name: str, at_least: int = 1) -> Any:
            if dataset is None:
                return None
            found = with_room(dataset, name, count, self._context, self.args.long_prompts == "drop")
            if found is not dataset:
                check_prompts(found, name, at_least)
            return found

        self.train_dataset = fitting(self.train_dataset, "train_dataset", self.layout.prompts)
        if isinstance(sets := self.eval_dataset, Mapping):
            self.eval_dataset = {name: fitting(dataset, name) for name, dataset in sets.items()}
        else:
            self.eval_dataset = fitting(sets, "eval_dataset")

    def _check_tools(self) -> set[int]:
        """The tokens that end a turn with calls. Raises ValueError if the chat template does not support the tools."""
        if self.rollout_func is not None:
            return set()
        row = None if pipeline.is_stream(self.train_dataset) else self.train_dataset[0]
        return self.environments.check(self.codec, row)

    @property
    def reward_weights(self) -> torch.Tensor:
        """(F,) the weight of each reward function, those of environments among them."""
        return self.rewards.weights

    @property
    def epsilon_high(self) -> float:
        """How far the ratio to the old policy counts above 1."""
        return self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high

    @property
    def generation_config(self) -> GenerationConfig:
        """How completions are sampled, in the words of transformers."""
        return generation_config(self.sampling(), self.codec.tokenizer, settings_of(self.args))

    @property
    def layout(self) -> Layout:
        """Which completions of a rollout are whose."""
        size, parts, window = (
            self.train_batch_size,
            self.args.steps_per_generation,
            self.args.gradient_accumulation_steps,
        )
        chunk = size * (window if parts % window == 0 else parts)
        return Layout(self.num_generations, size * parts, chunk, self.dist.world_size)

    def _forget_rollout(self, keep_count: bool = False) -> None:
        self._shown = []
        self._rollout = None
        self._used = 0
        self._synced_at = None
        if not keep_count:
            self._num_rollouts = self._num_tokens = 0


NOT_THE_POLICYS = (
    "The log-probabilities that %s returned with its completions are not those of the policy: %s From now on the "
    "trainer computes them itself, by one more forward of each rollout where the loss needs them."
)

Triple = tuple[Sample, torch.Tensor, torch.Tensor]
"""A sample, its rewards and which of them failed: (F,) each."""

RESERVED = {"prompt", "completion", "completions", "completion_ids", "prompts"}
"""Columns that reward functions get by other names, or from elsewhere."""


def as_they_are(rows: list[Any]) -> list[Any]:
    """The collator: a batch of prompts is a list of rows."""
    return rows


def _turn_problems(args: RolloutConfig, names: list[str]) -> Iterator[str]:
    """What does not go together with further turns of the policy, which the arguments called `names` make."""
    for name in names:
        if args.data_parallel_size < args.world_size:
            yield (
                f"{name} may answer the processes that split a matrix (tp_size) or a row (cp_size) differently, and "
                "they must sample alike. Set both to 1, or shard the model by fsdp"
            )
        if args.router_replay:
            yield (
                f"router_replay=True replays the experts chosen in sampling, and of the turns of {name} they are not "
                "known; leave one of the two out"
            )


def _listed(ids: Any) -> list[Any]:
    return [*ids] if isinstance(ids, (list, tuple)) else [ids] if ids is not None else []


def _least(values: torch.Tensor) -> torch.Tensor:
    """The minimum without NaN: (N,) -> (); NaN if there is no other value."""
    least = values.nan_to_num(nan=torch.inf).amin()
    return least.masked_fill(least.isinf(), torch.nan)


def _triples(samples: list[Sample], scores: Scores) -> list[Triple]:
    samples = [replace(sample, environment=None) for sample in samples]  # its reward is known, and it stays here
    return list(zip(samples, scores.rewards, scores.failed, strict=True))
