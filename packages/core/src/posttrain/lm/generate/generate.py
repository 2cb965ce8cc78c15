"""Implements evaluations with `predict_with_generate`.

The loss and the generated tokens of a batch share one encoder pass. Models without an encoder get only the left-padded
prompts, which are removed from the output. Evaluation rows are sorted by length so that rows of a batch end together;
predictions are returned in the order of the dataset.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from posttrain.core.config import opt, value_of
from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.core.data.samplers import EpochSampler, columns_of, is_stream, transforms_rows
from posttrain.core.errors import DataError, did_you_mean
from posttrain.core.evaluation import eval_loop
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.core.models.wrapping import PretrainedModel, config_of, generation_config, is_encoder_decoder, unwrap

logger = logging.getLogger(__name__)


@dataclass
class GenerationArguments:
    """Evaluation by generated text."""

    predict_with_generate: bool = opt(
        False, "Let evaluations that compute metrics, and predict, generate: `compute_metrics` then gets token ids."
    )
    generation_max_length: int | None = opt(
        None,
        "Maximum tokens of an output (without the prompt); None: as in the model's config.",
        min=1,
        needs="predict_with_generate",
    )
    generation_num_beams: int | None = opt(
        None,
        "Number of beams: more search more widely and take proportionally longer; None: as in the model's config.",
        min=1,
        needs="predict_with_generate",
    )
    generation_config: str | None | Any = opt(  # in this order, HfArgumentParser reads it as text
        None,
        "How to generate: a GenerationConfig, a dict, its file or folder, or the name of a model; None: the model's.",
    )
    generation_samples: int = opt(
        3, "Rows shown in the log after each evaluation that generated: input, target and output.", min=0
    )

    def _problems(self) -> Iterator[str]:
        if self.predict_with_generate and value_of(self, "prediction_loss_only"):
            yield "predict_with_generate=True and prediction_loss_only=True cannot both hold; keep one"
        given = self.generation_config
        if given is not None and not (isinstance(given, (str, Path, Mapping)) or hasattr(given, "validate")):
            yield f"generation_config={given!r} is no GenerationConfig, dict, path or name"

    def _preflight(self) -> Iterator[str | Exception]:
        given = self.generation_config
        if isinstance(given, Mapping) or (isinstance(given, (str, Path)) and str(given).startswith((".", "/", "~"))):
            try:
                load_generation_config(given)
            except (OSError, ValueError) as error:
                yield error


def unknown_options(given: Mapping[str, Any]) -> list[str]:
    """The keys of `given` that name no field of transformers' GenerationConfig, which takes any in silence."""
    from transformers import GenerationConfig

    return [name for name in given if name not in vars(GenerationConfig())]


def load_generation_config(source: Any) -> Any:
    """The `transformers.GenerationConfig` that `source` is or names; always a copy. `source`: an object, a dict of its
    values, its file, a folder that holds one, or the name of a model on the Hub. Raises a `ValueError` where its values
    do not go together, so that it could not be saved with the model.
    """
    from transformers import GenerationConfig

    if isinstance(source, GenerationConfig):
        config = copy.deepcopy(source)
    elif isinstance(source, Mapping):
        for name in unknown_options(source):
            raise ValueError(
                f"generation_config: {name!r} is no field of "
                f"GenerationConfig{did_you_mean(name, vars(GenerationConfig())) or '.'}"
            )
        config = GenerationConfig(**source)
    elif isinstance(source, (str, Path)):
        path = Path(source).expanduser()
        place = (path.parent, path.name) if path.is_file() else (path if path.is_dir() else str(source), None)
        try:
            config = GenerationConfig.from_pretrained(*place)
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"generation_config={str(source)!r} is neither a file or folder here nor a model's name on the Hub: "
                f"{error}"
            ) from error
    else:
        raise TypeError(
            f"generation_config is of type {type(source).__name__}; pass a GenerationConfig, a dict, a path or a name."
        )
    try:
        config.validate(strict=True)
    except ValueError as error:
        raise ValueError(f"generation_config cannot be used, nor saved with the model: {error}") from error
    return config


def with_token_ids(config: Any, own: Any) -> Any:
    """`config`, with the ids of the tokens that begin, end and fill up a text from `own`, the model's, where it has
    none: no encoder-decoder generates without the first, and no output ends without the second.
    """
    for name in ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id"):
        if vars(config).get(name) is None:
            setattr(config, name, getattr(own, name, None))
    return config


# ---------------------------------------------------------------------------------------------------- order of the rows


class LongestFirst(EpochSampler):
    """Rows by length, longest first: batches of like rows, and what does not fit into memory fails at once.

    Attributes:
        rows_to_restore: the dataset's row of each row read; `posttrain.core.evaluation.eval_loop.run` puts results back
            by it.
        longest_target: the most labels that a row has; None where rows have none.
    """

    def __init__(self, inputs: Sequence[int], targets: Sequence[int] | None = None) -> None:
        super().__init__(len(inputs), seed=0)
        total = np.asarray(inputs) + (0 if targets is None else np.asarray(targets))
        self.rows_to_restore = np.argsort(-total, kind="stable")
        self.longest_target = None if targets is None else max(targets, default=0)

    def order(self) -> torch.Tensor:
        return torch.from_numpy(self.rows_to_restore)


def longest_first(dataset: Any, main_input: str = "input_ids", pad_token_id: int | None = None) -> LongestFirst | None:
    """The order of generation for `dataset`; None if its lengths would need a second read of every row. `pad_token_id`:
    not counted in labels, like -100; None if the id does not identify padding.
    """
    columns = columns_of(dataset)
    if is_stream(dataset):
        return None
    if isinstance(dataset, (list, tuple)):
        if not dataset or not all(isinstance(row, Mapping) and main_input in row for row in dataset):
            return None
        read: Callable[[str], Any] = lambda name: [row.get(name) for row in dataset]  # noqa: E731
        columns = list(dataset[0])
    elif main_input in columns and not transforms_rows(dataset):
        read = dataset.__getitem__
    else:
        return None
    try:
        inputs = [len(row) for row in read(main_input)]
        targets = [_count(row, pad_token_id) for row in read("labels")] if "labels" in columns else None
    except TypeError:  # numbers, or null
        return None
    return LongestFirst(inputs, targets)


def _count(labels: Any, pad_token_id: int | None) -> int:
    values = np.asarray(labels)
    return int(((values != IGNORE_INDEX) & (values != (IGNORE_INDEX if pad_token_id is None else pad_token_id))).sum())


# ---------------------------------------------------------------------------------------------------- options


def options(args: GenerationArguments, given: dict[str, Any], model: nn.Module, longest: int | None) -> dict[str, Any]:
    """The arguments of ``generate`` in an evaluation.

    The call overrides `args`, which override the model's generation config. For a model without an encoder, a length
    excludes the prompt, because it would otherwise depend on the batch. A warning says where `args` sets outputs
    shorter than the longest label. An unset length is raised instead.

    Args:
        given: arguments of `evaluate` or `predict`; None means unset.
        longest: the maximum tokens of a row's labels; None if unknown.
    """
    found = {name: value for name, value in given.items() if value is not None}
    if "generation_config" in found:
        found["generation_config"] = load_generation_config(found["generation_config"])
    if "num_beams" not in found and args.generation_num_beams is not None:
        found["num_beams"] = args.generation_num_beams
    if "max_length" not in found and "max_new_tokens" not in found:
        found |= _length(args, found.get("generation_config"), model, longest)
    encodes, own = is_encoder_decoder(model), found.get("generation_config") or generation_config(model)
    if "max_length" in found and not (
        encodes and getattr(own, "max_new_tokens", None) is None
    ):  # which would take precedence
        found.setdefault("max_new_tokens", found.pop("max_length") - encodes)
    return found


def _length(args: GenerationArguments, config: Any, model: nn.Module, longest: int | None) -> dict[str, int]:
    own: Any = model.generation_config if config is None else config
    encodes = is_encoder_decoder(model)
    asked = config is not None or args.generation_config is not None
    if args.generation_max_length is not None:
        limit, who = args.generation_max_length, f"generation_max_length={args.generation_max_length}"
        found = {"max_length": limit}
    elif own.max_new_tokens is not None:
        limit, who, found = own.max_new_tokens, f"max_new_tokens={own.max_new_tokens} of the generation config", {}
    elif own.max_length is not None and encodes:
        limit, who, found = own.max_length, f"max_length={own.max_length} of the generation config", {}
    else:  # without an encoder, the max_length of a generation config counts the prompt
        limit, who, found, asked = 20, "the usual 20 tokens", {}, False
    if longest is None or longest <= limit:
        return found
    if asked or args.generation_max_length is not None:
        logger.warning(
            f"{who} is below the longest label of the evaluation set, which has {longest} tokens: that row cannot be "
            f"generated whole, and its metrics are those of a cut text. generation_max_length={longest + encodes} is "
            "enough."
        )
        return found
    logger.info(
        f"The longest label of the evaluation set has {longest} tokens, so up to that many are generated, not {who}. "
        "Set generation_max_length to choose another length."
    )
    return {"max_length": longest + encodes}


def padding_id(processing_class: Any, model: nn.Module) -> int:
    """The padding of generated rows: the pad token, or else the eos token. Raises a `ValueError` where there is
    neither.
    """
    for source in (tokenizer_of(processing_class), generation_config(model), config_of(model)):
        for name in ("pad_token_id", "eos_token_id"):
            token = getattr(source, name, None)
            token = token[0] if isinstance(token, (list, tuple)) else token
            if token is not None:
                return int(token)
    raise ValueError(
        "Neither the tokenizer nor the model names a pad or an eos token, so generated rows cannot be padded. Set "
        "model.config.pad_token_id, or pass the tokenizer as processing_class."
    )


# ---------------------------------------------------------------------------------------------------- one batch


@torch.no_grad()
def predict_batch(
    model: nn.Module,
    inputs: Mapping[str, Any],
    compute_loss: Callable[..., Any],
    generate_options: dict[str, Any],
    *,
    label_names: list[str],
    pad_token_id: int,
    synced: bool = False,
    lean: Callable[[dict[str, Any], Any, dict[str, Any]], torch.Tensor | None] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """(loss, generated tokens, labels) of one batch: (), (B x sequences returned of each, T) and (B, L), or None.

    Args:
        compute_loss: ``(model, inputs) -> loss``; called where the batch has labels.
        generate_options: as `options` gives them.
        synced: the parameters are spread over processes, which must take every step together.
        lean: generates in place of ``model.generate`` where it can, given inputs, encoder outputs and options; else
            None.
    """
    inputs, whole = dict(inputs), unwrap(model)
    labels = inputs.get("labels")
    has_labels = eval_loop.labels_are_there(model, inputs, label_names)
    encodes = is_encoder_decoder(whole)
    # Spread parameters are gathered by the forward of the whole model, not by that of its encoder alone.
    encoded = encode(whole, inputs) if encodes and not synced else None
    loss = None
    if has_labels:
        shared = inputs if encoded is None else inputs | {"encoder_outputs": copy.copy(encoded)}
        loss, _, _ = eval_loop.predict_batch(model, shared, compute_loss, label_names=label_names, loss_only=True)
    generate_options = generate_options | ({"synced_gpus": True} if synced else {})
    if not encodes:
        prompts, labels = split_prompts(inputs, pad_token_id)
        tokens = whole.generate(**prompts, **({"pad_token_id": pad_token_id} | generate_options))
        return loss, tokens[:, prompts["input_ids"].shape[1] :], labels
    begun = inputs.get("decoder_input_ids")
    # A collator shifted the labels into them: generation must not begin with the answer.
    if labels is not None and begun is not None and begun.shape == labels.shape:
        inputs = {name: inputs[name] for name in inputs if name not in ("decoder_input_ids", "decoder_attention_mask")}
    inputs = {name: value for name, value in inputs.items() if name not in label_names}
    if encoded is None:
        return loss, whole.generate(**inputs, **generate_options), labels
    tokens = lean(inputs, encoded, generate_options) if lean is not None else None
    if tokens is None:
        tokens = whole.generate(**inputs, encoder_outputs=copy.copy(encoded), **generate_options)
    return loss, tokens, labels


def encode(model: PretrainedModel, inputs: Mapping[str, Any]) -> Any:
    """What the encoder of `model` makes of those of the `inputs` that it takes."""
    encoder = model.get_encoder()
    names = inspect.signature(encoder.forward).parameters
    return encoder(**{name: value for name, value in inputs.items() if name in names}, return_dict=True)


#: Inputs with the kind of each token, text or image, that models which see read with a prompt.
TOKEN_KINDS = ("token_type_ids", "mm_token_type_ids")


def split_prompts(inputs: Mapping[str, Any], pad_token_id: int) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Rows of prompt and target become (prompts padded on the left, targets padded on the right with -100).

    The target is the last run of labelled tokens: the completion, or the last answer of a conversation. The prompt is
    everything before it, or the whole row without labels. The padding side of the batch does not matter. Raises a
    `DataError` where a row is labelled from its first token on, so it has no prompt.

    Args:
        inputs: ``input_ids`` (B, T), with ``attention_mask`` and ``labels`` of the same shape where there are any;
            other inputs that are not per token are kept, image tensors among them, and `TOKEN_KINDS`.
    """
    ids = inputs["input_ids"]
    mask, labels = inputs.get("attention_mask"), inputs.get("labels")
    is_prompt = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    targets = None
    if labels is not None:
        if labels.shape != ids.shape:
            raise DataError(
                f"labels of shape {tuple(labels.shape)} do not match input_ids of shape {tuple(ids.shape)}. A model "
                "without an encoder needs prompt and target in one row, with labels of -100 over the prompt."
            )
        labelled = labels != IGNORE_INDEX
        begins = labelled.clone()
        begins[:, 1:] &= ~labelled[:, :-1]
        places = torch.arange(ids.shape[1], device=ids.device)
        # Of a row without labels the target begins after its end.
        start = torch.where(begins, places, -1).amax(1, keepdim=True)
        start = start.masked_fill(start < 0, ids.shape[1])
        is_prompt = is_prompt & (places < start)
        targets = _pack(labels, labelled & (places >= start), IGNORE_INDEX, "right")
    lengths = is_prompt.sum(1)
    if not bool(lengths.all()):
        raise DataError(
            f"Row {int(lengths.argmin())} of the batch has no prompt: its first token is labelled already, so there "
            "is nothing to generate from. Use rows of prompt and completion, with labels of -100 over the prompt, "
            "or set predict_with_generate=False."
        )
    kinds = {name: _pack(inputs[name], is_prompt, 0, "left") for name in TOKEN_KINDS if name in inputs}
    by_token = {name for name, v in inputs.items() if isinstance(v, torch.Tensor) and v.shape[:2] == ids.shape}
    rest = {name: v for name, v in inputs.items() if name not in {*by_token, "labels", "seq_lengths"} and v is not None}
    prompts = {"input_ids": _pack(ids, is_prompt, pad_token_id, "left")}
    prompts["attention_mask"] = _pack(is_prompt.long(), is_prompt, 0, "left")
    return rest | kinds | prompts, targets


def _pack(values: torch.Tensor, keep: torch.Tensor, fill: int, side: str) -> torch.Tensor:
    """The kept values of each row, in order, moved together; (B, longest), the rest is `fill` on `side`."""
    width = int(keep.sum(1).max()) if keep.numel() else 0
    rank = keep.long() if side == "left" else (~keep).long()
    order = rank.argsort(dim=1, stable=True)
    order = order[:, order.shape[1] - width :] if side == "left" else order[:, :width]
    return values.gather(1, order).masked_fill(~keep.gather(1, order), fill)


# ---------------------------------------------------------------------------------------------------- to be looked at


def samples(
    dataset: Any,
    predictions: Any,
    labels: Any,
    tokenizer: Any,
    number: int,
    main_input: str = "input_ids",
    encodes: bool = True,
) -> list[dict[str, str]]:
    """``{"input", "target", "output"}`` as text, of the first rows of a dataset that was generated from; what cannot be
    had is left out.

    Args:
        predictions, labels: token ids of all rows in the dataset's order, (rows x sequences of each, T) and (rows, L).
    """
    if not isinstance(predictions, np.ndarray) or not hasattr(tokenizer, "decode"):
        return []
    each = max(1, len(predictions) // len(labels)) if isinstance(labels, np.ndarray) and len(labels) else 1
    shown = []
    for i in range(min(number, len(predictions) // each)):
        row = {
            "input": _source(dataset, i, main_input, encodes),
            "target": labels[i] if isinstance(labels, np.ndarray) else None,
            "output": predictions[i * each],
        }
        tokens = {name: [int(t) for t in ids if t >= 0] for name, ids in row.items() if ids is not None}
        shown.append({name: tokenizer.decode(ids, skip_special_tokens=True) for name, ids in tokens.items()})
    return shown


def _source(dataset: Any, number: int, main_input: str, encodes: bool) -> Any:
    row = dataset[number] if hasattr(dataset, "__getitem__") else None
    if not isinstance(row, Mapping) or row.get(main_input) is None or np.ndim(row[main_input]) != 1:
        return None
    if encodes or row.get("labels") is None or len(row["labels"]) != len(row[main_input]):
        return row[main_input]
    batch = {
        name: torch.as_tensor(np.asarray(row[key]))[None] for name, key in (("input_ids", main_input), ("labels",) * 2)
    }
    return split_prompts(batch, 0)[0]["input_ids"][0].tolist()


def table(rows: list[dict[str, str]], width: int = 160) -> str:
    """`rows` of `samples` for people: a block for each, one line for each of its texts."""
    lines = []
    for number, row in enumerate(rows, start=1):
        for name, text in row.items():
            text = " ".join(text.split())
            lines.append(
                f"{number if name == next(iter(row)) else '':>3}  {name:<7} {text[:width]}{'...' * (len(text) > width)}"
            )
    return "\n".join(lines)
