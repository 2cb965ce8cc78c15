"""An override runs as it was written, in every signature that its method ever had, and the loss and the gradient of a
step are those of a loop by hand: for each way to cut the step, on two processes, and where micro-batches are halved.
"""

import inspect
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from torch import nn

from posttrain.core import Trainer, TrainerCallback, TrainingArguments
from tests import tiny
from tests.contract.trainers import arguments, pad
from tests.programs import together

ROWS, STEPS = 12, 2


def override(method):
    """A class with `method` as a script's, which counts how often it ran."""

    class Script(Trainer):
        ran = 0

    def counted(self, *args, **kwargs):
        Script.ran += 1
        return method(self, *args, **kwargs)

    counted.__wrapped__ = method  # whose signature it has
    setattr(Script, method.__name__, counted)
    return Script


def with_its_own_count(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten(), reduction="sum")


def processes():
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def times_the_processes(trainer, loss):
    return loss * trainer.accelerator.num_processes


class Table:
    """Each hook in each signature, as scripts of some year have it."""

    def training_step__of_4_45(self, model, inputs):
        return Trainer.training_step(self, model, inputs)

    def training_step__of_4_46(self, model, inputs, num_items_in_batch=None):
        return Trainer.training_step(self, model, inputs, num_items_in_batch)

    def training_step__required(self, model, inputs, num_items_in_batch):
        return Trainer.training_step(self, model, inputs, num_items_in_batch)

    def training_step__drops_the_count(self, model, inputs, num_items_in_batch=None):
        return Trainer.training_step(self, model, inputs)

    def training_step__another_name(self, model, inputs, n=None):
        return Trainer.training_step(self, model, inputs, n)

    def training_step__args(self, *args):
        return Trainer.training_step(self, *args)

    def training_step__args_and_kwargs(self, *args, **kwargs):
        return Trainer.training_step(self, *args, **kwargs)

    def training_step__kwargs(self, model, inputs, **kwargs):
        return Trainer.training_step(self, model, inputs, **kwargs)

    def training_step__keyword_only(self, model, inputs, *, num_items_in_batch=None):
        return Trainer.training_step(self, model, inputs, num_items_in_batch)

    def compute_loss__of_4_45(self, model, inputs, return_outputs=False):
        return Trainer.compute_loss(self, model, inputs, return_outputs)

    def compute_loss__of_4_46(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    def compute_loss__drops_the_count(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return Trainer.compute_loss(self, model, inputs, return_outputs)

    def compute_loss__another_order(self, model, inputs, num_items_in_batch=None, return_outputs=False):
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    def compute_loss__kwargs(self, model, inputs, **kwargs):
        return Trainer.compute_loss(self, model, inputs, **kwargs)

    def compute_loss__args(self, *args, **kwargs):
        return Trainer.compute_loss(self, *args, **kwargs)

    def compute_loss__sums(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return with_its_own_count(self, model, inputs) / num_items_in_batch

    def compute_loss__of_transformers(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Its own, as forks have it: times the processes, over which gradients are averaged."""
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs["loss"]
        if (
            self.args.average_tokens_across_devices
            and self.model_accepts_loss_kwargs
            and num_items_in_batch is not None
        ):
            loss *= self.accelerator.num_processes if self.args.n_gpu <= 1 else self.args.n_gpu
        return (loss, outputs) if return_outputs else loss

    def compute_loss__times_the_world_size(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return with_its_own_count(self, model, inputs) / num_items_in_batch * self.args.world_size

    def compute_loss__declared_and_times_the_processes(self, model, inputs, num_items_in_batch=None, **options):
        return with_its_own_count(self, model, inputs) / num_items_in_batch * self.accelerator.num_processes

    def compute_loss__times_the_processes_of_a_new_state(self, model, inputs, num_items_in_batch=None, **options):
        AcceleratorState()  # as functions of accelerate make one: it takes in the number of processes again
        return with_its_own_count(self, model, inputs) / num_items_in_batch * self.accelerator.num_processes

    def compute_loss__times_what_torch_says(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return with_its_own_count(self, model, inputs) / num_items_in_batch * processes()

    def compute_loss__times_the_processes_elsewhere(self, model, inputs, num_items_in_batch=None, **options):
        return times_the_processes(self, with_its_own_count(self, model, inputs) / num_items_in_batch)

    def compute_loss__reads_the_processes(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ones = self.accelerator.gather(torch.ones(3))
        assert ones.view(self.accelerator.num_processes, -1).shape == (self.accelerator.num_processes, 3)
        return with_its_own_count(self, model, inputs) / num_items_in_batch

    def training_step__of_transformers(self, model, inputs, num_items_in_batch=None):
        """Its own, as forks have it: the loss goes backward as `compute_loss` has returned it."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def training_step__adds_to_ours(self, model, inputs, num_items_in_batch=None):
        before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        half = Trainer.training_step(self, model, dict(inputs), num_items_in_batch)
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            if parameter.grad is not None:
                parameter.grad = 0.5 * (parameter.grad if gradient is None else parameter.grad + gradient)
        loss = 0.5 * self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return 0.5 * half + loss.detach()

    def compute_loss__mean(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return with_its_own_count(self, model, inputs) / (inputs["labels"][:, 1:] != -100).sum()

    def compute_loss__half_and_half(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        total = with_its_own_count(self, model, inputs)
        return 0.5 * total / num_items_in_batch + 0.5 * total / (inputs["labels"][:, 1:] != -100).sum()

    def compute_loss__pair(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return with_its_own_count(self, model, inputs), (inputs["labels"][:, 1:] != -100).sum()

    def get_batch_samples__of_4_46(self, epoch_iterator, num_batches):
        return [batch for batch, _ in zip(epoch_iterator, range(num_batches), strict=False)], None

    def get_batch_samples__of_4_49(self, epoch_iterator, num_batches, device):
        return Trainer.get_batch_samples(self, epoch_iterator, num_batches, device)

    def get_batch_samples__args(self, *args, **kwargs):
        return Trainer.get_batch_samples(self, *args, **kwargs)

    def _prepare_inputs__of_4_46(self, inputs):
        return Trainer._prepare_inputs(self, inputs)

    def _prepare_input__of_4_46(self, data):
        return Trainer._prepare_input(self, data)

    def _get_train_sampler__of_4_46(self):
        return Trainer._get_train_sampler(self)

    def _get_train_sampler__of_5(self, train_dataset=None):
        return Trainer._get_train_sampler(self, train_dataset)

    def _get_dataloader__of_5(self, dataset, description, batch_size, sampler_fn=None, is_training=False,
                              dataloader_key=None):  # fmt: skip
        return Trainer._get_dataloader(self, dataset, description, batch_size, sampler_fn, is_training, dataloader_key)

    def _get_dataloader__kwargs(self, **kwargs):
        return Trainer._get_dataloader(self, **kwargs)

    def create_scheduler__of_4_46(self, num_training_steps, optimizer):
        return Trainer.create_scheduler(self, num_training_steps, optimizer)

    def create_scheduler__without_optimizer(self, num_training_steps):
        return Trainer.create_scheduler(self, num_training_steps)

    def create_optimizer__of_4_46(self):
        return Trainer.create_optimizer(self)

    def get_total_train_batch_size__of_4_46(self, args):
        return Trainer.get_total_train_batch_size(self, args)

    def _get_output_dir__of_4_46(self, trial):
        return Trainer._get_output_dir(self, trial)

    def _get_collator_with_removed_columns__of_4_46(self, data_collator, description=None):
        return Trainer._get_collator_with_removed_columns(self, data_collator, description)


def a_script(name):
    method = vars(Table)[name]
    method.__name__ = name.split("__")[0] if not name.startswith("_") else "_" + name[1:].split("__")[0]
    kind = override(method)
    kind.loss_is_scaled_for_ga = True if "declared" in name else None
    return kind


class Sampling(Trainer):
    """The way of trl's GRPO: a step of its own, with inputs that it may sample, and a loss times the processes."""

    prepared = 0

    def _prepare_inputs(self, inputs):
        Sampling.prepared += 1
        return Trainer._prepare_inputs(self, inputs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        return Table.training_step__of_transformers(self, model, inputs, num_items_in_batch)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return with_its_own_count(self, model, inputs) / num_items_in_batch * self.args.world_size


class Keeping(Trainer):
    """It keeps the number of processes, and multiplies its loss with it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.world_size = self.args.world_size

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return with_its_own_count(self, model, inputs) / num_items_in_batch * self.world_size


CASES = [name for name in vars(Table) if "__" in name[2:] and not name.startswith("__")]
#: Those that the scale of a loss goes through.
SCALED = [name for name in CASES if name.startswith(("training_step", "compute_loss", "get_batch_samples"))]
#: Rows of a micro-batch and micro-batches of a step: each step reads all rows.
CUTS = {"whole": (12, 1), "cut": (4, 3), "short of memory": (6, 2)}


def steps(name, folder, size, accumulation, script=None, **changes):
    """Loss and gradient norm of the steps of the script `name`, which must have run."""
    options = (
        dict(per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, max_steps=STEPS) | changes
    )
    args = arguments(TrainingArguments, folder, train_sampling_strategy="sequential", max_grad_norm=1e9, **options)
    kind, model = script or a_script(name), tiny.causal_lm()
    model.pooler = nn.Linear(2, 2)  # in no loss, as BERT's in a model of embeddings
    trainer = kind(model, args, pad, tiny.token_rows(ROWS))
    if args.auto_find_batch_size:
        run_short_of_memory(trainer)
    trainer.train()
    assert script or kind.ran, f"{name} was never called"
    return [[record["loss"], record["grad_norm"]] for record in trainer.state.log_history if "loss" in record]


def run_short_of_memory(trainer):
    """Micro-batches of more than two rows do not fit."""
    accumulate = trainer.accumulate

    def small(model, window, num_items):
        if any(len(batch["input_ids"]) > 2 for batch in window):
            raise torch.OutOfMemoryError("not enough")
        return accumulate(model, window, num_items)

    trainer.accumulate = small


@pytest.fixture(scope="module")
def by_hand():
    """The same steps without a trainer."""
    model, rows, found = tiny.causal_lm(), tiny.token_rows(ROWS), []
    batch = pad(rows)
    count = (batch["labels"][:, 1:] != -100).sum()
    for step in range(STEPS):
        loss = with_its_own_count(None, model, batch) / count
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        found.append([loss.item(), norm.item()])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * (1 - step / STEPS) * parameter.grad
                    parameter.grad = None
    return found


@pytest.mark.parametrize(("name", "cut"), [(name, cut) for cut in CUTS for name in (CASES if cut == "cut" else SCALED)])
def test_an_override_runs_and_a_step_is_that_of_a_loop_by_hand(name, cut, by_hand, tmp_path):
    found = steps(name, tmp_path, *CUTS[cut], auto_find_batch_size=cut == "short of memory")
    torch.testing.assert_close(torch.tensor(found), torch.tensor(by_hand), rtol=2e-5, atol=0)


def test_two_processes_make_the_steps_of_a_loop_by_hand(by_hand, tmp_path):
    done = together(2, [__file__, str(tmp_path)])
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == [*SCALED, "checkpointed", "sampling", "keeping"]
    for name, of_case in found.items():
        torch.testing.assert_close(torch.tensor(of_case), torch.tensor(by_hand), rtol=2e-5, atol=0, msg=name)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_a_loss_does_beside_is_done_once(accumulation, tmp_path):
    """Where nothing is to be measured it is called once, and else its state and control are put back."""
    calls = []

    class Script(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            calls.append(self.accelerator.sync_gradients)
            self.state.mine = getattr(self.state, "mine", 0) + 1
            self.control.should_log = self.state.mine == 3
            return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    args = arguments(TrainingArguments, tmp_path, per_device_train_batch_size=2, max_steps=3, logging_steps=100)
    args.gradient_accumulation_steps = accumulation
    trainer = Script(tiny.causal_lm(), args, pad, tiny.token_rows(16))
    assert "epoch" in trainer.train().metrics
    assert trainer.state.mine == 3 * accumulation
    assert calls == [True] * 3 if accumulation == 1 else calls[-2:] == [False, True]
    assert [record["step"] for record in trainer.state.log_history[:-1]] == ([3] if accumulation == 1 else [])


def test_a_run_goes_on_from_what_a_script_saves_itself_as_transformers_does(tmp_path):
    """The way of LLaVA's trainer and of those made after it: other files, by the parts of transformers' method."""
    saved = []

    class Script(Trainer):
        def _save_checkpoint(self, model, trial):
            folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            self.save_model(str(folder), _internal_call=True)
            self._save_optimizer_and_scheduler(folder)
            self._save_scaler(folder)
            self._save_rng_state(folder)
            self.state.save_to_json(str(folder / "trainer_state.json"))

    class Callback(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            saved.append(state.global_step)

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == stopped_at:
                os.kill(os.getpid(), signal.SIGTERM)

    def run(checkpoint=None):
        changes = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "cosine"}
        args = arguments(TrainingArguments, tmp_path, per_device_train_batch_size=2, optim="adamw_torch", **changes)
        trainer = Script(tiny.causal_lm(), args, pad, tiny.token_rows(24), callbacks=[Callback()])
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer.model.state_dict(), [r["loss"] for r in trainer.state.log_history if "loss" in r]

    stopped_at = None
    weights, losses = run()
    assert saved == [3, 6] and (tmp_path / "checkpoint-3" / "optimizer.pt").is_file()
    stopped_at = 5
    with pytest.raises(SystemExit):
        run(tmp_path / "checkpoint-3")
    assert saved == [3, 6, 5]
    stopped_at = None
    again, same = run(tmp_path / "checkpoint-5")
    # The record of step 5 was to come after its checkpoint, and these files have no place to say so.
    assert same == losses[:4] + losses[5:] and all(torch.equal(weights[name], again[name]) for name in weights)


#: What the methods of transformers 4.31 to 5.23 take, the most of any version: an override may hand all of it on.
PASSED_ON = {
    "_determine_best_metric": "metrics trial",
    "_evaluate": "trial ignore_keys_for_eval skip_scheduler",
    "_get_collator_with_removed_columns": "data_collator description",
    "_get_dataloader": "dataset description batch_size sampler_fn is_training dataloader_key",
    "_get_eval_sampler": "eval_dataset",
    "_get_output_dir": "trial",
    "_get_train_sampler": "train_dataset",
    "_load_from_checkpoint": "resume_from_checkpoint model",
    "_nested_gather": "tensors name",
    "_pad_across_processes": "tensor pad_index",
    "_prepare_input": "data",
    "_prepare_inputs": "inputs",
    "_remove_unused_columns": "dataset description",
    "_save": "output_dir state_dict",
    "_save_checkpoint": "model trial metrics",
    "_wrap_model": "model training dataloader",
    "autocast_smart_context_manager": "cache_enabled",
    "call_model_init": "trial",
    "compute_loss": "model inputs return_outputs num_items_in_batch",
    "create_optimizer": "model",
    "create_optimizer_and_scheduler": "num_training_steps",
    "create_scheduler": "num_training_steps optimizer",
    "evaluate": "eval_dataset ignore_keys metric_key_prefix",
    "evaluation_loop": "dataloader description prediction_loss_only ignore_keys metric_key_prefix",
    "floating_point_ops": "inputs",
    "get_batch_samples": "epoch_iterator num_batches device",
    "get_decay_parameter_names": "model",
    "get_eval_dataloader": "eval_dataset",
    "get_test_dataloader": "test_dataset",
    "get_total_train_batch_size": "args",
    "hyperparameter_search": "hp_space compute_objective n_trials direction backend hp_name",
    "log": "logs start_time",
    "log_metrics": "split metrics",
    "predict": "test_dataset ignore_keys metric_key_prefix",
    "prediction_step": "model inputs prediction_loss_only ignore_keys",
    "push_to_hub": "commit_message blocking token revision",
    "save_metrics": "split metrics combined",
    "save_model": "output_dir _internal_call",
    "train": "resume_from_checkpoint trial ignore_keys_for_eval",
    "training_step": "model inputs num_items_in_batch",
}


@pytest.mark.parametrize("name", PASSED_ON)
def test_a_method_takes_what_an_override_of_any_year_hands_on(name):
    inspect.signature(getattr(Trainer, name)).bind(None, *PASSED_ON[name].split())  # by position


def test_a_checkpoint_is_written_by_an_override_of_4_46(tmp_path):
    class Script(Trainer):
        def _save_checkpoint(self, model, trial, metrics=None):
            super()._save_checkpoint(model, trial, metrics)

    args = arguments(TrainingArguments, tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    Script(tiny.causal_lm(), args, pad, tiny.token_rows(16)).train()
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x, labels):
        return {"loss": (x * self.weight - labels).square().mean()}


@pytest.mark.parametrize(("size", "accumulation"), [(4, 1), (2, 2), (3, 2)])
def test_a_target_of_minus_100_is_a_number(size, accumulation, tmp_path):
    rows = [{"x": [1.0], "labels": [target]} for target in (-100.0, 0.0, -100.0, 7.0)]
    args = arguments(TrainingArguments, tmp_path, per_device_train_batch_size=size, max_steps=1)
    args.gradient_accumulation_steps = accumulation
    trainer = Trainer(Line(), args, None, rows, rows)
    assert trainer.evaluate()["eval_loss"] == pytest.approx((2 * 100**2 + 7**2) / 4)
    trainer.train()
    assert trainer.state.log_history[-2]["loss"] == pytest.approx((2 * 100**2 + 7**2) / 4)


if __name__ == "__main__":  # two processes, started by the test above
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    args = TrainingArguments(folder / "arguments", use_cpu=True)
    assert torch.distributed.get_rank() == args.process_index  # scripts ask before there is a trainer
    found = {name: steps(name, folder / name, 2, 3) for name in SCALED}
    found["checkpointed"] = steps(SCALED[0], folder / "checkpointed", 2, 3, gradient_checkpointing=True)
    found["sampling"] = steps("sampling", folder / "sampling", 2, 3, Sampling)
    found["keeping"] = steps("keeping", folder / "keeping", 2, 3, Keeping)
    assert Sampling.prepared == STEPS * 3, Sampling.prepared  # each micro-batch once, though the loss was measured
    if torch.distributed.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
