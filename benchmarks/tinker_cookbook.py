"""The basics of tinker-cookbook against `posttrain serve-training`: sl_basic, then rl_basic from what that saved.

    python3 -m venv env && env/bin/pip install "tinker-cookbook[math-rl]"
    python benchmarks/tinker_cookbook.py env/bin/python MODEL_FOLDER

The recipes are unchanged and find the server by TINKER_BASE_URL. Their table of models has none that a laptop trains,
and their data is on the Hub: in a folder of their own, the name of a model of the table leads to MODEL_FOLDER, and
those of their datasets to sums of two numbers below 60, in the same columns. Batches are smaller: 16 rows, and 4
problems with 8 completions each. What was logged goes to `out/tinker_cookbook`; an interrupted run goes on.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

MODEL, HOME = "Qwen/Qwen3-8B-Base", Path("out/tinker_cookbook").absolute()
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SUPERVISED = """
import sys
from tinker_cookbook.recipes import sl_basic
from tinker_cookbook.recipes.chat_sl.chat_datasets import NoRobotsBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=sys.argv[1], renderer_name="role_colon", max_length=512, batch_size=16,
    train_on_what="all_assistant_messages",
)
builder = NoRobotsBuilder(common_config=common)
blueprint = sl_basic.build_config_blueprint(sys.argv[1]).apply({"dataset_builder": builder})
blueprint.make_from_argv(sys.argv[2:])
sl_basic.main(blueprint.make())
"""
REINFORCED = """
import sys
from tinker_cookbook.recipes import rl_basic
from tinker_cookbook.recipes.math_rl.math_env import Gsm8kDatasetBuilder
builder = Gsm8kDatasetBuilder(
    model_name_for_tokenizer=sys.argv[1], renderer_name="role_colon", batch_size=4, group_size=8, convo_prefix=None
)
blueprint = rl_basic.build_config_blueprint(sys.argv[1]).apply({"dataset_builder": builder})
blueprint.make_from_argv(sys.argv[2:])
rl_basic.main(blueprint.make())
"""


def write_data() -> None:
    """Sums, under the names of the datasets that the recipes load."""
    sums = [(a, b) for a in range(2, 60) for b in range(2, 60)]
    random.Random(0).shuffle(sums)
    files = {"HuggingFaceH4/no_robots": ("default", 0, 640, 672), "openai/gsm8k": ("main", 700, 2700, 2764)}
    for name, (config, *places) in files.items():
        (HOME / name).mkdir(parents=True, exist_ok=True)
        splits = {"train": sums[places[0] : places[1]], "test": sums[places[1] : places[2]]}
        for split, some in splits.items():
            rows = [_talk(a, b) if config == "default" else _problem(a, b) for a, b in some]
            (HOME / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        parts = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
        about = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{parts}---\n"
        (HOME / name / "README.md").write_text(about)


def _talk(a: int, b: int) -> dict:
    answer = {"role": "assistant", "content": f"\\boxed{{{a + b}}}"}
    return {"messages": [{"role": "user", "content": f"What is {a} plus {b}?{SUFFIX}"}, answer]}


def _problem(a: int, b: int) -> dict:
    return {"question": f"What is {a} plus {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}


def lines_of(file: str) -> list[dict]:
    return [json.loads(line) for line in (HOME / file).read_text().splitlines()]


def main(python: str, model: str) -> None:
    """Serve `model`, run both recipes with the interpreter `python`, and print the loss and the reward of each step."""
    write_data()
    link = HOME / MODEL
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(Path(model).absolute())
    command = [sys.executable, "-m", "posttrain.cli", "serve-training", MODEL, "--port", "8123", "--output", "states"]
    quiet = os.environ | {"TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    about = quiet | {"TINKER_BASE_URL": "http://127.0.0.1:8123"}
    server = subprocess.Popen(command, cwd=HOME, env=quiet, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None and "until Ctrl-C" in server.stdout.readline()
        recipe(python, SUPERVISED, about, "max_steps=24", f"log_path={HOME / 'sl'}")
        state = lines_of("sl/checkpoints.jsonl")[-1]["state_path"]
        rates = "learning_rate=1e-4", "max_tokens=24", "max_steps=24", "save_every=4"
        recipe(python, REINFORCED, about, *rates, f"load_checkpoint_path={state}", f"log_path={HOME / 'rl'}")
    finally:
        server.terminate()
    print("loss", *(f"{line['train_mean_nll']:.2f}" for line in lines_of("sl/metrics.jsonl")))
    print("reward", *(f"{line['env/all/reward/total']:.2f}" for line in lines_of("rl/metrics.jsonl")))


def recipe(python: str, program: str, about: dict[str, str], *words: str) -> None:
    subprocess.run([python, "-c", program, MODEL, *words], cwd=HOME, env=about, input="resume\n", text=True, check=True)


if __name__ == "__main__":
    main(os.path.abspath(sys.argv[1]), sys.argv[2])
