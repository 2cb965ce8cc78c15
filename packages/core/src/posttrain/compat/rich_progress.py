"""A progress bar and the last log record with the package rich."""

from __future__ import annotations

from typing import Any

from posttrain.core.callbacks import TrainerCallback
from posttrain.core.data.samplers import has_length
from posttrain.core.errors import require
from posttrain.core.state import TrainerControl, TrainerState

COLUMNS = 2


class RichProgressCallback(TrainerCallback):
    """Draws progress bars of training and evaluation above the last log record; needs the package rich.

    Pass it in `callbacks`, with ``disable_tqdm=True``, or there are two bars.
    """

    def __init__(self) -> None:
        require("rich", "rich", why="RichProgressCallback")
        self._live: Any = None
        self._bars: Any = None
        self._training: Any = None
        self._prediction: Any = None
        self._logs: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._bars = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn())
        self._training = self._bars.add_task("Training", total=state.known_steps, completed=state.global_step)
        self._live = Live(self._drawing(), refresh_per_second=4)
        self._live.start()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._live is not None:
            self._bars.update(self._training, completed=state.global_step)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        if self._live is None or eval_dataloader is None:
            return
        if self._prediction is None:
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            self._prediction = self._bars.add_task("Evaluating", total=total)
        self._bars.advance(self._prediction)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._prediction is not None:
            self._bars.remove_task(self._prediction)
            self._prediction = None

    on_predict: Any = on_evaluate

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if self._live is not None and logs:
            self._logs = {name: value for name, value in logs.items() if not name.startswith("perf/")}
            self._live.update(self._drawing())

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._live is not None:
            self._bars.update(self._training, completed=state.global_step)
            self._live.stop()
            self._live = self._bars = self._training = self._prediction = None

    def _drawing(self) -> Any:
        """The bars over a table of the record, `COLUMNS` names and values in a row."""
        from rich.console import Group
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        cells = [cell for name, value in self._logs.items() for cell in (name, _text(value))]
        for start in range(0, len(cells), 2 * COLUMNS):
            table.add_row(*cells[start : start + 2 * COLUMNS])
        return Group(self._bars, table)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
