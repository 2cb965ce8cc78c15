"""Build the five distributions into dist/, install them from there alone, and use them outside of the checkout.

    python .ci/check_dist.py [--keep FOLDER]

Each sdist is built first and its wheel from it. The fresh environment sees the dependencies that are installed here,
but none of our packages: pip takes those from dist/ without an index. Each trainer makes one optimizer step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [*sorted((ROOT / "packages").iterdir()), ROOT]
CHECK = """
import importlib.metadata as metadata, pathlib, sys
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification
from transformers import T5Config, T5ForConditionalGeneration
import posttrain.core
from posttrain.cli.tools.new import recipes
from posttrain.rl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer
from posttrain.seq2seq import Seq2SeqConfig, Seq2SeqTrainer
from posttrain.sft import SFTConfig, SFTTrainer

checkout, version = sys.argv[1:]
inside = [path for path in sys.path if path and pathlib.Path(path).resolve().is_relative_to(checkout)
          and "site-packages" not in path]
assert not inside, inside
assert not pathlib.Path(posttrain.core.__file__).is_relative_to(pathlib.Path(checkout) / "packages")
for name in ("posttrain-all", "posttrain-core", "posttrain-sft", "posttrain-rl", "posttrain-seq2seq"):
    assert metadata.version(name) == version, (name, metadata.version(name))
assert len(recipes()) >= 14

words = {w: i for i, w in enumerate(["<pad>", "</s>", "<unk>", *"abcdefgh"])}
raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
size = dict(vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, max_position_embeddings=64, pad_token_id=0, eos_token_id=1)
lm = lambda: Qwen3ForCausalLM(Qwen3Config(**size))
common = dict(max_steps=1, per_device_train_batch_size=4, logging_steps=1, report_to="none", use_cpu=True,
              gradient_checkpointing=False)
rows = lambda **columns: Dataset.from_list([columns] * 8)
pairs = rows(prompt="a b", chosen=" c d", rejected=" e f")
t5 = T5ForConditionalGeneration(T5Config(vocab_size=len(words), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
                                         decoder_start_token_id=0, pad_token_id=0, eos_token_id=1))
trainers = [
    SFTTrainer(lm(), SFTConfig("sft", **common), train_dataset=rows(text="a b c"), processing_class=tokenizer),
    DPOTrainer(lm(), None, DPOConfig("dpo", **common), train_dataset=pairs, processing_class=tokenizer),
    RewardTrainer(Qwen3ForSequenceClassification(Qwen3Config(num_labels=1, **size)), RewardConfig("reward", **common),
                  train_dataset=pairs, processing_class=tokenizer),
    GRPOTrainer(lm(), lambda completions: [float(len(c)) for c in completions],
                GRPOConfig("grpo", num_generations=2, max_completion_length=4, **common), rows(prompt="a b"),
                processing_class=tokenizer),
    Seq2SeqTrainer(t5, Seq2SeqConfig("seq2seq", **{k: v for k, v in common.items()}), processing_class=tokenizer,
                   train_dataset=rows(input_ids=[3, 4, 1], attention_mask=[1, 1, 1], labels=[4, 3, 1])),
]
for trainer in trainers:
    trainer.train()
    trainer.save_model()
    assert trainer.state.global_step == 1 and list(pathlib.Path(trainer.args.output_dir).glob("*.safetensors"))
    print(type(trainer).__name__, "trains")
"""


def run(*words: object, **options: object) -> str:
    done = subprocess.run([str(word) for word in words], text=True, capture_output=True, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))[:300]} failed:\n{done.stdout[-3000:]}{done.stderr[-5000:]}")
    return done.stdout


def build(folder: Path) -> None:
    for source in SOURCES:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source)
    made = sorted(path.name for path in folder.iterdir())
    if len(made) != 2 * len(SOURCES):
        raise SystemExit(f"{len(made)} files were built, not {2 * len(SOURCES)}: {made}")
    print("\n".join(made), flush=True)


def environment(home: Path) -> Path:
    """A fresh environment that sees the dependencies installed here; its Python."""
    venv.create(home, with_pip=True, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    # A path that is added by a .pth file is not searched for further .pth files: editable installs stay outside.
    seen = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(seen) + "\n", encoding="utf-8")
    return home / "bin" / "python"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the distributions go; else they are removed")
    keep = parser.parse_args().keep
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as place:
        dist = keep or Path(place) / "dist"
        dist.mkdir(parents=True, exist_ok=True)
        build(dist)
        python, away = environment(Path(place) / "venv"), Path(place) / "away"
        away.mkdir()
        names = [f"posttrain-{part.name}=={version}" for part in SOURCES[:-1]]
        options = ["--no-index", "--no-deps", "--force-reinstall", "--quiet", "--disable-pip-version-check"]
        run(
            python,
            "-m",
            "pip",
            "install",
            *options,
            "--find-links",
            dist,
            *names,
            f"posttrain-all=={version}",
            env=clean,
        )
        found = run(python.parent / "posttrain", "--version", cwd=away, env=clean).strip()
        if found != f"posttrain {version}":
            raise SystemExit(f"posttrain --version says {found!r}, not {version}")
        print(found)
        print(run(python, "-c", CHECK, ROOT, version, cwd=away, env=clean | {"CUDA_VISIBLE_DEVICES": ""}).strip())


if __name__ == "__main__":
    main()
