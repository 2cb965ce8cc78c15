"""What surrounds the steps of a run: its set-up, signals, memory, compiled layers, and what is done after an error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from posttrain.core.callbacks import ClosingCallback
from posttrain.core.config import value_of
from posttrain.core.data import pipeline, workers
from posttrain.core.distributed import sharding
from posttrain.core.evaluation import eval_loop
from posttrain.core.logging import memory, terminal
from posttrain.core.logging.metrics import Clock, clock_of
from posttrain.core.losses import normalization
from posttrain.core.models import compiling, regularization, special_tokens, wrapping
from posttrain.core.optim import builder
from posttrain.core.state import TrainerControl, TrainerState
from posttrain.core.training import allocator, nonfinite, override_checks, preemption, resume
from posttrain.core.training.plan import Plan, check_intervals, number_of_saves
from posttrain.core.training.record import Record
from posttrain.core.training.run import Run
from posttrain.core.training.scaling import Scaling

if TYPE_CHECKING:
    from posttrain.core.trainer import Trainer

logger = logging.getLogger(__name__)

#: What stands for a model, an optimizer or a manager of checkpoints until the run makes it.
NOT_MADE: Any = None


def set_up(
    owner: Trainer, plan: Plan, loader: Any, checkpoint: Path | None, trial: Any, ignore_keys: list[str] | None
) -> Run:
    """Make the model, optimizer and state of a run, or load them from `checkpoint`."""
    args, handler = owner.args, owner.callback_handler
    terminal.open_streams()
    handler.look_again()
    override_checks.check_parts(owner)
    check_intervals(plan, args)
    find_owners(owner)
    if owner.model_init is not None:
        pipeline.set_seed(args.seed)
        # Those of an earlier run are dropped before the next are made: two need not fit at once.
        owner.model = owner.model_wrapped = handler.model = NOT_MADE
        owner.run = Run(owner)
        if owner._owns_optimizer:
            owner.optimizer = handler.optimizer = NOT_MADE
        owner.set_model(owner.call_model_init(trial))
    if checkpoint is not None:
        owner._load_from_checkpoint(str(checkpoint))
    special_tokens.align_special_tokens(owner.model, owner.processing_class)
    owner.model_wrapped = owner._wrap_model(owner.model)
    _compare_with_optimizer(owner, resumes=checkpoint is not None)
    _make_optimizer_and_scheduler(owner, plan.max_steps)
    owner.state, owner.control = new_state(owner), TrainerControl()
    owner.state.train_batch_size, owner.state.is_hyper_param_search = owner.train_batch_size, trial is not None
    new_record(owner, clock_of(owner.model, owner.dist))
    owner.run = run = Run.make(owner, plan, loader, trial, ignore_keys)
    owner.checkpoints.check_space(number_of_saves(plan, args))
    loader.set_epoch(0)
    owner.scaling, owner._non_blocking = Scaling(owner), args.non_blocking
    if checkpoint is not None:
        resume.resume(run, checkpoint)
    owner.state.compute_steps(args, plan.max_steps)
    owner.state.max_steps, owner.state.num_train_epochs = plan.max_steps, min(plan.num_epochs, 2**31)
    run.first_step = owner.state.global_step
    handler.model, handler.optimizer, handler.lr_scheduler = owner.model, owner.optimizer, owner.lr_scheduler
    handler.train_dataloader = loader
    owner.is_in_train = True
    announce(run)
    if not owner.scaling.objective.takes_count:
        logger.info(
            f"{owner.__class__.__name__}.compute_loss takes no num_items_in_batch: its loss is treated as a mean over "
            "the micro-batch, and weighted by the items of each in the step."
        )
    eval_loop.train_mode(owner.model_wrapped, owner.optimizer)
    if owner.dist.num_processes > 1:
        run.callbacks_may_differ = any(owner.dist.gather_patiently(handler.may_differ or args.goes_by_time))
    return run


def look_up(owner: Trainer, model: nn.Module) -> None:
    """Look up once what a run needs to know of the model that it trains."""
    args, base = owner.args, wrapping.base_model(model)
    owner.model_accepts_loss_kwargs = normalization.accepts_loss_kwargs(model)
    owner.loss_shifts_labels = normalization.shifts_labels(base)
    owner.label_names = normalization.label_names(base) if args.label_names is None else args.label_names
    owner.can_return_loss = normalization.can_return_loss(base)
    owner.label_smoother = normalization.label_smoother(model, args.label_smoothing_factor)
    owner.main_input = getattr(base, "main_input_name", "input_ids")
    owner._non_blocking = args.non_blocking
    owner._signature_columns = owner._flops_parameters = None
    add_tags: Any = getattr(base, "add_model_tags", None)  # the model's own push_to_hub and the card use them
    if add_tags is not None and (tags := [*owner.tag_names, *owner._tag_names]):
        add_tags(tags)


def find_owners(owner: Trainer) -> None:
    """Find out which of optimizer and schedule the user has set: those are used as they are."""
    owner._owns_optimizer = owner.optimizer is None or owner.optimizer is owner._made_optimizer
    owner._owns_scheduler = owner.lr_scheduler is None or owner.lr_scheduler is owner._made_scheduler
    if owner.model_init is not None and not (owner._owns_optimizer and owner._owns_scheduler):
        raise ValueError(
            "model_init makes new parameters at each train, which the optimizer in optimizers (or set as "
            "trainer.optimizer, or behind trainer.lr_scheduler) does not know; pass a model, or "
            "optimizer_cls_and_kwargs, or override create_optimizer."
        )


def _compare_with_optimizer(owner: Trainer, resumes: bool) -> None:
    """Warn where a run goes on with the optimizer of an earlier one, which does not follow arguments that changed."""
    now = {name: value_of(owner.args, name) for name in builder.OF_OPTIMIZER}
    if resumes or not owner._owns_optimizer or owner.optimizer is None:  # a checkpoint says itself what changed
        owner._made_with = now
    elif changed := [f"{n} from {old!r} to {now[n]!r}" for n, old in owner._made_with.items() if old != now[n]]:
        logger.warning(
            f"train() goes on with the optimizer that it made before, which does not follow what changed since: "
            f"{', '.join(changed)}. Set trainer.optimizer = None before train() for a new one."
        )


def _make_optimizer_and_scheduler(owner: Trainer, num_training_steps: int) -> None:
    """The optimizer and the schedule of this run: the user's, or new ones."""
    if owner._owns_scheduler:
        owner.lr_scheduler = None
    owner.create_optimizer_and_scheduler(num_training_steps)
    if not owner._owns_optimizer:
        builder.check_given_optimizer(owner.optimizer, owner.model_wrapped)
    if not owner._owns_scheduler:
        builder.check_given_schedule(owner.lr_scheduler, owner.optimizer)
    owner.model_wrapped, owner.optimizer = owner.dist.start(owner.model_wrapped, owner.optimizer)
    owner._made_optimizer = owner.optimizer if owner._owns_optimizer else None
    owner._made_scheduler = owner.lr_scheduler if owner._owns_scheduler else None


def new_state(owner: Trainer) -> TrainerState:
    """The state of a run that begins."""
    return TrainerState(
        is_local_process_zero=owner.dist.is_local_main,
        is_world_process_zero=owner.dist.is_main,
        stateful_callbacks=[*owner.callback_handler.callbacks, owner.control],
    )


def new_record(owner: Trainer, clock: Clock | None = None) -> None:
    """Let the trainer log into a new record."""
    owner.record = Record(owner.args, owner.dist, clock, getattr(owner.processing_class, "pad_token_id", None))
    owner.metrics, owner.clock = owner.record.metrics, owner.record.clock


def announce(run: Run) -> None:
    """Log what is trained, and for how long."""
    owner, args, loader = run.owner, run.owner.args, run.loader
    size = loader.rows_per_turn and f"about {loader.rows_per_turn / owner.dist.world_size:.1f}"
    logger.info(
        "Training %s parameters for %s of %s x %d x %d rows (batch x accumulation x processes)%s.",
        f"{sharding.count(p for p in run.parameters if p.requires_grad):,}",
        f"{args.max_duration}, in steps" if run.plan.is_open else f"{run.plan.max_steps} steps",
        size or owner.train_batch_size,
        run.plan.accumulation,
        owner.dist.world_size,
        f", from step {run.first_step}" if run.first_step else "",
    )


@contextlib.contextmanager
def under_way(run: Run) -> Iterator[nn.Module]:
    """The wrapped model, where everything is set up for training it; taken down after the last step, whatever
    happens between.
    """
    owner, args = run.owner, run.owner.args
    try:
        run.watch.begin()
        debug = nonfinite.watched(owner.model) if args.debug else contextlib.nullcontext()
        noise = regularization.neftune(owner.model, args.neftune_noise_alpha)
        kept = allocator.freed_memory_kept(args.keep_freed_memory and owner.dist.device.type == "cpu")
        compiled: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if args.torch_compile and not args.debug:  # which looks at every module as it runs
            compiled = compiling.compiled(owner.model, args.torch_compile_backend, args.torch_compile_mode)
        with kept, noise, debug, compiled, owner._memory_tracker.stage("train") as run.memory:
            yield owner.model_wrapped
        owner.saving.settle()
        reason = run.watch.settle(owner.dist.gather_patiently)
        if reason > preemption.TIME_IS_UP:  # a signal during the last step; a time limit has no meaning any more
            run.interrupt(reason)
    except preemption.Left as left:
        if (end := left.exit()) is not None:
            raise end from None
    except Exception as error:
        _explain(run, error)
        if args.save_on_exception:
            owner.saving.after_error(error)
        raise
    finally:
        _take_down(run)


def _explain(run: Run, error: Exception) -> None:
    """Add to an error for lack of memory, or for a worker that ended, the cause and what to set."""
    owner = run.owner
    if run.window_size and run.splitter is None and memory.is_out_of_memory(error):
        error.add_note(memory.advice(owner.train_batch_size, run.window_size))
    workers.explain(error)
    if memory.is_out_of_memory(error):
        error.add_note(memory.live_in_words(memory.live(owner.model, owner.optimizer, owner.dist.device)))


def _take_down(run: Run) -> None:
    owner, run.window_size, run.num_items = run.owner, 0, None
    run.watch.end()
    owner.is_in_train = False
    owner.loaders.end_workers(run.loader)
    owner.checkpoints.close()  # after an error; else everything is settled
    for callback in owner.callback_handler.callbacks:
        if isinstance(callback, ClosingCallback):
            callback.close()  # on_train_end is not called when training raises
    eval_loop.keep_averages(owner.optimizer)  # also after an error
