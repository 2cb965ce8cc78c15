"""Estimates the peak memory of a run without computing or loading, and finds changes that make it fit.

The model is built from its config with fake tensors (torch's `FakeTensorMode`), which have shapes, types and a device,
but no numbers. The training code runs one micro-batch forward and backward and one optimizer step, and every tensor is
counted while it exists. So weights, gradients and optimizer state are exact; activations and the peak are estimates:
see `Footprint`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from posttrain.cli.tools import memory_mesh
from posttrain.cli.tools.communication import Exchange, Traffic, head_size, of_pairs
from posttrain.cli.tools.memory_count import LiveBytes
from posttrain.cli.tools.workload import Workload, load_config, trusts, with_images
from posttrain.core.checkpoint import codec
from posttrain.core.config import value_of
from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.core.distributed import environment, shard_settings
from posttrain.core.distributed.strategies.base import to_round
from posttrain.core.errors import ConfigError
from posttrain.core.losses import shift_labels
from posttrain.core.models import gradient_checkpointing, regularization, rms_norm, wrapping
from posttrain.core.models.wrapping import local_part, setting
from posttrain.core.optim import builder
from posttrain.core.registry import Run
from posttrain.lm.attention import attention_blocks, context_parallel, varlen_attention
from posttrain.lm.attention.activation_offloading import OffloadActivations
from posttrain.lm.attention.flash_attention import is_flash_name
from posttrain.lm.attention.segments import Segments
from posttrain.lm.loading import adapters, loading, parts
from posttrain.lm.loss import language_modeling, lm_head, tiles

TILE = 512  # rows of the largest tile of `posttrain.lm.loss.language_modeling`
BUCKET = 25  # MiB of gradients that DDP averages at a time, unless ddp_bucket_cap_mb is set
STATS = ("entropy", "correct", "mean_logit")  # what trainers of preferences log of each token

# Bytes of bitsandbytes for each number of a weight, by the field of `ModelConfig`: a 4-bit
# number with a float32 scale for each 64 of them, or with an 8-bit scale and a float32 for each 256 scales; 8 bits,
# with a scale for each row.
QUANTIZED = {"load_in_4bit": 0.5 + 4 / 64, "use_bnb_nested_quant": 0.5 + 1 / 64 + 4 / 64 / 256, "load_in_8bit": 1.0}


@dataclass(frozen=True)
class Footprint:
    """Bytes of one process on its device, but for `host`.

    weights, gradients, optimizer (its state), reference, average (EMA): exact, but for quantized weights, which follow
    `QUANTIZED`. others: models that score. activations: what lives when the head is reached; head: what the
    loss takes on top of it at most. buckets: gradients as DDP averages them, which live beside them. cache: keys and
    values in generation. peak: the most that lives at one time. Not in it: what kernels use inside, the fragments
    between tensors, batches that are waiting, CUDA's own libraries, Python. host: the most that is moved to the host at
    one time: activations, and with FSDP's `cpu_offload` weights, gradients and optimizer state, which the other numbers
    then leave out.

    Of an optimizer step, with all its micro-batches: operations: of floating-point numbers in matrix products and
    attention. exchanges: what is sent between processes, but for what is a few bytes: norms, counts, metrics.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    peak: int
    reference: int = 0
    others: int = 0
    average: int = 0
    cache: int = 0
    buckets: int = 0
    host: int = 0
    operations: float = 0
    exchanges: tuple[Exchange, ...] = ()

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by kind; they sum to `peak`."""
        found = {
            "weights": self.weights,
            "reference model": self.reference,
            "reward models": self.others,
            "average of the weights": self.average,
            "gradients": self.gradients,
            "gradients in DDP's buckets": self.buckets,
            "optimizer state": self.optimizer,
            "activations": self.activations,
            "loss and logits": self.head,
            "generation cache": self.cache,
        }
        rest = self.peak - sum(found.values())
        found["passing tensors" if rest > 0 else "not there at the peak"] = rest
        return {name: size for name, size in found.items() if size or name == "weights"}


# ------------------------------------------------------------------------------------------------------------ measuring


def measure(run: Run, work: Workload) -> Footprint:
    """The footprint of `run` on the training device of this machine; `ConfigError` if its model does not run so."""
    config, device = load_config(run), device_type(run.config)
    mesh = memory_mesh.mesh_of(run.config, device, config)
    try:
        with torch.device("meta"):
            model, quantized = _make(run, work, config)
            sizes = shard_settings.sizes_of(run.config.parallelism_config)
            if device != "cpu" and sizes.get("tp_size", 1) == 1 and not run.config.torch_compile:
                rms_norm.use_kernels(model)  # as `Distributed` does
        # Created on the meta device because peft cannot convert fake tensors, which in turn know the kernels of their
        # device.
        varlen_attention.tiles_of(_rows(work.rows, work.computed))  # kept, because it hangs on numbers
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.device(device),
            memory_mesh.even_routes(mesh),
            _two_blocks(),
            wrapping.replaced(rms_norm, "KERNEL", _Norm.apply),
        ):
            _make_fake(model)
            if run.config.activation_checkpointing:
                how = dict(run.config.activation_checkpointing_kwargs or {})
                how.pop("offload", None)  # see `_save_inputs_on_host`
                gradient_checkpointing.enable_gradient_checkpointing(model, how)
            memory_mesh.divide(model, mesh, torch.device(device), environment.precision(run.config))
            return _measure(run, work, model, quantized, mesh)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines() or [""]
        raise ConfigError(
            "posttrain plan",
            [f"{run.model.model_name_or_path} cannot be run without numbers: {type(error).__name__}: {reason[0]}"],
        ) from error


def device_type(config: Any) -> str:
    """Where a run with `config` would train here."""
    return environment.device(config.use_cpu).type


def _make_fake(model: nn.Module) -> None:
    """Replace each tensor of `model` by an empty one on the current device; tied ones stay tied."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in tables:
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in made:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    trained = tensor.requires_grad
                    made[tensor] = nn.Parameter(empty, trained) if tensors is module._parameters else empty
                tensors[name] = None if tensor is None else made[tensor]


def _rows(rows: int, length: int) -> Segments:
    """The trainers' layout of rows of the same length on the CPU."""
    return Segments((length,) * rows, (-1,) * rows)


class _EqualRows(attention_blocks.Blocks):
    """Of rows of one length, which need the same memory one after another, the first two; operations count for all."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, layout: Any, scale: float) -> Any:
        forward: Any = attention_blocks.Blocks.forward
        ctx.times = max(len(layout.own) / 2, 1)
        with Traffic.times(ctx.times):
            return forward(ctx, query, key, value, dataclasses.replace(layout, own=layout.own[:2]), scale)

    @staticmethod
    def backward(ctx: Any, grad_out: Any) -> Any:
        with Traffic.times(ctx.times):
            return attention_blocks.Blocks.backward(ctx, grad_out)


def _two_blocks() -> contextlib.AbstractContextManager[None]:
    """Of the blocks of a tile of logits, which need the same memory one after another, compute the first two."""
    blocks = tiles.Tiles.blocks
    return wrapping.replaced(tiles.Tiles, "blocks", lambda self, tile: itertools.islice(blocks(self, tile), 2))


class _Norm(torch.autograd.Function):
    """What a kernel of `rms_norm` keeps for its gradient: the input, and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Any, shape: Any, weight: Any, eps: float) -> Any:
        rms = x.new_empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, rms)
        ctx.mark_non_differentiable(rms)
        return torch.empty_like(x), rms

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None, torch.empty_like(weight), None


@functools.cache
def _register_attention() -> str:
    """The name of an attention for rows without padding: sdpa masks fake tensors though nothing is to hide."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        rows, length, dropout = len(query), query.shape[2], kwargs.get("dropout")
        if query.device.type != "cpu" or dropout or not getattr(module, "is_causal", False) or length != key.shape[2]:
            return sdpa(module, query, key, value, attention_mask, **kwargs)
        queries, keys, values = (tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in (query, key, value))
        segments = _rows(rows, length)
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        window, softcap = varlen_attention.layer_window(module, kwargs.get("sliding_window")), kwargs.get("softcap")
        options = {"scale": scale, "window": window, "softcap": softcap, "blocks": _EqualRows}
        out = varlen_attention.segment_attention(queries, keys, values, segments, **options)
        return out[0].transpose(0, 1).unflatten(0, (rows, length)), None

    AttentionInterface.register("footprint", attend)
    AttentionMaskInterface.register("footprint", lambda *args, **kwargs: None)
    return "footprint"


def _measure(
    run: Run, work: Workload, model: nn.Module, quantized: list[nn.Linear], mesh: memory_mesh.Mesh
) -> Footprint:
    args, live, traffic = run.config, LiveBytes(), Traffic()
    weights = live.add([*model.parameters(), *model.buffers()])
    held = weights
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if (args.activation_checkpointing_kwargs or {}).get("offload"):
        _save_inputs_on_host(model, live)
    if mesh.offloads:
        live.to_host(model.parameters())
        weights = live.now
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda one: live.to_host([one.grad]))
    with traffic, live:
        optimizer = builder.build(model, args)
        if args.gradient_accumulation_steps > 1:  # what the micro-batches before this one have left
            with traffic.times(args.gradient_accumulation_steps - 1):
                _accumulate(model, args, work, live, trained)
        traffic.operations = 0.0
        activations, head, left_out = _pass(model, args, work, live)
        if wrapping.sees(model) and work.image is None:  # what encodes images is trained too, though none was shown
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = sum(local_part(p.grad).nbytes for p in trained if p.grad is not None)
        if work.unseen:
            forwards = 1 + bool(args.activation_checkpointing) + work.reference
            pairs = work.unseen / shard_settings.peers(shard_settings.sizes_of(args.parallelism_config))
            left_out += of_pairs(wrapping.base_model(model).config.get_text_config(), pairs, forwards)
        operations = (traffic.operations + left_out) * args.gradient_accumulation_steps
        early, in_pass, host = _state_bytes(optimizer), live.peak, live.host_peak
        with live.on_host() if mesh.offloads else contextlib.nullcontext():
            memory_mesh.step(optimizer, mesh)
    state = _state_bytes(optimizer)
    bits = "load_in_8bit" if run.model.load_in_8bit else "load_in_4bit"
    rate = QUANTIZED["use_bnb_nested_quant" if bits == "load_in_4bit" and run.model.use_bnb_nested_quant else bits]
    saved = sum(m.weight.nbytes - int(m.weight.numel() * rate) for m in quantized)
    unpacked = max((m.weight.nbytes for m in quantized), default=0)  # one matrix at a time, for its product
    reference = 0
    if work.teacher:
        whole = sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})
        reference = work.teacher * held // whole
    elif work.reference and not wrapping.is_peft_model(model):
        rounds = environment.precision(args) != "no" and not value_of(args, "sync_ref_model")
        rounded = to_round(model, everything=mesh.division is not None) if rounds else ()
        reference = held - sum(local_part(parameter).nbytes // 2 for parameter in rounded)
    average = 0 if args.ema_decay is None else sum(4 * local_part(parameter).numel() for parameter in trained)
    cache = _cache_bytes(wrapping.base_model(model).config, work.generated, next(model.parameters()).itemsize)
    # The pass was measured without optimizer state, which always exists from the second step on.
    if mesh.offloads:
        host = max(host + state - early, live.host_peak) + reference + average
        state = early = gradients = reference = average = 0
    else:
        host = live.host_peak
    buckets = gradients if mesh.copies else 0
    if mesh.copies:
        cap = (args.ddp_bucket_cap_mb or BUCKET) * 2**20
        traffic.add("all-reduce", tuple(range(memory_mesh.processes())), gradients, calls=math.ceil(gradients / cap))
    peak = max(in_pass + state - early + unpacked, live.peak, weights + state + cache)
    peak += reference + work.others + average - saved
    more: dict[str, Any] = {"reference": reference, "others": work.others, "average": average, "cache": cache}
    more |= {"buckets": buckets, "host": host, "operations": operations}
    more |= {"exchanges": tuple(traffic.exchanges.values())}
    return Footprint(weights - saved, gradients, state, activations, head, peak + buckets, **more)


def _save_inputs_on_host(model: nn.Module, live: LiveBytes) -> None:
    """Let recomputed layers keep their inputs on the host, as transformers does with ``offload=True``."""

    def within(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with live.saves_on_host():
                return checkpoint(*args, **kwargs)

        return call

    for module in model.modules():
        if (checkpoint := vars(module).get("_gradient_checkpointing_func")) is not None:
            module._gradient_checkpointing_func = within(checkpoint)  # type: ignore[assignment]


class _Offloaded(OffloadActivations):
    """Counts what is moved to the host, which is the device of fake tensors."""

    kinds = (torch.Tensor, FakeTensor)

    def __init__(self, model: nn.Module, live: LiveBytes) -> None:
        head = wrapping.output_embedding(model)
        super().__init__(model, torch.device("cpu"), stays=[] if head is None else [head])
        self.live = live

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.live.on_host():
            return super().to_host(tensor)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor)


def _accumulate(model: nn.Module, args: Any, work: Workload, live: LiveBytes, trained: list[nn.Parameter]) -> None:
    """What the micro-batches before the last one leave: gradients, under FSDP of whole weights."""
    sharded: Any = model
    if not hasattr(model, "set_requires_gradient_sync"):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        return
    each = bool(args.accelerator_config.accumulation.get("sync_each_batch"))
    sharded.set_requires_gradient_sync(each)
    _pass(model, args, work, live)
    sharded.set_requires_gradient_sync(True)


def _make(run: Run, work: Workload, config: Any) -> tuple[nn.Module, list[nn.Linear]]:
    """(the model on the meta device, those of its layers that would be quantized)."""
    import transformers

    options, quantized = run.model, []
    if work.loss == "score":
        config.num_labels = 1
        for one in (config, config.get_text_config()):
            one.pad_token_id = setting(one, "pad_token_id") or 0
    config.use_cache = run.config.use_cache
    dtype = config.dtype if options.dtype == "auto" else codec.dtype_named(options.dtype or "float32")
    kwargs = {"dtype": dtype or torch.float32, "trust_remote_code": trusts(run)}
    # Flash attention holds what the attention of this plan does, and its package may be on another machine alone.
    is_flash = is_flash_name(options.attn_implementation)
    if options.attn_implementation:
        kwargs["attn_implementation"] = "eager" if is_flash else options.attn_implementation
    auto_class = work.auto_class
    if auto_class == loading.READING[0]:
        auto_class = loading.whole_class(config, auto_class, run.model.model_name_or_path)
    make = work.make or getattr(transformers, auto_class).from_config
    model: Any = make(config, **kwargs).train()
    slices = memory_mesh.cp_size(run.config) > 1  # their own attention
    is_tiled = is_flash or model.config._attn_implementation == "sdpa"
    if is_tiled and not slices and not setting(config, "is_encoder_decoder"):
        model.set_attn_implementation(_register_attention())
    if options.load_in_4bit or options.load_in_8bit:
        model.is_loaded_in_4bit = True  # `add_adapter` keeps what it puts on such a model in bfloat16
        head = wrapping.output_embedding(model)
        quantized = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    path, trained = options.model_name_or_path, value_of(run.config, "train_parts")
    adapter = adapters.saved_config(path) if loading.is_adapter(path) else options.peft_config()
    if adapter is not None:
        model = adapters.add_adapter(model, adapter, trained)
    elif trained is not None:
        parts.freeze_others(model, trained)
    if value_of(run.config, "disable_dropout"):
        regularization.disable_dropout(model)
    return model, quantized


def _pass(model: nn.Module, args: Any, work: Workload, live: LiveBytes) -> tuple[int, int, int]:
    """A micro-batch forward and backward, gradients stay: `Footprint`'s (activations, head), operations left out."""
    before = reached = live.now
    left_out = 0
    head = wrapping.output_embedding(model)
    inputs = {"input_ids": torch.zeros(work.rows, work.computed, dtype=torch.long)}
    untrained = work.rows * work.untrained
    if work.image is not None:
        inputs = live.known(functools.partial(with_images, work))
    labels = torch.empty(work.rows, work.target_length or work.computed, dtype=torch.long)
    plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
    in_tiles = plain and work.loss in ("tokens", "logps")
    if not in_tiles and work.loss != "score":
        inputs["labels"] = labels

    def arrive(*_: Any) -> None:
        nonlocal reached
        reached = live.high = live.now

    def loss_in_tiles(head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
        # All tiles need the same memory, so enough labelled positions for the largest tile suffice.
        nonlocal left_out
        targets, live.most = shift_labels(labels), min(TILE, labels.numel() - untrained)
        if slicing is not None and slicing.current is not None:
            targets = slicing.current.cut(targets, IGNORE_INDEX)
        weight, options = lm_head.CausalHead(head).own()
        # Logits, their gradients by both factors, and those of log-probabilities again in the backward pass.
        backward = (1 + weight.requires_grad + (work.loss == "logps")) * torch.is_grad_enabled()
        left_out += (1 + backward) * 2 * weight.numel() * max(targets.numel() - work.rows - untrained - TILE, 0)
        if work.loss == "logps":
            return torch.stack(tuple(language_modeling.token_logps(hidden, weight, targets, stats=STATS, **options)))
        loss, stats, *_ = language_modeling.linear_cross_entropy(hidden, weight, targets, return_stats=True, **options)
        return torch.stack([loss, *stats])

    low = bool(args.bf16 or args.fp16)
    with contextlib.ExitStack() as stack:
        if value_of(args, "activation_offloading"):
            stack.enter_context(_Offloaded(model, live))
        slicing = stack.enter_context(context_parallel.head_reads_slices(model)) if in_tiles else None
        if head is not None:
            stack.enter_context(head.register_forward_pre_hook(arrive))
        if isinstance(head, nn.Linear) and in_tiles:
            stack.enter_context(wrapping.replaced(head, "forward", functools.partial(loss_in_tiles, head)))
        with torch.autocast(labels.device.type, torch.float16 if args.fp16 else torch.bfloat16, enabled=low):
            output = model(**inputs)
            loss = output.loss if "labels" in inputs else output.logits[0].sum()
            activations, taken = reached - before, live.high - reached
            if work.loss == "score" or head is None:
                activations, taken = live.now - before, 0
            output = None
            if work.reference:
                with torch.no_grad():
                    model(**inputs)
        loss.backward()
    return activations, taken, left_out


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        local_part(tensor).nbytes for tensor in tree_leaves(dict(optimizer.state)) if isinstance(tensor, torch.Tensor)
    )


def _cache_bytes(config: Any, tokens: int, itemsize: int) -> int:
    """Of the keys and values of `tokens` in each layer."""
    text = config.get_text_config()
    heads_kept = setting(text, "num_key_value_heads") or text.num_attention_heads
    return 2 * text.num_hidden_layers * heads_kept * head_size(text) * tokens * itemsize
