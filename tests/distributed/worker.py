"""Run as several processes: does the named pieces of work one after another in one group, and writes what each led to.

A piece of work is a function below; its arguments come as JSON. What it returns on rank 0 is saved as ``<label>.pt``.
"""

import contextlib
import copy
import errno
import faulthandler
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from posttrain.core import Trainer, TrainerCallback, TrainingArguments
from posttrain.core.checkpoint import weights
from posttrain.core.checkpoint.store import get_last_checkpoint
from posttrain.core.distributed import shard_settings, sharding, tensor_parallel
from posttrain.core.errors import CheckpointError
from posttrain.core.logging.metrics import is_timing
from posttrain.core.optim import builder, by_name
from posttrain.core.optim.muon import Muon
from posttrain.sft import SFTTrainer
from tests import tiny
from tests.contract.trainers import TRAINERS, arguments, causal_lm, image_rows, images

#: As one process does it with 8 x 1: for 2 processes, and for 4; and for 2 that read the same rows.
SPLITS = {1: (8, 1), 2: (2, 2), 4: (1, 2), "tp": (4, 2)}


class PowerCut(Exception):
    pass


class CutAfter(TrainerCallback):
    """Saves after a step and breaks the run off at the beginning of the next."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == self.step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise PowerCut


def split(processes):
    batch, accumulation = SPLITS[processes]
    return {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}


def dealt(sizes):
    """The key of `SPLITS` for groups of these sizes."""
    peers = sizes.get("tp_size", 1) * sizes.get("cp_size", 1)
    processes = int(os.environ.get("WORLD_SIZE", 1)) // peers
    return "tp" if peers > processes else processes


def whole(trainer):
    """The weights, put together; on rank 0 alone where they are in pieces."""
    state = trainer.dist.whole_state_dict(trainer.model)
    return {k: v.detach().clone() for k, v in trainer.model.state_dict().items()} if state is None else state


def history(trainer):
    return [{k: v for k, v in record.items() if not is_timing(k)} for record in trainer.state.log_history]


def train(name, out, cut=None, resume=None, evaluate=True, **changes):
    """Train one of the contract's trainers, with the rows of an update dealt to all processes.

    Args:
        cut: train only until after that step, whose checkpoint is written.
        resume: the output directory of the run to go on from.
    """
    resume = resume and get_last_checkpoint(resume)
    changes = (
        split(dealt(changes.get("parallelism_config") or {}))
        | {"per_device_eval_batch_size": 2, "ddp_timeout": 60}
        | changes
    )
    trainer = TRAINERS[name](out, callbacks=[CutAfter(cut)] if cut else None, **changes)
    with contextlib.suppress(PowerCut):
        trainer.train(resume_from_checkpoint=resume)
    found = {"weights": whole(trainer), "log": history(trainer), "class": type(trainer.model).__name__}
    found |= {"is_fsdp": trainer.is_fsdp_enabled, "step": trainer.state.global_step}
    found["held"] = {name: tuple(getattr(p, "_local_tensor", p).shape) for name, p in trainer.model.named_parameters()}
    if evaluate:
        found["eval"] = trainer.evaluate()
        output = trainer.predict(trainer.eval_dataset)
        found |= {"predictions": output.predictions, "label_ids": output.label_ids, "test": output.metrics}
    trainer.save_model(str(Path(out) / "final"))
    return found


def cut_elsewhere(experts=None, **given):
    """`train`, or `mixture` of so many experts, with weights cut along another dimension than the first, where one
    divides evenly: as those are whose first has fewer rows than there are processes.
    """
    with mock.patch.object(sharding, "MOST_FILLED", 0.0):
        found = train(**given) if experts is None else mixture(model={"num_experts": experts}, **given)
    return found


def with_cpu_adam(name, out, **changes):
    """`train` with DeepSpeed's own AdamW, which is made for states in host memory."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    chosen = DeepSpeedCPUAdam, {"lr": changes["learning_rate"], "eps": changes["adam_epsilon"]}
    with mock.patch.object(Trainer, "get_optimizer_cls_and_kwargs", lambda *_: chosen):
        return train(name, out, **changes)


@contextlib.contextmanager
def mixtures(arch="qwen3_moe", adapters=False, **model):
    """Within this context the contract's models are mixtures of experts, with `adapters` on all of these."""
    make = functools.partial(tiny.mixture_of_experts, arch=arch, **{"initializer_range": 0.1} | model)
    if adapters:
        make = functools.partial(tiny.adapted_experts, make)
    score = functools.partial(make, kind="ForSequenceClassification", num_labels=1)
    with mock.patch.multiple(tiny, causal_lm=lambda **_: make(), reward_model=score):
        yield


def mixture(name, arch="qwen3_moe", model=None, **changes):
    """`train` with a mixture of experts in place of each of the contract's models."""
    with mixtures(arch, **(model or {})):
        return train(name, **changes)


def memory(out, folder, **changes):
    """The bytes that each process holds of a model that is divided between them, and its lowest peak in a step."""
    from tests.core.cli.tools import test_memory_plan

    run = test_memory_plan.a_run(folder, out, **changes)
    found = vars(test_memory_plan.really(run))
    gathered = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, found)
    return gathered


def saving(out, **changes):
    """Of each process: the bytes that torch allocates at most while a checkpoint is saved (`taken`), those of the
    memory through which files are written (`blocks`), and its share of the weights.
    """
    from tests.core.cli.tools import test_memory_plan

    trainer = causal_lm(hidden_size=128, vocab_size=8192)(out, max_steps=1, save_steps=1, **changes)
    save, whole, found, last = trainer._save_checkpoint, sharding.whole, {}, []

    def freed_here(tensor):
        """Where the last to let go of a matrix is a thread of gloo, which is not profiled, its memory is counted to the
        end. So it is kept until nothing else holds it.
        """
        until = time.monotonic() + 60
        while last and torch._C._storage_Use_Count(last[0]._cdata) > 1:
            assert time.monotonic() < until, "a matrix is still held when the next one is gathered"
            time.sleep(0.001)
        last.clear()
        full = whole(tensor)
        if sharding.is_piece(tensor) and not trainer.dist.is_main:
            last.append(full.untyped_storage())
        return full

    def watched(*args, **kwargs):
        found["share"] = test_memory_plan.held(trainer.model)
        memory = [torch.profiler.ProfilerActivity.CPU]
        profiled = torch.profiler.profile(activities=memory, profile_memory=True)
        with profiled as profile, mock.patch.object(sharding, "whole", freed_here):
            save(*args, **kwargs)
        found["taken"] = test_memory_plan.most_allocated(profile)
        found["blocks"] = trainer.checkpoints.saver._memory.bytes

    trainer._save_checkpoint = watched
    trainer.train()
    gathered = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, found)
    return gathered


def saved_twice(out, arch=None, tied=False, full_disk=False, apart=False, **changes):
    """A model is trained a step and saved into one file, and into files that all processes write; returns for each
    process the entries it had whole for the second.

    Args:
        full_disk: of process 1; returns what went wrong on each process instead.
        apart: the second is a folder of each process' own, as on machines that share no disk.
    """
    with mixtures(arch) if arch else contextlib.nullcontext():
        make = causal_lm(**{} if arch else {"tie_word_embeddings": tied})
        trainer = make(out, max_steps=1, save_strategy="no", **split(2) | changes)
    trainer.train()
    trainer.save_model(str(Path(out) / "one"))
    trainer.args.max_shard_size = "30KB"
    gather, write, had, folder = trainer.dist.whole_state_dict, weights.write_file, [], Path(out) / "shares"
    if apart:
        folder = folder / str(trainer.args.process_index)

    def watched(*args, **kwargs):
        found = gather(*args, **kwargs)
        had.extend(sorted(found))
        return found

    def refused(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    told, write = "", refused if full_disk and trainer.args.process_index else write
    patched = mock.patch.object(trainer.dist, "whole_state_dict", watched)
    with patched, mock.patch.object(weights, "write_file", write):
        try:
            trainer.save_model(str(folder))
        except (OSError, CheckpointError) as error:
            told = f"{type(error).__name__}: {error}"
    gathered = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, told if full_disk else had)
    return gathered


def text_beside_images(out, family, **changes):
    """One process has rows of text alone in every micro-batch, and the other one rows with images: SFT's weights."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    rows = [{name: row[name] for name in ("images", "prompt", "completion")} for row in image_rows(12)]
    rows = [row for i in range(4) for row in (rows[3 * i + 1], rows[3 * i])]
    usual = {
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": 2 // processes,
        "num_train_epochs": 1,
    }
    trainer = images(SFTTrainer, "prompt completion", family)(out, **(usual | changes))
    trainer.train_dataset = rows
    trainer.train()
    return {"weights": whole(trainer), "log": history(trainer)}


def refused(name, out, model=None, **changes):
    """The message with which a training is refused, on every process; of a mixture, if `model` says what of it."""
    try:
        with contextlib.nullcontext() if model is None else mixtures(**model):
            TRAINERS[name](out, **split(1), **changes).train()
    except ValueError as error:
        return str(error)


def between_matrices(out, archs):
    """Of each architecture, whose layers are recomputed: how many tokens a norm between matrices was given on each
    process, and by how much the gradients of two losses differ from those of one process, as a share of the largest.
    """
    TRAINERS["causal-lm"](out)  # starts the group of the processes
    processes, ids = torch.distributed.get_world_size(), torch.arange(4, 18).view(2, 7)
    mesh, found = init_device_mesh("cpu", (processes,), mesh_dim_names=("tp",)), {}
    for arch in archs:
        gradients, seen = [], []
        for by_rows in (False, True):
            model = tiny.causal_lm(arch)
            if by_rows:
                tensor_parallel.split(model, mesh, torch.device("cpu"), by_rows=True)
                model.model.layers[1].input_layernorm.register_forward_pre_hook(
                    lambda norm, inputs, seen=seen: seen.append(inputs[0].shape[1])
                )
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            other = model(input_ids=ids[:, :3], labels=ids[:, :3], use_cache=False).loss
            with torch.no_grad():  # of whole rows, before the layers are recomputed
                model(input_ids=ids[:1], use_cache=False)
            (loss + 2 * other).backward()
            gradients.append([sharding.whole(parameter.grad) for parameter in model.parameters()])
        gap = max((one - two).abs().max().item() for one, two in zip(*gradients, strict=True))
        tokens = [None] * processes
        torch.distributed.all_gather_object(tokens, seen[:3])
        found[arch] = tokens, gap / max(one.abs().max().item() for one in gradients[0])
    return found


def loaded_in_parts(out, loaded=None, **changes):
    """A model that ``from_pretrained`` split while it was loaded, without a word in the arguments.

    Args:
        loaded: what was asked of ``from_pretrained``; then what the trainer says to it and to `changes`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    trainer = causal_lm(num_key_value_heads=2 if loaded is None else 4)(out, **split("tp"))
    trainer.dist.on_main(lambda: trainer.model.save_pretrained(f"{out}/base"))
    asked = DistributedConfig(**(loaded or {"tp_size": 2}))
    model = AutoModelForCausalLM.from_pretrained(f"{out}/base", distributed_config=asked)
    if loaded is not None:
        try:
            return Trainer(model, arguments(TrainingArguments, out, **changes)) and None
        except ValueError as error:
            return str(error)
    trainer = Trainer(model, trainer.args, data_collator=trainer.data_collator, train_dataset=trainer.train_dataset)
    trainer.train()
    trainer.save_model(f"{out}/final")
    local = model.model.layers[0].mlp.gate_proj.weight.to_local()
    return {"size": trainer.dist.tp_size, "halves": tuple(local.shape)}


def slices(arch, batch):
    """The largest gaps, of logits, log-probabilities and gradients, between slices of rows and whole rows: parts of the
    largest number.
    """
    from posttrain.core.distributed.world import whole_rows
    from posttrain.lm.attention import context_parallel
    from posttrain.lm.attention.segments import Segments
    from posttrain.lm.attention.varlen_attention import enable_segments
    from posttrain.lm.loss.lm_head import logps_in_head
    from tests.core.lm.attention.test_varlen_attention import model_of

    model = model_of(arch).eval()
    ids = torch.randint(2, 384, (3, 9), generator=torch.Generator().manual_seed(0))
    inputs, counted = {"input_ids": ids}, torch.ones(3, 9, dtype=torch.bool)
    if batch == "packed":
        enable_segments(model)
        inputs |= Segments((7, 2, 4, 6, 3, 5), (-1, -1, 1, 1, 3, 3)).model_inputs(ids.shape)
    elif batch != "plain":
        starts, ends = torch.tensor([0, 3, 1]), torch.tensor([9, 9, 8] if batch == "left" else [9, 5, 7])
        starts = starts if batch == "left" else torch.zeros_like(starts)
        counted = (torch.arange(9) >= starts[:, None]) & (torch.arange(9) < ends[:, None])
        inputs["attention_mask"] = counted.long()
    labels = ids.masked_fill(~counted, -100)
    labels[:, 1:][~counted[:, :-1]] = -100  # what padding predicts
    weights = torch.randn(3, 9, 384, generator=torch.Generator().manual_seed(1)) * counted[..., None]

    def compute():
        logits = model(**inputs).logits
        with logps_in_head(model, labels):
            logps = model(**inputs).logits
        gradients = torch.autograd.grad((logits * weights).sum() + logps.sum(), list(model.parameters()))
        return logits * counted[..., None], logps, gradients

    expected = compute()
    context_parallel.enable(model, torch.distributed.group.WORLD)
    found = compute()
    for gradient in found[2]:
        torch.distributed.all_reduce(gradient)  # what DDP and FSDP average
    with whole_rows():
        torch.testing.assert_close(compute()[0], expected[0])
    pairs = [*zip(found[:2], expected[:2], strict=True)]
    pairs += [(one / 2, other) for one, other in zip(found[2], expected[2], strict=True)]
    return [float((one - other).abs().max() / other.abs().max().clamp_min(1)) for one, other in pairs]


def slices_of_all(out, archs, batches):
    TRAINERS["causal-lm"](out)  # starts the group of the processes
    return {f"{arch} {batch}": slices(arch, batch) for arch in archs for batch in batches}


def vocabulary(out, kind, options):
    """The loss of two processes that have half of the vocabulary each, and its gradients, beside that of the whole."""
    from posttrain.lm.loss.language_modeling import linear_cross_entropy, token_logps
    from posttrain.lm.loss.vocabulary_slices import Slice

    TRAINERS["causal-lm"](out)  # starts the group of the processes
    rank, random = torch.distributed.get_rank(), torch.Generator().manual_seed(0)
    whole = [torch.randn(size, generator=random) for size in ((37, 16), (101, 16), (101,))]
    whole[1][5] = whole[1][70]  # two tokens that are as probable as each other, one on each process
    labels = torch.randint(0, 101, (37,), generator=random)
    labels[::5], factors = -100, torch.rand(37, generator=random)
    tokens = slice(0, 51) if rank == 0 else slice(51, 101)

    def compute(tensors, part):
        hidden, weight, bias = (tensor.clone().requires_grad_() for tensor in tensors)
        function = linear_cross_entropy if kind == "loss" else token_logps
        found = function(hidden, weight, labels, bias=bias, part=part, chunk_size=8, **options)
        first, *rest = found if isinstance(found, tuple) else [found]
        first = first if kind == "loss" else (first * factors).sum()
        gradients = torch.autograd.grad(first, (hidden, weight, bias))
        values = [first, *(value for one in rest for value in (one if isinstance(one, tuple) else (one,)))]
        return [value.detach() for value in values], gradients

    expected, (of_hidden, *others) = compute(whole, None)
    mine = [whole[0], whole[1][tokens], whole[2][tokens]]
    found, gradients = compute(mine, Slice(tokens.start, 101, torch.distributed.group.WORLD))
    pairs = [*zip(found, expected, strict=True), (gradients[0], of_hidden)]
    pairs += [(one, other[tokens]) for one, other in zip(gradients[1:], others, strict=True)]
    gaps = [float((one - other).abs().max() / other.abs().max().clamp_min(1)) for one, other in pairs]
    return of_all(gaps)


def of_all(values):
    """The largest of each of `values` over all processes."""
    highest = torch.tensor(values)
    torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX)
    return highest.tolist()


def tied(out):
    trainer = causal_lm(tie_word_embeddings=True)(out, fsdp="full_shard", **split(2))
    trainer.train()
    trainer.save_model(str(Path(out) / "final"))
    model = trainer.model
    return {"weights": whole(trainer), "is_one": model.lm_head.weight is model.model.embed_tokens.weight}


def given_optimizer(out):
    trainer = TRAINERS["causal-lm"](out, fsdp="full_shard", **split(2))
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.05)
    trainer.train()
    return whole(trainer)


def steps_of_muon(out):
    """Matrices after three steps with given gradients, cut by rows where there are two processes."""
    TRAINERS["causal-lm"](out)  # joins the processes
    generator, part = torch.Generator().manual_seed(0), torch.clone
    if torch.distributed.is_initialized():
        part = functools.partial(distribute_tensor, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
    shapes = (6, 4), (5, 8), (1, 3)
    matrices = [torch.nn.Parameter(part(torch.randn(shape, generator=generator))) for shape in shapes]
    optimizer = Muon(matrices, lr=0.1, weight_decay=0.1)
    for _ in range(3):
        for matrix in matrices:
            matrix.grad = part(torch.randn(matrix.shape, generator=generator))
        optimizer.step()
    return [sharding.whole(matrix.detach()) for matrix in matrices]


def optimizers(out):
    """By name of an optimizer that is not refused under FSDP: how far the weights are apart that it leads to where each
    process has a part of them, and where one has all.
    """
    from tests.core.optim.test_builder import Net, arguments, train

    TRAINERS["causal-lm"](out)  # joins the processes
    apart, mesh = {}, init_device_mesh("cpu", (2,))
    for name in by_name.OPTIMIZERS:
        if name.endswith("_layerwise") or name in ("lomo", "adalomo") or [*shard_settings.optimizer_problems(name)]:
            continue
        args, models = arguments(name, learning_rate=1e-2), (Net(), Net())
        if not [*builder.package_problems(args)]:
            fully_shard(models[1], mesh=mesh)
            for model in models:
                train(model, builder.build(model, args), 4)
            pairs = zip(*(model.parameters() for model in models), strict=True)
            apart[name] = max((a - b.full_tensor()).abs().max().item() for a, b in pairs)
    return apart


def low_precision(out):
    seen = set()

    def look(module, inputs):
        seen.update(parameter.dtype for parameter in module.parameters())

    trainer = TRAINERS["causal-lm"](out, fsdp="full_shard", bf16=True, max_steps=1, **split(2))
    trainer.model.model.layers[0].mlp.register_forward_pre_hook(look)
    trainer.train()
    kept = {parameter.dtype for parameter in trainer.model.parameters()}
    return {"kept": kept, "gathered": seen, "loss": trainer.state.log_history[0]["loss"]}


def best_of_all(out):
    """Evaluates before and while it trains, loads the best of its checkpoints, and trains once more."""
    changes = {"fsdp": "full_shard", "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    trainer = TRAINERS["causal-lm"](out, **changes, **split(2))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    best, after = trainer.state.best_metric, trainer.evaluate()["eval_loss"]
    trainer.train()
    return {"before": before, "best": best, "after": after, "again": trainer.evaluate()["eval_loss"]}


def on_meta(out):
    """The weights come from rank 0: those of the others were never made, as under cpu_ram_efficient_loading."""
    trainer = causal_lm(tie_word_embeddings=True)(out, fsdp="full_shard", max_steps=2, **split(2))
    if not trainer.dist.is_main:
        trainer.model.to("meta")
        trainer.model.lm_head.weight = trainer.model.model.embed_tokens.weight
    trainer.train()
    return whole(trainer)


def generation(out, **changes):
    """Greedy tokens from pieces, from gathered weights, and from the whole model; of FSDP, without `changes`."""
    trainer = TRAINERS["causal-lm"](out, **(changes or {"fsdp": "full_shard"}), **split(2))
    ids = {"input_ids": torch.arange(5, 13).view(1, 8), "max_new_tokens": 5, "do_sample": False}
    expected = trainer.model.generate(**ids)
    trainer.train()
    trainer.dist.shard(trainer.model)
    pieces = trainer.model.generate(**ids)
    with trainer.dist.gathered(trainer.model):
        shapes = {tuple(p.shape) for p in trainer.model.model.layers[0].parameters() if type(p) is torch.nn.Parameter}
        ids["synced_gpus"] = False
        gathered = trainer.model.generate(**ids)
        for _ in range(1 + trainer.dist.rank):  # no process waits for another
            trainer.model.generate(**ids)
    try:
        trainer.train()  # in pieces again
        told = None
    except RuntimeError as error:
        told = str(error)
    return {"length": expected.shape[1], "pieces": pieces, "gathered": gathered, "shapes": shapes, "told": told}


def overflow(out):
    """A loss scaler, where the gradient of rank 1's piece alone overflows."""
    trainer = TRAINERS["causal-lm"](out, fsdp="full_shard", max_steps=1, **split(2))
    trainer.dist.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}

    unscale = trainer.dist.scaler.unscale_

    def spoil(optimizer):
        if trainer.dist.rank == 1:
            trainer.model.lm_head.weight.grad.to_local()[0, 0] = float("inf")
        return unscale(optimizer)

    trainer.dist.scaler.unscale_ = spoil
    trainer.train()
    state = whole(trainer)
    scale = trainer.dist.gather_object(trainer.dist.scaler.get_scale())
    return {"same": all(torch.equal(state[k], before[k]) for k in state), "scale": scale} if state else None


def order(out):
    """Who logs, and who goes first."""
    args = arguments(TrainingArguments, out, log_level="info", log_level_replica="error")
    times = []
    with args.main_process_first():
        if args.process_index == 0:
            time.sleep(0.3)
        times.append(time.time())
    trainer = TRAINERS["causal-lm"](out, log_level="info", log_level_replica="error", max_steps=1, **split(2))
    found = trainer.dist.gather_object((args.process_index, args.get_process_log_level(), args.should_log, times[0]))
    return found


def generate(out, **changes):
    """What each process writes before an update and after it, of the prompts of all; those of rank 0 are returned."""
    from posttrain.rl.generation.local import problem

    ranks = int(os.environ.get("WORLD_SIZE", 1))
    trainer = TRAINERS["grpo"](out, max_completion_length=24, max_steps=1, **split(ranks), **changes)
    trainer.train()
    rank, forwards = trainer.dist.rank, []
    trainer.model.register_forward_pre_hook(lambda module, inputs: forwards.append(1))
    found = {"ids": [], "logps": []}
    with trainer.dist.gathered(trainer.model):
        sampling, told = trainer.sampling(), problem(trainer.model)
        forwards.clear()
        for number in range(4) if ranks == 1 else [rank, rank + 2]:
            done = trainer.generator.generate([[9 + number, 30, 31]], 2, sampling, [2 * number, 2 * number + 1])
            found["ids"].append((number, done.ids))
            found["logps"].append((number, [torch.tensor(logps) for logps in done.logps]))
    parts = trainer.dist.gather_object(found)
    joined = {
        name: [value for _, value in sorted((x for p in parts for x in p[name]), key=lambda x: x[0])] for name in found
    }
    return {
        "ids": joined["ids"],
        "logps": [logps for pair in joined["logps"] for logps in pair],
        "engine": type(trainer.generator).__name__,
        "problems": told,
        "forwards": trainer.dist.gather_object(len(forwards)),
    }


def stream_weights(out, **changes):
    """Weights in pieces as an engine is sent them, on each process, beside the model put together by a checkpoint."""
    import weakref

    from posttrain.core.distributed.sharding import is_in_pieces
    from posttrain.rl.generation.weights import Weights

    trainer = TRAINERS["grpo"](out, max_steps=1, **split(2), **changes)
    trainer.train()
    state = trainer.dist.broadcast_object(whole(trainer))
    weights, equal, made, alive = Weights(trainer.model), True, [], []
    for name, weight in weights:
        equal &= torch.equal(weight, state[name])
        made.append(weakref.ref(weight))
        alive.append(sum(ref() is not None for ref in made))
    return {
        "equal": trainer.dist.gather_object(equal and [name for name, *_ in weights.facts] == list(state)),
        "still_in_pieces": weights.are_in_pieces and all(map(is_in_pieces, trainer.model.parameters())),
        "alive": max(alive),
        "all": len(weights),
    }


def merged_experts(out, **changes):
    """Of a mixture with adapters on its experts, after a step: the weights that an engine is sent, and the logits of
    the model without its adapters.
    """
    from posttrain.rl.generation.weights import Weights

    with mixtures(adapters=True):
        trainer = TRAINERS["grpo"](out, **changes)
    trainer.train()
    with torch.no_grad(), trainer.model.eval().disable_adapter():
        logits = trainer.model(input_ids=torch.arange(4, 20)[None]).logits
    return {"weights": dict(Weights(trainer.model)), "without": logits}


def send_weights(name, out, **changes):
    """What the workers of a server get over gloo of weights in pieces, and the adapter that it reads, if there is one.

    The first process sends, and the other helps to gather.
    """
    from safetensors.torch import load_file

    from posttrain.rl.generation import transfer
    from posttrain.rl.generation.transfer import AdapterFolder
    from posttrain.rl.generation.weights import AdapterWeights, Weights
    from tests.rl.generation.test_transfer import Workers

    trainer = TRAINERS[name](out, **split(2) | {"max_steps": 1} | changes)
    trainer.train()
    weights = AdapterWeights(trainer.model) if name == "grpo-lora" else Weights(trainer.model)
    first, server = trainer.dist.is_main, Workers(0, size=2)
    transport = AdapterFolder(Path(out) / "shared") if name == "grpo-lora" else transfer.Gloo(0, 60)
    if first:
        transport.send(weights, [server], "one")
    else:
        list(map(len, weights))
    expected = {path: weight.clone() for path, weight in weights}
    got = server.received
    if first and name == "grpo-lora":
        got = [load_file(Path(out) / "shared" / "adapter" / "adapter_model.safetensors")]
    same = [one.keys() == expected.keys() and all(torch.equal(one[n], w) for n, w in expected.items()) for one in got]
    return {"same": same, "count": len(expected), "in_pieces": weights.are_in_pieces}


def reference(name, out, **changes):
    """Train against a reference that is a copy of the policy; how each process holds it."""
    from posttrain.core.distributed.sharding import is_in_pieces

    changes = (
        split(dealt(changes.get("parallelism_config") or {}))
        | {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
        | changes
    )
    trainer = TRAINERS[name](out, **changes)
    trainer.train()
    own = [p.to_local() if is_in_pieces(p) else p for p in trainer.reference.model.parameters()]
    pieces = all(map(is_in_pieces, trainer.reference.model.parameters()))
    return {
        "in_pieces": trainer.dist.gather_object(pieces),
        "held": trainer.dist.gather_object(sum(p.numel() * p.element_size() for p in own)),
        "loss": torch.tensor([record["loss"] for record in trainer.state.log_history if "loss" in record]),
        "state": trainer.reference.state_dict(),
    }


def split_vllm(out):
    """Two processes whose stand-in for vLLM splits the model, and what each would write with the model whole."""
    import types

    from posttrain.rl.generation import Sampling
    from posttrain.rl.generation.local import LocalGenerator
    from posttrain.rl.generation.vllm_colocated import VLLMColocatedGenerator
    from tests.rl.generation.test_vllm_colocated import LLM, SamplingParams

    sys.modules["vllm"] = types.ModuleType("vllm")
    sys.modules["vllm"].LLM, sys.modules["vllm"].SamplingParams = LLM, SamplingParams
    trainer = TRAINERS["grpo"](out, **split(2))
    LLM.architecture, rank = trainer.model, trainer.dist.rank
    prompts, seeds = [[5 + rank, 9, 14], [7, 8 + rank]][: 2 - rank], [10 * rank + i for i in range(4 - 2 * rank)]
    found = []
    for engine in (VLLMColocatedGenerator(group_size=2, sleeps=True), LocalGenerator(trainer.processing_class)):
        engine.sync_weights(trainer.model)
        found.append(engine.generate(prompts, 2, Sampling(6, eos_token_ids=tuple(range(40))), seeds).ids)
    ids = trainer.dist.gather_object(found)
    return {"ids": ids, "tensor_parallel_size": LLM.made[0].settings["tensor_parallel_size"]}


def uneven_vllm(out, **changes):
    """Train and evaluate where processes that split vLLM ask for completions a different number of times."""
    import types

    from posttrain.rl import GRPOConfig, GRPOTrainer
    from tests import tiny
    from tests.rl.generation.test_vllm_colocated import LLM, SamplingParams

    sys.modules["vllm"] = types.ModuleType("vllm")
    sys.modules["vllm"].LLM, sys.modules["vllm"].SamplingParams = LLM, SamplingParams

    class Turns(GRPOTrainer):
        """As with tools: completions of the second process go on for three more turns, of different lengths."""

        def generate(self, samples, sampling):
            samples = super().generate(samples, sampling)
            for turn in range(3 * self.dist.rank):
                shorter = replace(sampling, max_new_tokens=turn + 2)
                some = self.sampler.generate_turn(samples[: turn + 1], shorter)
                samples = [*some, *samples[turn + 1 :]]
            return samples

    args = arguments(
        GRPOConfig, out, num_generations=2, max_completion_length=4, max_steps=2, use_vllm=True, beta=0.1,
        vllm_tensor_parallel_size=2, vllm_enable_sleep_mode=True, ddp_timeout=60, per_device_eval_batch_size=2,
        temperature=0.8, **split(2), **changes,
    )  # fmt: skip
    prompts = [{"prompt": f"question {i}"} for i in range(8)]
    model = tiny.causal_lm(initializer_range=0.3)
    LLM.architecture = copy.deepcopy(model)

    def spread(completion_ids):
        return [sum(ids) % 11 / 11 for ids in completion_ids]

    trainer = Turns(model, spread, args, prompts, prompts[:3], tiny.tokenizer())
    metrics = [trainer.evaluate()]  # before anything was synced, and of the last prompt one process has none
    gathered = []
    inside = trainer.dist.gathered
    trainer.dist.gathered = lambda *models: gathered.append(trainer.is_in_train) or inside(*models)
    trainer.train()
    metrics.append(trainer.evaluate())
    return {
        "together": trainer.dist.gather_object([LLM.made[0].events.count(e) for e in ("together", "sleep 2")]),
        "steps": trainer.state.global_step,
        "rewards": [one["eval_reward"] for one in metrics],
        "gap": max(r.get("sampling/sampling_logp_difference/max", 0) for r in trainer.state.log_history),
        "gathered_in_training": sum(gathered),
    }


def asynchronous(out, **changes):
    """Sample ahead from one server. It is lost once while the first process sends weights, and once for the second one
    alone, whose rewards come later.
    """
    from posttrain.rl import GRPOConfig, GRPOTrainer
    from posttrain.rl.generation.vllm import VLLMServerGenerator
    from posttrain.rl.online.ledger import audit
    from tests import tiny
    from tests.contract.trainers import digit_sum, text_rows
    from tests.rl.generation.test_vllm import OpenAI, Server

    rank, address = int(os.environ["RANK"]), Path(out) / "address"
    if rank == 0:
        server = Server(tiny.causal_lm(seed=9, initializer_range=0.3).eval(), OpenAI, mode="processed_logprobs")
        address.parent.mkdir(parents=True, exist_ok=True)
        (made := address.with_suffix(".new")).write_text(f"http://127.0.0.1:{server.server_port}")
        made.rename(address)
    while not address.exists():
        time.sleep(0.02)

    class Client(VLLMServerGenerator):
        probes = 0

        def _probe(self, model):
            self.probes += 1
            if rank == 1 and self.probes == 2:
                raise ConnectionError("this process has lost it")
            return super()._probe(model)

    client = Client(address.read_text(), 20, folder=str(Path(out) / "shared"))
    update = client._update

    def breaks_off(weights):
        if client._syncs == 4:
            next(iter(weights))
            raise ConnectionError("it has gone after the first weight")
        update(weights)

    client._update = breaks_off

    def reward(completion_ids):
        time.sleep(0.1 * rank)
        return digit_sum(completion_ids)

    trainer = GRPOTrainer(
        tiny.causal_lm(initializer_range=0.1), reward,
        arguments(
            GRPOConfig, Path(out) / "run", num_generations=2, max_completion_length=6, max_steps=6, max_staleness=2,
            ddp_timeout=60, gradient_checkpointing=False, **split(2), **changes,
        ),
        [{"prompt": row["prompt"]} for row in text_rows(9)], None, tiny.tokenizer(), generator=client,
    )  # fmt: skip
    trainer.train()
    syncs = trainer.dist.gather_object(client._syncs)
    found = audit(Path(out) / "run")
    return {
        "syncs": syncs, "problems": found.problems, "steps": [line["step"] for line in found.used],
        "ages": sorted({line["step"] - 1 - line["versions"][0] for line in found.used}),
    }  # fmt: skip


def left_in_wait(out, hears):
    """A run that samples ahead, left by a signal to process `hears` while it waits for a rollout of process 1, and gone
    on with; and one that was not left. What the engine writes depends on seeds alone.
    """
    from posttrain.rl import GRPOConfig, GRPOTrainer
    from posttrain.rl.generation import Completions
    from posttrain.rl.online.asynchronous import Background
    from posttrain.rl.online.ledger import audit
    from tests.contract.trainers import digit_sum, text_rows

    class Written:
        has_own_weights = True

        def sync_weights(self, model):
            pass

        def generate(self, prompts, n, sampling, seeds):
            ids = [[5 + seed // 7**place % 20 for place in range(2 + seed % 4)] for seed in seeds]
            return Completions(ids, [[-3.0 - seed % 3] * len(own) for seed, own in zip(seeds, ids, strict=True)],
                               [True] * len(ids))  # fmt: skip

    rank, heard, ended, has = int(os.environ["RANK"]), [], threading.Event(), Background.has

    def leaves(background, *given):
        if not (there := has(background, *given)) and rank == hears and not heard:
            heard.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)
        return there

    class Ends(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            ended.set()

    def trainer_in(name, holds=False):
        def reward(completion_ids):
            if holds and rank == 1 and trainer.state.global_step > 1:
                assert ended.wait(60), "the signal was not heard"
            return digit_sum(completion_ids)

        trainer = GRPOTrainer(
            tiny.causal_lm(initializer_range=0.1), reward,
            arguments(
                GRPOConfig, Path(out) / name, num_generations=2, max_completion_length=6, max_steps=6, max_staleness=2,
                save_on_signal=True, num_train_epochs=9, ddp_timeout=60, gradient_checkpointing=False, **split(2),
            ),
            [{"prompt": row["prompt"]} for row in text_rows(9)], None, tiny.tokenizer(), generator=Written(),
            callbacks=[Ends()] if holds else [],
        )  # fmt: skip
        return trainer

    straight, left, code = trainer_in("straight"), trainer_in("left", holds=True), None
    straight.train()
    with mock.patch.object(Background, "has", leaves):
        try:
            left.train()
        except SystemExit as end:
            code = end.code
    seconds = time.monotonic() - heard[0] if heard else None
    found = {"codes": left.dist.gather_object((code, left.state.global_step)), "expected": whole(straight)}
    found["seconds"] = left.dist.gather_object(seconds)[hears]
    resumed = trainer_in("left")
    resumed.train(resume_from_checkpoint=True)
    found |= {"weights": whole(resumed), "problems": audit(Path(out) / "left").problems}
    for name, each in (("log", resumed), ("expected_log", straight)):
        found[name] = [(r["step"], r["loss"], r["reward"]) for r in history(each) if "loss" in r]
    return found


def rollout_worker(out, fails="", cut=None, resume=None, waits=0.0, **changes):
    """Learn from what a rollout worker gives. It `waits` so many seconds before the second step, or `fails` there: as a
    worker ("health"), or while it gets weights ("send").
    """
    from posttrain.rl.online import rollout_worker
    from tests.rl.online import test_rollout_worker

    class Worker(test_rollout_worker.Worker):
        def put(self, one):
            more = one.input_ids[-1] % 3  # completions of different lengths
            one.input_ids, one.completion_mask = one.input_ids + [7] * more, one.completion_mask + [1] * more
            one.old_log_probs = one.old_log_probs + [-0.3] * more
            super().put(one)

        def fill(self):
            if self.version == 1 and waits:
                threading.Timer(waits, super().fill).start()
            elif self.version != 1 or fails != "health":
                super().fill()

        def check_health(self, stale_after_s):
            if not waits:
                super().check_health(stale_after_s)

    class Transfer(test_rollout_worker.Transfer):
        def send_weights(self, iterator):
            if fails == "send" and self.sent:
                next(iterator)
                raise RuntimeError("the worker took no weights")
            super().send_weights(iterator)

    rollout_worker.POLL, worker, transfer = 0.05, Worker(per_step=8, old={2: 3}), Transfer()
    usual = {"optim": "sgd", "learning_rate": 0.5, "max_steps": 4, "ddp_timeout": 60} | split(
        int(os.environ.get("WORLD_SIZE", 1))
    )
    trainer = test_rollout_worker.make(Path(out), worker, transfer, **usual | changes)
    if cut:
        trainer.add_callback(CutAfter(cut))
    error = None
    try:
        trainer.train(resume_from_checkpoint=resume and get_last_checkpoint(resume))
    except (PowerCut, RuntimeError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    return {
        "errors": trainer.dist.gather_object(error),
        "calls": trainer.dist.gather_object(worker.calls),
        "weights": whole(trainer),
        "log": history(trainer),
        "sent": transfer.sent,
        "class": type(trainer.model).__name__,
    }


def conversations(out, **changes):
    """Conversations with a tool, whose turns are rewarded one by one, of prompts that are chosen by their pass rate."""
    from posttrain.core.models.wrapping import unwrap
    from posttrain.rl import GRPOConfig, GRPOTrainer
    from posttrain.rl.generation import Completions
    from tests.contract.trainers import text_rows
    from tests.rl.agents.scripted import ScriptedEngine, call

    def add(a: int, b: int):
        """Add.

        Args:
            a: One.
            b: Another.
        """
        return a + b

    class Seeded(ScriptedEngine):
        """What it writes depends on the seed of the completion."""

        def sync_weights(self, model):
            super().sync_weights(unwrap(model))

        def generate(self, prompts, n, sampling, seeds):
            parts = []
            for place, self.seed in enumerate(seeds):
                parts.append(super().generate([prompts[place // n]], 1, sampling))
            ids, logps, finished = ([one for part in parts for one in getattr(part, name)]
                                    for name in ("ids", "logps", "finished"))  # fmt: skip
            return Completions(ids, logps, finished, is_exact=True)

    def answer(text):
        calls = text.count("<tool_response>") < 2 and engine.seed % 3
        return call("add", a=engine.seed % 10, b=1) if calls else f"It is {engine.seed % 5}."

    def of_turns(completions):
        turns = [[json.dumps(m) for m in said if m["role"] == "assistant"] for said in completions]
        return [[sum(map(ord, turn)) % 7 / 7 for turn in some] for some in turns]

    tokenizer = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)
    engine = Seeded(tokenizer, answer)
    usual = split(int(os.environ.get("WORLD_SIZE", 1))) | {"max_steps": 6, "num_train_epochs": 9, "ddp_timeout": 60}
    trainer = GRPOTrainer(
        tiny.causal_lm(initializer_range=0.1, max_position_embeddings=1024), of_turns,
        arguments(
            GRPOConfig, out, num_generations=2, max_completion_length=300, curriculum=True, pass_threshold=1.0,
            gradient_checkpointing=False, **usual, **changes,
        ),
        [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in text_rows(9)], None, tokenizer,
        tools=[add], generator=engine,
    )  # fmt: skip
    trainer.train()
    return {"weights": whole(trainer), "log": history(trainer), "rates": trainer.rollout_maker.curriculum.rates}


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for label, function, options in json.loads(sys.argv[2]):
        started = time.perf_counter()
        try:
            result = globals()[function](**options)
        except Exception:  # on all processes alike; where not, the watchdog ends the job
            result = {"error": traceback.format_exc()}
            print(result["error"], file=sys.stderr, flush=True)
        if os.environ.get("RANK", "0") == "0":
            torch.save(result, folder / f"{label}.pt")
            print(f"{label}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    # All is done and written. Under load, gloo's threads now and then abort the interpreter as it is taken down.
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(0)
