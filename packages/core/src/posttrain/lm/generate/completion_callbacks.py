"""Callbacks that log completions of evaluation prompts to trackers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from posttrain.core.callbacks import TrainerCallback
from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.core.errors import DataError, require
from posttrain.core.evaluation.eval_loop import eval_mode
from posttrain.core.logging.trackers import show_table
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.core.models.wrapping import base_model, base_name, is_encoder_decoder, unwrap
from posttrain.lm.generate import samples
from posttrain.lm.images.images import IMAGE_COLUMNS, VIDEO_COLUMNS, ImageReader, described, has_images, read_images
from posttrain.lm.images.vision import Shown, VisionProcessor, join_tensors, place_images


class _Answers(TrainerCallback):
    """The base: which prompts, and how they are answered."""

    def __init__(self, trainer: Any, generation_config: Any = None, num_prompts: int | None = None) -> None:
        self.trainer, self.generation_config = trainer, generation_config
        if trainer.eval_dataset is None:
            raise ValueError(
                f"{type(self).__name__} answers prompts of the eval_dataset, and the trainer has none; pass one."
            )
        self.rows = _first(trainer.eval_dataset, num_prompts)
        self.notes: list[str] = []

    def answer(self) -> list[tuple[str, str]]:
        """(prompt, completion) of each row, on every process, which all must call."""
        trainer, args, dist = self.trainer, self.trainer.args, self.trainer.dist
        tokenizer, reads = tokenizer_of(trainer.processing_class), None
        if has_images(self.rows):
            reader = ImageReader.of(args) if hasattr(args, "max_image_pixels") else ImageReader()
            reads = VisionProcessor(trainer.processing_class, base_model(trainer.model)), reader
        prompts = [_prompt_of(row, tokenizer, reads) for row in self.rows]
        with dist.gathered(trainer.model), eval_mode(trainer.model), trainer.compute_loss_context_manager():
            batch = max(args.per_device_eval_batch_size, 1)
            mine = prompts[dist.rank :: dist.world_size]
            written = [
                text
                for start in range(0, len(mine), batch)
                for text in complete(trainer.model, tokenizer, mine[start : start + batch], self.generation_config)
            ]
        parts, size = dist.gather_object(written), dist.world_size
        self.notes = [prompt.note for prompt in prompts]
        return [(prompt.text, parts[i % size][i // size]) for i, prompt in enumerate(prompts)]


@dataclass(frozen=True)
class Prompt:
    """What is answered.

    text: as it is shown. ids: its tokens, those of images among them. shown: its images. note: what there is to say
    about them.
    """

    text: str
    ids: list[int]
    shown: Shown | None = None
    note: str = ""


@torch.no_grad()
def complete(model: Any, tokenizer: Any, prompts: Sequence[Prompt], generation_config: Any) -> list[str]:
    """What `model` writes after each of `prompts`."""
    model = unwrap(model)
    width, pad = max(len(prompt.ids) for prompt in prompts), tokenizer.pad_token_id
    device = next(model.parameters()).device

    def padded(rows: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([[fill] * (width - len(row)) + row for row in rows], device=device)

    ids = padded([prompt.ids for prompt in prompts], pad or 0)
    mask = padded([[1] * len(prompt.ids) for prompt in prompts], 0)
    images = [(prompt.ids, prompt.shown) for prompt in prompts if prompt.shown is not None]
    inputs = {name: tensor.to(device) for name, tensor in join_tensors([shown.tensors for _, shown in images]).items()}
    for name in images[0][1].kinds if images else ():
        inputs[name] = padded([shown.numbers(row)[name] for row, shown in images], 0)
    options: dict[str, Any] = {"pad_token_id": pad}
    if generation_config is not None:  # transformers takes either a configuration or single arguments
        options = {"generation_config": copy.copy(generation_config)}
        options["generation_config"].pad_token_id = pad
    out = model.generate(input_ids=ids, attention_mask=mask, **inputs, **options)
    return tokenizer.batch_decode(out[:, 1 if is_encoder_decoder(model) else width :], skip_special_tokens=True)


def _first(dataset: Any, number: int | None) -> list[Any]:
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()))
    rows = (dataset[i] for i in range(len(dataset))) if hasattr(dataset, "__getitem__") else dataset
    return list(itertools.islice(rows, number))


def _before_the_answer(row: Any) -> list[int]:
    """The tokens of a row before its last run of labels; none of a row without such."""
    ids, labels = row.get("input_ids"), row.get("labels")
    if ids is None or labels is None or np.ndim(labels) != 1 or len(ids) != len(labels):
        return []
    kept = np.asarray(labels) != IGNORE_INDEX
    starts = np.flatnonzero(kept & ~np.append(False, kept[:-1]))
    return [int(token) for token in ids[: starts[-1]]] if len(starts) else []


def _prompt_of(row: Any, tokenizer: Any, reads: tuple[VisionProcessor, ImageReader] | None) -> Prompt:
    """The prompt of a row, with its images where `reads` reads these: its `prompt`, or of tokens its `prompt_ids`, or
    what stands before the last run of labels.
    """
    prompt = row.get("prompt")
    values: list[Any] = []
    images: list[Any] = []
    options: dict[str, Any] = {}
    if prompt is None and reads is None and (ids := row.get("prompt_ids") or _before_the_answer(row)):
        return Prompt(tokenizer.decode(ids), list(ids))
    if prompt is None:
        raise DataError(
            f"The rows of eval_dataset have no column 'prompt' to be answered, but {', '.join(map(str, row))}, and no "
            "label of -100 before an answer. Give rows of prompt and completion, or train on the assistant's turns "
            "alone; a column that the model does not read needs remove_unused_columns=True."
        )
    if reads is not None:
        vision, reader = reads
        own = {name: row[name] for name in ("prompt", *IMAGE_COLUMNS, *VIDEO_COLUMNS) if name in row}
        placed, values = place_images(own, ("prompt",))
        prompt, images, options = placed["prompt"], read_images(values, reader), vision.template_kwargs()
    text, is_text = prompt, isinstance(prompt, str)
    if not is_text:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, **options | {"add_generation_prompt": True})
    shown = None if reads is None else reads[0].show(text, images)
    ids = tokenizer(text if shown is None else shown.text, add_special_tokens=is_text)["input_ids"]
    return Prompt(text, list(ids), shown, "; ".join(map(described, values, images)))


class LogCompletionsCallback(_Answers):
    """Logs completions of evaluation prompts as the table ``completions``: step, prompt, completion; of prompts with
    images also ``images``, where each comes from and its size.

    The table goes to wandb, trackio and comet_ml, if `report_to` names them and a run is active, and to
    ``samples.jsonl`` in the output directory.

    Args:
        trainer: provides model, tokenizer and eval_dataset, whose rows have a `prompt`.
        generation_config: of ``model.generate``.
        num_prompts: the number of prompts from the start; None: all.
        freq: optimizer steps between tables; None: `eval_steps`, and with each evaluation if that is no number.
    """

    def __init__(
        self, trainer: Any, generation_config: Any = None, num_prompts: int | None = None, freq: int | None = None
    ) -> None:
        super().__init__(trainer, generation_config, num_prompts)
        self.freq = freq
        self.table: list[dict[str, Any]] = []
        self._last_logged_step = -1

    def on_step_end(self, args, state, control, **kwargs):
        step, every = state.global_step, self.freq or state.eval_steps
        passed = not self.freq and isinstance(args.eval_steps, str) and control.should_evaluate
        if step == self._last_logged_step or not (passed or (every and step % every == 0)):
            return
        self._last_logged_step = step
        rows = [{"prompt": prompt, "completion": text} for prompt, text in self.answer()]
        if any(self.notes):
            rows = [row | {"images": note} for row, note in zip(rows, self.notes, strict=True)]
        self.table += [{"step": step} | row for row in rows]
        if state.is_world_process_zero:
            samples.append(rows, step, args.output_dir)
            show_table(self.table, "completions", args.report_to)


class WeaveCallback(_Answers):
    """Sends completions of evaluation prompts to Weights & Biases Weave after each evaluation.

    Without `scorers` each answer is a trace; with them the answers are an evaluation, with the mean of each score.

    Args:
        trainer, generation_config, num_prompts: as for `LogCompletionsCallback`.
        project_name: of weave; None: that of the active wandb run.
        scorers: ``{name: f(prompt, completion) -> number or bool}``.
        dataset_name, model_name: their names in weave; None: the model's own name.
    """

    def __init__(
        self,
        trainer: Any,
        project_name: str | None = None,
        scorers: dict[str, Callable[[str, str], float | int | bool]] | None = None,
        generation_config: Any = None,
        num_prompts: int | None = None,
        dataset_name: str = "eval_dataset",
        model_name: str | None = None,
    ) -> None:
        super().__init__(trainer, generation_config, num_prompts)
        self.weave = require("weave", "weave", why="WeaveCallback")
        self.project_name, self.scorers = project_name, dict(scorers or {})
        self.dataset_name, self.model_name = dataset_name, model_name
        self._started = False

    def on_train_begin(self, args, state, control, **kwargs):
        self._start(state)

    def on_evaluate(self, args, state, control, **kwargs):
        self._start(state)
        answers = self.answer()
        if not state.is_world_process_zero:
            return
        name = self.model_name or base_name(self.trainer.model) or "model"
        if self.scorers:
            self._evaluate(name, state.global_step, answers)
            return

        @self.weave.op(name="answer")
        def answer(prompt: str, completion: str, step: int, model: str) -> dict[str, Any]:
            return {"prompt": prompt, "completion": completion, "step": step, "model": model}

        for prompt, text in answers:
            answer(prompt, text, state.global_step, name)

    def _start(self, state: Any) -> None:
        if self._started or not state.is_world_process_zero:
            return
        import sys

        run = getattr(sys.modules.get("wandb"), "run", None)
        project = self.project_name or (None if run is None else f"{run.entity}/{run.project}")
        if project is None:
            raise ValueError("WeaveCallback: there is no active wandb run with a project; set project_name.")
        self.weave.init(project)
        self._started = True

    def _evaluate(self, name: str, step: int, answers: list[tuple[str, str]]) -> None:
        logger = self.weave.EvaluationLogger(model=f"{name}_step_{step}".replace("/", "_"), dataset=self.dataset_name)
        sums = dict.fromkeys(self.scorers, 0.0)
        for prompt, text in answers:
            shown = logger.log_prediction(inputs={"prompt": prompt}, output=text)
            for scorer, score in self.scorers.items():
                value = score(prompt, text)
                shown.log_score(scorer=scorer, score=value)
                sums[scorer] += float(value)
            shown.finish()
        logger.log_summary({scorer: total / max(len(answers), 1) for scorer, total in sums.items()} | {"step": step})
