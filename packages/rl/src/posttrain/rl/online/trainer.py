"""Online training: prompts -> generate -> score -> advantages -> windows of micro-batches -> loss.

`RolloutTrainer` has the methods to override, and hands the work to objects that know no trainer: `Sampler` completes
prompts, `Rollouts` makes rollouts of them and hands out their micro-batches, `OldLogps` knows the policy that sampled,
and `Reporter` shows completions.
An algorithm is a subclass that overrides `compute_advantages` and `policy_loss`.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from posttrain.compat.trainer_names import reads_from_arguments
from posttrain.core.config import set_among
from posttrain.core.data import pipeline
from posttrain.core.errors import checked_args
from posttrain.core.logging.metrics import num_tokens_in
from posttrain.core.models import regularization, wrapping
from posttrain.core.models.embeddings import id_limits
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.core.state import EvalLoopOutput, TrainOutput
from posttrain.core.training.plan import Plan, make_plan
from posttrain.core.training.preflight import Parts, Problem
from posttrain.lm.attention.document_positions import invocation_tokens
from posttrain.lm.generate.trajectories import REPLAYED, name_of, read
from posttrain.lm.images.images import IMAGE_COLUMNS, VIDEO_COLUMNS, ImageReader, has_images
from posttrain.lm.images.vision import check_model, check_processor
from posttrain.lm.loading import loading
from posttrain.lm.trainer import LanguageModelTrainer
from posttrain.rl.agents.agent import Agent, Episodes
from posttrain.rl.generation import Generator, Sampling
from posttrain.rl.generation.engines import make_generator, settings_of
from posttrain.rl.generation.protocol import Abilities
from posttrain.rl.generation.transformers import generation_config
from posttrain.rl.losses import credit, policy_losses
from posttrain.rl.online import reporting, setup
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.asynchronous import NO_WEIGHTS
from posttrain.rl.online.curriculum import Curriculum, Numbered
from posttrain.rl.online.old_logps import OldLogps
from posttrain.rl.online.reporting import Reporter
from posttrain.rl.online.rollouts import Rollouts
from posttrain.rl.online.sampler import Sampler
from posttrain.rl.online.trajectories import replayed
from posttrain.rl.policy.loading import cast_head, refuse_other_models
from posttrain.rl.policy.logprobs import CompletionLogps, completion_logps
from posttrain.rl.policy.overrides import ROLLOUT_METHODS
from posttrain.rl.policy.reference import FrozenReference, MovableReference, SyncReference, movers, set_up_reference
from posttrain.rl.rewards.scorers import RewardModel, functions_by_name
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.images import ImagePrompts, can_see
from posttrain.rl.samples.prompts import (
    OF_TEXT_ALONE,
    GroupedStream,
    GroupSampler,
    Layout,
    context_length,
    require_prompts,
    with_room,
)
from posttrain.rl.samples.rendered import codec_of
from posttrain.rl.samples.samples import Rollout, Sample, take_rollout

if TYPE_CHECKING:
    from transformers import GenerationConfig

logger = logging.getLogger(__name__)


@reads_from_arguments(
    *"chat_template_kwargs generation_kwargs log_completions log_multimodal log_unique_prompts".split(),
    *"mask_truncated_completions max_completion_length max_tool_calling_iterations num_completions_to_print".split(),
    *"pad_to_multiple_of shuffle_dataset use_transformers_continuous_batching vllm_gpu_memory_utilization".split(),
    *(f"vllm_importance_sampling_{name}" for name in ("clip_max", "clip_min", "correction", "mode")),
    *"vllm_tensor_parallel_size use_vllm vllm_mode top_p top_k min_p repetition_penalty".split(),
    epsilon_low="epsilon",
)
class RolloutTrainer(LanguageModelTrainer):
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
            `posttrain.rl.samples.samples.take_rollout`.
        environment_factory: makes environments, see `posttrain.rl.agents.environments`.
        generator: the generation engine; by default as `args` set.
        agent: what makes episodes of rows in place of all these: ``async (episode, row)``, a command, or an
            `posttrain.rl.agents.agent.Agent`.

    The other arguments are those of `Trainer`.
    """

    config_class: type[RolloutConfig] = RolloutConfig
    args: RolloutConfig
    takes = "pass a causal language model, or the name of one."
    evaluation_metrics = None
    signature_columns: tuple[str, ...] | None = ("prompt", *IMAGE_COLUMNS, *VIDEO_COLUMNS)
    fixed_at_construction: tuple[str, ...] = ("num_generations", "beta", "reward_weights", "chat_template_kwargs")
    #: Whether prompts may have images.
    reads_images = True
    #: Parts that do not go with the algorithm, which needs the prompts of rows and one sequence of each.
    does_not_take: tuple[str, ...] = ()
    #: What the loss of a completion reads besides its tokens and its advantage, such as another one; "": nothing.
    reads_besides = ""
    #: Whether there must be reward functions. Elsewhere they are metrics.
    learns_from_rewards = True
    #: The reference; None: the weights that the policy begins with.
    given_reference: nn.Module | str | None = None
    #: Whether advantages depend on the divergence of the policy that sampled from the reference.
    needs_kl_of_samples = False
    #: Whether the loss reads a gradient of the entropies.
    learns_entropy = False
    #: Whether `policy_loss` multiplies by ``inputs["correction"]`` itself.
    corrects_itself = False
    INSTEAD = ROLLOUT_METHODS

    def __init__(
        self,
        model: nn.Module | str | None = None,
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
        agent: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        **others: Any,
    ) -> None:
        args = self.config_class() if args is None else checked_args(args, self.config_class)
        reward_funcs = functions_by_name(args) if reward_funcs is None else reward_funcs
        rare = {n: others.pop(n, None) for n in ("compute_loss_func", "compute_metrics", "optimizer_cls_and_kwargs")}
        given = {**locals()} | rare
        own = "reward_funcs reward_processing_classes environment_factory tools rollout_func agent".split()
        parts = Parts.of(given, ref_model=self.given_reference, datasets={}, others={name: given[name] for name in own})
        self.rollout_func = rollout_func
        super().__init__(args, parts, **others)
        functions = self.rewards.functions
        for function in functions:
            if isinstance(function, RewardModel):
                self.dist.place(function.model)
        self.reward_funcs, self.reward_func_names = functions, self.rewards.names
        self.reward_processing_classes = [getattr(function, "tokenizer", None) for function in functions]
        self.num_generations, self.num_iterations = args.num_generations, args.num_iterations
        self.num_generations_eval = args.num_generations_eval or args.num_generations
        self.beta, self.temperature = args.beta, args.temperature
        if pipeline.is_stream(train_dataset):  # each process reads its own part, as trl notes in the same place
            accelerator_config: Any = args.accelerator_config
            accelerator_config.dispatch_batches = False
        reader = ImageReader.of(args)
        self.image_prompts = ImagePrompts(self.processing_class, self.model, reader, args) if self.sees else None
        self._make_sampler(generator, parts.others["agent"])
        self.prepare_datasets(self.train_dataset, self.eval_dataset)
        own = weakref.proxy(self)  # a trainer that is dropped must free its memory at once
        self.rollout_maker, self.old_logps = Rollouts(own, args), OldLogps(own, args)
        self.look_at_model(parts)
        self.reporter = Reporter(args, self.dist, self.image_prompts)

    def look_at_model(self, parts: Parts) -> None:
        """Makes the reference, and finds out how micro-batches are read."""
        args = self.args
        self.reference = self._make_reference(parts.peft_config is not None and not loading.is_adapter(parts.model))
        self.ref_model = self.reference.model if isinstance(self.reference, FrozenReference) else None
        if self.reference is not None and args.sync_ref_model:
            self.remove_callback(SyncReference)  # of the model before
            self.add_callback(SyncReference(self.reference, args.ref_model_mixup_alpha, args.ref_model_sync_steps))
        self.router_aux_loss_coef = loading.router_coefficient(self.model, args.router_aux_loss_coef)
        self.aux_loss_enabled = self.router_aux_loss_coef != 0
        models = [model for model in (self.model, self.ref_model) if model is not None]
        example = None if self.image_prompts is None else self.image_prompts.example
        coefficient = self.router_aux_loss_coef
        self.shares_prompts = setup.shares_prompts(models, args, self.train_batch_size, example, coefficient)
        if args.router_replay:
            setup.enable_router_replay(self.model, self.sees)

    def _make_sampler(self, generator: Generator | None, agent: Agent | None) -> None:
        """Make what completes prompts, once the prompts and the tools are checked."""
        args, images, processor = self.args, self.image_prompts, self.processing_class
        kwargs = images.vision.template_kwargs(args.chat_template_kwargs) if images else None
        tokenizer = tokenizer_of(processor)
        limit = id_limits(self.model).get("input_ids")
        self.codec = codec_of(tokenizer, args, kwargs, limit)
        config = wrapping.config_of(self.model)
        context = context_length(config, args.vllm_max_model_length if args.use_vllm else None)
        ends = self._ends_of_calls()
        self.episodes = None if agent is None else Episodes(agent, self.codec, context, args)
        generator = generator or make_generator(tokenizer, args, None if images is None else images.example)
        if args.max_staleness and not Abilities.of(generator).has_own_weights:
            raise ValueError(NO_WEIGHTS.format(type(generator).__name__))
        self.sampler = Sampler(generator, self.codec, self.environments, images, self.dist, context)
        self.sampler.ends_of_calls = ends

    # ------------------------------------------------------------------------------------------------ to override

    @classmethod
    def dataset_problems(cls, args: Any, parts: Parts) -> Iterator[Problem]:
        """Problems with prompts, with what answers the policy, and with reward functions."""
        yield from setup.problems(args, parts, cls)

    def shows_images(self, args: Any, parts: Parts) -> bool:
        """Whether prompts have images, or may have them in evaluations to come."""
        may = self.reads_images and can_see(parts.model, parts.processing_class)
        may = may and not set_among(args, *OF_TEXT_ALONE)
        return may or any(map(has_images, (parts.train_dataset, parts.eval_dataset)))

    def before_loading(self, args: Any, parts: Parts) -> None:
        """Makes the environments, and loads the reward models."""
        self.environments, self.rewards = setup.make_rewards(args, parts, self.learns_from_rewards)

    def check_model(self, model: Any) -> None:
        """Raise TypeError for a model that does not predict next tokens."""
        refuse_other_models(model, decodes_alone=True)

    def set_up_batches(self, model: nn.Module, tokenizer: Any, args: Any, parts: Parts) -> Any:
        """Rows stay as they are: they become tokens when completions are sampled."""
        if self.sees:
            check_processor(tokenizer)
            check_model(wrapping.base_model(model))
        if args.disable_dropout:
            regularization.disable_dropout(model)
        if args.cast_lm_head_to_fp32:
            cast_head(model)
        return pipeline.unchanged

    def prepare_rows(self, dataset: Any, role: str, name: str) -> Any:
        """`dataset` without prompts that leave no room for a completion."""
        environments, drops = self.environments, self.args.long_prompts == "drop"
        if self.rollout_func is not None or environments.factories or self.sees or self.episodes is not None:
            return dataset
        name = f"{name}_dataset" if name == role else name
        count = partial(setup.tokens_of, codec=self.codec, environments=environments)
        dataset = with_room(dataset, name, count, self.sampler.context, drops)
        if role == "train":
            invocation, refuses = invocation_tokens(self.model), self.args.on_bad_rows == "raise"
            setup.check_invocation(dataset, self.codec, environments, invocation, refuses)
        return dataset

    def new_samples(self, rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
        """A sample without a completion for each row."""
        if self.episodes is not None:  # the agent makes the prompts
            return [Sample(dict(row), row.get("prompt"), []) for row in rows]
        return self.sampler.new_samples(rows, check=self.rollout_func is None)

    def generate(self, samples: list[Sample], sampling: Sampling) -> list[Sample]:
        """The `samples` completed, in their order: by `rollout_func`, by episodes of the agent, or by turns of the
        policy and of its tools.
        """
        if self.rollout_func is not None:
            output = self.rollout_func([sample.prompt for sample in samples], self)
            return take_rollout(samples, output, self.codec)
        if self.episodes is not None:
            return self.episodes.run(samples, sampling, self.sampler.open_turns, self.metrics, self.sampler.ended)
        return self.sampler.converse(samples, sampling, self.metrics)

    def score(self, samples: list[Sample]) -> Scores:
        """What the reward functions make of `samples`."""
        return self.rewards.of(samples, self.state)

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

    def compute_turn_advantages(self, advantages: torch.Tensor, turns: credit.Turns, group_size: int) -> torch.Tensor:
        """What each turn of each completion has earned; asked where `credits_turns` is True.

        Args:
            advantages: (N,) of `compute_advantages`. turns: of all processes, see `posttrain.rl.losses.credit.Turns`.

        Returns:
            (N, T).
        """
        raise TypeError(f"{type(self).__name__} must override compute_turn_advantages.")

    def policy_loss(self, policy: CompletionLogps, inputs: dict[str, Any]) -> torch.Tensor:
        """The loss of each token (N, C) or completion (N, 1) of a micro-batch; see `Rollout.micro_batches`."""
        raise TypeError(f"{type(self).__name__} must override policy_loss.")

    @property
    def needs_old_logps(self) -> bool:
        """Whether the policy may have moved since it sampled, when its completions are learned from."""
        return self.args.gradient_accumulation_steps % (self.args.steps_per_generation * self.num_iterations) != 0

    @property
    def credits_turns(self) -> bool:
        """Whether `compute_turn_advantages` says what each turn has earned."""
        return False

    @property
    def uses_reference(self) -> bool:
        """Whether the loss reads the reference's log-probabilities of the completions."""
        return bool(self.beta)

    def complete_rollout(self, rollout: Rollout, samples: list[Sample]) -> Rollout:
        """`rollout` with whatever else the loss needs of it; adds the reference's log-probabilities.

        Args:
            samples: of each of its completions.
        """
        if self.reference is None or not self.uses_reference:
            return rollout
        with self.reference.use() as policy:  # which chooses its own experts
            return replace(rollout, ref_logps=self.rollout_maker.logps_of(policy, replace(rollout, routes=None))[0])

    def complete_scored(self, rollout: Rollout, samples: list[Sample], scores: Scores) -> Rollout:
        """`rollout` with whatever the loss needs that depends on the `scores` of its completions. Every process
        calls it for each rollout that is learned from.
        """
        return rollout

    @property
    def average(self) -> str:
        """What the summed loss is divided by, a name in `posttrain.rl.losses.policy_losses.AVERAGES`."""
        return "sequences"

    @property
    def top_entropy_quantile(self) -> float:
        """The share of most uncertain tokens that are learned from."""
        return 1.0

    def logps(self, model: nn.Module, batch: dict[str, Any], with_entropy: bool, training: bool) -> CompletionLogps:
        """Log-probabilities of the completions of a micro-batch."""
        router, entropies = training and bool(self.router_aux_loss_coef), training and self.learns_entropy
        return completion_logps(model, batch, self.logps_temperature, with_entropy, entropies, router)

    @property
    def logps_temperature(self) -> float:
        """What logits are divided by in the loss: by default what they are in sampling."""
        return self.temperature

    def sampling(self, temperature: float | None = None) -> Sampling:
        """How tokens are drawn: as the arguments say, and ``generation_kwargs``, which replace them."""
        sampling = self.sampler.sampling(self.args, self.model, self.temperature)
        return sampling if temperature is None else replace(sampling, temperature=temperature)

    def get_high_entropy_mask(self, entropies: torch.Tensor, mask: torch.Tensor, threshold: float) -> torch.Tensor:
        """The tokens of `mask` whose entropy is at least the quantile `threshold` of all processes' tokens: (N, C)."""
        local = entropies[mask.bool()].float()
        everyone = self.accelerator.gather(self.accelerator.pad_across_processes(local, dim=0, pad_index=-1))
        if self.accelerator.num_processes > 1:  # of processes that read the same rows, one
            everyone = everyone.view(self.accelerator.num_processes, -1)[:: self.dist.peers]
        least = policy_losses.entropy_threshold(everyone[everyone >= 0], 1 - threshold)  # no entropy is below 0
        return (entropies >= least) & mask.bool()

    # ---------------------------------------------------------------------------------- overridable methods of the loop

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """As the core's; with ``max_staleness`` above 0, completions are sampled in the background."""
        if name := os.environ.get(REPLAYED):  # of `posttrain rerun`: nothing after the training may run
            (one,) = [one for one in read(self.args.output_dir) if name_of(one) == name]
            print(replayed(self, one), flush=True)
            raise SystemExit
        self.sampler.synced_at = None  # the weights may have changed since an evaluation
        self.old_logps.begin_run()
        with self.rollout_maker.running():
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        """The prompts of `steps_per_generation` micro-batches at once, each `num_generations` times in a row.

        Raises:
            DataError: there are too few for one rollout.
        """
        if self.train_dataset is None:
            raise ValueError(f"{type(self).__name__}: training requires a train_dataset.")
        dataset = self.train_dataset
        require_prompts(dataset, self.layout.prompts)
        if pipeline.is_stream(dataset):
            shuffles = self.args.shuffle_dataset and hasattr(dataset, "shuffle")
            dataset = dataset.shuffle(seed=self.data_seed) if shuffles else dataset
            dataset = GroupedStream(dataset, self.layout)
        elif self.args.curriculum:
            if self.rollout_maker.curriculum is None or self.rollout_maker.curriculum.dataset is not dataset:
                self.rollout_maker.curriculum = Curriculum(dataset, self.args, self.data_seed)
            dataset = Numbered(dataset)
        size = self.train_batch_size * self.args.steps_per_generation
        return self.make_dataloader(dataset, "Training", size, is_training=True)

    def train_sampler(self, dataset: Any) -> torch.utils.data.Sampler[Any] | None:
        """Groups of completions next to each other; None for a stream, whose rows come grouped."""
        if pipeline.is_stream(dataset):
            return None
        return GroupSampler(len(dataset), self.layout, self.data_seed, bool(self.args.shuffle_dataset))

    @property
    def layout(self) -> Layout:
        """Which completions of a rollout are whose."""
        size, parts = self.train_batch_size, self.args.steps_per_generation
        window = self.args.gradient_accumulation_steps
        chunk = size * (window if parts % window == 0 else parts)
        return Layout(self.num_generations, size * parts, chunk, self.dist.world_size)

    @property
    def eval_batch_size(self) -> int:
        """Prompts of an evaluation batch on each process: the size that is set counts their completions."""
        return max(self.args.eval_batch_size // self.num_generations_eval, 1)

    def make_plan(self, loader: Any) -> Plan:
        """As the core's; each batch of prompts is a rollout, gone through `num_iterations` times."""
        args, parts = self.args, self.rollout_maker.per_rollout
        length = len(loader) * parts if pipeline.has_length(loader) else None
        epochs, window = args.num_train_epochs, args.gradient_accumulation_steps
        return replace(make_plan(length, window, epochs, args.max_steps, args.epochs_of_stream), uses=parts)

    def windows(self, plan: Plan, loader: Any) -> Iterator[tuple[list[Any], torch.Tensor | None]]:
        """Micro-batches of rollouts, which are made on demand."""
        if self.run.progress.batches == 0:
            self.rollout_maker.begin_epoch(self.state.global_step)
        batches = self.rollout_maker.read(self.run.progress.epoch, loader)
        self.restore_rng()
        return self._windows_of(plan, batches)

    def windows_left(self, plan: Plan, loader: Any, epoch: int) -> Iterator[tuple[list[Any], torch.Tensor | None]]:
        if loader.epoch == epoch or self.rollout_maker.rollout is None or self.run.epoch_stopped:
            return super().windows_left(plan, loader, epoch)
        self.restore_rng()  # the prompts were used up, the last rollout was not
        return self._windows_of(plan, self.rollout_maker.read(epoch, loader, iter(())))

    def _windows_of(
        self, plan: Plan, batches: Iterator[list[dict[str, Any]]]
    ) -> Iterator[tuple[list[Any], torch.Tensor | None]]:
        stream = self.rollout_maker.micro_batches(batches)
        while self.state.global_step < plan.max_steps and not self.control.should_training_stop:
            if self.rollout_maker.background is not None or self.rollout_maker.are_there is not None:
                self.rollout_maker.begin_window(plan)
            if not (window := self.rollout_maker.window(stream, plan.accumulation)):
                return
            yield window, self.count_window(window)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The policy loss, shape (); the outputs are the log-probabilities and entropies of the completions."""
        policy, mask = self.logps(model, inputs, with_entropy=True, training=True), inputs["loss_mask"]
        of_tokens = self.policy_loss(policy, inputs)
        if "correction" in inputs and not self.corrects_itself:
            of_tokens = of_tokens * inputs["correction"]
        loss = policy_losses.summed(of_tokens, mask, self.average, inputs.get("trajectories"))
        loss = self.mean_loss(loss, inputs, num_items_in_batch, policy.aux_loss)
        if policy.entropies is not None:
            self.metrics.add_sum("entropy", (policy.entropies.detach() * mask).sum(), mask.sum())
        return (loss, policy._asdict()) if return_outputs else loss

    def mean_loss(
        self,
        summed: torch.Tensor,
        inputs: dict[str, Any],
        num_items: torch.Tensor | None,
        aux_loss: torch.Tensor | None,
    ) -> torch.Tensor:
        """The share of a micro-batch, whose losses are `summed`, in the mean over the window: shape ()."""
        total = self.count_items(inputs) if num_items is None else num_items
        loss = summed / torch.where(total > 0, total, 1)
        if aux_loss is None:
            return loss
        self.log_metric("aux_loss", aux_loss)
        return loss + self.router_aux_loss_coef * aux_loss * (self.count_items(inputs) / total.clamp(min=1))

    @overload
    def count_items(self, inputs: dict[str, Any]) -> torch.Tensor: ...
    @overload
    def count_items(self, inputs: list[Any]) -> int: ...
    def count_items(self, inputs: Any) -> torch.Tensor | int:
        """The divisor of the loss for `average`; for a batch of prompts, their number."""
        if isinstance(inputs, list):
            return len(inputs)
        longest, per_row = self.args.max_completion_length, inputs["tokens_per_row"]
        number = len(inputs["first_sequences"]) if "first_sequences" in inputs else None
        return policy_losses.count(inputs["loss_mask"], self.average, longest, per_row, number)

    def loss_is_scaled(self) -> bool:
        return True

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        """Evaluates, then shows the completions if ``log_completions`` is set."""
        self.reporter.evaluated = []
        if not self.is_in_train:
            self.sampler.synced_at = None  # the weights may have changed
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        step, stem = self.state.global_step, f"{metric_key_prefix}_completions"
        self.reporter.show(self.reporter.evaluated, f"{description} at step {step}", stem, step)
        return output._replace(metrics=reporting.with_errors(output.metrics or {}))

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[None, None, None]:
        """Complete and score prompts; logs rewards, ``pass@k`` and the policy loss."""
        models = [model for model in (self.model, self.ref_model) if isinstance(model, nn.Module)]
        self.rollout_maker.evaluate([] if pipeline.is_filler(inputs) else inputs, models)
        return None, None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs; warns if a record shows that nothing was learned."""
        if "perf/step_seconds" in logs:
            logs["step_time"] = logs["perf/step_seconds"]  # as trl calls it
        if (name := num_tokens_in(logs)) == "eval_num_tokens":
            logs[name] = self.rollout_maker.num_tokens
        super().log(logs, start_time)
        problem = reporting.learning_problem(logs, self.learns_from_rewards)
        if problem is not None and self.dist.is_main:
            logger.warning("Step %d: %s", self.state.global_step, problem)

    def state_dict(self) -> dict[str, Any]:
        """As the core's, with the rollout that is being gone through, and a reference that has moved."""
        state = super().state_dict() | self.rollout_maker.state_dict()
        state |= {"recomputes": True} if self.old_logps.recomputes else {}
        return state if self.reference is None else state | {"reference": self.reference.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.rollout_maker.load_state_dict(state)
        self.old_logps.recomputes = state.get("recomputes", False)
        if self.reference is not None and "reference" in state:
            self.reference.load_state_dict(state["reference"], self.args.output_dir)

    def batches_left(self, loader: Any, saved: dict[str, Any]) -> int:
        """As the core's, with those left of the present rollout, which goes on if it is distributed as before."""
        each = self.rollout_maker.per_rollout
        goes_on = "rollout" in saved and saved["dealt"] == self.rollout_maker.how_dealt
        left = super().batches_left(loader, saved) - len(saved.get("used_parts", ())) // saved.get("parts", 1)
        return left * each + (each - saved["used"] if goes_on else 0)

    # ------------------------------------------------------------------------------------------------ a rollout

    def make_rollout(self, batches: Iterator[list[dict[str, Any]]]) -> Rollout | None:
        """The next rollout; None where the epoch has no more prompts."""
        return self.rollout_maker.make(batches)

    @property
    def _corrects_engine(self) -> bool:
        """Whether completions of weights that are not quite the policy are weighted, by ``inputs["correction"]``."""
        return self.args.max_staleness > 0 and self.args.vllm_importance_sampling_correction

    # ------------------------------------------------------------------------------------------------ what scripts read

    def _make_reference(self, fresh_adapter: bool) -> MovableReference | None:
        """The current policy's log-probabilities, if the loss needs them."""
        if not self.uses_reference:
            return None
        given = self.given_reference if isinstance(self.given_reference, nn.Module) else None
        self.old_logps.starts_at_reference = given is None
        own = movers(self.callback_handler.callbacks, self.model)
        return set_up_reference(self.model, given, fresh_adapter, self.args, self.dist, own)

    def _ends_of_calls(self) -> set[int]:
        """The tokens that end a turn with calls. Raises ValueError if the chat template does not support the tools."""
        if self.rollout_func is not None:
            return set()
        first = None if pipeline.is_stream(self.train_dataset) else self.train_dataset[0]
        return self.environments.check(self.codec, first)

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """What the policy may call, the tools of every kind of environment included. Others can be set between two
        rollouts; environments keep theirs.
        """
        return self.environments.all_tools()

    @tools.setter
    def tools(self, tools: list[Callable[..., Any]] | None) -> None:
        for problem in setup.turn_problems(self.args, ["tools"] if tools else []):
            raise ValueError(f"{problem}.")
        before = list(self.environments.tools.values())
        self.environments.set_tools(tools)
        try:
            self.sampler.ends_of_calls = self._ends_of_calls()
        except ValueError:
            self.environments.set_tools(before)
            raise

    @property
    def generator(self) -> Generator:
        """The engine that generates."""
        return self.sampler.generator

    @generator.setter
    def generator(self, generator: Generator) -> None:
        self.sampler.use(generator)

    @property
    def reward_weights(self) -> torch.Tensor:
        """(F,) the weight of each reward function, those of environments among them."""
        return self.rewards.weights

    @reward_weights.setter
    def reward_weights(self, weights: Any) -> None:
        given, names = torch.as_tensor(weights, dtype=torch.float32), self.rewards.names
        if given.shape != (len(names),):
            raise ValueError(f"reward_weights={weights}: give a number for each reward function ({', '.join(names)}).")
        self.rewards.weights = given

    @property
    def epsilon_high(self) -> float:
        """How far the ratio to the old policy counts above 1."""
        return self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high

    @epsilon_high.setter
    def epsilon_high(self, most: float) -> None:
        self.args.epsilon_high = most

    @property
    def generation_config(self) -> GenerationConfig:
        """How completions are sampled, in the words of transformers."""
        greedy = {"do_sample": False} if (given := self.args.generation_kwargs or {}).get("do_sample") is False else {}
        sampling = self.sampling(given.get("temperature", self.temperature) if greedy else None)  # shown, though unused
        return generation_config(sampling, self.codec.tokenizer, settings_of(self.args) | greedy)
