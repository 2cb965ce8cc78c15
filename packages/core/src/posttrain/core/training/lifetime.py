"""What surrounds the steps of a run: signals, memory, compiled layers, and what is done after an error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from torch import nn

from posttrain.core.callbacks import ClosingCallback
from posttrain.core.data import workers
from posttrain.core.distributed import sharding
from posttrain.core.evaluation import eval_loop
from posttrain.core.logging import memory
from posttrain.core.models import compiling, regularization
from posttrain.core.training import allocator, nonfinite, preemption
from posttrain.core.training.run import Run

logger = logging.getLogger(__name__)


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
    happens between."""
    owner, args = run.owner, run.owner.args
    try:
        run.watch.begin()
        debug = nonfinite.watched(owner.model) if args.debug else contextlib.nullcontext()
        noise = regularization.neftune(owner.model, args.neftune_noise_alpha)
        kept = allocator.freed_memory_kept(args.keep_freed_memory and owner.dist.device.type == "cpu")
        with kept, noise, debug, _compiled(run), owner._memory.stage("train") as run.memory:
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


def _compiled(run: Run) -> contextlib.AbstractContextManager:
    args = run.owner.args
    if not args.torch_compile or args.debug:  # which looks at every module as it runs
        return contextlib.nullcontext()
    return compiling.compiled(run.owner.model, args.torch_compile_backend, args.torch_compile_mode)


def _explain(run: Run, error: Exception) -> None:
    """Add to an error for lack of memory, or for a worker that ended, the cause and what to set."""
    owner = run.owner
    if run.window_size and run.splitter is None and memory.is_out_of_memory(error):
        error.add_note(memory.advice(owner.train_batch_size, run.window_size))
    workers.explain(error)
    memory.explain_shortage(error, owner.model, owner.optimizer, owner.dist.device)


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
