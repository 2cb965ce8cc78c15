"""Checks arguments, paths, packages and data before a model is loaded, and reports all problems together.

A problem is a sentence, or an exception if callers may catch its type. Checks are generators of problems. There are
three places to add one:

- ``_preflight(self)`` of a class of arguments, for problems of these alone; every class in the method resolution order
  has its own;
- a function of this module, for problems in combination with the trainer's arguments (`Parts`);
- ``Trainer.preflight``, which calls the two and which subclasses extend.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatch
from typing import Any, cast

from torch import nn

from posttrain.core import registry
from posttrain.core.arguments import TrainingArguments
from posttrain.core.callbacks import as_list, problems_of_callbacks
from posttrain.core.config import value_of, values_of
from posttrain.core.data import pipeline
from posttrain.core.distributed import division, shard_settings
from posttrain.core.errors import BEFORE_THE_RUN, Config, ConfigError, did_you_mean, warn, wrong_args
from posttrain.core.evaluation import eval_loop
from posttrain.core.losses.normalization import accepts
from posttrain.core.models.wrapping import config_of
from posttrain.core.optim import builder
from posttrain.core.optim.layerwise import Layerwise
from posttrain.core.state import metric_key
from posttrain.core.training.plan import END_OF_STREAM

logger = logging.getLogger(__name__)

Problem = str | Exception

#: Metrics of every evaluation in addition to the trainer's own.
EVERY_EVALUATION = ("loss", "runtime", "samples_per_second", "steps_per_second", "mem_*")


class PreflightError(ConfigError):
    """Several problems prevent a run, all found before a model was loaded. The message lists them, one per line.

    If one of them has its own type, such as `DataError`, the error has that type too.
    """

    @classmethod
    def of(cls, where: str, problems: Iterable[Problem]) -> PreflightError:
        """The error that holds `problems`."""
        found = list(problems)
        sentences = dict.fromkeys(
            "; ".join(one.problems) if isinstance(one, ConfigError) else str(one) or type(one).__name__ for one in found
        )
        kinds = dict.fromkeys(type(problem) for problem in found if isinstance(problem, Exception))
        # Not types with their own fields, such as OSError: Python cannot combine two of them.
        plain = [kind for kind in kinds if kind.__basicsize__ <= cls.__basicsize__ and not issubclass(cls, kind)]
        try:
            return type(cls.__name__, (cls, *plain), {"__module__": cls.__module__})(where, sentences)
        except TypeError:  # kinds that contradict each other in their order
            return cls(where, sentences)

    def __reduce__(self):
        return PreflightError, (self.where, self.problems)


@dataclass
class Parts:
    """The objects that a trainer gets in addition to its arguments."""

    trainer_class: type | None = None  # that is being made
    model: Any = None  # a module, or the name or folder of one; None where `model_init` makes it
    train_dataset: Any = None  # as it was passed
    eval_dataset: Any = None
    processing_class: Any = None  # of a named model, filled in by a trainer of language models where it was not passed
    data_collator: Any = None
    read_config: Callable[[], Any] | None = None  # reads the config of a named model; None where there is none to read
    model_init: Any = None
    compute_loss_func: Any = None
    preprocess_logits_for_metrics: Any = None
    compute_metrics: Any = None
    callbacks: Any = None
    optimizers: tuple[Any, Any] = (None, None)
    optimizer_cls_and_kwargs: Any = None
    quantization_config: Any = None
    peft_config: Any = None
    ref_model: Any = None
    datasets: dict[str, Any] | None = None  # those that must be readable, by their names in messages; None: of above
    auto_class: str = "AutoTokenizer"  # that loads a named model's `processing_class`
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any], **more: Any) -> Parts:
        """Those among the arguments that a trainer is `given`, by name, and `more`."""
        return cls(**{each.name: given[each.name] for each in fields(cls) if each.name in given} | more)

    @property
    def is_named(self) -> bool:
        """Whether the model is given by name and still has to be loaded."""
        return isinstance(self.model, (str, os.PathLike))

    def is_ours(self, *methods: str) -> bool:
        """Whether the trainer has none of `methods` from a class other than posttrain's."""
        owners = (next((c for c in (self.trainer_class or object).__mro__ if m in vars(c)), None) for m in methods)
        return all(owner is None or owner.__module__.startswith("posttrain.") for owner in owners)


def passed_on(scope: Mapping[str, Any], *without: str, rest: str = "others") -> dict[str, Any]:
    """The arguments of an ``__init__`` by name, for that of its base, which takes them in another order: its
    ``locals()`` `without` arguments of its own, and those in ``**others``, named `rest`.
    """
    own = {"self", "__class__", rest, *without}
    return {**{name: value for name, value in scope.items() if name not in own}, **scope[rest]}


def raise_together(where: str, problems: Iterable[Problem]) -> None:
    """Raise the problems: a single exception itself, several as a `PreflightError` that lists all, each once."""
    found = list({str(problem): problem for problem in problems}.values())
    if len(found) == 1 and isinstance(found[0], Exception):
        setattr(found[0], BEFORE_THE_RUN, True)  # the command line prints such an error without its traceback
        raise found[0]
    if found:
        raise PreflightError.of(where, found)


def caught(check: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Exception]:
    """The problem that the function `check` raises."""
    try:
        check(*args, **kwargs)
    except (TypeError, ValueError, OSError, ImportError, RuntimeError) as error:
        yield error


def check_types(name: str, config_class: type, model: Any, model_init: Any, args: Any) -> None:
    """Raise where a trainer's constructor got no model, or model or arguments of another type; messages have the `name`
    of the trainer, and the `config_class` of its arguments.
    """
    if (model is None) == (model_init is None):
        given = "neither was given" if model is None else "both were given"
        raise ValueError(f"{name} needs a model or a model_init, and {given}.")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"model is of type {type(model).__name__}; {name} takes a loaded one, for instance from "
            "AutoModelForCausalLM.from_pretrained(...)."
        )
    if isinstance(model_init, nn.Module):
        raise TypeError("model_init is a model; pass the function that makes it, without calling it.")
    if args is not None and not isinstance(args, TrainingArguments):
        raise wrong_args(args, config_class)


def refuse_unknown(owner: Any, names: Iterable[str]) -> None:
    """Raise a `TypeError` for an argument among `names` that neither the class `owner` nor one below it takes."""
    written = (vars(one)["__init__"] for one in owner.__mro__ if "__init__" in vars(one))
    own = [name for each in written for name in inspect.signature(each).parameters]
    later = ("tokenizer", "callback", "optimizer_cls_and_kwargs", "preprocess_logits_for_metrics")
    for name in (name for name in names if name not in later):
        config, fields = owner.config_class, owner.config_class.__dataclass_fields__
        hint = "" if name in registry.OF_TRAINERS else config.unknown_argument_hint(name)
        if name in fields:
            hint = f", which {config.__name__} has: pass args={config.__name__}({name}=...)"
        hint = hint or did_you_mean(name, [*own, *fields])
        raise TypeError(f"{owner.__name__} got an unknown argument {name!r}{hint}")


def renamed_arguments(trainer_class: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor under their names of today, with one warning for each old one. Raises a
    `ValueError` where both the old and the new name were given.

    Args:
        given: by name; None is taken as not given.
    """
    owner = trainer_class.__name__
    renamed = {name: value for name, value in given.items() if name not in trainer_class.OLD_ARGUMENTS}
    for old, new in trainer_class.OLD_ARGUMENTS.items():
        if given.get(old) is None:
            continue
        if renamed.get(new) is not None:
            raise ValueError(f"{owner} got both {new}= and its earlier name {old}=; pass {new}= alone.")
        warn(f"{owner}: {old}= is now {new}=; both work.", FutureWarning)
        renamed[new] = given[old]
    return renamed


def renamed_parts(
    trainer_class: type[Any], old: dict[str, Any], processing_class: Any, callbacks: Any
) -> tuple[Any, Any]:
    """(processing_class, callbacks) of a constructor with ``tokenizer=`` or ``callback=``; TypeError for others."""
    refuse_unknown(trainer_class, old.keys() - trainer_class.OLD_ARGUMENTS.keys())
    given = {"processing_class": processing_class, "callbacks": callbacks} | old
    now = renamed_arguments(trainer_class, given)
    return now["processing_class"], now["callbacks"]


def as_config(owner: str, config_class: type[Config], args: Any, moved: Mapping[str, Any]) -> Config:
    """The config of the trainer `owner`: `args`, or a `config_class` with the fields of plain ones, and the arguments
    that were `moved` into it from the constructor, by field. Raises a `TypeError` where `args` is no config of
    posttrain, and a `ConfigError` where an argument contradicts what was written in `args`, be it the default.
    """
    if args is None:
        return config_class(**moved)
    if not isinstance(args, TrainingArguments):
        raise wrong_args(args, config_class)
    of_class: Any = config_class
    default = {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for field in dataclasses.fields(of_class)
        if field.init
    }
    written = {*vars(args).get("_given", ())}
    if not isinstance(args, config_class):
        given = values_of(args)
        args = config_class(**{name: value for name, value in given.items() if name in default})
        own = [name for name in config_class.__annotations__ if name not in {*given, *moved}]
        rest = ", ".join(f"{name}={value!r}" for name in own if (value := value_of(args, name)) is not None)
        logger.info("args of another class are kept. The rest is %s's default: %s.", config_class.__name__, rest)
    problems = [
        f"{name}={value!r} was passed to {owner}, and {name}={known!r} in its args; give it in args alone"
        for name, value in moved.items()
        if (known := value_of(args, name)) != value and (name in written or known != default[name])
    ]
    if problems:
        raise ConfigError(owner, problems)
    return cast(Config, dataclasses.replace(args, **moved) if moved else args)


def of_arguments(*configs: Any) -> Iterator[Problem]:
    """Problems: packages, files, folders and hardware that are missing on this machine."""
    for config in configs:
        for owner in reversed(type(config).__mro__):
            if "_preflight" in vars(owner):
                yield from vars(owner)["_preflight"](config)


def of_parts(args: Any, parts: Parts) -> Iterator[Problem]:
    """Problems with the arguments that every trainer takes."""
    yield from division_problems(args, parts)
    yield from dataset_problems(args, parts)
    yield from optimizer_problems(args, parts)
    yield from metric_problems(args, parts)
    yield from problems_of_callbacks(parts.callbacks, args)
    if (given := parts.data_collator) is not None and not callable(given):
        yield TypeError(f"data_collator must be callable with a list of rows; {type(given).__name__} is not.")
    if isinstance(given := parts.processing_class, (str, type)):
        yield TypeError(f"processing_class is {given!r}; pass a loaded one, as AutoTokenizer.from_pretrained gives.")
    for name in ("compute_loss_func", "model_init", "preprocess_logits_for_metrics"):
        is_read = name != "compute_loss_func" or parts.is_ours("compute_loss")
        if (value := vars(parts)[name]) is not None and not callable(value) and is_read:
            yield TypeError(f"{name} must be a function, not {value!r}.")
    if callable(parts.compute_loss_func) and not accepts(parts.compute_loss_func, "num_items_in_batch"):
        yield TypeError("compute_loss_func is called with num_items_in_batch=..., and this one has no such argument.")


def division_problems(args: Any, parts: Parts) -> Iterator[Problem]:
    """Problems with dividing the model over processes; reads the config alone of a named model."""
    sizes = shard_settings.sizes_of(args.parallelism_config)
    if max(sizes.get("tp_size", 1), sizes.get("ep_size", 1)) == 1:
        return
    if isinstance(parts.model, nn.Module):
        config = config_of(parts.model)
    elif parts.read_config is not None:
        config = parts.read_config()
    else:
        return  # made later, or reported with the model
    if config is not None:
        yield from division.model_problems(sizes, config)


def dataset_problems(args: Any, parts: Parts) -> Iterator[Problem]:
    """Problems with the datasets, without reading rows."""
    sets = parts.datasets
    if sets is None:
        sets = {}
        if parts.is_ours("get_train_dataloader"):
            sets["train_dataset"] = parts.train_dataset
        if parts.is_ours("get_eval_dataloader"):
            several = isinstance(given := parts.eval_dataset, Mapping)
            sets |= {f"{name}_dataset": rows for name, rows in given.items()} if several else {"eval_dataset": given}
    for name, dataset in sets.items():
        if dataset is not None:
            yield from caught(pipeline.check_dataset, dataset, name)
    if args.eval_strategy != "no" and (parts.eval_dataset is None or parts.eval_dataset == {}):
        if parts.is_ours("get_eval_dataloader", "evaluate"):
            yield ValueError(
                f"eval_strategy={str(args.eval_strategy)!r} needs an eval_dataset; pass one, or set eval_strategy='no'."
            )
    rows = parts.train_dataset
    strategy = str(args.train_sampling_strategy)
    by_length = f"train_sampling_strategy={strategy!r}" if strategy in pipeline.BY_LENGTH else ""
    by_length = by_length if args.max_batch_tokens is None else f"max_batch_tokens={args.max_batch_tokens}"
    if by_length and rows is not None and not isinstance(rows, Mapping):
        if pipeline.is_stream(rows) and parts.is_ours("get_train_dataloader", "_get_train_sampler", "train_sampler"):
            yield (
                f"{by_length} has no effect on a stream ({type(rows).__name__}), whose "
                "rows come in their own order: leave it out, or pass rows that can be read by index"
            )
    ends = args.max_steps > 0 or args.epochs_of_stream is not None
    if rows is not None and not ends and not isinstance(rows, Mapping) and pipeline.is_stream(rows):
        if not pipeline.has_length(rows) and parts.is_ours("get_train_dataloader", "make_plan"):
            yield ValueError(
                f"train_dataset ({type(rows).__name__}) is a stream without a length, so the number of optimizer "
                f"steps cannot be computed from num_train_epochs. {END_OF_STREAM}"
            )


def optimizer_problems(args: Any, parts: Parts) -> Iterator[Problem]:
    """Problems with the passed or named optimizer."""
    pair = parts.optimizers
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or any(isinstance(each, (str, type)) for each in pair):
        yield TypeError(f"optimizers={pair!r} must be a pair (optimizer, lr_scheduler), made or None; optim is a name.")
        return
    (optimizer, scheduler), chosen = pair, parts.optimizer_cls_and_kwargs
    if optimizer is not None and chosen is not None:
        yield ValueError("optimizers holds an optimizer, so optimizer_cls_and_kwargs has no effect; pass one of them.")
    if parts.model_init is not None and (optimizer is not None or scheduler is not None):
        yield ValueError(
            "model_init makes new parameters at each train, which are not in the optimizer in optimizers; pass a "
            "model, or optimizer_cls_and_kwargs, or override create_optimizer."
        )
    if chosen is not None and not (isinstance(chosen, (tuple, list)) and len(chosen) == 2):
        yield TypeError(f"optimizer_cls_and_kwargs={chosen!r} must be a pair (class, dict of its arguments).")
        return
    kind: Any = type(optimizer) if optimizer is not None or chosen is None else chosen[0]
    if isinstance(kind, type) and issubclass(kind, Layerwise):
        yield from map(ValueError, builder.layerwise_problems(args, f"{kind.__name__}, which was passed,"))
    own = optimizer is None and chosen is None and parts.train_dataset is not None
    if own and parts.is_ours("create_optimizer", "get_optimizer_cls_and_kwargs", "create_optimizer_and_scheduler"):
        yield from builder.package_problems(args)


def metric_problems(args: Any, parts: Parts) -> Iterator[Problem]:
    """Problems with `compute_metrics`, or with the metric of the best model."""
    yield from caught(eval_loop.check_metrics, parts.compute_metrics, args.batch_eval_metrics, args.include_for_metrics)
    wanted, sets = args.metric_for_best_model, parts.eval_dataset
    if wanted is None or args.eval_strategy == "no" or not parts.is_ours("evaluate", "evaluation_loop", "log"):
        return
    if _hears_evaluations(parts.callbacks):
        return
    key = metric_key(wanted).removeprefix("eval_")
    if isinstance(sets, Mapping) and sets:
        prefix = next((f"{name}_" for name in sets if key.startswith(f"{name}_")), None)
        if prefix is None:
            names = ", ".join(f"{name}_{key}" for name in sets)
            yield (
                f"metric_for_best_model={wanted!r} cannot exist: eval_dataset holds several sets, each with its own "
                f"metrics. Set it to one of {names}"
            )
            return
        key = key.removeprefix(prefix)
    known = getattr(parts.trainer_class, "evaluation_metrics", None)
    open_ended = parts.compute_loss_func is not None or not parts.is_ours("compute_loss", "prediction_step")
    computes = parts.compute_metrics is not None and not args.prediction_loss_only
    if known is None or open_ended or computes or vars(args).get("predict_with_generate"):
        return
    if not any(fnmatch(key, pattern) for pattern in (*EVERY_EVALUATION, *known)):
        why = "there is no compute_metrics to return it"
        if parts.compute_metrics:
            why = "prediction_loss_only=True keeps compute_metrics from being called"
        names = ", ".join(name for name in ("loss", *known) if "*" not in name)
        yield f"metric_for_best_model={wanted!r} cannot exist: {why}. Without it, evaluations give {names}"


def _hears_evaluations(callbacks: Any) -> bool:
    """Whether one of the user's own callbacks hears of evaluations: it may add to their metrics."""
    kinds = [one if isinstance(one, type) else type(one) for one in as_list(callbacks)]
    owners = [next((c for c in kind.__mro__ if "on_evaluate" in vars(c)), object) for kind in kinds]
    return any(not owner.__module__.startswith(("posttrain.", "transformers.", "builtins")) for owner in owners)
