"""The shared arguments of preference trainers, and their names in earlier versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from posttrain.core import Trainer, opt
from posttrain.core.config import Resolved
from posttrain.core.fields.old_names import Removed, Renamed, moved_arguments
from posttrain.core.training import preflight
from posttrain.lm.images.images import ImageArguments
from posttrain.lm.loading.arguments import LanguageModelArguments
from posttrain.rl.preference.rows import FAULTY, LONG

#: Names that the configs of trainers without a reference had in earlier versions of the field.
WITHOUT_REFERENCE: dict[str, Renamed | Removed] = {
    # Limits under which most rows stay; what is cut is counted in the report of the data.
    "max_prompt_length": Removed("a row is cut as a whole, by max_length.", harmless=None),
    "max_completion_length": Removed("a row is cut as a whole, by max_length.", harmless=None),
    "max_target_length": Removed("a row is cut as a whole, by max_length.", harmless=None),
    "generate_during_eval": Removed("set num_eval_samples.", harmless=(None, False)),
    "is_encoder_decoder": Removed("the model says so itself.", harmless=None),
    "label_pad_token_id": Removed("labels are made in the trainer.", harmless=None),
    "padding_value": Removed("padding is never read; pad_token names another token for it.", harmless=None),
}
#: Those of trainers with one.
WITH_REFERENCE: dict[str, Renamed | Removed] = WITHOUT_REFERENCE | {
    "force_use_ref_model": Removed("a ref_model that is passed is used, with adapters too.", harmless=None),
    "model_adapter_name": Removed("the active adapter is trained; call model.set_adapter.", (None, "default")),
    "ref_adapter_name": Removed("the reference is the adapter as it is passed; for another, pass ref_model."),
    "ref_model_init_kwargs": Removed("a reference given by name is loaded with model_init_kwargs.", harmless=None),
    "base_model_attribute_name": Removed("the head is found by itself.", harmless=None),
    "use_liger_loss": Removed("logits are never held whole, without Liger too.", harmless=None),
}


@dataclass
class PreferenceConfig(ImageArguments, LanguageModelArguments):
    """Arguments of every trainer of preferences."""

    learning_rate: float = opt(1e-6, "Peak learning rate. With LoRA ten times as much is usual.", min=0)
    disable_dropout: bool = opt(True, "Set every dropout of the model and the reference to 0.")
    dataset_num_proc: int | None = opt(
        None, "Processes that tokenise; None: one, with the tokenizer's own threads.", min=1
    )
    max_length: int | None = opt(1024, "Most tokens of a prompt with one completion; None: any number.", min=2)
    truncation_mode: str = opt(
        "keep_start",
        "keep_start cuts long completions at their end, keep_end cuts the prompt at its beginning.",
        choices=("keep_start", "keep_end"),
    )
    long_rows: str = opt("truncate", "What becomes of rows longer than max_length.", choices=LONG)
    faulty_rows: str = opt(
        "drop", "How equal and empty completions are handled; each is counted and reported.", choices=FAULTY
    )
    shared_prefix: bool | None = opt(
        None, "Read each prompt once for all its completions. None: where the model's attention allows it.", flag=True
    )
    padding_free: bool = opt(False, "Join the rows of a batch into one, with no padding; shared_prefix does so anyway.")
    pad_to_multiple_of: Resolved[int | str | None, int | None] = opt(
        "auto", "Pad batches that have padding to a multiple of this; auto: to none.", min=1
    )
    num_eval_samples: int = opt(
        0, "Prompts of each evaluation that policy and reference answer, side by side in samples.jsonl.", min=0
    )
    max_sample_tokens: int = opt(64, "Most tokens of such an answer.", min=1)
    pad_token: str | None = opt(None, "Token that fills batches up, instead of the tokenizer's own.")

    def _normalize(self) -> None:
        if self.pad_to_multiple_of == "auto":
            self.pad_to_multiple_of = None

    def _problems(self) -> Iterator[str]:
        if isinstance(self.pad_to_multiple_of, str):
            yield f"pad_to_multiple_of={self.pad_to_multiple_of!r} must be a number, 'auto' or None"
        if self.label_smoothing_factor:
            instead = "set label_smoothing" if "label_smoothing" in vars(self) else "leave it 0"
            yield (
                f"label_smoothing_factor={self.label_smoothing_factor} has no effect: it smooths the targets of a "
                f"cross-entropy, and the loss of {type(self).__name__} compares completions; {instead}"
            )


def as_config(trainer: type[Trainer], args: Any, old_names: dict[str, Any]) -> PreferenceConfig:
    """The config from `args` and arguments of earlier versions, which are removed from `old_names`."""
    config_class: type[Any] = trainer.config_class
    moved = moved_arguments(trainer.__name__, config_class, old_names)
    preflight.refuse_unknown(trainer, old_names)
    return preflight.as_config(trainer.__name__, config_class, args, moved)
