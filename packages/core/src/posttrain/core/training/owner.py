"""What the collaborators of a trainer read of it, and the hooks of it that they call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

if TYPE_CHECKING:
    from posttrain.core.checkpoint.manager import CheckpointManager, Stateful
    from posttrain.core.logging.memory import MemoryTracker
    from posttrain.core.logging.metrics import Clock, Metrics
    from posttrain.core.state import EvalLoopOutput, TrainerControl, TrainerState
    from posttrain.core.training.evaluator import Evaluator
    from posttrain.core.training.record import Record
    from posttrain.core.training.run import Run
    from posttrain.core.training.saving import Saving
    from posttrain.core.training.scaling import Scaling


class Owner(Protocol):
    """A trainer, as `Run`, `Saving` and `Evaluator` see it. They hold it by a weak reference: a trainer that is dropped
    frees its memory at once."""

    args: Any
    dist: Any
    state: TrainerState
    control: TrainerControl
    model: nn.Module
    model_wrapped: nn.Module
    optimizer: Any
    lr_scheduler: Any
    processing_class: Any
    data_collator: Any
    compute_metrics: Any
    preprocess_logits_for_metrics: Any
    compute_loss_func: Any
    main_input: str
    data_seed: int
    train_batch_size: int
    eval_batch_size: int
    prediction_fill: int
    is_in_train: bool
    loss_is_scaled_for_ga: bool | str | None
    model_init: Any
    logs_num_tokens: bool
    data_reports: Mapping[str, Any]
    callback_handler: Any
    metrics: Metrics
    clock: Clock
    store: Any
    uploader: Any
    checkpoints: CheckpointManager
    record: Record
    saving: Saving
    evaluator: Evaluator
    run: Run
    scaling: Scaling
    loaders: Any
    _memory_tracker: MemoryTracker
    _non_blocking: bool
    #: Which of optimizer and schedule the trainer makes itself, and what it has made.
    _owns_optimizer: bool
    _owns_scheduler: bool
    _made_optimizer: Any
    _made_scheduler: Any

    # Hooks, which a subclass may override.
    call_model_init: Callable[..., nn.Module]
    checkpoint_parts: Callable[[], dict[str, Stateful]]
    compute_loss: Callable[..., Any]
    compute_loss_context_manager: Callable[[], Any]
    count_items: Callable[[Any], Any]
    create_optimizer_and_scheduler: Callable[[int], None]
    create_model_card: Callable[..., None]
    evaluation_loop: Callable[..., EvalLoopOutput]
    floating_point_ops: Callable[[Any], int]
    get_total_train_batch_size: Callable[[Any], int]
    load_checkpoint: Callable[..., None]
    load_state_dict: Callable[[dict[str, Any]], None]
    log: Callable[..., None]
    loss_is_scaled: Callable[[], bool | None]
    prediction_step: Callable[..., Any]
    prepare_inputs: Callable[[Any], Any]
    save_model: Callable[..., None]
    set_model: Callable[[nn.Module], None]
    store_flos: Callable[[], None]
    training_step: Callable[..., Any]
    state_dict: Callable[[], dict[str, Any]]
    write_checkpoint: Callable[[Path], None]
    _determine_best_metric: Callable[..., bool]
    _load_from_checkpoint: Callable[..., None]
    _evaluate: Callable[..., dict[str, float]]
    _save: Callable[..., None]
    _save_checkpoint: Callable[..., None]
    _wrap_model: Callable[[nn.Module], nn.Module]

    def _fire(self, event: str, state: TrainerState | None = None, **kwargs: Any) -> None:
        """Call the callbacks that implement `event`, with `state` or that of the trainer."""
