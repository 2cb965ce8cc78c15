"""Scripts for transformers' Trainer or trl become scripts for posttrain by the smallest edit, and then they run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.compat import absent_names, migration
from posttrain.compat.migration import migrate
from tests import programs
from tests.test_docs import DOCUMENTS, blocks

ROOT = Path(__file__).resolve().parents[3]


def dedent(text: str) -> str:
    return textwrap.dedent(text).lstrip("\n")


def rewritten(before: str) -> str:
    """The script that `before` becomes, which must not change a second time."""
    done = migrate(dedent(before))
    assert done is not None
    again = migrate(done.text)
    assert again is not None and again.text == done.text
    return done.text


def notes(script: str) -> list[tuple[int, str]]:
    done = migrate(dedent(script))
    assert done is not None
    return [(note.line, note.text) for note in done.notes]


# ---- whole scripts ----

CLASSIFIER = """
    #!/usr/bin/env python
    # -*- coding: utf-8 -*-
    \"\"\"Fine-tune a classifier (naïve settings).\"\"\"
    import numpy as np
    from datasets import load_dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,  # pads to the longest row
        HfArgumentParser,
        Trainer, TrainingArguments,
        set_seed,
    )
    from transformers.trainer_callback import EarlyStoppingCallback as Stop  # noqa: F401


    def compute_metrics(eval_pred):
        logits, labels = eval_pred
        return {"accuracy": (np.argmax(logits, -1)==labels).mean()}   # plain

    set_seed(7)
    args = TrainingArguments(
        "out",
        evaluation_strategy = "epoch",   # «every» epoch
        per_gpu_train_batch_size=8,
        group_by_length=True, warmup_ratio=0.1,
        no_cuda=not use_gpu(no_cuda=True),
        **common,
    )
    trainer = Trainer(model, args, train_dataset=rows, tokenizer=tokenizer, callback=[Stop(3)],
                      data_collator=DataCollatorWithPadding(tokenizer))
"""
CLASSIFIER_NOW = """
    #!/usr/bin/env python
    # -*- coding: utf-8 -*-
    \"\"\"Fine-tune a classifier (naïve settings).\"\"\"
    import numpy as np
    from datasets import load_dataset
    from posttrain.core import DataCollatorWithPadding, Trainer, TrainingArguments, set_seed
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        # pads to the longest row
        HfArgumentParser,
    )
    from posttrain.core import EarlyStoppingCallback as Stop  # noqa: F401


    def compute_metrics(eval_pred):
        logits, labels = eval_pred
        return {"accuracy": (np.argmax(logits, -1)==labels).mean()}   # plain

    set_seed(7)
    args = TrainingArguments(
        "out",
        eval_strategy = "epoch",   # «every» epoch
        per_device_train_batch_size=8,
        train_sampling_strategy="group_by_length", warmup_steps=0.1,
        use_cpu=not use_gpu(no_cuda=True),
        **common,
    )
    trainer = Trainer(model, args, train_dataset=rows, processing_class=tokenizer, callbacks=[Stop(3)],
                      data_collator=DataCollatorWithPadding(tokenizer))
"""


@pytest.mark.long
def test_a_script_for_the_trainer_keeps_its_comments_and_its_layout():
    assert rewritten(CLASSIFIER) == dedent(CLASSIFIER_NOW)
    assert notes(CLASSIFIER) == []


def test_a_script_for_trl_is_split_between_the_packages():
    before = """
        from peft import LoraConfig
        from trl import NAMES

        if __name__ == "__main__":
            parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
            args = SFTConfig(output_dir="out", max_seq_length=512, packing=True)
            trainer = SFTTrainer(model="m", args=args, tokenizer=tok, peft_config=get_peft_config(model_args))
            second = DPOTrainer(model, None, args=DPOConfig("dpo", beta=0.1), train_dataset=pairs, tokenizer=tok)
    """
    names = "DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config"
    before = before.replace("NAMES", names)  # in one line
    after = """
        from peft import LoraConfig
        from posttrain.rl import DPOConfig, DPOTrainer
        from posttrain.sft import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

        if __name__ == "__main__":
            parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
            args = SFTConfig(output_dir="out", max_length=512, packing=True)
            trainer = SFTTrainer(model="m", args=args, processing_class=tok, peft_config=get_peft_config(model_args))
            second = DPOTrainer(model, None, args=DPOConfig("dpo", beta=0.1), train_dataset=pairs, processing_class=tok)
    """
    assert rewritten(before) == dedent(after) and notes(before) == []


@pytest.mark.parametrize(("before", "after"), [
    ('["trl>=1.0", "peft"]', '["posttrain-core", "posttrain-sft", "peft"]'),
    ('[\n#     "peft",\n#     "trl[vllm]",\n# ]', '[\n#     "peft",\n#     "posttrain-core", "posttrain-sft",\n# ]'),
    ('["transformers"]', '["posttrain-core", "posttrain-sft", "transformers"]'),
    ('["trl-lib/rows"]', '["trl-lib/rows"]'),
])  # fmt: skip
def test_the_dependencies_that_uv_installs_for_a_script_are_those_of_its_imports(before, after):
    script = (
        "# /// script\n# dependencies = {}\n# ///\nfrom transformers import AutoTokenizer, TrainerCallback\n"
        "from trl import SFTTrainer\n"
    )
    assert rewritten(script.format(before)).startswith(f"# /// script\n# dependencies = {after}\n# ///\n")


def test_names_below_modules_are_replaced_and_other_uses_stay():
    before = """
        import torch, transformers
        import trl as t

        @dataclass
        class TrainingArguments(transformers.TrainingArguments):
            cache_dir: str = ""

        def train(model_args):
            args = TrainingArguments("out", evaluation_strategy="no", cache_dir="c")
            model = transformers.AutoModelForCausalLM.from_pretrained("m")
            return t.SFTTrainer(model, t.trainer.sft_config.SFTConfig("o", max_seq_length=9))
    """
    after = """
        import posttrain.core
        import torch, transformers
        import posttrain.sft

        @dataclass
        class TrainingArguments(posttrain.core.TrainingArguments):
            cache_dir: str = ""

        def train(model_args):
            args = TrainingArguments("out", eval_strategy="no", cache_dir="c")
            model = transformers.AutoModelForCausalLM.from_pretrained("m")
            return posttrain.sft.SFTTrainer(model, posttrain.sft.SFTConfig("o", max_length=9))
    """
    assert rewritten(before) == dedent(after) and notes(before) == []


def test_documents_get_the_imports_that_were_written_by_hand():
    compared = 0
    for page in DOCUMENTS:
        for block in blocks(page.read_text(encoding="utf-8")):
            now, old = block.code, block.code.replace("from posttrain.core import", "from transformers import")
            if block.language in ("python", "py") and old != now and "posttrain import sft" not in now:
                for name, today in {
                    "tokenizer=tokenizer": "processing_class=tokenizer",
                    "callback=": "callbacks=",
                }.items():
                    now = now.replace(name, today)
                assert rewritten(old) == dedent(now), f"{page.name}:{block.line}"
                compared += 1
    assert compared >= 10


@pytest.mark.long
def test_a_document_that_trains_with_trl():
    page = next(page for page in DOCUMENTS if page.name == "guide.md")
    code = next(b.code for b in blocks(page.read_text(encoding="utf-8")) if "posttrain import sft as trl" in b.code)
    old = code.replace("from posttrain import sft as trl", "import trl").replace("posttrain.core", "transformers")
    now = code.replace("from posttrain import sft as trl", "import posttrain.sft")
    assert rewritten(old) == now.replace("trl.SFTTrainer", "posttrain.sft.SFTTrainer")
    assert [text for _, text in notes(old)] == [
        "SFTTrainer: dataset_text_field is an argument of its config; pass args=SFTConfig(dataset_text_field=...)",
        "SFTTrainer: max_seq_length is an argument of its config; pass args=SFTConfig(max_length=...)",
    ]


# ---- imports ----


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from trl import SFTTrainer", "from posttrain.sft import SFTTrainer"),
        ("from trl import ModelConfig", "from posttrain.core import ModelConfig"),
        ("from trl import ModelConfig, SFTConfig", "from posttrain.sft import ModelConfig, SFTConfig"),
        ("from trl.trainer.sft_trainer import SFTTrainer as S", "from posttrain.sft import SFTTrainer as S"),
        ("from trl.experimental.orpo import ORPOConfig", "from posttrain.rl import ORPOConfig"),
        ("import trl; t = trl.SFTTrainer", "import posttrain.sft; t = posttrain.sft.SFTTrainer"),
        ("import transformers as tf\nx = tf.Trainer", "import posttrain.core\nx = posttrain.core.Trainer"),
        (
            "import transformers.trainer_callback as c\nclass Mine(c.TrainerCallback): ...",
            "import posttrain.core\nclass Mine(posttrain.core.TrainerCallback): ...",
        ),
        (
            "import trl\nx = trl.SFTTrainer, trl.DPOTrainer",
            "import posttrain.rl\nimport posttrain.sft\nx = posttrain.sft.SFTTrainer, posttrain.rl.DPOTrainer",
        ),
        (
            "if x: from transformers import AutoModel, Trainer; y = 1",
            "if x: from posttrain.core import Trainer; from transformers import AutoModel; y = 1",
        ),
        (
            "def f():\n\tfrom transformers import Trainer, AutoModel  # late",
            "def f():\n\tfrom posttrain.core import Trainer\n\tfrom transformers import AutoModel  # late",
        ),
        (
            "from transformers import AutoModel, \\\n    Trainer, \\\n    AutoConfig",
            "from posttrain.core import Trainer\nfrom transformers import AutoModel, AutoConfig",
        ),
        ("import torch, \\\n    trl\ntrl.SFTConfig", "import posttrain.sft\nimport torch\nposttrain.sft.SFTConfig"),
        (
            "from transformers import (AutoModel, Trainer)",
            "from posttrain.core import Trainer\nfrom transformers import (AutoModel)",
        ),
        (
            "from transformers import (Trainer,\n                          AutoModel)",
            "from posttrain.core import Trainer\nfrom transformers import (\n                          AutoModel)",
        ),
        (
            "from transformers import (\n    AutoModel, Trainer,  # a\n    TrainingArguments\n)",
            "from posttrain.core import Trainer, TrainingArguments\nfrom transformers import (\n    AutoModel  # a\n)",
        ),
        (
            "try:\n    from trl import SFTTrainer\nexcept ImportError:\n    SFTTrainer = None",
            "try:\n    from posttrain.sft import SFTTrainer\nexcept ImportError:\n    SFTTrainer = None",
        ),
    ],
)  # fmt: skip
def test_an_import_is_rewritten(before, after):
    assert rewritten(before) == after


@pytest.mark.parametrize(
    "script",
    [
        "from transformers import AutoModel, HfArgumentParser, PreTrainedModel",
        "import transformers\ntransformers.AutoModel",
        "from .trl import SFTTrainer\nfrom posttrain.core import Trainer",
        "from posttrain.sft import SFTTrainer\nSFTTrainer(model, processing_class=t)",
    ],
)
def test_what_is_right_stays_without_a_word(script):
    assert migrate(script) == migration.Migration(script, [])


def test_names_are_taken_from_the_package_that_has_them():
    script = "from posttrain import SFTConfig, SFTTrainer, core\nSFTTrainer(args=SFTConfig(max_seq_length=3))\n"
    lines = rewritten(script).splitlines()
    assert set(lines[:-1]) == {"from posttrain import core", "from posttrain.sft import SFTConfig, SFTTrainer"}
    assert lines[-1] == "SFTTrainer(args=SFTConfig(max_length=3))"
    assert rewritten("from posttrain import Trainer\n") == "from posttrain.core import Trainer\n"


def test_a_script_of_neither_library_is_none_of_its_business():
    assert migrate("import torch\nfrom .transformers import Trainer\nTrainer(tokenizer=1)") is None


def test_a_name_that_is_bound_twice_is_left_to_a_person():
    script = "try:\n    import trl\nexcept ImportError:\n    trl = None\ntrl.SFTTrainer(tokenizer=t)\n"
    done = migrate(script)
    assert done.text == script.replace("tokenizer=", "processing_class=")
    assert [note.text for note in done.notes] == [
        "trl.SFTTrainer stays for you to replace: trl is also the name of something else here"
    ]


def test_a_place_inside_an_f_string_is_met_or_left():
    text = 'x = f"""é\n {1} é {trl.SFTTrainer(tokenizer=t)} é"""\n'
    done = migrate("import trl\n" + text)
    now = text.replace("trl.", "posttrain.sft.").replace("tokenizer=", "processing_class=")
    left = migration.Migration("import trl\n" + text, done.notes)
    assert done == migration.Migration("import posttrain.sft\n" + now, []) or (done == left and len(done.notes) == 2)


def test_names_that_posttrain_lacks_stay_and_are_named():
    script = """
        import trl
        from trl import PPOTrainer, SFTTrainer, DataCollatorForPreference
        from transformers import TFTrainer, AutoModel
        from trl import *
        trl.experimental.ppo.PPOConfig.from_dict({})
        trl.__version__
        from trl.experimental.async_grpo.openenv_harness import HarnessRolloutWorker
    """
    assert rewritten(script) == dedent(script).replace(
        "from trl import PPOTrainer, SFTTrainer, DataCollatorForPreference",
        "from posttrain.sft import SFTTrainer\nfrom trl import PPOTrainer, DataCollatorForPreference",
    )
    assert notes(script) == [
        (2, "posttrain has no DataCollatorForPreference: " + absent_names.INSTEAD["DataCollatorForPreference"]),
        (2, "posttrain has no PPOTrainer: " + absent_names.INSTEAD["PPOTrainer"]),
        (3, "posttrain has no TFTrainer; it stays with transformers"),
        (4, "what `from trl import *` brings is not seen; import names one by one"),
        (5, "posttrain has no PPOConfig: " + absent_names.INSTEAD["PPOConfig"]),
        (7, "posttrain has no HarnessRolloutWorker: " + absent_names.INSTEAD["HarnessRolloutWorker"]),
    ]  # fmt: skip


def test_a_class_of_trl_stays_where_posttrains_of_that_name_is_that_of_transformers():
    script = """
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    collator = DataCollatorForLanguageModeling(pad_token_id=0)
    """
    assert rewritten(script) == dedent(script)
    [(line, text)] = notes(script)
    assert line == 1 and "leave data_collator out" in text
    theirs = "from transformers import DataCollatorForLanguageModeling\n"
    assert rewritten(theirs) == theirs.replace("transformers", "posttrain.core")


def test_names_that_transformers_itself_has_dropped_are_named():
    script = """
    from transformers import AdamW, AutoModel, Trainer
    from transformers.deepspeed import HfDeepSpeedConfig
    from transformers.utils import check_min_version, send_example_telemetry
    """
    version = metadata.version("transformers")
    assert notes(script) == [
        (1, f"transformers {version} has no AdamW: import it from torch.optim, or leave optimizers to the trainer"),
        (2, f"transformers {version} has no module transformers.deepspeed"),
        (3, f"transformers {version} has no send_example_telemetry: leave out the call"),
    ]


def test_reward_functions_that_posttrain_has_are_taken_from_it():
    script = """
        from trl.rewards import accuracy_reward, think_format_reward, get_soft_overlong_punishment
        import trl
        trl.rewards.reasoning_accuracy_reward
    """
    assert "from posttrain.rl import accuracy_reward, think_format_reward, get_soft_overlong_punishment" in rewritten(
        script
    )
    assert "posttrain.rl.reasoning_accuracy_reward" in rewritten(script) and notes(script) == []


@pytest.mark.parametrize(
    ("head", "trainer", "part"),
    [
        ("from transformers import AutoModelForImageTextToText", "SFTTrainer", "takes one dataset of rows with images"),
        ("from transformers import Qwen2VLForConditionalGeneration", "GRPOTrainer", "takes prompts with images"),
        ("import transformers; transformers.AutoModelForVision2Seq", "DPOTrainer", "takes prompts with images"),
        ("f = lambda row: row['images'][0]", "GRPOTrainer", "takes prompts with images"),
        ("from PIL import Image", "KTOTrainer", "takes prompts with images"),
    ],
)
def test_scripts_about_images_are_told_what_is_not_covered(head, trainer, part):
    script = f"{head}\nfrom trl import {trainer}\n{trainer}(model='x')\n{trainer}(model='y')\n"
    ((line, text),) = notes(script)  # of the first of them
    assert line == 3 and text.startswith(f"images: {trainer} ") and part in text
    assert notes(f"from trl import {trainer}\n{trainer}(model='x')\n") == []


def test_a_package_that_is_not_installed_keeps_its_names_with_trl(monkeypatch, tmp_path, capsys):
    there = {name: face for name, face in migration.faces().items() if name != "rl"}
    migration.homes.cache_clear()
    monkeypatch.setattr(migration, "faces", lambda: there)
    (tmp_path / "train.py").write_text("from trl import SFTTrainer, DPOTrainer")
    assert main(["migrate", str(tmp_path), "--write"]) == 0
    migration.homes.cache_clear()
    assert (tmp_path / "train.py").read_text() == "from posttrain.sft import SFTTrainer\nfrom trl import DPOTrainer"
    out = capsys.readouterr().out
    assert "train.py:1: posttrain has no DPOTrainer; it stays with trl" in out
    assert "Not installed, so that what they have stays as it is: posttrain-rl." in out


# ---- arguments ----


@pytest.mark.parametrize(
    ("call", "today"),
    [
        ("TrainingArguments(evaluation_strategy=x)", "TrainingArguments(eval_strategy=x)"),
        ("TrainingArguments(adafactor=True)", 'TrainingArguments(optim="adafactor")'),
        ("TrainingArguments(include_inputs_for_metrics=True)", 'TrainingArguments(include_for_metrics=["inputs"])'),
        ("TrainingArguments(warmup_ratio=1)", "TrainingArguments(warmup_steps=0.9999999999999999)"),
        ("f(x=[Trainer(tokenizer=t, **kw)])", "f(x=[Trainer(processing_class=t, **kw)])"),
        ("Trainer(args=TrainingArguments(no_cuda=1))", "Trainer(args=TrainingArguments(use_cpu=1))"),
        ("GRPOConfig(vllm_importance_sampling_cap=2.0)", "GRPOConfig(vllm_importance_sampling_clip_max=2.0)"),
        ("GRPOConfig(evaluation_strategy='no')", "GRPOConfig(eval_strategy='no')"),
        (
            "class T(Trainer):\n    def __init__(self, *a, **k):\n        super().__init__(*a, tokenizer=1, **k)\n"
            "T(tokenizer=2)",
            "class T(Trainer):\n    def __init__(self, *a, **k):\n        super().__init__(*a, processing_class=1, "
            "**k)\nT(tokenizer=2)",
        ),
        ("class T(Trainer): pass\nT(tokenizer=1)", "class T(Trainer): pass\nT(processing_class=1)"),
        ("other(tokenizer=1, evaluation_strategy=2)", "other(tokenizer=1, evaluation_strategy=2)"),
    ],
)  # fmt: skip
def test_a_renamed_argument(call, today):
    imports = "from posttrain.core import Trainer, TrainingArguments\nfrom posttrain.rl import GRPOConfig\n"
    assert rewritten(imports + call) == imports + today
    assert notes(imports + call) == []


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("TrainingArguments(save_safetensors=False)", "save_safetensors has no effect: weights are always written as"),
        ("TrainingArguments(group_by_length=flag)", "group_by_length is now train_sampling_strategy, which may want"),
        ("TrainingArguments(group_by_length=False)", "group_by_length=False has no meaning; leave it out"),
        ("TrainingArguments(no_cuda=1, use_cpu=1)", "no_cuda is the old name of use_cpu, given too; keep use_cpu"),
        ("TrainingArguments(learning_rte=1)", "unknown argument 'learning_rte', did you mean 'learning_rate'?"),
        ("TrainingArguments(num_generations=1)", "unknown argument 'num_generations', which DistillationConfig"),
        ("DPOConfig(rpo_alpha=0.5)", "rpo_alpha is now loss_weights=[1.0, 0.5], loss_type=['sigmoid', 'sft']"),
        ("DPOTrainer(m, beta=1)", "beta is an argument of its config; pass args=DPOConfig(beta=...)"),
        ("Trainer(m, train_datasets=1)", "unknown argument 'train_datasets', did you mean 'train_dataset'?"),
    ],
)
def test_what_a_person_has_to_decide_is_said_and_left(call, text):
    script = (
        f"from posttrain.core import Trainer, TrainingArguments\nfrom posttrain.rl import DPOConfig, DPOTrainer\n{call}"
    )
    assert rewritten(script) == script
    [(line, said)] = notes(script)
    assert line == 3 and text in said


def test_methods_that_nothing_calls_and_fields_of_old_names_are_named():
    script = """
        from transformers import Trainer, TrainingArguments
        from trl import GRPOTrainer
        class Loop(Trainer):
            def _inner_training_loop(self, *args): ...
            def compute_loss(self, model, inputs, return_outputs=False): ...
        class Mine(GRPOTrainer):
            def _generate_and_score_completions(self, inputs): ...
        class Callback:
            def _clip_grad_norm(self): ...
        class Arguments(TrainingArguments):
            evaluation_strategy: str = "epoch"
    """
    said = notes(script)
    assert [line for line, _ in said] == [4, 7, 11]
    assert said[0][1].startswith("Loop._inner_training_loop is never called: the loop is train; override")
    assert said[1][1].startswith("Mine._generate_and_score_completions is never called: ")
    assert said[2][1] == "Arguments: evaluation_strategy is now eval_strategy"


# ---- the command ----


def test_the_command_shows_the_change_and_writes_nothing(tmp_path, capsys):
    (tmp_path / ".venv").mkdir()
    for name in ("train.py", ".venv/other.py"):
        (tmp_path / name).write_text("from trl import PPOTrainer, SFTTrainer\n")
    (tmp_path / "plain.py").write_text("import torch\n")
    assert main(["migrate", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\n-from trl import PPOTrainer, SFTTrainer\n+from posttrain.sft import SFTTrainer\n" in out
    assert out.endswith(
        f"{tmp_path}/train.py:1: posttrain has no PPOTrainer: {absent_names.INSTEAD['PPOTrainer']}\n"
        "Scripts: 1 to be rewritten, 1 without transformers and trl. Nothing was written; --write does.\n"
    )
    assert "plain.py" not in out
    assert (tmp_path / "train.py").read_text() == "from trl import PPOTrainer, SFTTrainer\n"


def test_writing_keeps_mode_line_ends_encoding_and_links(tmp_path, capsys):
    script = tmp_path / "train.py"
    lines = [
        "# -*- coding: latin-1 -*-",
        "from transformers import AutoModel, Trainer",
        "x = 'é'; Trainer(tokenizer=x)",
    ]
    script.write_bytes("\r\n".join(lines).encode("latin-1"))
    script.chmod(0o750)
    marked = tmp_path / "marked.py"
    marked.write_bytes(b"\xef\xbb\xbffrom trl import SFTTrainer")
    (tmp_path / "link.py").symlink_to(script)
    assert main(["migrate", "--write", str(tmp_path / "link.py"), str(marked)]) == 0
    lines[1:] = ["from posttrain.core import Trainer", "from transformers import AutoModel", lines[2]]
    lines[-1] = lines[-1].replace("tokenizer=", "processing_class=")
    assert script.read_bytes() == "\r\n".join(lines).encode("latin-1")
    assert stat.S_IMODE(script.stat().st_mode) == 0o750 and (tmp_path / "link.py").is_symlink()
    assert marked.read_bytes() == b"\xef\xbb\xbffrom posttrain.sft import SFTTrainer"
    assert sorted(os.listdir(tmp_path)) == ["link.py", "marked.py", "train.py"]
    before = script.stat()
    capsys.readouterr()
    assert main(["migrate", "--write", str(script)]) == 0
    assert script.stat() == before and capsys.readouterr().out == "Scripts: 1 as it should be.\n"


def test_a_file_that_is_no_python_is_left_and_the_others_are_not(tmp_path, capsys):
    (tmp_path / "a.py").write_text("from trl import SFTTrainer\nprint 'hello'\n")
    (tmp_path / "b.py").write_bytes(b"from trl import SFTTrainer # \xff\n")
    (tmp_path / "c.py").write_text("from trl import SFTTrainer\n")
    assert main(["migrate", str(tmp_path), "--write"]) == 1
    out = capsys.readouterr().out
    assert f"{tmp_path}/a.py:2: Missing parentheses" in out and f"{tmp_path}/b.py" in out
    assert (tmp_path / "a.py").read_text() == "from trl import SFTTrainer\nprint 'hello'\n"
    assert (tmp_path / "b.py").read_bytes() == b"from trl import SFTTrainer # \xff\n"
    assert (tmp_path / "c.py").read_text() == "from posttrain.sft import SFTTrainer\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "it takes the scripts to rewrite"),
        (["none.py"], "none.py does not exist"),
        (["--wrte", "."], "unknown flag --wrte"),
    ],
)
def test_wrong_words_are_answered(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["migrate", *words]) == 2
    assert said in capsys.readouterr().err


def test_help_needs_no_torch():
    code = "import sys; from posttrain.cli import main; main(['migrate', '--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("posttrain migrate SCRIPT.py") and done.stdout.endswith("False\n"), done.stderr


# ---- migrated scripts train ----

TRAIN = """
    import numpy as np
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed, AutoConfig
    from tests import tiny
    from tests.contract.trainers import classification_rows

    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    set_seed(0)
    args = TrainingArguments(
        "out", evaluation_strategy="steps", eval_steps=2, max_steps=4, no_cuda=True, warmup_ratio=0.25, logging_steps=1,
        save_steps=2, load_best_model_at_end=True, report_to="none", per_gpu_train_batch_size=4,
    )
    trainer = Weighted(
        tiny.classifier(), args, train_dataset=classification_rows(16), eval_dataset=classification_rows(8),
        compute_metrics=lambda p: {"accuracy": (np.argmax(p[0], -1) == p[1]).mean()},
        tokenizer=tiny.tokenizer(), callback=[EarlyStoppingCallback(3)],
    )
    trainer.train()
    print("trained", type(trainer).__mro__[1].__module__, trainer.state.global_step, type(args).__module__)
"""
PREFER = """
    import trl
    from tests import tiny

    rows = [{"prompt": "one and", "chosen": " two", "rejected": " three"}] * 8
    args = trl.DPOConfig("out", max_steps=2, no_cuda=True, report_to="none", evaluation_strategy="no", bf16=False)
    trainer = trl.DPOTrainer(tiny.causal_lm(), None, args=args, train_dataset=rows, tokenizer=tiny.tokenizer())
    trainer.train()
    args = trl.SFTConfig("sft", max_steps=2, max_seq_length=32, no_cuda=True, report_to="none", bf16=False)
    rows = [{"text": "one and two"}] * 8
    second = trl.SFTTrainer(tiny.causal_lm(), args=args, train_dataset=rows, tokenizer=tiny.tokenizer())
    second.train()
    print("trained", type(trainer).__module__, trainer.state.global_step, type(second).__module__)
"""


@pytest.mark.rotated
@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (TRAIN, "posttrain.core.trainer 4 posttrain.core.arguments"),
        (PREFER, "posttrain.rl.algorithms.dpo 2 posttrain.sft.trainer"),
    ],
)
def test_a_migrated_script_trains(script, said, tmp_path):
    datasets = "import datasets\n" if "import trl" in script else ""
    file = tmp_path / "train.py"
    text = dedent(script).replace("train_dataset=rows", "train_dataset=datasets.Dataset.from_list(rows)")
    file.write_text(datasets + text)
    assert main(["migrate", str(file), "--write"]) == 0
    done = programs.run([str(file)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert " is now " not in done.stderr, "an old name was left"
    assert f"trained {said}\n" in done.stdout
