"""A callback that lets a judge compare what a model writes with what it wrote before training."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

from posttrain.core.errors import DataError
from posttrain.core.files import write_text
from posttrain.core.logging.trackers import show_table
from posttrain.core.models.wrapping import is_peft_model, replaced, unwrap
from posttrain.lm.generate.completion_callbacks import _Answers

REFERENCE = "win_rate_reference.json"


class WinRateCallback(_Answers):
    """Logs ``eval_win_rate`` when training begins and after each evaluation.

    It is the share of evaluation prompts whose answer by the trained model a judge prefers to that of the reference;
    a verdict of neither counts half. The reference is the trainer's ``ref_model``, else the model without its adapters,
    else the model as it is when training begins, whose answers stay in ``win_rate_reference.json`` for a resumed run.
    Verdicts go to trackers as the table ``win_rate_completions``.

    Args:
        judge: has ``judge(prompts, completions) -> places``: for each prompt the place of the better one of its two
            completions, 0 or 1; -1 for neither. As of `posttrain.rl.OnlineDPOTrainer`.
        trainer: provides model, tokenizer and eval_dataset, whose rows have a `prompt`.
        generation_config: of ``model.generate``.
        num_prompts: the number of prompts from the start; None: all.
        shuffle_order: exchange the two completions of every other prompt on average before judging, as a judge may
            prefer a place.
        use_soft_judge: the judge is asked with ``return_scores=True`` and gives the probability that the first
            completion wins; ``eval_avg_win_prob`` is logged too.
    """

    def __init__(
        self,
        judge: Any,
        trainer: Any,
        generation_config: Any = None,
        num_prompts: int | None = None,
        shuffle_order: bool = True,
        use_soft_judge: bool = False,
    ) -> None:
        super().__init__(trainer, generation_config, num_prompts)
        if not callable(getattr(judge, "judge", None)):
            raise TypeError(f"WinRateCallback: judge is of type {type(judge).__name__}, which has no method judge.")
        self.judge, self.shuffle_order, self.use_soft_judge = judge, shuffle_order, use_soft_judge
        self.reference: list[str] = []

    def on_train_begin(self, args, state, control, **kwargs):
        saved = Path(args.output_dir) / REFERENCE
        if state.global_step and saved.is_file():
            self.reference = json.loads(saved.read_text(encoding="utf-8"))
            return
        answers = self._of_reference()
        self.reference = [text for _, text in answers]
        if state.is_world_process_zero:
            saved.parent.mkdir(parents=True, exist_ok=True)
            write_text(saved, json.dumps(self.reference))
        self._compare(args, state, answers)

    def on_evaluate(self, args, state, control, **kwargs):
        if self.reference:  # else evaluated before training
            self._compare(args, state, self.answer())

    def _of_reference(self) -> list[tuple[str, str]]:
        trainer, model = self.trainer, unwrap(self.trainer.model)
        if hasattr(getattr(trainer, "ref_model", None), "generate"):
            with replaced(trainer, "model", trainer.ref_model):
                return self.answer()
        with model.disable_adapter() if is_peft_model(model) else contextlib.nullcontext():
            return self.answer()

    def _compare(self, args: Any, state: Any, answers: list[tuple[str, str]]) -> None:
        """Judge on the main process, and log on all."""
        logs = self._judged(args, state, answers) if state.is_world_process_zero else {}
        self.trainer.log(self.trainer.dist.broadcast_object(logs))

    def _judged(self, args: Any, state: Any, answers: list[tuple[str, str]]) -> dict[str, float]:
        prompts = [prompt for prompt, _ in answers]
        pairs = [[old, new] for old, (_, new) in zip(self.reference, answers, strict=True)]
        draws = random.Random(state.global_step)
        swaps = [self.shuffle_order and draws.random() < 0.5 for _ in pairs]
        shown = [pair[::-1] if swap else pair for pair, swap in zip(pairs, swaps, strict=True)]
        chances = [  # that the new one wins
            1 - chance if swap else chance for chance, swap in zip(self._chances(prompts, shown), swaps, strict=True)
        ]
        wins = [0.5 if chance == 0.5 else float(chance > 0.5) for chance in chances]
        rows = [
            {"step": state.global_step, "prompt": prompt, "reference": old, "completion": new, "win": win}
            for prompt, (old, new), win in zip(prompts, pairs, wins, strict=True)
        ]
        show_table(rows, "win_rate_completions", args.report_to)
        logs = {"eval_win_rate": sum(wins) / len(wins)}
        return logs | ({"eval_avg_win_prob": sum(chances) / len(chances)} if self.use_soft_judge else {})

    def _chances(self, prompts: list[str], pairs: list[list[str]]) -> list[float]:
        """For each pair the probability that the second completion is the better one."""
        options = {"return_scores": True} if self.use_soft_judge else {}
        verdicts = list(self.judge.judge(prompts, pairs, **options))
        if len(verdicts) != len(pairs):
            name = type(self.judge).__name__
            raise DataError(f"The judge {name} gave {len(verdicts)} verdicts on {len(pairs)} pairs.")
        if self.use_soft_judge:
            return [1 - float(first) for first in verdicts]
        return [float(place) if place in (0, 1) else 0.5 for place in verdicts]
