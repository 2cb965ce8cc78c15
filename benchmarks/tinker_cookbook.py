"""The basics of tinker-cookbook against `posttrain serve-training`: sl_basic, then rl_basic from what that saved.

    python3 -m venv env && env/bin/pip install "tinker-cookbook[math-rl]"
    python benchmarks/tinker_cookbook.py env/bin/python
    python benchmarks/tinker_cookbook.py env/bin/python --seed 1
    python benchmarks/tinker_cookbook.py env/bin/python --model MODEL_FOLDER

The recipes are unchanged and find the server by TINKER_BASE_URL. Their table of models has none that a laptop trains,
and their data is on the Hub: in a folder of their own, the name of a model of the table leads to the model here, and
those of their datasets to sums of two numbers, in the same columns. Without a folder the model is a new one of 0.1
million parameters, which learns sums up to 3 and 3 from demonstrations of which two in five have any answer, and then
by reinforcement to give the right one. With a folder it is sums below 60, right ones, in smaller batches and fewer
steps. A seed changes the first weights of the new model, the rows and their order; the matrices of LoRA differ anyhow.
What was logged goes to `out/tinker_cookbook/SEED`; an interrupted run goes on. It fails where the loss does not fall or
the reward does not rise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

from posttrain.core import testing

MODEL, HOME, PORT = "Qwen/Qwen3-8B-Base", Path("out/tinker_cookbook").absolute(), "8123"
SUFFIX = " Write your answer in \\boxed{} format."  # what the recipe of reinforcement puts behind each problem
SUPERVISED = """
import sys
from tinker_cookbook.recipes import sl_basic
from tinker_cookbook.recipes.chat_sl.chat_datasets import NoRobotsBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig
common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=sys.argv[1], renderer_name="role_colon", max_length=256, batch_size=16,
    train_on_what="all_assistant_messages",
)
builder = NoRobotsBuilder(common_config=common)
blueprint = sl_basic.build_config_blueprint(sys.argv[1]).apply({"dataset_builder": builder})
blueprint.make_from_argv(sys.argv[4:])
sl_basic.main(blueprint.make())
"""
REINFORCED = """
import sys
from tinker_cookbook.recipes import rl_basic
from tinker_cookbook.recipes.math_rl.math_env import Gsm8kDatasetBuilder
builder = Gsm8kDatasetBuilder(
    model_name_for_tokenizer=sys.argv[1], renderer_name="role_colon", batch_size=int(sys.argv[2]), group_size=8,
    convo_prefix=None, seed=int(sys.argv[3]),
)
blueprint = rl_basic.build_config_blueprint(sys.argv[1]).apply({"dataset_builder": builder})
blueprint.make_from_argv(sys.argv[4:])
rl_basic.main(blueprint.make())
"""
#: Words of the supervised recipe, those of the other, and its problems a step, for the new model and for a given one.
NEW = (
    "num_epochs=3 max_steps=700 learning_rate=6e-3 lora_rank=64 eval_every=350",
    "max_steps=40 learning_rate=6e-4 save_every=5",
    8,
)
GIVEN = ("max_steps=24", "max_steps=24 learning_rate=1e-4 save_every=4", 4)


def write_data(home: Path, seed: int, greatest: int, wrong: float) -> None:
    """Sums of numbers up to `greatest`, under the names of the datasets that the recipes load; a share `wrong` of the
    demonstrations has an answer drawn from all.
    """
    choose = random.Random(seed)
    sums = [(choose.randint(1, greatest), choose.randint(1, greatest)) for _ in range(4000)]
    told = [choose.randint(2, 2 * greatest) if choose.random() < wrong else a + b for a, b in sums]
    problems = [{"question": f"What is {a} plus {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in sums]
    talks = [
        {
            "messages": [
                {"role": "user", "content": row["question"] + SUFFIX},
                {"role": "assistant", "content": f"\\boxed{{{answer}}}"},
            ]
        }
        for row, answer in zip(problems, told, strict=True)
    ]
    for name, config, rows in (("HuggingFaceH4/no_robots", "default", talks), ("openai/gsm8k", "main", problems)):
        (home / name).mkdir(parents=True, exist_ok=True)
        for split, some in (("train", rows), ("test", rows[:32])):
            (home / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
        (home / name / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")


def put_model(home: Path, seed: int, folder: str | None) -> None:
    """Let the name in the table lead to the model at `folder`, or to a new one."""
    place = home / MODEL
    place.parent.mkdir(parents=True, exist_ok=True)
    if folder is None:
        size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256}
        testing.causal_lm("llama", seed, **size).save_pretrained(place)
        testing.tokenizer().save_pretrained(place)
    elif not place.exists():
        place.symlink_to(Path(folder).absolute())


def lines_of(file: Path) -> list[dict]:
    found = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in found.splitlines()]


def main(python: str, folder: str | None = None, seed: int = 0) -> None:
    """Serve the model, run both recipes with the interpreter `python`, and print how loss and reward went."""
    supervised, reinforced, problems = NEW if folder is None else GIVEN
    home = HOME / str(seed)
    write_data(home, seed, *((3, 0.4) if folder is None else (59, 0.0)))
    put_model(home, seed, folder)
    quiet = {"TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    about = os.environ | quiet | {"HF_DATASETS_CACHE": str(home / "cache"), "OMP_WAIT_POLICY": "passive"}
    about["TINKER_BASE_URL"] = f"http://127.0.0.1:{PORT}"
    command = [sys.executable, "-m", "posttrain.cli", "serve-training", MODEL, "--port", PORT, "--output", "states"]
    server = subprocess.Popen(command, cwd=home, env=about, stdout=subprocess.PIPE, text=True)

    def recipe(program: str, *words: str) -> None:
        whole = [python, "-c", program, MODEL, str(problems), str(seed), *words]
        subprocess.run(whole, cwd=home, env=about, input="resume\n", text=True, check=True)

    try:
        assert server.stdout is not None and "until Ctrl-C" in server.stdout.readline()
        if "final" not in [line["name"] for line in lines_of(home / "sl/checkpoints.jsonl")]:
            recipe(SUPERVISED, *supervised.split(), f"log_path={home / 'sl'}")
        state = lines_of(home / "sl/checkpoints.jsonl")[-1]["state_path"]
        more = "max_tokens=24", f"load_checkpoint_path={state}", f"log_path={home / 'rl'}"
        recipe(REINFORCED, *reinforced.split(), *more)
    finally:
        server.terminate()
    missed = []
    for name, file, key, sign in (
        ("loss", "sl/metrics.jsonl", "train_mean_nll", -1),
        ("reward", "rl/metrics.jsonl", "env/all/reward/total", 1),
    ):
        values = [line[key] for line in lines_of(home / file)]
        first, last = statistics.mean(values[:10]), statistics.mean(values[-10:])
        print(f"{name}: {first:.3f} in the first 10 of {len(values)} steps, {last:.3f} in the last 10")
        missed += [f"the {name} did not {'rise' if sign > 0 else 'fall'}"] if sign * (last - first) <= 0 else []
    if missed:
        raise SystemExit(" and ".join(missed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("python", type=os.path.abspath)
    parser.add_argument("--model")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    main(given.python, given.model, given.seed)
