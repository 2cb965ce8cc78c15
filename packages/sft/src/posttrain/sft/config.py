"""The arguments of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.core.config import JSONObject, Resolved, opt, set_among
from posttrain.core.errors import did_you_mean, warn
from posttrain.core.fields.old_names import Removed, Renamed
from posttrain.lm.generate.generate import GenerationArguments
from posttrain.lm.images.images import ImageArguments
from posttrain.lm.loading.arguments import LanguageModelArguments

#: What earlier versions of trl read from dataset_kwargs, and why it changes nothing here.
NO_EFFECT = {
    "add_special_tokens": "rows get the special tokens of their chat template, or of the tokenizer, once",
    "append_concat_token": "each row ends in its own eos token",
}

#: What earlier versions of trl asked about packing.
ABOUT_PACKING = ("infinite", "num_of_sequences", "chars_per_token", "dataset_batch_size")

#: Arguments that the trainer itself took in earlier versions.
FORMERLY_ITS_OWN = (
    "max_seq_length dataset_text_field max_length packing eval_packing dataset_num_proc dataset_kwargs "
    "model_init_kwargs neftune_noise_alpha"
).split()
FORMERLY_ITS_OWN += ABOUT_PACKING


@dataclass
class SFTConfig(ImageArguments, GenerationArguments, LanguageModelArguments):
    """Arguments of `SFTTrainer`: those of every trainer, and what concerns rows of text."""

    learning_rate: float = opt(2e-5, "Peak learning rate. With LoRA ten times as much is usual.", min=0)

    chat_template_path: str | None = opt(
        None, "A Jinja file, or a tokenizer's folder or name, whose chat template replaces the tokenizer's own."
    )
    eos_token: str | None = opt(None, "Token that ends a row, instead of the tokenizer's own.")
    pad_token: str | None = opt(None, "Token that fills batches up, instead of the tokenizer's own.")

    dataset_text_field: str = opt("text", "Column that holds the text of plain rows.")
    dataset_weights: JSONObject = opt(
        None,
        'Share of the rows that each of several datasets gives, by name: {"math": 3, "chat": 1}. A weight that changes '
        'over the run, from a share of it on: {"math": {0: 1, 0.8: 5}, "chat": 1}. None: each row once an epoch.',
    )
    dataset_weights_of: str = opt(
        "rows",
        "What dataset_weights are shares of: rows, or tokens that are trained on.",
        choices=("rows", "tokens"),
    )
    dataset_max_tokens: JSONObject = opt(
        None,
        "Most tokens of each of several datasets that a run trains on, by name; others take what that leaves, by "
        "dataset_weights. None, or a name left out: no limit.",
    )
    dataset_kwargs: JSONObject = opt(None, '{"skip_prepare_dataset": True} takes the rows as they are.')
    dataset_num_proc: int | None = opt(
        None, "Processes that tokenise; None: one, with the tokenizer's own threads.", min=1
    )
    max_length: int | None = opt(
        1024,
        "Longest row in tokens, and the length of packed rows; None: rows stay whole.",
        min=2,
        aliases=("max_seq_length",),
    )
    truncation_mode: str = opt(
        "keep_start", "Which end of a row longer than max_length is kept.", choices=("keep_start", "keep_end")
    )
    too_long: str = opt(
        "truncate",
        "How a row longer than max_length is handled: truncated as truncation_mode sets, dropped, split into "
        "several rows, or an error.",
        choices=("truncate", "drop", "split", "error"),
    )
    chat_template_kwargs: JSONObject = opt(
        None, "Variables for the chat template, as JSON; a row's own column of that name takes precedence."
    )
    shuffle_dataset: bool = opt(
        False, "Shuffle the training rows once, before they are packed; of a stream, within a buffer."
    )
    packing: bool = opt(False, "Pack several documents into each row of max_length; they do not attend to each other.")
    packing_strategy: str = opt(
        "bfd",
        "bfd: whole documents, best fit; bfd_split: longer ones are split first; wrapped: cut wherever a row is full.",
        choices=("bfd", "bfd_split", "wrapped"),
        needs="packing",
    )
    eval_packing: Resolved[bool | None, bool] = opt(None, "Pack evaluation rows too; None follows packing.", flag=True)
    padding_free: bool = opt(False, "Join the rows of a batch into one, with no padding at all.")
    pad_to_multiple_of: Resolved[int | str | None, int | Literal["auto"] | None] = opt(
        "auto", "Pad batches to a multiple of this; auto: 8 on a GPU in half precision, else none.", min=1
    )
    completion_only_loss: bool | None = opt(
        None, "Train on completions alone. None: on for rows of prompt and completion, off for others.", flag=True
    )
    assistant_only_loss: bool = opt(False, "Train on the assistant's turns of a conversation alone.")
    train_on: list[str] | None | str = opt(  # in this order, HfArgumentParser takes several words
        None,
        "Messages of a conversation that are trained on: of a role or several, last (the assistant's last), or "
        "all. A message's own flag, train or weight, takes precedence. None: all, or as assistant_only_loss sets.",
    )
    loss_type: str = opt(
        "nll",
        "nll: token cross-entropy, chunked_nll: the same, because whole logits are never stored; dft: each "
        "token's is weighted by its probability (https://arxiv.org/abs/2508.05629).",
        choices=("nll", "chunked_nll", "dft"),
    )

    OLD_NAMES = {"use_liger": Renamed("use_liger_kernel", ignore=(None, False))} | dict.fromkeys(
        ABOUT_PACKING, Removed("packing joins whole rows, and training reads as many as it needs.", harmless=None)
    )

    @classmethod
    def accept_old_names(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        """``packing_strategy="bfd-requeue"``."""
        kwargs = super().accept_old_names(kwargs)
        return kwargs | ({"packing_strategy": "bfd_split"} if kwargs.get("packing_strategy") == "bfd-requeue" else {})

    def _normalize(self) -> None:
        for name in self.dataset_kwargs if isinstance(self.dataset_kwargs, dict) else ():
            if name in NO_EFFECT:
                warn(f"SFTConfig: dataset_kwargs: {name!r} has no effect: {NO_EFFECT[name]}", FutureWarning)
        if isinstance(self.train_on, list) and len(self.train_on) == 1:
            self.train_on = self.train_on[0]
        if self.eval_packing is None:
            self.eval_packing = self.packing and not self.predict_with_generate

    def _problems(self) -> Iterator[str]:
        if self.packing and self.max_batch_tokens is not None:
            yield "packing=True fills each row up to max_length, so max_batch_tokens has nothing to sort; leave it out"
        if self.use_cache and (self.packing or self.eval_packing or self.padding_free):
            yield "use_cache=True keeps keys of all documents of a packed row, which would see each other; leave it out"
        for name in set_among(self, "eval_packing", "padding_free"):
            if self.predict_with_generate:
                yield f"predict_with_generate=True needs a separate row for each prompt; set {name}=False"
        if (self.packing or self.eval_packing) and self.max_length is None:
            yield "packing=True needs max_length: it is the length of the rows that documents are packed into"
        if self.packing and self.packing_strategy != "bfd" and self.too_long in ("drop", "error"):
            yield (
                f"packing_strategy={self.packing_strategy!r} splits long rows, and too_long={self.too_long!r} "
                "excludes them; set packing_strategy=bfd or too_long=split"
            )
        yield from self._problems_of_plan()
        if self.loss_type == "dft" and self.label_smoothing_factor:
            yield (
                "loss_type='dft' weights a token by its probability, and "
                f"label_smoothing_factor={self.label_smoothing_factor} names several tokens; set "
                "label_smoothing_factor=0"
            )
        if self.assistant_only_loss and self.train_on not in (None, "assistant"):
            yield f"assistant_only_loss=True and train_on={self.train_on!r} contradict each other; keep one"
        if isinstance(self.train_on, list) and (not self.train_on or {"last", "all"} & set(self.train_on)):
            yield f"train_on={self.train_on!r} must name roles; last and all stand alone, as in train_on=last"
        if isinstance(self.pad_to_multiple_of, str) and self.pad_to_multiple_of != "auto":
            yield f"pad_to_multiple_of={self.pad_to_multiple_of!r} must be a number, 'auto' or None"
        if isinstance(self.dataset_kwargs, dict):
            for name in self.dataset_kwargs:
                if name not in ("skip_prepare_dataset", *NO_EFFECT):
                    near = did_you_mean(name, ("skip_prepare_dataset",))
                    yield f"dataset_kwargs: {name!r} has no effect; it may hold skip_prepare_dataset alone{near}"

    @property
    def _weights_change(self) -> bool:
        weights = self.dataset_weights.values() if isinstance(self.dataset_weights, dict) else ()
        return any(isinstance(weight, dict) for weight in weights)

    @property
    def mixes_over_the_run(self) -> bool:
        """Whether a mixture of datasets is laid over the whole run, and not over an epoch."""
        return self._weights_change or bool(self.dataset_max_tokens)

    @property
    def epochs_of_mixture(self) -> float:
        """Of how many epochs the rows of a mixture are, which may be of the whole run; `max_steps` is one."""
        return self.num_train_epochs or 1 if self.mixes_over_the_run and self.max_steps < 1 else 1

    def _problems_of_plan(self) -> Iterator[str]:
        """What reads the rows of a run in another order than its weights, or budgets, need."""
        is_ordered = self._weights_change or self.epochs_of_mixture != 1
        planned = "weights that change over the run" if self._weights_change else "dataset_max_tokens"
        for name, given, ours, needs_order in (
            ("train_sampling_strategy", self.train_sampling_strategy, ("random", "sequential"), is_ordered),
            ("max_batch_tokens", self.max_batch_tokens, (None,), is_ordered or self.max_steps > 0),
        ):
            if self.mixes_over_the_run and needs_order and given not in ours:
                yield f"{planned} order the rows, and so does {name}={given!r}; set {name}={ours[0]!r}"
