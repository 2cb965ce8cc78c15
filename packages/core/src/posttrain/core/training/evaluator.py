"""Evaluates the model of a trainer: one timed pass over a loader, and which evaluation was the best."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from posttrain.core.data import pipeline
from posttrain.core.data.samplers import inner_sampler
from posttrain.core.evaluation import eval_loop
from posttrain.core.logging.metrics import speed_metrics
from posttrain.core.state import EvalLoopOutput, merit
from posttrain.core.training.preemption import EvaluationLeft

if TYPE_CHECKING:
    from posttrain.core.trainer import Trainer


class Evaluator:
    """Runs the evaluations and predictions of the trainer that owns it."""

    def __init__(self, owner: Trainer) -> None:
        self.owner = owner

    @contextlib.contextmanager
    def timed(
        self, loader: Any, description: str, ignore_keys: list[str] | None, prefix: str, keep: bool = False
    ) -> Iterator[EvalLoopOutput]:
        """`Trainer.evaluation_loop` over `loader`, with the averaged weights where they are asked for, and with metrics
        of speed and memory; predictions are returned if `keep`. Within this context `Trainer.log` and callbacks see the
        model as it was evaluated, without dropout.
        """
        owner, args = self.owner, self.owner.args
        if not owner.is_in_train:  # a process that has prepared something may come hours after the others
            owner.dist.meet("the beginning of an evaluation")
            owner.callback_handler.look_again()
        started, loader = time.perf_counter(), owner.loaders.adopt(loader, is_training=False)
        average = owner.run.ema if owner.is_in_train and args.ema_use != "final" else None
        with eval_loop.eval_mode(owner.model, owner.optimizer):
            with (
                contextlib.nullcontext() if average is None else average.swapped_in(),
                owner._memory_tracker.stage(prefix) as memory,
                owner.loaders.ending_workers(loader, owner.is_in_train),
            ):
                output = owner.evaluation_loop(
                    loader,
                    description=description,
                    prediction_loss_only=None if keep or owner.compute_metrics is not None else True,
                    ignore_keys=ignore_keys,
                    metric_key_prefix=prefix,
                )
            seconds, size = time.perf_counter() - started, args.eval_batch_size * owner.dist.world_size
            output.metrics.update(speed_metrics(prefix, seconds, output.num_samples, -(-output.num_samples // size)))
            output.metrics.update(memory)
            if owner.logs_num_tokens:
                owner.store_flos()
            yield output

    def loop(
        self, loader: Any, description: str, loss_only: bool, ignore_keys: list[str] | None, prefix: str
    ) -> EvalLoopOutput:
        """One pass over `loader` without gradients; see `Trainer.evaluation_loop`."""
        owner, args = self.owner, self.owner.args
        compute_metrics = None if loss_only else owner.compute_metrics
        batch_metrics = eval_loop.by_batch(compute_metrics, args.batch_eval_metrics)
        of_all: Any = compute_metrics if batch_metrics is None else None
        owner.callback_handler.eval_dataloader = loader
        with contextlib.ExitStack() as stack:
            halves = args.bf16_full_eval or args.fp16_full_eval
            if halves and not owner.is_in_train and owner.optimizer is not None and not owner.dist.shards:
                owner.dist.place(owner.model)
                stack.enter_context(eval_loop.weights_kept(owner.model))  # a trained one comes back as it was
            model, metrics = self.model(), stack.enter_context(owner.metrics.apart())
            stack.enter_context(eval_loop.eval_mode(model, owner.optimizer))
            kept, named, num_samples = eval_loop.run(
                loader,
                lambda inputs: self._predict(model, inputs, loss_only, ignore_keys),
                count_items=owner.count_items,
                weight=owner.scaling.objective.take_weight,
                metrics=metrics,
                keep=not loss_only,
                keep_with_batch_metrics=description == "Prediction",  # which is to return them
                is_filler=pipeline.is_filler,
                preprocess_logits=owner.preprocess_logits_for_metrics,
                batch_metrics=batch_metrics,
                include=args.include_for_metrics,
                main_input=owner.main_input,
                on_batch=lambda: self._after_batch(loader),
                gather=owner.dist.gather_object,
                num_batches=len(loader) if pipeline.has_length(loader) else None,
                accumulate=args.eval_accumulation_steps,
                concatenate=args.eval_do_concat_batches,
                order=getattr(inner_sampler(loader), "rows_to_restore", None),
                fill=owner.prediction_fill,
            )
        if of_all is not None and kept.predictions is not None and kept.label_ids is not None:
            named = eval_loop.with_returned(named, of_all(kept), prefix)
        prefixed = {n if n.startswith(f"{prefix}_") else f"{prefix}_{n}": v for n, v in eval_loop.plain(named).items()}
        return EvalLoopOutput(kept.predictions, kept.label_ids, prefixed, num_samples)

    def _predict(self, model: nn.Module, inputs: Any, loss_only: bool, ignore_keys: list[str] | None) -> Any:
        owner = self.owner
        with owner.dist.computing(inputs, owner.metrics):
            return owner.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)

    def _after_batch(self, loader: Any) -> None:
        owner = self.owner
        owner._fire("on_prediction_step")
        # Not once a set of several is evaluated and logged. Our own loaders have as many batches on every process, so
        # that all ask equally often.
        may_stop = len(owner.state.log_history) == owner.run.records_before_evaluation
        if may_stop and (owner.dist.num_processes == 1 or isinstance(loader, pipeline.Loader)):
            if reason := owner.run.watch.due():
                raise EvaluationLeft(reason)

    def model(self) -> nn.Module:
        """The model as an evaluation runs it: sharded where training shards it, and on the device."""
        # Without the DDP wrapper: an evaluation has no gradients to average, and processes need not move in step.
        owner, args, dist = self.owner, self.owner.args, self.owner.dist
        if dist.uses_deepspeed and owner.is_in_train:
            return owner.model_wrapped
        if dist.shards:
            return dist.shard(owner.model, owner.optimizer)
        if not owner.is_in_train:
            dist.place(owner.model)
            if args.bf16_full_eval or args.fp16_full_eval:
                owner.model.to(torch.bfloat16 if args.bf16_full_eval else torch.float16)
        return owner.model

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Remember the metric to keep the best model by, in the state of the trainer; True where it has improved."""
        args, state, saves = self.owner.args, self.owner.state, self.owner.checkpoints
        if args.metric_for_best_model is None:
            return False
        value = eval_loop.named_metric(metrics, args.metric_for_best_model)
        best = -math.inf if state.best_metric is None else merit(state.best_metric, args.greater_is_better)
        if not merit(value, args.greater_is_better) > best:  # NaN never is
            return False
        state.best_metric, state.best_global_step = value, state.global_step
        # Saved before it is evaluated, where steps are saved and epochs evaluated.
        saved = state.global_step in (saves.saved_step, saves.saver.pending)
        kept = saved or args.save_strategy == "best" or self.owner.control.should_save
        state.best_model_checkpoint = str(self.owner.store.path(state.global_step)) if kept else None
        return True
