"""LoRA models on one base: their losses and gradients, optimizer steps and checkpoints.

The losses are those of https://tinker-docs.thinkingmachines.ai/losses, of each token: N rows of up to T tokens, (N, T).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from posttrain.core.checkpoint import codec, weights
from posttrain.core.checkpoint.store import Store
from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.core.errors import CheckpointError, did_you_mean, require
from posttrain.core.files import remove
from posttrain.core.models.wrapping import PretrainedModel, text_config
from posttrain.core.optim import builder
from posttrain.lm.loading import adapters
from posttrain.rl.losses.policy_losses import cispo, clipped, importance_ratio
from posttrain.rl.policy.logprobs import token_scores
from posttrain.rl.training_server import wire

ALPHA = 32
"""What LoRA's product is multiplied by, over the rank, as in the service: rates then suit all ranks alike."""
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}
"""The numbers of an optimizer step that a request leaves out."""
STATES, SAMPLERS = "weights", "sampler_weights"
"""The kinds of checkpoints in paths of the API: with the optimizer, or to sample from."""
PATH = re.compile(rf"tinker://(?P<run>\w[\w.:-]*)/(?P<kind>{STATES}|{SAMPLERS})/(?P<name>\w[\w.-]*)")


Tensors = Mapping[str, torch.Tensor]
Options = Mapping[str, float]


@dataclass(frozen=True)
class Loss:
    """A loss, whose sum over tokens is minimized.

    of_tokens: ``(log-probabilities, what it reads, its options) -> (N, T)``; 0 where both of the first are. reads: the
    inputs of each row beside ``target_tokens``. options: their defaults; None where a request must have it.
    """

    of_tokens: Callable[[torch.Tensor, Tensors, Options], torch.Tensor]
    reads: tuple[str, ...] = ("logprobs", "advantages")
    options: Mapping[str, float | None] = field(default_factory=dict)


def _ratio(logps: torch.Tensor, x: Tensors) -> torch.Tensor:
    return importance_ratio(logps, x["logprobs"], torch.ones_like(logps))


def _ppo(logps: torch.Tensor, x: Tensors, o: Options) -> torch.Tensor:
    low, high = 1 - o["clip_low_threshold"], o["clip_high_threshold"] - 1
    return clipped(_ratio(logps, x), x["advantages"], low, high)


def _cispo(logps: torch.Tensor, x: Tensors, o: Options) -> torch.Tensor:
    ratio = _ratio(logps, x).clamp(min=o["clip_low_threshold"])
    return cispo(logps, ratio, x["advantages"], o["clip_high_threshold"])


def _dro(logps: torch.Tensor, x: Tensors, o: Options) -> torch.Tensor:
    """Richemond et al. 2024, https://arxiv.org/abs/2405.19107, with advantages for rewards less values."""
    return -(logps * x["advantages"] - 0.5 * o["beta"] * (logps - x["logprobs"]).square())


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(lambda logps, x, o: -logps * x["weights"], ("weights",)),
    "importance_sampling": Loss(lambda logps, x, o: -_ratio(logps, x) * x["advantages"]),
    "ppo": Loss(_ppo, options={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Loss(_cispo, options={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Loss(_dro, options={"beta": None}),
}
"""``loss_fn`` -> the loss."""


def find_loss(name: str, given: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """(the loss `name`, its options, of which a request has `given` some); a ValueError where there is no such loss, or
    an option is unknown, missing, or no number.
    """
    if name not in LOSSES:
        raise ValueError(
            f"loss_fn={name!r} is not done here; there are {', '.join(LOSSES)}{did_you_mean(name, LOSSES, '.')} "
            "forward_backward_custom computes any other in your program."
        )
    loss, found = LOSSES[name], {**LOSSES[name].options, **given}
    for option, value in found.items():
        if option not in loss.options or not isinstance(value, (int, float)):
            takes = ", ".join(loss.options) or "none"
            raise ValueError(
                f"loss_fn_config: {option}={value!r} is no option of {name} with a number; it has {takes}."
            )
    return loss, {option: float(value) for option, value in found.items() if not isinstance(value, (str, type(None)))}


@dataclass
class Base:
    """The base model, whose weights stay as they are, and which all LoRA models share.

    Attributes:
        name: as requests have it. most: tokens, with padding, that are read in one forward, unless a row has more.
        vocabulary: how many tokens there are. max_length: of the longest text, in tokens.
    """

    model: PretrainedModel
    tokenizer: Any
    name: str
    most: int = 4096

    def __post_init__(self) -> None:
        self.model.requires_grad_(False).eval()
        self.vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        self.max_length: int = text_config(self.model.config).to_dict().get("max_position_embeddings") or 2**20

    def lora(self, rank: int, train_attn: bool = True, train_mlp: bool = True, train_unembed: bool = True) -> Any:
        """The `peft.LoraConfig` of these parts; a ValueError where the model has none that can be adapted."""
        peft = require("peft", "posttrain-core[peft]", "posttrain serve-training")
        if train_mlp and any(p.ndim == 3 and ".experts." in name for name, p in self.model.named_parameters()):
            raise ValueError(
                f"The experts of {self.name} are no linear layers, and this server does not adapt them. Set "
                "train_mlp=False, or use a trainer and target_parameters."
            )
        head, targets = self.model.get_output_embeddings(), set()
        for name, module in self.model.named_modules():
            if not isinstance(module, nn.Linear) and type(module).__name__ != "Conv1D":  # as in GPT-2
                continue
            in_attention = any("attn" in part or "attention" in part for part in name.split("."))
            if train_unembed if module is head else train_attn if in_attention else train_mlp:
                targets.add(".".join(name.split(".")[-2:]))
        if not targets or rank < 1:
            raise ValueError(
                f"rank={rank} must be at least 1, and one of train_attn, train_mlp and train_unembed True."
            )
        return peft.LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=sorted(targets), task_type="CAUSAL_LM")

    def adapted(self, config: Any, seed: int | None = None) -> Any:
        """A `peft.PeftModel` with modules of its own and the weights of the base; `seed` is of the matrices A."""
        shared: dict[int, Any] = {id(one): one for one in (*self.model.parameters(), *self.model.buffers())}
        with torch.random.fork_rng():
            torch.manual_seed(secrets.randbits(31) if seed is None else seed)
            model: Any = adapters.set_trained(copy.deepcopy(self.model, shared), copy.deepcopy(config), None)
        model.peft_config["default"].base_model_name_or_path = self.name  # for peft, which looks for it
        return model.eval()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of an adapter, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def scores(
    model: nn.Module, rows: Sequence[tuple[Sequence[int], torch.Tensor]], most: int
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """(which rows, (N, T) log-probabilities of their targets, 0 behind a row's end) of some rows of like length at a
    time. Each row is the tokens that are read and what each position predicts, (T,); `most`: see `Base`.
    """
    device, pad = next(model.parameters()).device, nn.utils.rnn.pad_sequence
    order = sorted(range(len(rows)), key=lambda place: len(rows[place][0]), reverse=True)
    while order:
        places = order[: max(most // len(rows[order[0]][0]), 1)]
        order = order[len(places) :]
        ids = pad([torch.tensor(rows[place][0]) for place in places], batch_first=True)
        labels = pad([rows[place][1].long() for place in places], batch_first=True, padding_value=IGNORE_INDEX)
        inputs = {"input_ids": ids.to(device), "attention_mask": (labels != IGNORE_INDEX).long().to(device)}
        found, _ = token_scores(model, inputs | {"use_cache": False}, labels.to(device), 1.0, ())
        yield places, found[0]


class Policy:
    """A LoRA model in training, after `steps` of its optimizer."""

    def __init__(self, base: Base, config: Any, seed: int | None = None) -> None:
        self.base, self.model, self.steps = base, base.adapted(config, seed), 0
        others = {"deepspeed": None, "lr_scheduler_type": "constant", "warmup_steps": 0}
        self._args = SimpleNamespace(**dataclasses.asdict(builder.OptimizerArguments()) | others)
        self.optimizer = builder.build(self.model, self._args)
        self._failure: str | None = None  # of a request for gradients since the last step

    @property
    def config(self) -> Any:
        """The `peft.LoraConfig`."""
        return self.model.peft_config["default"]

    def forward_backward(self, request: wire.ForwardBackward) -> bytes:
        """Add the gradients of the summed loss to those that are there; the loss and each row's log-probabilities.
        Where it fails, there is no step with the other gradients.
        """
        try:
            return self._forward_backward(request)
        except Exception as error:
            if not request.forward_only:
                self._failure = f"{type(error).__name__}: {error}"
                self.optimizer.zero_grad()
            raise

    def _forward_backward(self, request: wire.ForwardBackward) -> bytes:
        loss, options = find_loss(request.loss, request.options())
        data, pad, total = request.data(), nn.utils.rnn.pad_sequence, 0.0
        if "weights" in loss.reads:
            for row in data:
                row.inputs.setdefault("weights", torch.ones(len(row.tokens)))
        self._check(data, request.loss, {"target_tokens", *loss.reads})
        logps = [torch.empty(0) for _ in data]
        with torch.set_grad_enabled(not request.forward_only):
            rows = [(row.tokens, row.inputs["target_tokens"]) for row in data]
            for places, found in scores(self.model, rows, self.base.most):
                inputs = {
                    name: pad([data[place].inputs[name].float() for place in places], batch_first=True).to(found.device)
                    for name in loss.reads
                }
                summed = loss.of_tokens(found, inputs, options).sum()
                if not request.forward_only:
                    torch.autograd.backward(summed)
                total += float(summed.detach())
                for place, row in zip(places, found.detach().cpu(), strict=True):
                    logps[place] = row[: len(rows[place][0])]
        return wire.forward_backward_output(logps, {"loss:sum": total})

    def _check(self, data: Sequence[wire.Datum], name: str, reads: set[str]) -> None:
        """Raise ValueError where a row cannot be read."""
        if not data:
            raise ValueError("forward_backward got no data; send a row at least.")
        size, longest = self.base.vocabulary, self.base.max_length
        for number, row in enumerate(data):
            if wrong := sorted(row.inputs.keys() ^ reads):
                does = "needs; send it" if wrong[0] in reads else "does not read; leave it out"
                raise ValueError(f"data[{number}].loss_fn_inputs: {wrong[0]!r} is what {name} {does}.")
            if not 0 < (length := len(row.tokens)) <= longest:
                raise ValueError(f"data[{number}] has {length} tokens; {self.base.name} reads 1 to {longest}.")
            if wrong := [key for key, values in row.inputs.items() if len(values) != length]:
                raise ValueError(f"data[{number}].{wrong[0]} must have {length} numbers, one for each token.")
            if not all(0 <= token < size for token in [*row.tokens, *row.inputs["target_tokens"].tolist()]):
                raise ValueError(f"data[{number}] has a token that is none of 0 to {size - 1} of {self.base.name}.")

    def optim_step(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Take a step of AdamW with the gradients since the last one, and the numbers of `ADAM` that are in `params`; a
        ValueError where one is out of its range, or there are no gradients that a step can be taken with.
        """
        if not isinstance(params, Mapping):
            raise ValueError(f"optim_step: adam_params must be an object with some of {', '.join(ADAM)}.")
        if others := sorted(params.keys() - ADAM.keys()):
            raise ValueError(f"optim_step has no {others[0]!r}; AdamW here takes {', '.join(ADAM)}.")
        settings = {name: float(params.get(name, default)) for name, default in ADAM.items()}
        for name, value in settings.items():
            below = 1.0 if name.startswith("beta") else math.inf
            if not 0 <= value < below:  # the weights would be NaN for good, or climb
                raise ValueError(f"optim_step: {name}={value} must be at least 0 and below {below:g}.")
        failure, self._failure = self._failure, None
        if failure is not None:
            self.optimizer.zero_grad()
            raise ValueError(f"No step is taken, because a forward_backward for it failed: {failure}")
        if all(parameter.grad is None for parameter in trained(self.model).values()):
            raise ValueError("No step is taken, because there are no gradients: send forward_backward before it.")
        limit = settings["grad_clip_norm"] if settings["grad_clip_norm"] > 0 else math.inf
        norm = float(nn.utils.clip_grad_norm_(trained(self.model).values(), limit))
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise ValueError(f"No step is taken, as the norm of the gradients is {norm}. Look for NaN in the data.")
        own = {"lr": settings["learning_rate"], "betas": (settings["beta1"], settings["beta2"])}
        for group in self.optimizer.param_groups:
            group |= own | {name: settings[name] for name in ("eps", "weight_decay")}
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return {"metrics": {"grad_norm": norm}}

    def save(self, folder: Path, extra: dict[str, Any], with_optimizer: bool) -> None:
        """Write the adapter, as peft reads it, and the optimizer as a checkpoint in `folder` in the place of others."""
        from peft.utils import get_peft_model_state_dict

        store = Store(folder)
        temp = store.begin(self.steps)
        try:
            with store.writing(temp):
                self.config.save_pretrained(str(temp))
                # Where the head is adapted, peft would write the whole embeddings of the base too.
                tensors = get_peft_model_state_dict(self.model, save_embedding_layers=False)
                codec.write_tensors(tensors, temp / weights.ADAPTER)
                if with_optimizer:
                    codec.save_tree({"optimizer": self.optimizer.state_dict(), "steps": self.steps}, temp / "training")
        except BaseException:
            store.abort(temp)
            raise
        kept = store.commit(temp, extra)
        for other in store.checkpoints():  # where this save is killed, `newest` chooses
            if other != kept:
                remove(other)

    def load(self, folder: Path, with_optimizer: bool) -> None:
        """Go on from what `save` wrote into `folder` of such a model; without its optimizer, with a new one."""
        place = newest(folder)
        weights.load_weights(self.model, place)
        self.optimizer.zero_grad()
        self.optimizer, self.steps, self._failure = builder.build(self.model, self._args), 0, None
        if with_optimizer:
            state = codec.load_tree(place / "training", mmap=False)
            self.optimizer.load_state_dict(state["optimizer"])
            self.steps = state["steps"]


def folder_of(output: Path, path: str) -> Path:
    """Where the checkpoint of a path of the API is; a ValueError where it is no such path."""
    found = PATH.fullmatch(path)
    if found is None:
        raise ValueError(
            f"{path!r} is no path of a checkpoint here: tinker://RUN/{STATES}/NAME or tinker://RUN/{SAMPLERS}/NAME, "
            "of letters, digits, '.', '-' and '_'."
        )
    return output / found["run"].replace(":", "-") / found["kind"] / found["name"]


def newest(folder: Path) -> Path:
    """The checkpoint in `folder`, whole: of two, where a save was killed in the last moment, the later one. Raises
    CheckpointError where there is none, or it is damaged.
    """
    store = Store(folder)
    store.clean()  # what was killed while it took the place of another gives that its name back
    if not (found := store.manifests()):
        raise CheckpointError(f"There is no checkpoint in {folder}. Save one under that name first.")
    return store.resolve(max(found, key=lambda path: found[path]["written"]))


def config_in(folder: Path, base: Base) -> Any:
    """The `peft.LoraConfig` of the checkpoint in `folder`; a CheckpointError where it is of another base model."""
    place, peft = newest(folder), require("peft", "posttrain-core[peft]", "posttrain serve-training")
    found = peft.LoraConfig.from_pretrained(str(place))
    if found.base_model_name_or_path != base.name:
        raise CheckpointError(f"{place} is of {found.base_model_name_or_path!r}, and this server has {base.name!r}.")
    return found
