"""Products in float8: refused where no kernel is, and close to those of float32 where torchao computes them."""

import sys
import types

import pytest
import torch

from posttrain.core import TrainingArguments
from posttrain.core.distributed.environment import precision
from posttrain.core.errors import ConfigError
from posttrain.core.models import float8
from tests import tiny


@pytest.fixture
def gpu(monkeypatch):
    """Lets a GPU of some capability be there."""

    def there(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")

    return there


def test_a_machine_without_kernels_is_refused_with_one_sentence(gpu):
    assert float8.problem(use_cpu=True).endswith("and this run is on the CPU; set bf16=True instead")
    gpu(8, 0)
    assert float8.problem(use_cpu=False).endswith("and a card has 8.0; set bf16=True instead")
    gpu(8, 9)
    assert float8.problem(use_cpu=False) is None and float8.problem(use_cpu=True)


def test_a_run_is_refused_before_its_model_is_made(tmp_path):
    from posttrain.core import Trainer

    args = TrainingArguments(str(tmp_path), fp8=True, bf16=True, use_cpu=True, report_to="none")
    with pytest.raises((ConfigError, ValueError), match="fp8=True needs a GPU that multiplies float8"):
        Trainer(model_init=lambda: pytest.fail("a model was made"), args=args, train_dataset=tiny.token_rows(4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"deepspeed": {}}, "deepspeed divides"), ({"parallelism_config": {"tp_size": 2}}, "split matrices")],
)
def test_what_does_not_go_together_is_refused(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        TrainingArguments(str(tmp_path), fp8=True, use_cpu=True, **changes)


def test_a_launcher_that_asks_for_it_is_told_where_it_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(ConfigError, match="fp8=True in the arguments of the run"):
        precision(TrainingArguments(str(tmp_path), use_cpu=True))


def test_layers_of_transformers_multiply_in_float8_and_keep_their_weights():
    pytest.importorskip("torchao")
    model, ids = tiny.causal_lm(), torch.arange(4, 36).view(2, 16)
    before, names = model(input_ids=ids, labels=ids).loss, dict(model.named_parameters())
    assert float8.use_float8(model, emulate=True) == 14 and float8.use_float8(model, emulate=True) == 0
    assert type(model.lm_head) is torch.nn.Linear
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in names.items()}
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(before.item(), rel=0.02) and loss.item() != before.item()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("compiled", [True, False])
def test_float8_without_the_compiler_is_warned_of(compiled, caplog, monkeypatch):
    torchao = types.ModuleType("torchao.float8")
    torchao.Float8LinearConfig, torchao.convert_to_float8_training = dict, lambda *args, **kwargs: None
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", torchao)
    float8.use_float8(torch.nn.Sequential(torch.nn.Linear(16, 16)), emulate=True, compiled=compiled)
    assert ("Set torch_compile=True too" in caplog.text) is not compiled


def test_adapters_stay_as_they_are():
    pytest.importorskip("torchao")
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.causal_lm(), LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert float8.use_float8(model, emulate=True) == 14
    halves = [m for name, m in model.named_modules() if name.endswith((".lora_A.default", ".lora_B.default"))]
    assert len(halves) == 28 and all(type(half) is torch.nn.Linear for half in halves)
