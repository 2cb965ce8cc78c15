"""What can be known before a model is loaded is said before one is loaded, all of it in one message, by every
trainer.
"""

from __future__ import annotations

import re
import sys
import types

import pytest
import torch
import transformers

from posttrain.cli import main
from posttrain.core import EarlyStoppingCallback, Trainer, TrainingArguments
from posttrain.core.errors import CheckpointError, ConfigError, DataError
from posttrain.core.training.preflight import PreflightError
from posttrain.lm.loading import loading
from posttrain.rl import (
    Agent,
    AgentCommand,
    CPOTrainer,
    DPOTrainer,
    GRPOTrainer,
    KTOTrainer,
    ORPOTrainer,
    ReinforcePlusPlusTrainer,
    RewardTrainer,
    RLOOTrainer,
)
from posttrain.seq2seq import Seq2SeqTrainer
from posttrain.sft import SFTTrainer
from tests import tiny
from tests.contract.trainers import digit_sum, preference_rows, text_rows

NAMED = [
    SFTTrainer, DPOTrainer, KTOTrainer, ORPOTrainer, CPOTrainer, RewardTrainer, GRPOTrainer, RLOOTrainer,
    ReinforcePlusPlusTrainer,
]  # fmt: skip
ONLINE = (GRPOTrainer, RLOOTrainer, ReinforcePlusPlusTrainer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.causal_lm().save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def make(folder, tmp_path, monkeypatch):
    """A function that makes a trainer, or fails; its model must not be loaded, nor made."""

    def must_not_be_called(*args, **kwargs):
        raise AssertionError("a model was loaded")

    for name in ("AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoModelForSeq2SeqLM"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", must_not_be_called)

    def build(trainer_class, **changes):
        parts = {name: changes.pop(name) for name in PARTS if name in changes}
        usual = {"output_dir": str(tmp_path / "out"), "report_to": "none", "use_cpu": True, "max_steps": 1}
        if trainer_class in (Trainer, Seq2SeqTrainer):
            given = {"model_init": must_not_be_called, "train_dataset": tiny.token_rows(4)}
        else:
            given = {"model": str(folder), "train_dataset": preference_rows(8)}
        if trainer_class is SFTTrainer:
            given["train_dataset"] = text_rows(8)
        if trainer_class in ONLINE:
            given["reward_funcs"] = digit_sum
        return trainer_class(args=trainer_class.config_class(**(usual | changes)), **(given | parts))

    return build


PARTS = (
    "model", "train_dataset", "eval_dataset", "peft_config", "callbacks", "optimizers", "reward_funcs",
    "compute_metrics", "quantization_config", "data_collator", "processing_class", "optimizer_cls_and_kwargs",
    "agent", "compute_loss_func",
)  # fmt: skip


@pytest.fixture(autouse=True)
def absent_packages(monkeypatch):
    for name in ("liger_kernel", "optimi"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("trainer_class", [Trainer, Seq2SeqTrainer, *NAMED])
def test_every_trainer_says_everything_at_once_before_a_model_is_there(trainer_class, make, tmp_path):
    (tmp_path / "a file").write_text("")
    with pytest.raises(PreflightError) as caught:
        make(
            trainer_class, output_dir=str(tmp_path / "a file"), eval_strategy="epoch", report_to=["tensorbord"],
            resume_from_checkpoint=str(tmp_path / "gone"), use_liger_kernel=True, optim="stable_adamw", callbacks=[5],
            remote_dir="nosuch://bucket/run",
        )  # fmt: skip
    said = str(caught.value)
    for part in (
        "output_dir=", "is a file", "eval_strategy='epoch' needs an eval_dataset", "did you mean 'tensorboard'",
        "liger-kernel", "torch-optimi", "5 is no callback", "nosuch", "Can't find a valid checkpoint",
    ):  # fmt: skip
        if part != "Can't find a valid checkpoint":  # nothing is looked for where the remote place cannot be reached
            assert part in said, part
    assert len(caught.value.problems) == 7, said


ALONE = [
    ({"eval_strategy": "steps"}, ValueError, ["eval_strategy='steps' needs an eval_dataset"]),
    ({"report_to": "wandbb"}, ValueError, ["report_to='wandbb'", "did you mean 'wandb'"]),
    ({"report_to": "swanlab"}, ImportError, ["report_to='swanlab'", "pip install swanlab"]),
    ({"resume_from_checkpoint": "/gone/checkpoint-3"}, CheckpointError, ["/gone/checkpoint-3"]),
    ({"resume_from_checkpoint": "true"}, CheckpointError, ["No valid checkpoint found"]),
    ({"output_dir": "/proc/nothing/here"}, ConfigError, ["output_dir='/proc/nothing/here' cannot be written to"]),
    ({"use_liger_kernel": True}, ImportError, ["liger-kernel", "without it"]),
    ({"deepspeed": {}}, ImportError, ["'deepspeed' is not installed"]),
    ({"optim": "stable_adamw"}, ImportError, ["torch-optimi"]),
    ({"callbacks": ["print"]}, TypeError, ["'print' is no callback"]),
    ({"callbacks": [EarlyStoppingCallback()]}, ConfigError, ["metric_for_best_model", "eval_strategy"]),
    ({"optimizers": 5}, TypeError, ["optimizers=5", "pair"]),
    ({"optimizers": ("adamw", None)}, TypeError, ["('adamw', None)", "optim is a name"]),
    ({"optimizers": (torch.optim.AdamW, None)}, TypeError, ["torch.optim.adamw.AdamW", "must be a pair"]),
    ({"processing_class": "gpt2"}, TypeError, ["processing_class is 'gpt2'", "AutoTokenizer.from_pretrained gives"]),
    ({"processing_class": transformers.AutoTokenizer}, TypeError, ["AutoTokenizer'>; pass a loaded one"]),
    ({"train_dataset": []}, DataError, ["train_dataset has no rows"]),
    ({"train_dataset": "gsm8k"}, TypeError, ["train_dataset is the string 'gsm8k'"]),
    ({"eval_dataset": 7}, TypeError, ["eval_dataset is of type int"]),
]


@pytest.mark.parametrize("trainer_class", [Trainer, SFTTrainer, DPOTrainer, GRPOTrainer])
@pytest.mark.parametrize(("changes", "error", "parts"), ALONE, ids=[" ".join(changes) for changes, *_ in ALONE])
def test_each_fault_alone_has_its_own_type(trainer_class, changes, error, parts, make, monkeypatch):
    if any(isinstance(value, dict) for value in changes.values()):
        monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(error) as caught:
        make(trainer_class, **changes)
    for part in parts:
        assert part in str(caught.value)


OF_A_NAMED_MODEL = [
    ({"peft_config": {"r": 8}}, TypeError, ["peft_config", "{'r': 8}"]),
    ({"model": "/no/such/folder"}, FileNotFoundError, ["/no/such/folder", "does not exist"]),
    ({"model": 5}, TypeError, ["model is of type int"]),
    ({"model_init_kwargs": {"dtype": "float99"}}, ValueError, ["dtype='float99'"]),
    ({"model_init_kwargs": {"attn_implementation": "sdpaa"}}, ConfigError,
    ["'sdpaa' is not one of", "did you mean 'sdpa'"]),
    ({"model_init_kwargs": {"load_in_4bit": True}}, ConfigError, ["load_in_4bit=True", "Pass peft_config"]),
    ({"pad_token": "<nope>"}, ValueError, ["pad_token='<nope>'", "vocabulary"]),
]  # fmt: skip


@pytest.mark.parametrize("trainer_class", NAMED)
@pytest.mark.parametrize(
    ("changes", "error", "parts"), OF_A_NAMED_MODEL, ids=[" ".join(changes) for changes, *_ in OF_A_NAMED_MODEL]
)
def test_what_is_wrong_with_a_named_model_is_said_before_it_is_loaded(trainer_class, changes, error, parts, make):
    if "pad_token" in changes and trainer_class in ONLINE:
        pytest.skip("these have no such argument")
    with pytest.raises(error) as caught:
        make(trainer_class, **changes)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("trainer_class", [Trainer, SFTTrainer])
def test_a_loss_function_of_other_arguments_is_said_before_a_model_is_loaded(trainer_class, make):
    with pytest.raises(TypeError, match="called with num_items_in_batch=..., and this one has no such"):
        make(trainer_class, compute_loss_func=lambda outputs, labels: outputs.loss)


def test_flash_attention_that_is_not_there_is_said_before_a_model_is_loaded(make):
    if transformers.utils.is_flash_attn_2_available():
        pytest.skip("it is there")
    with pytest.raises(ConfigError, match="flash_attention_2.*sdpa"):
        make(SFTTrainer, model_init_kwargs={"attn_implementation": "flash_attention_2"})


@pytest.mark.parametrize(
    ("implementation", "has_gpu", "message"),
    [
        ("kernels-community/flash-attn3", True, r"is a kernel of the Hub. Run: pip install 'kernels>="),
        ("flash_attention_3", True, r"its package is not installed. Run: pip install 'kernels>=.*sdpa"),
        ("flash_attention_4", False, "no GPU is visible. Run: pip install flash-attn-4, or 'kernels>=.*sdpa"),
    ],
)
def test_a_flash_attention_says_what_it_needs(implementation, has_gpu, message, monkeypatch):
    monkeypatch.setattr(loading.accelerator, "gpu", lambda: "cuda" if has_gpu else None)
    assert re.search(message, loading.attention_problem(implementation))
    monkeypatch.setattr(transformers.utils.import_utils, "is_kernels_available", lambda: True)
    assert (loading.attention_problem(implementation) is None) == has_gpu


@pytest.mark.parametrize("agent", ["python agent.py", ["python", "agent.py"], Agent(AgentCommand(["python"]))])
def test_a_program_that_cannot_reach_the_policy_is_said_before_a_model_is_loaded(agent, make, monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette", None)
    with pytest.raises(ImportError, match=r"pip install 'posttrain-rl\[agents\]'"):
        make(GRPOTrainer, agent=agent)


@pytest.mark.parametrize("trainer_class", ONLINE)
def test_online_trainers_say_what_their_rewards_and_engines_lack(trainer_class, make, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match="'vllm' is not installed"):
        make(trainer_class, use_vllm=True)
    with pytest.raises(PreflightError) as caught:
        make(
            trainer_class, reward_funcs=["nowhere:reward", "/no/reward/model", 5], reward_weights=[1.0], use_vllm=True,
            train_dataset=[{"question": "a"}] * 8,
        )  # fmt: skip
    for part in ("'nowhere:reward' cannot be imported", "/no/reward/model", "reward_funcs holds 5", "vllm", "'prompt'"):
        assert part in str(caught.value)
    assert isinstance(caught.value, DataError)  # one of them is


@pytest.mark.parametrize(("changes", "part"), [
    ({"generation_kwargs": {"zzz": 1}}, "'zzz' is neither stop nor a field of GenerationConfig"),
    ({"generation_kwargs": {"stop": 5}}, "stop=5 must be a text or a list of texts"),
    ({"generation_kwargs": {"stop": ["a", 5]}}, "must be a text or a list of texts"),
    ({"cache_implementation": "statik"}, "did you mean 'static'"),
], ids=str)  # fmt: skip
def test_settings_that_the_engine_would_not_know_are_said_before_a_model_is_loaded(changes, part, make):
    with pytest.raises(ConfigError, match=part.replace("(", "[(]")):
        make(GRPOTrainer, **changes)


@pytest.mark.parametrize("given", [{"num_beems": 2}, "/no/such/config"], ids=str)
def test_a_generation_config_that_cannot_be_used_is_said_before_a_model_is_loaded(given, make):
    with pytest.raises(
        (ValueError, FileNotFoundError), match="generation_config.*(did you mean 'num_beams'|neither a file)"
    ):
        make(SFTTrainer, generation_config=given)


def test_a_metric_that_cannot_exist_is_said_before_an_evaluation(make):
    rows, options = text_rows(4), {"eval_strategy": "steps"}
    for trainer_class, dataset in ((Trainer, tiny.token_rows(2)), (SFTTrainer, rows)):
        with pytest.raises(ConfigError, match="metric_for_best_model='accuracy' cannot exist.*compute_metrics.*loss"):
            make(trainer_class, eval_dataset=dataset, metric_for_best_model="accuracy", **options)
        with pytest.raises(ConfigError, match="one of a_loss, b_loss"):
            make(trainer_class, eval_dataset={"a": dataset, "b": dataset}, metric_for_best_model="loss", **options)
        for metric in ("loss", "eval_loss"):
            with pytest.raises(AssertionError, match="a model was loaded"):
                make(trainer_class, eval_dataset=dataset, metric_for_best_model=metric, **options)
        with pytest.raises(AssertionError, match="a model was loaded"):
            make(trainer_class, eval_dataset={"a": dataset}, metric_for_best_model="eval_a_loss", **options)
        computes = {"eval_dataset": dataset, "metric_for_best_model": "accuracy", "compute_metrics": lambda p: {}}
        with pytest.raises(AssertionError, match="a model was loaded"):
            make(trainer_class, **computes, **options)
    with pytest.raises(AssertionError, match="a model was loaded"):
        make(SFTTrainer, eval_dataset=rows, metric_for_best_model="mean_token_accuracy", **options)


def test_a_subclass_adds_its_own_checks(make):
    class Careful(SFTTrainer):
        @classmethod
        def preflight(cls, args, parts):
            yield from super().preflight(args, parts)
            if len(parts.train_dataset) < 100:
                yield f"{len(parts.train_dataset)} rows are too few"

    with pytest.raises(PreflightError) as caught:
        make(Careful, eval_strategy="epoch", train_dataset=text_rows(8))
    assert "8 rows are too few" in str(caught.value) and "needs an eval_dataset" in str(caught.value)


def test_an_upload_without_a_token_is_said_and_training_goes_on(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    args = TrainingArguments(str(tmp_path), push_to_hub=True, use_cpu=True, report_to="none")
    Trainer(tiny.causal_lm(), args, train_dataset=tiny.token_rows(4))
    assert "push_to_hub=True needs a token" in caplog.text
    caplog.clear()
    Trainer(
        tiny.causal_lm(),
        TrainingArguments(str(tmp_path), push_to_hub=True, hub_token="x", use_cpu=True, report_to="none"),
    )
    assert "token" not in caplog.text


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo", "seq2seq"])
def test_the_command_line_says_everything_at_once_before_data_and_model_are_read(
    method, folder, tmp_path, monkeypatch, capsys
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    monkeypatch.setattr("posttrain.cli.source.DataSource.load", lambda self: pytest.fail("data were read"))
    monkeypatch.setitem(sys.modules, "peft", None)
    words = [
        method,
        "--model_name_or_path",
        str(tmp_path / "gone"),
        "--dataset_name",
        str(rows),
        "--output_dir",
        str(rows),
    ]
    words += [
        "--report_to",
        "tensorbord",
        "--resume_from_checkpoint",
        "/gone/checkpoint-1",
        "--use_peft",
        "--optim",
        "stable_adamw",
    ]
    words += ["--reward_funcs", "accuracy_reward"] if method == "grpo" else []
    assert main(words) == 2
    said = capsys.readouterr().err
    for part in (
        "is a file",
        "tensorboard",
        "/gone/checkpoint-1",
        "'peft' is not installed",
        "torch-optimi",
        "model folder",
    ):
        assert part in said


def test_a_backend_and_a_mode_of_the_compiler_are_checked_with_the_arguments():
    with pytest.raises(ConfigError) as caught:
        TrainingArguments("out", torch_compile_mode="max-autotun", torch_compile_backend="inducter")
    assert "did you mean 'max-autotune'" in str(caught.value) and "did you mean 'inductor'" in str(caught.value)
    TrainingArguments("out", torch_compile_mode="reduce-overhead", torch_compile_backend="eager")


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_mode_that_records_cuda_graphs_of_changing_shapes_is_refused_on_a_gpu(mode, make, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match=f"{mode}.*records CUDA graphs.*max-autotune-no-cudagraphs"):
        make(Trainer, torch_compile_mode=mode)


def test_bfloat16_on_a_gpu_without_it_is_refused(make, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *_, **__: False)
    with pytest.raises(ConfigError, match="bf16=True needs a GPU that has bfloat16"):
        make(Trainer, bf16=True, use_cpu=False)


def test_liger_on_a_machine_without_a_gpu_is_said_and_training_goes_on(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    with pytest.raises(AssertionError, match="a model was loaded"):
        make(Trainer, use_liger_kernel=True)


def test_nothing_is_left_behind_by_looking(make, tmp_path):
    with pytest.raises(AssertionError, match="a model was loaded"):
        make(SFTTrainer)
    assert list(tmp_path.iterdir()) == []
