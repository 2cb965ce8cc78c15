"""The reference policy: the frozen initial weights of the trainer. Nothing is loaded again by name.

It is one of:

- a frozen copy of the model, or the model that was passed as such (`FrozenReference`);
- the model itself with its adapter off, or with another adapter that holds the initial adapter (`AdapterReference`);
- precomputed log-probabilities, without a model.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from posttrain.compat import bema
from posttrain.core import TrainerCallback, opt
from posttrain.core.checkpoint.weights import REFERENCE as ADAPTER
from posttrain.core.distributed.sharding import fill, is_in_pieces, whole
from posttrain.core.errors import CheckpointError
from posttrain.core.evaluation.eval_loop import eval_mode
from posttrain.core.models import embeddings, wrapping
from posttrain.core.models.special_tokens import tokenizer_of
from posttrain.core.models.wrapping import setting
from posttrain.lm.images import blank_images
from posttrain.lm.loading.loading import obey_softcap


@dataclass
class SyncArguments:
    """How the reference follows the policy."""

    sync_ref_model: bool = opt(
        False, "Move the reference towards the policy every ref_model_sync_steps optimizer steps (TR-DPO)."
    )
    ref_model_mixup_alpha: float = opt(
        0.6,
        "Share of the policy in the reference after a move; at 1 the reference becomes the policy.",
        above=0,
        max=1,
        needs="sync_ref_model",
    )
    ref_model_sync_steps: int = opt(
        512, "Optimizer steps between syncs of the reference.", min=1, needs="sync_ref_model"
    )


@dataclass
class ReferenceArguments(SyncArguments):
    """Where the reference log-probabilities come from."""

    precompute_ref_log_probs: bool = opt(
        False, "Compute the reference's log-probabilities once, before training, and keep no reference model."
    )
    precompute_ref_batch_size: int | None = opt(
        None,
        "Rows at a time when they are computed before training; None: as in training.",
        min=1,
        needs="precompute_ref_log_probs",
    )

    def _problems(self) -> Iterator[str]:
        if self.sync_ref_model and self.precompute_ref_log_probs:
            yield (
                "sync_ref_model=True changes the reference, and precompute_ref_log_probs=True fixes its "
                "log-probabilities; set one of them to False"
            )


def arguments_of(args: Any) -> ReferenceArguments:
    """`args`, the config of a trainer that compares with a reference, which must hold the arguments of one."""
    if not isinstance(args, ReferenceArguments):
        raise TypeError(
            f"{type(args).__name__} has no arguments of a reference: let it inherit "
            "posttrain.rl.policy.reference.ReferenceArguments, or set needs_reference = False in the trainer."
        )
    return args


ANOTHER = (
    "The run in {where} had another reference than this one, which is the weights that the model had when the "
    "trainer was made. Make the trainer from the weights that the run began with, not from its checkpoint, or pass "
    "ref_model."
)
SAMPLED = 512


def fingerprint(weights: dict[str, torch.Tensor]) -> str:
    """A hash of up to `SAMPLED` numbers of each tensor, spread over it, to detect trained weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLED)].float().cpu()
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


class Reference:
    """What a policy is compared with.

    Attributes:
        is_gone: it can no longer be evaluated.
        moves: its weights change in training.
        another: the message about a checkpoint of a run that had another one.
    """

    is_gone = moves = False
    adapter: str | None = None  # which stands for it in the policy
    another = ANOTHER
    _state: dict[str, Any] | None = None  # that of `state_dict`, where it stays as it is from the beginning

    def use(self) -> contextlib.AbstractContextManager[nn.Module]:
        """The model to call, without gradients and without dropout."""
        raise NotImplementedError

    def weights(self) -> dict[str, torch.Tensor]:
        """What makes the reference."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The checkpoint's state: the weights of a moving reference, else a fingerprint. Every process must call it."""
        if self._state is not None:
            return self._state
        if not self.moves:
            return {"fingerprint": fingerprint(self.weights())}
        return {"weights": {name: whole(own).detach().to("cpu", copy=True) for name, own in self.weights().items()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any], where: Any = "the checkpoint") -> None:
        """The inverse of `state_dict`. Raise CheckpointError if this reference is not the one that the run in `where`
        began with.
        """
        own = self.weights() if self._state is None else {}
        kept = state.get("weights") if self._state is None else None
        known = {"fingerprint": fingerprint(own)} if self._state is None else self._state
        if not (state == known if kept is None else kept.keys() == own.keys()):
            raise CheckpointError(self.another.format(where=where))
        for name, tensor in (kept or {}).items():
            fill(own[name], tensor)


class FrozenReference(Reference):
    """A separate model, never trained: `model`, called like the policy."""

    def __init__(self, model: nn.Module, moves: bool = False, is_copy: bool = False, another: str = ANOTHER) -> None:
        self.another = another
        obey_softcap(model)
        self.model, self.moves, self.is_copy = model.requires_grad_(False).eval(), moves, is_copy
        self._state = None if moves else self.state_dict()  # before it is sharded

    def place(self, dist: Any) -> None:
        """Move it to the policy's device and shard it like the policy; a copy that never changes is cast to the compute
        precision. Every process must call it.
        """
        self.model = dist.prepare_frozen(self.model, rounds=self.is_copy and not self.moves)

    @contextlib.contextmanager
    def use(self) -> Iterator[nn.Module]:
        with torch.no_grad():
            yield self.model

    @torch.no_grad()
    def sync(self, policy: nn.Module, alpha: float) -> None:
        """Move the weights to ``alpha * policy + (1 - alpha) * reference``.

        Gorbatovski et al. 2024, https://arxiv.org/abs/2404.09656, eq. 5.
        """
        own = self.weights()
        for name, parameter in wrapping.unwrap(policy).named_parameters():
            now = parameter.detach()
            now = now if is_in_pieces(own[name]) else whole(parameter).detach()  # both sharded alike, or neither
            own[name].lerp_(now.to(own[name]), alpha)

    def weights(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())


class AdapterReference(Reference):
    """The policy's own weights with its adapter off, or with the frozen adapter `adapter` in its place.

    Calling it is calling the policy so. It costs no second copy of the model.
    """

    def __init__(self, policy: nn.Module, adapter: str | None = None, moves: bool = False) -> None:
        self.policy, self.adapter, self.moves = wrapping.unwrap(policy), adapter, moves
        for parameter in self.weights().values():
            parameter.requires_grad_(False)

    @classmethod
    def copy_of(cls, policy: nn.Module, moves: bool) -> AdapterReference:
        """Freeze what the active adapter of `policy` is now as another one, `ADAPTER`."""
        from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

        peft_model = wrapping.unwrap(policy)
        [active] = peft_model.active_adapters
        if ADAPTER not in peft_model.peft_config:
            frozen = copy.copy(peft_model.peft_config[active])
            frozen.inference_mode = True  # some kinds have one trainable adapter at most
            if hasattr(frozen, "init_lora_weights"):  # PiSSA and others would change the weights below once more
                frozen.init_lora_weights = True
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "(PiSSA|OLoRA|CorDA) changes the base", UserWarning)
                peft_model.add_adapter(ADAPTER, frozen)
            state = get_peft_model_state_dict(peft_model, adapter_name=active, save_embedding_layers=False)
            set_peft_model_state_dict(peft_model, state, adapter_name=ADAPTER)
        return cls(peft_model, ADAPTER, moves)

    @property
    def model(self) -> AdapterReference:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.use() as model:
            return model(*args, **kwargs)

    @contextlib.contextmanager
    def use(self) -> Iterator[nn.Module]:
        policy = self.policy
        with torch.no_grad(), eval_mode(policy):
            if self.adapter is None:
                with policy.disable_adapter():
                    yield policy
                return
            active, trained = policy.active_adapters, [(p, p.requires_grad) for p in policy.parameters()]
            policy.set_adapter(self.adapter)
            try:
                yield policy
            finally:
                policy.set_adapter(active[0])
                if len(active) > 1:
                    policy.base_model.set_adapter(active)
                for parameter, requires_grad in trained:  # peft freezes the adapter that is put aside
                    parameter.requires_grad_(requires_grad)

    @torch.no_grad()
    def sync(self, policy: nn.Module, alpha: float) -> None:
        """As `FrozenReference.sync`, of factors, whose mean is not the adapter of the mean; see `sync_problem`."""
        [active], own = self.policy.active_adapters, dict(self.policy.named_parameters())
        for name, parameter in self.weights().items():
            parameter.lerp_(own[name.replace(f".{self.adapter}", f".{active}")].to(parameter), alpha)

    def weights(self) -> dict[str, torch.Tensor]:
        """What makes the reference: the frozen adapter, or all that belongs to no adapter."""
        tuned = {self.adapter} if self.adapter else {*self.policy.peft_config}
        named = self.policy.named_parameters()
        return {name: p for name, p in named if bool(tuned & {*name.split(".")}) == bool(self.adapter)}


def changes_nothing(policy: nn.Module) -> bool:
    """Whether the one adapter of `policy` gives what the model below gives: LoRA whose second factors are still 0."""
    peft_model = wrapping.unwrap(policy)
    (config, *others) = peft_model.peft_config.values()
    plain = config.peft_type == "LORA" and not config.use_dora
    more = [setting(config, name) for name in ("modules_to_save", "trainable_token_indices", "lora_bias")]
    tuned = [p for name, p in peft_model.named_parameters() if {"lora_B", "lora_embedding_B"} & {*name.split(".")}]
    return plain and not others and not any(more) and bool(tuned) and not any(bool(p.any()) for p in tuned)


class PolicyAsReference(Reference):
    """The untrained policy itself, to precompute the reference's log-probabilities."""

    model = None

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy
        self._state = {"fingerprint": fingerprint(dict(policy.named_parameters()))}

    @contextlib.contextmanager
    def use(self) -> Iterator[nn.Module]:
        with torch.no_grad(), eval_mode(self.policy):
            yield self.policy

    def let_go(self) -> None:
        """Before the policy is trained: it is no reference from then on."""
        del self.policy
        self.is_gone = True


MovableReference = FrozenReference | AdapterReference


def make_reference(
    policy: nn.Module, given: nn.Module | None, fresh_adapter: bool, moves: bool = False
) -> MovableReference:
    """The reference with the current weights of `policy`.

    Args:
        given: a model to use as the reference instead.
        fresh_adapter: the policy has a newly added adapter; the base without it is the reference, unless the adapter
            took a part of the base over (PiSSA, OLoRA, LoftQ).
        moves: the reference will be synchronized with the policy and needs its own weights.
    """
    if given is not None:
        blank_images.see_alike(given, policy)
        return FrozenReference(given, moves)
    if wrapping.is_peft_model(policy) and len(wrapping.unwrap(policy).active_adapters) == 1:
        (config, *_) = wrapping.unwrap(policy).peft_config.values()
        is_plain = fresh_adapter and not isinstance(vars(config).get("init_lora_weights"), str)
        if not moves and (is_plain or changes_nothing(policy)):
            return AdapterReference(policy)
        return AdapterReference.copy_of(policy, moves)
    return FrozenReference(copy.deepcopy(wrapping.unwrap(policy)), moves, is_copy=True)


def check_vocabulary(given: nn.Module, policy: nn.Module, tokenizer: Any) -> None:
    """Raise ValueError where the reference that was `given` lacks ids of `tokenizer`, or its processor, that the policy
    has.
    """
    known, own = (embeddings.id_limits(model).get("input_ids", math.inf) for model in (given, policy))
    if known < min(own, len(tokenizer_of(tokenizer))):
        raise ValueError(
            f"ref_model has {known} tokens and model {own}: it cannot read all that the tokenizer writes. Pass a "
            "ref_model of the same tokenizer, resized as the model was (resize_token_embeddings); or leave it out: the "
            "reference is then what the model is now."
        )


def set_up_reference(
    policy: nn.Module, given: nn.Module | None, fresh_adapter: bool, args: Any, dist: Any, movers: Sequence[Any] = ()
) -> MovableReference:
    """`make_reference` for `args`, placed and sharded like the policy. Every process must call it. It is given to the
    callbacks that move it, `movers`, as `reference`. Raise ValueError where there is a `sync_problem`.
    """
    if args.sync_ref_model and (problem := sync_problem(policy, given, args.ref_model_mixup_alpha)):
        raise ValueError(problem)
    reference = make_reference(policy, given, fresh_adapter, args.sync_ref_model or bool(movers))
    for mover in movers:
        mover.reference = reference
    if isinstance(reference, FrozenReference):
        reference.place(dist)
    return reference


def start_problem(policy: torch.Tensor, reference: torch.Tensor, half: bool) -> str | None:
    """Why a reference that is the policy's initial weights is not the policy before the first step; None if it is. Both
    are (N,) log-probabilities of completions, computed in 16 bits if `half`.
    """
    half = half or policy.dtype != torch.float32
    gap, scale = (float(values.detach().abs().max()) for values in (policy - reference, policy))
    if not gap > (5e-2 if half else 1e-4) * max(scale, 1.0):  # also where it is NaN, which `on_nonfinite` judges
        return None
    return (
        f"Before the first optimizer step, policy and reference already differ by up to {gap:.3g} in the "
        "log-probability of a completion. The reference is the weights that the policy begins with: the model was "
        "changed since the trainer was made, or its adapter changes it from the start (init_lora_weights, p-tuning). "
        "Take an adapter that starts at zero. To use another reference on purpose, pass ref_model; online, set beta=0."
    )


def sync_problem(policy: nn.Module, given: nn.Module | None, alpha: float) -> str | None:
    """Why the reference cannot be moved towards `policy`, as a sentence; None if it can."""
    if given is None:
        if not wrapping.is_peft_model(policy) or alpha == 1:
            return None
        return (
            f"sync_ref_model=True with ref_model_mixup_alpha={alpha} and an adapter: the mean of two adapters' "
            "factors is not the adapter of the mean. Set ref_model_mixup_alpha=1, or train without peft_config."
        )
    if wrapping.is_peft_model(policy):
        return "sync_ref_model=True cannot move a ref_model towards a policy with an adapter. Leave ref_model out."
    own, its = ({n: p.shape for n, p in model.named_parameters()} for model in (given, wrapping.unwrap(policy)))
    differs = (
        "sync_ref_model=True needs a ref_model of the policy's architecture and sizes. Leave ref_model out, or set "
    )
    return None if own == its else differs + "False."


def create_reference_model(
    model: nn.Module, num_shared_layers: int | None = None, pattern: str | None = None
) -> nn.Module:
    """A copy of `model` that is never trained, in evaluation mode, for scripts that pass a ``ref_model``.

    Args:
        num_shared_layers: what stands before the layer of this number is frozen in `model` too, and held once.
        pattern: in the names of that layer's parameters, with ``{layer}`` for the number; None: ``.{layer}.``.

    Raises:
        ValueError: no parameter has such a name.
    """
    model, shared = wrapping.unwrap(model), []
    if num_shared_layers is not None:
        named, mark = dict(model.named_parameters()), (pattern or ".{layer}.").format(layer=num_shared_layers)
        shared = [named[name] for name in itertools.takewhile(lambda name: mark not in name, named)]
        if len(shared) == len(named):
            raise ValueError(
                f"num_shared_layers={num_shared_layers}: no parameter of the model has {mark!r} in its name."
            )
    for parameter in shared:
        parameter.requires_grad_(False)
    return copy.deepcopy(model, {id(parameter): parameter for parameter in shared}).requires_grad_(False).eval()


class SyncRefModelCallback(TrainerCallback):
    """Moves `ref_model`, of the model's architecture, towards the model, as ``ref_model_sync_steps`` and
    ``ref_model_mixup_alpha`` of the arguments say. ``sync_ref_model=True`` does so without a callback.
    """

    def __init__(self, ref_model: nn.Module, accelerator: Any = None) -> None:
        self.ref_model = ref_model
        self._reference = FrozenReference(ref_model, moves=True)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            self._reference.sync(model, args.ref_model_mixup_alpha)


class SyncReference(TrainerCallback):
    """Moves the reference towards the policy every `every` optimizer steps (TR-DPO)."""

    def __init__(self, reference: MovableReference, alpha: float, every: int) -> None:
        self.reference, self.alpha, self.every = reference, alpha, every

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self.reference.sync(model, self.alpha)


class BEMACallback(bema.BEMACallback):
    """As `posttrain.core.BEMACallback`, and moves the reference to the average, which is bias-corrected.

    Args:
        update_ref_model: move the reference of the trainer, which then holds weights of its own.
        ref_model_update_freq: optimizer steps between moves. ref_model_update_after: steps before the first one.

    The other arguments are those of `posttrain.core.BEMACallback`.
    """

    def __init__(
        self,
        *args: Any,
        update_ref_model: bool = False,
        ref_model_update_freq: int = 400,
        ref_model_update_after: int = 0,
        **others: Any,
    ) -> None:
        if ref_model_update_freq < 1:
            raise ValueError(f"BEMACallback: ref_model_update_freq={ref_model_update_freq} must be 1 or more.")
        super().__init__(*args, **others)
        self.update_ref_model = update_ref_model
        self.ref_model_update_freq, self.ref_model_update_after = ref_model_update_freq, ref_model_update_after
        self.reference: MovableReference | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """As the base's. Raise ValueError if there is no reference to move."""
        if self.update_ref_model and self.reference is None:
            raise ValueError(
                "BEMACallback(update_ref_model=True) moves a reference, and this trainer holds none. Set beta above 0 "
                "in online training, or leave update_ref_model out."
            )
        super().on_train_begin(args, state, control, model, **kwargs)

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        since = state.global_step - self.ref_model_update_after
        if self.update_ref_model and self.reference is not None and since >= 0:
            if since % self.ref_model_update_freq == 0:
                own = self.reference.weights()
                for name, value in self.averaged().items():
                    own[name].copy_(value)


def movers(callbacks: Iterable[Any], policy: nn.Module, is_precomputed: bool = False) -> list[BEMACallback]:
    """Those of `callbacks` that move the reference of `policy`; give them one as `reference`. Raise ValueError if the
    reference cannot be moved.
    """
    found = [one for one in callbacks if isinstance(one, BEMACallback) and one.update_ref_model]
    if found and wrapping.is_peft_model(policy):
        raise ValueError(
            "BEMACallback(update_ref_model=True) averages whole weights, and the policy trains an adapter. Train "
            "without peft_config, or leave update_ref_model out."
        )
    if found and is_precomputed:
        raise ValueError(
            "BEMACallback(update_ref_model=True) changes the reference, and precompute_ref_log_probs=True fixes its "
            "log-probabilities. Set one of them to False."
        )
    return found
