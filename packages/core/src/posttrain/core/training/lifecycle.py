"""A training run from its set-up to its end: what lies behind the doors of `Trainer`.

The loop itself is `Trainer.train`. Here is what it calls between the steps: set-up and resuming before the first, logging,
evaluating and saving after each, and the last record.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.core import hub
from posttrain.core.checkpoint import Saver, asked_for, codec, elastic, rng, sharded, weights
from posttrain.core.data import pipeline
from posttrain.core.errors import DataError
from posttrain.core.evaluation import eval_loop
from posttrain.core.logging import trackers
from posttrain.core.logging.metrics import FLOPS, TOKENS, Clock, Metrics, clock_of, means, speed_metrics
from posttrain.core.losses import normalization, scale_check
from posttrain.core.models import (
    adapters,
    compiling,
    ema,
    gradient_checkpointing,
    liger,
    regularization,
    special_tokens,
    wrapping,
)
from posttrain.core.optim import builder, lr_scheduler
from posttrain.core.state import EvalLoopOutput, TrainerControl, TrainerState, TrainOutput
from posttrain.core.training import allocator, argument_changes, nonfinite, override_checks, preemption, preflight
from posttrain.core.training.incidents import Incidents
from posttrain.core.training.leaving import Leaving
from posttrain.core.training.memory import MemoryTracker
from posttrain.core.training.plan import Plan, Progress
from posttrain.core.training.resuming import Resuming

if TYPE_CHECKING:
    from posttrain.core.arguments import TrainingArguments
    from posttrain.core.callbacks import CallbackHandler
    from posttrain.core.checkpoint import Store
    from posttrain.core.distributed import Distributed

logger = logging.getLogger(__name__)


class Lifecycle(Incidents, Resuming, Leaving):
    """The private half of `Trainer`, which makes the attributes named here and offers the public methods called here."""

    args: TrainingArguments
    dist: Distributed
    store: Store
    model: nn.Module
    callback_handler: CallbackHandler
    state: TrainerState
    control: TrainerControl
    metrics: Metrics
    clock: Clock
    progress: Progress
    _made_optimizer: Any = None  # what this trainer made itself, for the run before or when it was asked to
    _made_scheduler: Any = None
    _memory: MemoryTracker
    #: What the Hub finds models of this trainer by, "trl" among them where scripts and searches expect it.
    _tag_names: tuple[str, ...] | list[str] = ()

    def _set_model(self, model: nn.Module) -> None:
        base = wrapping.base_model(model)
        if self.train_dataset is not None:
            adapters.check_trainable(model)
            nonfinite.check_float16(model, self.dist.precision, self.dist.engine is not None)
        self.model = self.model_wrapped = model
        self.model_accepts_loss_kwargs = normalization.accepts_loss_kwargs(model)
        self._loss_shifts_labels = normalization.shifts_labels(base)
        self.label_names = normalization.label_names(base) if self.args.label_names is None else self.args.label_names
        self.can_return_loss = normalization.can_return_loss(base)
        self._main_input = getattr(base, "main_input_name", "input_ids")
        self._signature_columns: list[str] | None = None
        self._flops_parameters: int | None = None
        # Elsewhere, what the attention mask shows counts as real; looking for padding would be one more kernel a step.
        counts = self.args.include_num_input_tokens_seen == "non_padding"
        self._pad_to_count = getattr(self.processing_class, "pad_token_id", None) if counts else None
        self._needs_mask_to_count = counts and self._pad_to_count is None
        self.label_smoother = normalization.label_smoother(model, self.args.label_smoothing_factor)
        if self._tag_names and hasattr(base, "add_model_tags"):
            base.add_model_tags(list(self._tag_names))  # which the model's own push_to_hub and the card carry on
        self._set_objective()
        self._adapters_checked = not wrapping.is_peft_model(model)
        self.dist.place(model, trained=True)
        if getattr(model, "config", None) is not None:
            model.config.use_cache = self.args.use_cache

    def _set_objective(self) -> None:
        """Look at `compute_loss` and `training_step` as they are now: a script may have replaced them since."""
        self._objective = normalization.Objective(self.compute_loss, self._declared_mean())
        self._step_takes_count = normalization.accepts(self.training_step, "num_items_in_batch")
        self._loss_scale = self.dist.world_size if self.args.average_tokens_across_devices else 1
        self._sync_each_batch = bool(self.args.accelerator_config.accumulation.get("sync_each_batch"))

    def _declared_mean(self) -> bool | None:
        """What is declared of `compute_loss`: that it returns a mean, or not; None: nothing. What our trainers know of their
        own losses does not hold for a method that replaced them."""
        scaled = self.loss_is_scaled_for_ga
        if scaled is None and override_checks.is_ours(self, "compute_loss"):
            scaled = self._loss_is_scaled()
        return None if scaled is None else not scaled

    def _loss_is_scaled(self) -> bool | None:
        """Whether this class' own `compute_loss` returns ``sum / num_items_in_batch``; None where only trying it tells."""
        own = self.compute_loss_func is None and self.label_smoother is None
        return False if own and not self.model_accepts_loss_kwargs else None

    def _find_out_scale(self, model: nn.Module, inputs: Any, num_items: torch.Tensor, items: Any) -> None:
        """Let all processes find out together whether `compute_loss` returns a mean; one without labels only keeps in step."""
        ratio = scale_check.loss_ratio(self.compute_loss, model, inputs, num_items, self)
        ratios = self.dist.gather_object(ratio if items else None)
        known = override_checks.is_ours(self, "compute_loss") and self.compute_loss_func is None
        self._objective.returns_mean = scale_check.returns_mean(ratios, known, type(self).__name__)

    _preflight_passed = False

    def _preflight(self, args: TrainingArguments, parts: preflight.Parts) -> None:
        """Raise all that stands against the run, before a model is loaded. A trainer that loads its model itself calls this
        first, and the call of the base class finds it done."""
        if self._preflight_passed:
            return
        parts.trainer_class = type(self)
        preflight.raise_together(type(self).__name__, self.preflight(args, parts))
        self._preflight_passed = True
        for sentence in (override_checks.unheard(type(self)), hub.missing_token(args) if args.should_save else None):
            if sentence is not None:
                logger.warning(sentence)

    def _ask_whose_parts(self) -> None:
        """Find out which of optimizer and schedule the user has set, to the constructor or since: those are used as they are."""
        self._owns_optimizer = self.optimizer is None or self.optimizer is self._made_optimizer
        self._owns_scheduler = self.lr_scheduler is None or self.lr_scheduler is self._made_scheduler
        if self.model_init is not None and not (self._owns_optimizer and self._owns_scheduler):
            raise ValueError(
                "model_init makes new parameters at each train, which the optimizer in optimizers (or set as trainer.optimizer, "
                "or behind trainer.lr_scheduler) does not know; pass a model, or optimizer_cls_and_kwargs, or override "
                "create_optimizer."
            )

    def _make_parts(self, num_training_steps: int) -> None:
        """The optimizer and the schedule of this run: the user's, or new ones."""
        if self._owns_scheduler:
            self.lr_scheduler = None
        self.create_optimizer_and_scheduler(num_training_steps)
        if not self._owns_optimizer:
            builder.check_given_optimizer(self.optimizer, self.model_wrapped)
        if not self._owns_scheduler:
            builder.check_given_schedule(self.lr_scheduler, self.optimizer)
        self.model_wrapped, self.optimizer = self.dist.start(self.model_wrapped, self.optimizer)
        self._made_optimizer = self.optimizer if self._owns_optimizer else None
        self._made_scheduler = self.lr_scheduler if self._owns_scheduler else None

    def _new_state(self) -> TrainerState:
        mine = [*self.callback_handler.callbacks, self.control]
        return TrainerState(
            is_local_process_zero=self.dist.is_local_main,
            is_world_process_zero=self.dist.is_main,
            stateful_callbacks=mine,
        )

    def _forget_model(self) -> None:
        """Let go of the model and optimizer of an earlier run before the next is made: two need not fit at once."""
        handler = self.callback_handler
        self.model = self.model_wrapped = handler.model = None
        self._parameters: list[nn.Parameter] = []
        if self._owns_optimizer:
            self.optimizer = handler.optimizer = None

    @contextlib.contextmanager
    def _training(self, plan: Plan, loader: Any, checkpoint: Path | None, trial: Any) -> Iterator[nn.Module]:
        """Everything that is set up before the first step and taken down after the last, whatever happens between."""
        args, handler = self.args, self.callback_handler
        self._ask_whose_parts()
        if self.model_init is not None:
            pipeline.set_seed(args.seed)
            self._forget_model()
            self._set_model(self.call_model_init(trial))
        if checkpoint is not None:
            self._load_from_checkpoint(checkpoint)
        special_tokens.align_special_tokens(self.model, self.processing_class)
        self.model_wrapped = self._wrap_model(self.model)
        self._make_parts(plan.max_steps)
        self._check_space(plan)
        self.state, self.control = self._new_state(), TrainerControl()
        self.state.train_batch_size, self.state.is_hyper_param_search = self._train_batch_size, trial is not None
        self.metrics, self.clock, self.progress = Metrics(), clock_of(self.model, self.dist), Progress()
        self._guard, self._ema = self._make_guard(), ema.make(self.model, args, self.optimizer)
        self._cuts, self._loss_terms, self._rows_read, self._epoch_stops = 0, {}, 0, False
        limit = args.max_time and preemption.seconds(args.max_time)
        self._watch = preemption.Watch(self._saves_on_signal, limit, self.dist.world_size, self.dist.device)
        self._is_moving, self._boundary, self._saved_step = False, None, None
        self._loader, self._rng = loader, None
        place = {"rank": self.dist.rank, "world_size": self.dist.world_size, "gather": self.dist.gather_patiently}
        place["leader"] = self.dist.rank - self.dist.local_rank if args.save_on_each_node else 0
        self._saver = Saver(self.store, **place, patience=max(args.ddp_timeout, 3600))
        loader.set_epoch(0)
        if checkpoint is not None:
            self._resume(checkpoint, plan)
        self.state.compute_steps(args, plan.max_steps)
        self.state.max_steps, self.state.num_train_epochs = plan.max_steps, min(plan.num_epochs, 2**31)
        first = self._first_step = self.state.global_step
        self._parameters = list(self.model_wrapped.parameters())
        self._set_objective()
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        handler.train_dataloader = loader
        self.is_in_train = True
        logger.info(
            "Training %s parameters for %d updates of %d x %d x %d rows (batch x accumulation x processes)%s.",
            f"{sum(p.numel() for p in self._parameters if p.requires_grad):,}", plan.max_steps, self._train_batch_size,
            plan.accumulation, self.dist.world_size, f", from update {first}" if first else "",
        )  # fmt: skip
        self._set_train_mode(self.model_wrapped)
        try:
            self._watch.begin()
            debug = nonfinite.watched(self.model) if args.debug else contextlib.nullcontext()
            memory = self._memory.stage("train")
            noise = regularization.neftune(self.model, args.neftune_noise_alpha)
            kept = allocator.freed_memory_kept(args.keep_freed_memory and self.dist.device.type == "cpu")
            with kept, noise, debug, self._compiled(), memory as self._train_memory:
                yield self.model_wrapped
            self._settle_save()
            self._leave_after_the_last(trial)
        except preemption.Left as left:
            if (end := left.exit()) is not None:
                raise end from None
        except Exception as error:
            if args.save_on_exception:
                self._save_after(error)
            raise
        finally:
            self._watch.end()
            self.is_in_train = False
            for reads in [loader, *(kept for _, kept in self._kept_loaders.values())]:
                reads.end_workers()
            self._saver.leave()  # after an error; else everything is settled
            self.store.settle()
            for callback in handler.callbacks:
                if isinstance(callback, trackers.JSONLinesCallback):
                    callback.close()  # on_train_end is not heard when training raises
            if hasattr(self.optimizer, "eval"):  # an optimizer that averages weights leaves the averages behind
                self.optimizer.eval()

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if not training:
            return model
        args = self.args
        if args.activation_checkpointing:
            gradient_checkpointing.enable_gradient_checkpointing(model, args.activation_checkpointing_kwargs)
        if args.use_liger_kernel and (why_not := liger.apply_liger(model, args.liger_kernel_config)):
            logger.warning("use_liger_kernel: %s", why_not)
        return self.dist.prepare_model(model, bool(args.activation_checkpointing), self.optimizer)

    def _compiled(self) -> contextlib.AbstractContextManager:
        args = self.args
        if not args.torch_compile or args.debug:  # which looks at every module as it runs
            return contextlib.nullcontext()
        return compiling.compiled(self.model, args.torch_compile_backend, args.torch_compile_mode)

    def _find_checkpoint(self, resume_from_checkpoint: str | bool | Path | None) -> Path | None:
        wanted = resume_from_checkpoint
        if wanted is None:
            wanted = asked_for(self.args.resume_from_checkpoint)
        self._on_savers(self.store.clean)
        if wanted:
            return self.dist.on_main(lambda: self.store.resolve(wanted), "the check of the checkpoint")
        if self.store.checkpoints() and not self.args.overwrite_output_dir:
            logger.warning(
                "%s holds checkpoints of an earlier run, and this one starts afresh among them. Pass "
                "resume_from_checkpoint=True to go on instead, another output_dir, or overwrite_output_dir=True.",
                self.args.output_dir,
            )  # fmt: skip
        return None

    def _batches_given(self) -> int:
        """Micro-batches of the epoch before the place where the loader stands."""
        return self._loader.batches_given

    def _resume(self, checkpoint: Path, plan: Plan) -> None:
        fresh = self.state
        ema.load(self._ema, checkpoint)
        self.state = TrainerState.load_from_json(checkpoint / "trainer_state.json")
        for name in ("is_local_process_zero", "is_world_process_zero", "train_batch_size", "is_hyper_param_search"):
            setattr(self.state, name, getattr(fresh, name))
        self._look_for_best()
        if self.args.restore_callback_states_from_checkpoint:
            self.callback_handler.restore(self.state.stateful_callbacks)
        if not any(sharded.is_there(checkpoint, name) for name in ("optimizer", "engine")):
            return self._go_on_from_weights(checkpoint, plan)
        options, changed = (
            argument_changes.group_options(self.optimizer),
            argument_changes.found(checkpoint, self.args, self.state.epoch),
        )
        self._load_optimizer(checkpoint)
        self.lr_scheduler.load_state_dict(codec.load_tree(checkpoint / "scheduler"))
        argument_changes.apply(changed, self.optimizer, options, self.lr_scheduler)
        self._saved_step = self.state.global_step
        saved = elastic.load(checkpoint, self.dist.rank, self.dist.world_size)
        self.load_state_dict(saved["trainer"])
        # A micro-batch may hold another number of rows now.
        if not self.progress.epoch_ended and self._loader.epoch == self.progress.epoch:
            self.progress.batches = self._batches_given()
        if saved["rng"] is None:
            self._rng = elastic.fresh_random_numbers(
                self.args.seed, self.state.global_step, self.dist.rank, pipeline.set_seed
            )
        else:
            self._rng = saved["rng"]
        if self.dist.scaler is not None and saved.get("scaler"):
            self.dist.scaler.load_state_dict(saved["scaler"])

    def _look_for_best(self) -> None:
        """Say at once that the best checkpoint is gone, rather than when it is to be loaded."""
        best = self.state.best_model_checkpoint
        if best is not None and not self.dist.on_main(lambda: Path(best).is_dir() or self.store.is_remote(best)):
            logger.warning(
                "The best checkpoint so far, %s (%s=%s), is no longer there. The best of those that follow is kept if it is "
                "better than that.", best, self.args.metric_for_best_model, self.state.best_metric,
            )  # fmt: skip
            self.state.best_model_checkpoint = None

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        directory, model = Path(output_dir or self.args.output_dir), wrapping.unwrap(self.model)
        if state_dict is None:
            weights.save_weights(model, directory)
        elif hasattr(model, "save_pretrained"):  # what a script has gathered or picked itself
            model.save_pretrained(str(directory), state_dict=state_dict)
        else:
            weights.write(state_dict, directory, type(model).__name__)
        self._save_beside(directory)

    def _save_beside(self, directory: Path) -> None:
        """What belongs to the model, besides its weights."""
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if hasattr(processor, "save_pretrained"):
            processor.save_pretrained(str(directory))
        (directory / "training_args.json").write_text(self.args.to_json_string() + "\n", encoding="utf-8")

    def _on_savers(self, work: Callable[[], Any]) -> None:
        """Run `work` on the process that writes checkpoints: the main one, or the main one of each machine."""
        if not self.args.save_on_each_node:
            return self.dist.on_main(lambda: work() and None)
        if self.args.should_save:
            work()
        self.dist.meet("the process of each machine that writes")

    def _get_output_dir(self, trial: Any = None) -> str:
        return self.args.output_dir

    def _write_checkpoint(self, directory: Path) -> None:
        self._write_model(directory)
        if not self.args.save_only_model:
            for rank, state in self._processes_at_save.items():
                codec.save_tree(state, directory / f"rank-{rank}")
            self._save_optimizer(directory)
        if self.args.should_save:
            if not self.args.save_only_model:
                codec.save_tree(self.lr_scheduler.state_dict(), directory / "scheduler")
            ema.save(self._ema, directory)
            self.state.collect([*self.callback_handler.callbacks, self.control])
            self.state.save_to_json(directory / "trainer_state.json")

    def _restore_rng(self) -> None:
        if self._rng is not None:
            rng.set_rng_state(self._rng)
            self._rng = None

    def _adopt(self, loader: Any, is_training: bool = True) -> Any:
        place = {"rank": self.dist.rank, "world_size": self.dist.world_size, "seed": self._data_seed}
        return pipeline.adopt(loader, is_training=is_training, **place)

    @property
    def _data_seed(self) -> int:
        return self.args.seed if self.args.data_seed is None else self.args.data_seed

    def _fire(self, event: str, **kwargs: Any) -> None:
        if self.callback_handler.nobody_hears(event):
            return
        self.control = self.callback_handler.call_event(event, self.args, self.state, self.control, **kwargs)

    def _set_train_mode(self, model: nn.Module) -> None:
        model.train()
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def _count_window(self, window: list[Any]) -> torch.Tensor | None:
        """Items of the window, shape (), on the device; over all processes unless told to keep to this one.

        None where nobody needs them: a mean over the only micro-batch there is, is the mean over the window.
        """
        items = sum(self.count_items(inputs) for inputs in window)
        if len(window) == 1 and self.dist.world_size == 1 and self._objective.returns_mean:
            on_host = not isinstance(items, torch.Tensor) or items.is_cpu
            if on_host and items:
                return None
        items = normalization.scalar(items, self.dist.device)
        if self.args.average_tokens_across_devices:
            return self.dist.sum(items)
        # A process without labels has no mean, and no part in the mean of the others.
        return items if self.dist.world_size == 1 else items.clamp(min=1)

    def _count_input(self, inputs: Any) -> None:
        if self._needs_mask_to_count and "attention_mask" not in inputs:
            self._needs_mask_to_count = False  # said once
            logger.warning(
                "include_num_input_tokens_seen='non_padding', but the batches have no attention_mask and there is no tokenizer "
                "with a pad token: padding cannot be told from tokens, and all of them are counted."
            )
        self.metrics.add_sum(TOKENS, *normalization.count_tokens(inputs, self._main_input, self._pad_to_count))
        if operations := self.floating_point_ops(inputs):
            self.metrics.add_sum(FLOPS, operations, 0)

    def _advance(self, plan: Plan, num_batches: int) -> None:
        before = self.progress.batches
        self.progress.batches += num_batches
        self._rows_read += self._rows_between(before, self.progress.batches)
        self.state.global_step += 1
        self._is_moving, self._boundary = False, None
        if self.state.global_step == self._first_step + 1:
            self._check_optimizer_state()
        self.state.epoch = plan.epoch_at(self.progress.epoch, self.progress.batches, self.state.global_step)
        if self.args.include_num_input_tokens_seen != "no":  # callbacks may stop at a budget of tokens
            self.store_flos()
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0:
            self.dist.empty_cache()

    def _rows_between(self, first: int, last: int) -> int:
        """Rows in the micro-batches `first` to `last` of the epoch, on all processes; the last of an epoch may be short."""
        size = self._train_batch_size * self.dist.world_size
        as_read = self._loader.rows_per_batch == size and override_checks.is_from(self, "windows", "Trainer")
        total = self._loader.total_rows if as_read else None
        return (last - first) * size if total is None else min(last * size, total) - min(first * size, total)

    def _begin_epoch(self, epoch: int) -> None:
        self.progress.epoch, self.progress.epoch_ended = epoch, False
        self.control.should_epoch_stop = False
        self._fire("on_epoch_begin")

    def _end_epoch(self, plan: Plan, model: nn.Module, trial: Any) -> None:
        progress, is_left = self.progress, self._leaves_the_epoch(plan)
        if progress.batches == 0 and self.state.global_step < plan.max_steps and not self.control.should_training_stop:
            if self.state.global_step == 0:
                raise DataError(
                    "The training data gave not one batch, so nothing was trained. See whether the stream is empty or used up, "
                    "or whether every row of it was dropped."
                )
            logger.warning("The training data gave no batch in epoch %d; training stops here.", progress.epoch)
            self.control.should_training_stop = True
        if not is_left:
            progress.epoch_ended, progress.batches = True, 0
            self._loader.set_epoch(progress.epoch + 1)
        self._fire("on_epoch_end")
        if is_left and self.control.should_save:
            self._save_before_the_rest(model, trial)

    def _log_evaluate_save(self, model: nn.Module, trial: Any, ignore_keys: list[str] | None) -> None:
        """Do what the flags of the control ask for, and clear them."""
        if reason := self._watch.due():
            self._leave(model, trial, reason)
        if self.control.should_log or self.control.should_evaluate or self.control.should_save:
            self._guard.settle()
        if self._saver.pending is not None and (self.dist.world_size == 1 or self.control.should_log):
            self._settle_save(wait=False)
        if self.control.should_log and self.state.global_step > self.progress.last_logged:
            self._log_training()
        self.control.should_log = False
        if self.control.should_evaluate:
            self.store_flos()
            metrics = self._evaluate_or_leave(model, trial, ignore_keys)
            self.control.should_evaluate = False
            improved = self._determine_best_metric(metrics)
            if self.args.save_strategy == "best":
                self.control.should_save = improved
        if self.control.should_save:
            self.control.should_save = False
            self.store_flos()
            with self.clock("save"):
                self._save_checkpoint(model, trial)
        if self.args.save_on_exception:
            self._boundary = copy.deepcopy(self._position())

    def _log_training(self) -> None:
        """A record of the steps since the last: the one place of a run that waits for the device."""
        progress, step = self.progress, self.state.global_step
        pairs = self.metrics.drain(self.dist.gather_object)
        self._count_inputs(pairs)
        progress.loss_sum, progress.loss_count = self._loss_so_far(pairs["loss"])
        progress.grad_norm = float(progress.grad_norm)
        logs = {"loss": 0.0} | means(pairs) | {"grad_norm": progress.grad_norm, "learning_rate": progress.learning_rate}
        logs |= self._guard.logged()
        logs |= self.clock.performance(step - progress.last_logged, self.state.max_steps - step)
        progress.last_logged = step
        self.log(logs)

    def _loss_so_far(self, more: tuple[float, float]) -> tuple[float, float]:
        """(sum, count) of the losses of this run; those of a record that is not finite are in the log, not in the mean."""
        total, count = more if math.isfinite(more[0]) else (0.0, 0)
        return self.progress.loss_sum + total, self.progress.loss_count + count

    def _count_inputs(self, pairs: dict[str, tuple[float, float]]) -> None:
        """Move what the steps since the last call have read from drained metrics to the state."""
        tokens, slots = pairs.pop(TOKENS, (0, 0))
        self.state.num_input_tokens_seen += slots if self.args.include_num_input_tokens_seen == "all" else tokens
        flops = float(pairs.pop(FLOPS, (0, 0))[0])
        self.state.total_flos += flops
        self.clock.count(tokens, slots, flops)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict[str, float]:
        with self.clock("eval"):
            metrics = self.evaluate(ignore_keys=ignore_keys_for_eval)
            self.dist.meet("what callbacks do after an evaluation")
        if self.args.metric_for_best_model is not None:  # said at the first evaluation, also one before the first step
            eval_loop.named_metric(metrics, self.args.metric_for_best_model)
        if lr_scheduler.follows_a_metric(self.lr_scheduler) and not skip_scheduler:
            self.lr_scheduler.step(eval_loop.named_metric(metrics, self.args.metric_for_best_model or "loss"))
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Remember the metric to keep the best model by; True where it has improved."""
        if self.args.metric_for_best_model is None:
            return False
        value, best = eval_loop.named_metric(metrics, self.args.metric_for_best_model), self.state.best_metric
        if best is None:  # and NaN is no better than none
            best = -math.inf if self.args.greater_is_better else math.inf
        better = value > best if self.args.greater_is_better else value < best
        if better:
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
            # Saved before it is evaluated, where steps are saved and epochs evaluated.
            saved = self.state.global_step in (self._saved_step, self._saver.pending)
            kept = saved or self.args.save_strategy == "best" or self.control.should_save
            self.state.best_model_checkpoint = str(self.store.path(self.state.global_step)) if kept else None
        return better

    def _finish(self) -> TrainOutput:
        """The last record, the best model where it was asked for, and what `train` returns."""
        self._guard.finish()
        rest = self.metrics.drain(self.dist.gather_object)
        self._count_inputs(rest)
        loss_sum, loss_count = self._loss_so_far(rest.get("loss", (0.0, 0)))
        done = self.state.global_step - self._first_step
        # Of losses that were all NaN or infinite there is no mean, least of all 0; where nothing was learned from, it is 0.
        train_loss = loss_sum / loss_count if loss_count else math.nan if self._guard.count else 0.0
        metrics = speed_metrics("train", self.clock.total(), self._rows_read, done)
        metrics |= {"total_flos": float(self.state.total_flos), "train_loss": train_loss}
        metrics |= {"nonfinite_steps": self._guard.count} if self._guard.count else {}
        metrics |= self._train_memory
        rest.pop("loss", None)
        self.log(means(rest) | metrics)  # with what the algorithm measured since the last record
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            logger.info("Loading the best model, from %s (%s).", best, self.state.best_metric)
            folder = self.dist.on_main(lambda: self.store.resolve(best))
            self._load_from_checkpoint(folder)
            ema.load(self._ema, folder)
        elif self.args.load_best_model_at_end and self.state.best_metric is not None:
            logger.warning(
                "load_best_model_at_end: there is no checkpoint of the best update (%s, %s), so the model stays that of update %d.",
                self.state.best_global_step, self.state.best_metric, self.state.global_step,
            )  # fmt: skip
        if self._ema is not None and self.args.ema_use != "eval":
            self._ema.copy_to_model()
        self._push_at_end()
        self._copy_files()
        self._fire("on_train_end")
        return TrainOutput(self.state.global_step, train_loss, metrics)

    def _rotate(self, best: str | None) -> None:
        keep = [*([Path(best)] if best else []), *self._top_checkpoints(), *self.uploader.in_use]
        self._on_savers(lambda: self.store.rotate(self.args.most_checkpoints, keep=keep))

    def _top_checkpoints(self) -> list[Path]:
        """The `save_top_k` checkpoints whose evaluations were best, of those that are there; the later of two alike."""
        if self.args.save_top_k is None:
            return []
        name, sign = eval_loop.metric_key(self.args.metric_for_best_model), 1 if self.args.greater_is_better else -1
        scores = {record["step"]: record[name] for record in self.state.log_history if name in record}
        # A score that is not a number is no score; in a log that was read from a checkpoint it is None.
        scored = [(sign * score, step) for step, score in scores.items() if score is not None and score == score]
        there = [path for _, step in sorted(scored, reverse=True) if (path := self.store.path(step)).is_dir()]
        return there[: self.args.save_top_k]

    def _upload(self, checkpoint: Path | None, at_end: bool = False) -> None:
        """Queue for the Hub what the strategy asks for; the thread that uploads never stops the run."""
        if not self.args.push_to_hub:
            return
        self._fire("on_push_begin")
        message = "End of training" if at_end else f"Training in progress, step {self.state.global_step}"
        for folder, path, ignore in hub.jobs(self.args.hub_strategy, checkpoint, self.args.output_dir, at_end):
            if self.dist.is_main:
                self.uploader.push(folder, path, message, ignore)

    def _push_at_end(self) -> None:
        if not self.args.push_to_hub:
            return
        self.save_model(_internal_call=True)
        self.create_model_card()
        self._upload(None, at_end=True)
        self.dist.on_main(self.uploader.finish, "the last uploads")
        self._rotate(self.state.best_model_checkpoint)

    def _timed_pass(
        self, loader: Any, description: str, ignore_keys: list[str] | None, prefix: str, keep: bool = False
    ) -> EvalLoopOutput:
        if not self.is_in_train:  # who has prepared something may come hours after the others
            self.dist.meet("the beginning of an evaluation")
        started, loader = time.perf_counter(), self._adopt(loader, is_training=False)
        loss_only = None if keep or self.compute_metrics is not None else True
        averaged = self.is_in_train and self._ema is not None and self.args.ema_use != "final"
        weights = self._ema.swapped_in() if averaged else contextlib.nullcontext()
        with weights, self._memory.stage(prefix) as memory, self._ending_workers(loader):
            output = self.evaluation_loop(loader, description, loss_only, ignore_keys, prefix)
        seconds, size = time.perf_counter() - started, self.args.eval_batch_size * self.dist.world_size
        output.metrics.update(speed_metrics(prefix, seconds, output.num_samples, -(-output.num_samples // size)))
        output.metrics.update(memory)
        return output

    @contextlib.contextmanager
    def _ending_workers(self, loader: pipeline.Loader) -> Iterator[None]:
        """After this context no process reads for `loader`, unless the next evaluation of the same training will take it."""
        try:
            yield
        finally:
            if not self.is_in_train or all(loader is not kept for _, kept in self._kept_loaders.values()):
                loader.end_workers()

    def _evaluation_model(self) -> nn.Module:
        # Without the DDP wrapper: an evaluation has no gradients to average, and processes need not move in step.
        if self.dist.engine is not None and self.is_in_train:
            return self.model_wrapped
        if self.dist.shards:
            return self.dist.shard(self.model, self.optimizer)
        if not self.is_in_train:
            self.dist.place(self.model)
            if self.args.bf16_full_eval or self.args.fp16_full_eval:
                self.model.to(torch.bfloat16 if self.args.bf16_full_eval else torch.float16)
        return self.model

    @contextlib.contextmanager
    def _metrics_apart(self) -> Iterator[Metrics]:
        """What `log_metric` takes in here belongs to the evaluation, not to the training step around it."""
        training, self.metrics = self.metrics, Metrics()
        try:
            yield self.metrics
        finally:
            self.metrics = training
