"""The command ``posttrain merge``, which merges an adapter into its base and compares the logits."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.cli import parse
from posttrain.cli.tools import load
from posttrain.core.checkpoint import codec
from posttrain.core.checkpoint.weights import ADAPTER, save_weights
from posttrain.core.errors import CheckpointError, require
from posttrain.core.models import special_tokens
from posttrain.core.models.wrapping import PretrainedModel, base_model, is_encoder_decoder, setting
from posttrain.lm.loading import loading

HELP = """posttrain merge ADAPTER FOLDER [--base MODEL] [--dtype TYPE] [--tolerance SHARE] [--trust_remote_code]

Merge an adapter (LoRA and others) into its base weights and write the model with its tokenizer into FOLDER, in the
format of from_pretrained. An adapter trained on 4 or 8 bits is added to the original weights. The logits of the merged
model are compared with those of base and adapter, and a merge that loses too much is an error.

  --base MODEL         folder or name of the base weights; by default those named in the adapter
  --dtype TYPE         of the merged weights: float32, bfloat16 or float16; by default that of the base
  --tolerance SHARE    share of the adapter's effect that may be lost [default 0.1]
  --trust_remote_code  run code from the model's repository
"""


def run(words: list[str]) -> None:
    """Merge the adapter, and print what is lost."""
    kinds = {"base": str, "dtype": str, "tolerance": float, "trust_remote_code": bool}
    what = "the folder of the adapter and the folder to write: ADAPTER FOLDER"
    folders, given = parse.typed_flags("merge", words, kinds, names=2, what=what)
    with parse.reported("merge"):
        print(merge(folders[0], folders[1], **given))
    print(f"The model is in {folders[1]}.")


#: Classes of transformers by the task that peft notes in an adapter's config.
AUTO_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
}
PROBE = (
    "The quick brown fox jumps over the lazy dog, and then it sleeps until the evening.",
    "Question: A train takes 3 hours for 240 km. How fast is it? Answer: 240 / 3 = 80 km/h.",
    "def mean(numbers):\n    return sum(numbers) / len(numbers)\n",
    "Die Ergebnisse wurden gemessen und mit denen des vorigen Jahres verglichen.",
)
PROBE_WIDTH = 64
#: The part of what the adapter changes that a merge may lose.
TOLERANCE = 0.1
#: Differences below this part of the spread of all logits are rounding.
ROUNDING = 1e-3


@dataclass(frozen=True)
class Merge:
    """The effect of a merge on the logits of a fixed batch, computed in float32.

    Args:
        base: the model to which the adapter was added.
        dtype: of the merged weights.
        largest, mean: of the absolute differences between the merged model, read back, and the base with its adapter.
        effect: the mean absolute difference between the base with and without the adapter.
        spread: the standard deviation of the logits.
    """

    base: str
    dtype: str
    largest: float
    mean: float
    effect: float
    spread: float

    def __str__(self) -> str:
        said = f"Merged into {self.base} in {self.dtype}: the logits differ from those of base and adapter by "
        said += f"{self.mean:.3g} in the mean"
        if self.effect:
            said += f", {self.mean / self.effect:.2%} of the {self.effect:.3g} that the adapter changes"
        return f"{said}, and by {self.largest:.3g} at most (they spread by {self.spread:.3g})."


def merge(
    adapter: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    base: str | None = None,
    dtype: str | None = None,
    tolerance: float = TOLERANCE,
    trust_remote_code: bool = False,
) -> Merge:
    """Write the merged model with its tokenizer into `folder`, in the format of ``from_pretrained``.

    An adapter that was trained on 4 or 8 bits is added to the original weights, because quantized ones cannot hold the
    sum. The sum is in float32 and rounded once. The host needs memory for two float32 copies of the weights. Raises a
    `CheckpointError` where the adapter cannot be merged, the base holds quantized weights, or too much is lost, and
    writes nothing then; and a `FileExistsError` where there is something in `folder`.

    Args:
        adapter: a folder with a saved adapter: a checkpoint, or the output of `save_model`.
        folder: of the merged model; it must not exist.
        base: folder or Hub name of the weights; by default those named in the adapter.
        dtype: of the merged weights; by default that of the base.
        tolerance: a merge that loses a larger part of the adapter's effect is an error, unless it is rounding.
    """
    peft = require("peft", "posttrain-core[peft]", why="merging an adapter")
    adapter, folder = Path(adapter), Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"There is something in {folder} already; name a new folder.")
    for name in (loading.ADAPTER_CONFIG, ADAPTER):
        if not (adapter / name).is_file():
            raise CheckpointError(f"There is no adapter in {adapter}: {name} is missing.")
    config, base, tokenizer = load.of_adapter(str(adapter), base, trust_remote_code)
    task = config.task_type or "CAUSAL_LM"
    if config.is_prompt_learning:
        raise CheckpointError(
            f"The adapter in {adapter} is of {config.peft_type.value}, whose virtual tokens are no part of any weight "
            "and cannot be merged. Use it with peft.PeftModel.from_pretrained."
        )
    if task not in AUTO_CLASSES:
        raise CheckpointError(f"The adapter in {adapter} is for {task}; merge knows {', '.join(AUTO_CLASSES)}.")
    kwargs = _labels(adapter) if task == "SEQ_CLS" else {}
    kwargs |= {"revision": config.revision} if config.revision else {}
    with loading.explain_missing(base, "model"):
        stored = loading.config_of(base, kwargs, trust_remote_code)
    if setting(stored, "quantization_config") is not None:
        raise CheckpointError(
            f"{base} holds quantized weights, which cannot hold the sum with an adapter: each weight has 16 or 256 "
            "values. Name the model that they were made of: --base MODEL"
        )
    dtype = dtype or str(stored.dtype or torch.float32).removeprefix("torch.")
    options: dict[str, Any] = {"auto_class": AUTO_CLASSES[task], "trust_remote_code": trust_remote_code}
    options["model_init_kwargs"] = kwargs | load.changes_of_run(adapter, base, trust_remote_code)
    model = loading.load_causal_lm(base, **options)
    batch = _batch(base_model(model), tokenizer)
    plain = _logits(model, batch)
    adapted = peft.PeftModel.from_pretrained(model, str(adapter), config=config)
    expected = _logits(adapted, batch)
    merged = adapted.merge_and_unload(safe_merge=True).to(codec.dtype_named(dtype))
    _untie_if_different(merged)
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_weights(merged, beside)
        tokenizer.save_pretrained(str(beside))
        del model, adapted, merged
        options["model_init_kwargs"].pop("revision", None)
        difference = (_logits(loading.load_causal_lm(str(beside), **options), batch) - expected).abs()
        sizes = (difference.max(), difference.mean(), (expected - plain).abs().mean(), expected.std())
        outcome = Merge(base, dtype, *map(float, sizes))
        if not outcome.mean <= max(tolerance * outcome.effect, ROUNDING * outcome.spread):
            raise CheckpointError(
                f"{outcome} More than {tolerance:.0%} of the adapter is lost, so nothing was written. Set --dtype "
                f"float32 if {dtype} rounds it away, --base if it was trained on another model than {base}, or "
                "--tolerance to accept the loss."
            )
        beside.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return outcome


def _labels(adapter: Path) -> dict[str, Any]:
    """The classes of a classifier, whose head the adapter holds whole."""
    names = ("score.weight", "classifier.weight", "out_proj.weight")
    tensors = codec.read_tensors(adapter / ADAPTER).items()
    return next(({"num_labels": tensor.shape[0]} for name, tensor in tensors if name.endswith(names)), {})


def _batch(model: PretrainedModel, tokenizer: Any) -> dict[str, torch.Tensor]:
    """The same tokens each time, as inputs of `model`."""
    special_tokens.ensure_pad_token(tokenizer)
    options = {"truncation": True, "max_length": PROBE_WIDTH, "padding_side": "right", "return_tensors": "pt"}
    rows = tokenizer(list(PROBE), padding=True, **options)
    batch = {"input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"]}
    if is_encoder_decoder(model):
        batch["decoder_input_ids"] = rows["input_ids"]
    if setting(model.config, "pad_token_id") is None:
        model.config.pad_token_id = tokenizer.pad_token_id  # a classifier looks for the last real token by it
    return batch


def _logits(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the real tokens, or of the rows, in float32."""
    with torch.no_grad():
        logits = model.eval()(**batch).logits.float()
    return logits[batch["attention_mask"].bool()] if logits.ndim == 3 else logits


def _untie_if_different(model: PretrainedModel) -> None:
    """An adapter may have trained the head or the embedding alone of a model that had one weight for both."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    if head is None or not setting(config, "tie_word_embeddings"):
        return
    embedding = model.get_input_embeddings()
    if head.weight is not embedding.weight and not torch.equal(head.weight, embedding.weight):
        model.config.tie_word_embeddings = config.tie_word_embeddings = False
