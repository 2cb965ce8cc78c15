"""What training survives: posttrain and its peers under the same injected faults, judged by the same criteria.

    python benchmarks/faults.py [--peers transformers trl] [--peer-python PYTHON] [--groups 01 03] [--keep]

Every row is one or several runs in processes of their own: a tiny model, a fault, and a criterion that is written
beside the row below. Peers promise only some of it. A row that does not apply to a library is left out of its count.
Where the disk cannot be made small (mounting a tmpfs takes the rights for it), group 04 is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ["posttrain", "posttrain-sft", "posttrain-grpo", "transformers", "trl-sft", "trl-grpo"]
STEPS, SAVE = 6, 2
#: What Python raises out of the depths: no answer to a fault of the data or the arguments.
RAW = "KeyError IndexError AttributeError StopIteration AssertionError ZeroDivisionError UnboundLocalError".split()


# ---------------------------------------------------------------------------------------------------- in the child


def make(spec: dict[str, Any]) -> Any:
    """The trainer that `spec` describes."""
    from tests import tiny

    library, arguments, parts = spec["library"], dict(spec.get("arguments", {})), {}
    if library.startswith("posttrain"):
        from posttrain import core as package
    else:
        import transformers as package
    if library in ("posttrain", "transformers"):
        trainer_class, config_class = package.Trainer, package.TrainingArguments
    elif library == "posttrain-sft":
        from posttrain.sft import SFTConfig as config_class
        from posttrain.sft import SFTTrainer as trainer_class
    elif library == "trl-sft":
        from trl import SFTConfig as config_class
        from trl import SFTTrainer as trainer_class
    elif library == "posttrain-grpo":
        from posttrain.rl import GRPOConfig as config_class
        from posttrain.rl import GRPOTrainer as trainer_class
    else:
        from trl import GRPOConfig as config_class
        from trl import GRPOTrainer as trainer_class
    usual = dict(
        output_dir=spec["folder"], per_device_train_batch_size=3, gradient_accumulation_steps=2, max_steps=STEPS,
        save_steps=SAVE, save_strategy="steps", logging_steps=1, learning_rate=1e-2, use_cpu=True, report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    rows = spec.get("rows")
    if library.endswith(("sft", "grpo")):
        usual |= {"bf16": False, "gradient_checkpointing": False, "max_length": 32}
        words = " ".join(tiny.CORPUS).split()
        texts = [" ".join(words[i : i + 5 + i % 5]) for i in range(22)]
        rows = [{"text": text} for text in texts] if rows is None else rows
        parts["processing_class"] = tiny.tokenizer()
    else:
        rows = tiny.token_rows(22) if rows is None else rows
        collator = spec.get("collator", "pad")
        parts["data_collator"] = COLLATORS.get(collator) or package.DataCollatorForSeq2Seq(tiny.tokenizer())
    if library.endswith("grpo"):
        del usual["max_length"]
        usual |= {"num_generations": 3, "max_completion_length": 4, "per_device_train_batch_size": 3}
        rows = [{"prompt": row["text"]} for row in rows]
        parts["reward_funcs"] = REWARDS[spec.get("reward", "good")]
    if library.endswith("sft") and spec.get("chat_template"):
        parts["processing_class"].chat_template = spec["chat_template"]
    from datasets import Dataset

    if "eval_strategy" in arguments:
        parts["eval_dataset"] = Dataset.from_list(rows[: spec.get("eval_rows", 7)])

    model = spec.get("model") or tiny.causal_lm(arch="gpt2", resid_pdrop=0.1, embd_pdrop=0.1, **spec.get("size", {}))
    args = config_class(**usual | arguments)
    dataset = Dataset.from_list(rows) if rows else rows
    if spec.get("stream"):
        dataset = dataset.to_iterable_dataset()
    callbacks = [callback(package.TrainerCallback, fault) for fault in spec.get("faults", [])]
    if spec.get("early_stopping"):
        callbacks.append(package.EarlyStoppingCallback(early_stopping_patience=2))
    return trainer_class(model=model, args=args, train_dataset=dataset, callbacks=callbacks, **parts)


def pad(rows):
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {k: torch.tensor([row[k] + [v] * (longest - len(row[k])) for row in rows]) for k, v in fill.items()}


def random_pad(rows):
    import torch

    batch = pad(rows)
    batch["input_ids"] = torch.where(torch.rand(batch["input_ids"].shape) < 0.2, 4, batch["input_ids"])
    return batch


COLLATORS = {"pad": pad, "random": random_pad}
REWARDS = {
    "good": lambda completions, **_: [float(len(text)) for text in completions],
    "short": lambda completions, **_: [1.0],
    "nan": lambda completions, **_: [float("nan")] * len(completions),
    "text": lambda completions, **_: ["good"] * len(completions),
    "raises": lambda completions, **_: 1 / 0,
}


def callback(base: type, fault: dict[str, Any]) -> Any:
    """Does ``fault["what"]`` at ``fault["event"]`` of ``fault["step"]``, on the process of that rank or on all."""

    def hear(self, args, state, control, **kwargs):
        if state.global_step != fault["step"] or getattr(self, "done", False):
            return
        if fault.get("rank") not in (None, int(os.environ.get("RANK", 0))):
            return
        self.done = True
        what = fault["what"]
        if what == "raise":
            raise RuntimeError("injected")
        elif what == "hang":
            time.sleep(600)
        elif what == "stop":  # a time limit, a deadline: what a callback of the user's own asks for
            control.should_training_stop = True
        else:
            os.kill(os.getpid(), getattr(signal, what))
            time.sleep(0.05)

    return type("Fault", (base,), {fault["event"]: hear})()


def plain_log(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without what the clock says, and without the summary at the end, which each library defines its own
    way.
    """
    timing = re.compile(r"runtime|per_second|^perf/|seconds|flos|step_time")
    steps = [record for record in records if "train_loss" not in record]
    return [{k: repr(v) for k, v in sorted(record.items()) if not timing.search(k)} for record in steps]


def hashed(tree: Any) -> str:
    import torch

    digest = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            digest.update(repr(value).encode())

    add(tree)
    return digest.hexdigest()


def child(spec: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    phase = "construction"
    try:
        trainer = make(spec)
        if spec.get("nan_at"):
            spoil(trainer, spec["nan_at"], spec.get("value", "nan"))
        phase = "training"
        trainer.train(resume_from_checkpoint=spec.get("resume"))
        phase = "afterwards"
        state = trainer.state
        answer = {
            "step": state.global_step, "weights": hashed(trainer.model.state_dict()),
            "log": plain_log(state.log_history), "optimizer": hashed(trainer.optimizer.state_dict()["state"]),
            "finite": all(bool(torch.isfinite(value).all()) for value in trainer.model.state_dict().values()),
        }  # fmt: skip
    except Exception as error:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # what the other processes and the launcher make of it is the row
            raise
        answer = {"error": type(error).__name__, "message": str(error), "phase": phase}
    print("\nANSWER " + json.dumps(answer), flush=True)


def spoil(trainer: Any, step: int, value: str) -> None:
    """Make the loss of the `step`-th update NaN or infinite."""
    import torch

    compute, calls = trainer.compute_loss, [0]

    def compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None):
        calls[0] += 1
        found = compute(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        factor = float(value) if (calls[0] - 1) // 2 + 1 == step else 1.0
        loss = found[0] if return_outputs else found
        loss = loss * torch.tensor(factor)
        return (loss, found[1]) if return_outputs else loss

    trainer.compute_loss = compute_loss


# ---------------------------------------------------------------------------------------------------- in the parent


class Bench:
    """Runs children of one library, each in a folder below `root`."""

    def __init__(self, library: str, python: str, root: Path) -> None:
        self.library, self.python, self.root, self._number = library, python, root, 0
        self._straight: dict[str, dict] = {}

    def folder(self) -> Path:
        self._number += 1
        path = self.root / f"{self.library}-{self._number}"
        path.mkdir(parents=True)
        return path

    def start(self, folder: Path, launcher: tuple[str, ...] = (), **spec: Any) -> subprocess.Popen:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false",
        }
        paths = [str(ROOT), *(str(p) for p in sorted(ROOT.glob("packages/*/src")))]
        environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
        spec = {"library": self.library, "folder": str(folder)} | spec
        command = [self.python, *launcher, str(Path(__file__).resolve()), "--child", json.dumps(spec)]
        # A shell's background job ignores SIGINT, and would hand that down.
        restore = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=restore
        )

    def run(self, folder: Path, timeout: float = 600, **spec: Any) -> dict[str, Any]:
        """What the child answered, with its exit code and all that it printed."""
        process = self.start(folder, **spec)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            return {"code": None, "text": out + err, "error": "Timeout", "message": "", "phase": ""}
        return {"code": process.returncode, "text": out + err} | answer_in(out)

    def straight(self, **spec: Any) -> dict[str, Any]:
        key = json.dumps(spec, sort_keys=True, default=str)
        if key not in self._straight:
            self._straight[key] = self.run(self.folder(), **spec)
        return self._straight[key]


def answer_in(out: str) -> dict[str, Any]:
    lines = [line for line in out.splitlines() if line.startswith("ANSWER ")]
    return json.loads(lines[-1].removeprefix("ANSWER ")) if lines else {}


def same(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Empty where two runs led to the same; else the first thing that differs."""
    if "weights" not in one or "weights" not in other:
        failed = one if "weights" not in one else other
        return f"no result: {failed.get('error')}: {(failed.get('message') or failed['text'])[-160:]!r}"
    for name in ("step", "weights", "optimizer"):
        if one[name] != other[name]:
            return f"another {name}"
    return "" if one["log"] == other["log"] else "another log"


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


Judge = Callable[[Bench], str]  # "" where the criterion is met, else what was seen instead
ROWS: list[tuple[str, str, tuple[str, ...], Judge]] = []
BASIC, TRAINERS = ("posttrain", "transformers"), ("posttrain", "posttrain-sft", "transformers", "trl-sft")
SFT, GRPO = ("posttrain-sft", "trl-sft"), ("posttrain-grpo", "trl-grpo")


def row(group: str, name: str, libraries: tuple[str, ...] = TRAINERS) -> Callable[[Judge], Judge]:
    def add(judge: Judge) -> Judge:
        ROWS.append((group, name, libraries, judge))
        return judge

    return add


# ---- 01: a run cut after update 3 of 6 and gone on with ends bitwise as the straight one: weights, optimizer, log


def cut_and_resumed(bench: Bench, **spec: Any) -> str:
    folder = bench.folder()
    arguments = spec.pop("arguments", {})
    spec["arguments"] = {"save_steps": 1} | arguments
    bench.run(folder, **spec, faults=[{"event": "on_step_begin", "step": 3, "what": "SIGKILL"}])
    return same(bench.run(folder, **spec, resume=True), bench.straight(**spec))


for name, spec, libraries in (
    ("shuffled, accumulation, dropout", {}, TRAINERS),
    ("inside a logging interval", {"arguments": {"logging_steps": 4}}, TRAINERS),
    ("two workers", {"arguments": {"dataloader_num_workers": 2}}, TRAINERS),
    ("bf16, cosine", {"arguments": {"bf16": True, "lr_scheduler_type": "cosine"}}, TRAINERS),
    ("group_by_length", {"arguments": {"train_sampling_strategy": "group_by_length"}}, BASIC),
    ("random collator", {"collator": "random"}, BASIC),
    ("stream, second pass", {"stream": True, "arguments": {"max_steps": 7}}, BASIC),
    ("plateau, evaluation", {"arguments": {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps",
                                           "eval_steps": 1}}, BASIC),
    ("early stopping, best model", {"early_stopping": True, "arguments": {
        "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "learning_rate": 0.5}}, BASIC),
):  # fmt: skip
    row("01", name, libraries)(lambda bench, spec=spec: cut_and_resumed(bench, **dict(spec)))


# ---- 01, stopped by a callback: the same criterion; the run ends in peace, and `resume=True` goes on with it


def stopped_and_resumed(bench: Bench, *places: tuple[str, int], **spec: Any) -> str:
    folder = bench.folder()
    arguments = {"save_steps": 1} | spec.pop("arguments", {})
    for event, step in places:
        fault = {"event": event, "step": step, "what": "stop"}
        bench.run(folder, **spec, arguments=arguments, faults=[fault], resume=True if checkpoints(folder) else None)
        if not checkpoints(folder):
            return "no checkpoint"
        if (at := int(checkpoints(folder)[-1].name.split("-")[1])) not in (step, step + 1):
            return f"stopped at update {step} and the newest checkpoint is of update {at}"
    return same(
        bench.run(folder, **spec, arguments=arguments, resume=True), bench.straight(**spec, arguments=arguments)
    )


for name, places, spec in (
    ("at the end of an update", [("on_step_end", 3)], {}),
    ("inside an update, then between two", [("on_substep_end", 2), ("on_step_begin", 4)], {}),
    ("at a log, then at a save", [("on_log", 2), ("on_save", 4)], {}),
    ("at an evaluation", [("on_evaluate", 2)], {"arguments": {"eval_strategy": "steps", "eval_steps": 2}}),
    ("inside an epoch, saved by epochs", [("on_step_end", 3)], {"arguments": {"save_strategy": "epoch"}}),
):
    row("01", f"stopped by a callback {name}", TRAINERS if "evaluation" not in name else BASIC)(
        lambda bench, places=places, spec=spec: stopped_and_resumed(bench, *places, **dict(spec))
    )
row("01", "stopped by a callback inside an update", GRPO)(
    lambda bench: stopped_and_resumed(bench, ("on_substep_end", 2), ("on_step_end", 4))
)


# ---- 02: kill -9 and resume=True: no cleaning up by hand, at most save_steps lost


def killed(bench: Bench, inside_a_save: bool) -> str:
    draw = random.Random(1)
    size = {"size": {"n_embd": 256, "n_layer": 4}} if inside_a_save else {}  # a save takes long enough to be hit
    folder = bench.folder()
    for _trial in range(3):
        process = bench.start(folder, **size, resume=True if checkpoints(folder) else None, arguments={
            "max_steps": 400, "save_steps": 1 if inside_a_save else SAVE, "save_total_limit": 3})  # fmt: skip
        known = set(checkpoints(folder))
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None and len(set(checkpoints(folder)) - known) < 3:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.15))
        process.kill()
        out, err = process.communicate()
        if process.returncode != -signal.SIGKILL:
            return f"could not go on: {(out + err)[-160:]!r}"
    newest = int(checkpoints(folder)[-1].name.split("-")[1])
    done = bench.run(folder, **size, resume=True, arguments={"max_steps": newest + 2, "save_steps": 1})
    return "" if done.get("step") == newest + 2 else f"could not go on: {done.get('message') or done['text'][-160:]!r}"


row("02", "killed at random moments, three times")(lambda bench: killed(bench, False))
row("02", "killed inside saves, three times")(lambda bench: killed(bench, True))


# ---- 03: the newest checkpoint damaged: the file is named, and the run goes on from the one before to the same end


def biggest(folder: Path, weights: bool) -> Path:
    files = [path for path in folder.iterdir() if ("model" in path.name) == weights and path.suffix in (
        ".safetensors", ".pt", ".pth", ".bin")]  # fmt: skip
    return max(files, key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def named(folder: Path, pattern: str) -> Path:
    return next(path for path in sorted(folder.iterdir()) if re.search(pattern, path.name))


DAMAGES = {
    "a bit of the weights": lambda folder: (flip(file := biggest(folder, True)), file)[1],
    "a bit of the optimizer": lambda folder: (flip(file := biggest(folder, False)), file)[1],
    "weights cut": lambda folder: ((file := biggest(folder, True)).write_bytes(file.read_bytes()[:1000]), file)[1],
    "weights gone": lambda folder: ((file := biggest(folder, True)).unlink(), file)[1],
    "optimizer gone": lambda folder: ((file := biggest(folder, False)).unlink(), file)[1],
    "optimizer empty": lambda folder: ((file := biggest(folder, False)).write_bytes(b""), file)[1],
    "random state gone": lambda folder: ((file := named(folder, r"^rank-0\.json|^rng_state")).unlink(), file)[1],
    "state cut": lambda folder: ((file := folder / "trainer_state.json").write_text(file.read_text()[:300]), file)[1],
}


def damaged(bench: Bench, damage: Callable[[Path], Path]) -> str:
    folder = bench.folder()
    bench.run(folder, faults=[{"event": "on_step_begin", "step": 5, "what": "SIGKILL"}])
    file = damage(folder / "checkpoint-4")
    done = bench.run(folder, resume=True)
    problem = same(done, bench.straight())
    return problem or ("" if file.name in done["text"] else f"{file.name} was not named")


for name, damage in DAMAGES.items():
    row("03", name)(lambda bench, damage=damage: damaged(bench, damage))


# ---- 04: a disk that fills up inside a save: said so, training goes on to its end, the older checkpoint is whole


@contextlib.contextmanager
def small_disk(folder: Path, kib: int):
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)], capture_output=True)
    if made.returncode:
        raise NotImplementedError("a tmpfs cannot be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def full(bench: Bench, share: float) -> str:
    measured = bench.folder()
    bench.run(measured, arguments={"max_steps": SAVE})
    each = sum(path.stat().st_size for path in checkpoints(measured)[-1].rglob("*") if path.is_file()) // 1024
    folder = bench.folder()
    with small_disk(folder, int(each * (1 + share)) + 400):
        done = bench.run(folder)
        if done.get("step") != STEPS and "Training is over" not in done.get("message", ""):  # its last save fails too
            return f"training ended: {done.get('message') or done['text'][-160:]!r}"
        if "full" not in done["text"] and "No space" not in done["text"]:
            return "nobody said that the disk is full"
        again = bench.run(folder, resume=True, arguments={"save_strategy": "no"})
        return (
            "" if again.get("step") == STEPS else f"could not go on: {again.get('message') or again['text'][-160:]!r}"
        )


for share in (0.1, 0.4, 0.8):
    row("04", f"room for {1 + share:.1f} checkpoints")(lambda bench, share=share: full(bench, share))


# ---- 05: SIGTERM, SIGINT: the update is finished, a checkpoint written, exit 143 or 130; the resumed run is exact


def signalled(bench: Bench, name: str, event: str, code: int, **arguments: Any) -> str:
    folder, arguments = bench.folder(), {"save_steps": 100} | arguments
    done = bench.run(folder, arguments=arguments, faults=[{"event": event, "step": 3, "what": name}])
    if not checkpoints(folder):
        return f"no checkpoint (exit code {done['code']})"
    if done["code"] not in (code, code - 256):
        return f"exit code {done['code']} and not {code}"
    return same(bench.run(folder, arguments=arguments, resume=True), bench.straight(arguments=arguments))


row("05", "SIGTERM between updates")(lambda bench: signalled(bench, "SIGTERM", "on_step_begin", 143))
row("05", "SIGTERM inside an update")(lambda bench: signalled(bench, "SIGTERM", "on_substep_end", 143))
row("05", "SIGINT inside an update")(lambda bench: signalled(bench, "SIGINT", "on_substep_end", 130))
row("05", "SIGTERM inside an evaluation", BASIC)(
    lambda bench: signalled(bench, "SIGTERM", "on_prediction_step", 143, eval_strategy="steps", eval_steps=3)
)


# ---- 06: a loss that is not finite: weights stay finite, it is said, or the run stops with an error that says it


def nonfinite(bench: Bench, value: str, **arguments: Any) -> str:
    done = bench.run(bench.folder(), nan_at=3, value=value, arguments=arguments)
    if "error" in done:
        return "" if done["error"] == "NonFiniteError" else f"{done['error']}: {done['message'][-120:]!r}"
    if not done.get("finite"):
        return "weights that are not finite, and no error"
    return "" if re.search("finite|NaN", done["text"]) else "nobody said it"


row("06", "NaN")(lambda bench: nonfinite(bench, "nan"))
row("06", "infinite")(lambda bench: nonfinite(bench, "inf"))
row("06", "NaN under bf16")(lambda bench: nonfinite(bench, "nan", bf16=True))
row("06", "NaN without clipping")(lambda bench: nonfinite(bench, "nan", max_grad_norm=0.0))


# ---- 07: data that cannot be trained on is refused by name, or dropped with a count; no raw error, nothing silent


def bad_data(bench: Bench, rows: list[Any], names: str, **spec: Any) -> str:
    done = bench.run(bench.folder(), rows=rows, **spec)
    if "error" in done:
        if done["error"] in RAW or not done["message"].strip():
            return f"raw {done['error']}: {done['message'][:100]!r}"
        return "" if re.search(names, done["message"]) else f"does not say {names!r}: {done['message'][:140]!r}"
    return "" if re.search(r"dropped|skipped", done["text"]) else f"{done.get('step')} updates and not a word"


GOOD, TEXT = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [5, 6, 7]}, {"text": "one two three"}
for name, rows, names, libraries in (
    ("no rows", [], "train|dataset|rows", TRAINERS),
    ("null labels", [GOOD, GOOD | {"labels": None}], "labels", BASIC),
    ("unequal lengths", [GOOD, GOOD | {"labels": [5]}], "labels", BASIC),
    ("every label -100", [GOOD | {"labels": [-100] * 3}] * 4, "label|learn", BASIC),
    ("an id out of range", [GOOD, GOOD | {"input_ids": [5, 999, 7]}], "999|input_ids", BASIC),
    ("null text", [TEXT, {"text": None}], "text", SFT),
    ("empty text", [TEXT, {"text": ""}], "text|empty", SFT),
    ("column missing", [{"txt": "a"}] * 4, "txt|text", SFT),
    ("no messages", [{"messages": []}] * 4, "messages", SFT),
):
    # Of labels too few a collator of the user's own may make the rest; one that only pads hides that they are too few.
    how = {"collator": "the library's own"} if name == "unequal lengths" else {}
    row("07", name, libraries)(lambda bench, rows=rows, names=names, how=how: bad_data(bench, rows, names, **how))


row("07", "a prompt that is a number", GRPO)(
    lambda bench: bad_data(bench, [TEXT] * 3 + [{"text": None}], r"prompt is null.*rows? 3")
)
row("07", "a row cut to nothing", SFT)(
    lambda bench: bad_data(bench, [{"prompt": "one " * 90, "completion": " two"}] * 4, "max_length")
)


# ---- 08: reward functions that fail are named with what they returned


def bad_reward(bench: Bench, kind: str, says: str) -> str:
    done = bench.run(bench.folder(), reward=kind, arguments={"save_strategy": "no", "max_steps": 2})
    text = done.get("message", "") + done["text"]
    if "error" in done and done["error"] in RAW and not re.search(says, text):
        return f"raw {done['error']}: {done['message'][:100]!r}"
    return "" if re.search(says, text) else f"not said: {(done.get('message') or str(done.get('step')))[:140]!r}"


row("08", "too few rewards", GRPO)(lambda bench: bad_reward(bench, "short", r"(?s)returned.*\b1\b|\b1\b.*rewards"))
row("08", "NaN rewards", GRPO)(lambda bench: bad_reward(bench, "nan", "NaN|returned nan|not finite"))
row("08", "text for a reward", GRPO)(lambda bench: bad_reward(bench, "text", "'good'|returned"))
row("08", "a function that raises", GRPO)(lambda bench: bad_reward(bench, "raises", "ZeroDivisionError|division"))


# ---- 09: nothing in a file is run, nothing outside of a folder is read


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def hostile(bench: Bench, plant: Callable[[Path, bytes], None]) -> str:
    folder = bench.folder()
    mark = folder / "was-run"
    bench.run(folder, faults=[{"event": "on_step_begin", "step": 3, "what": "SIGKILL"}])
    plant(folder / "checkpoint-2", pickle.dumps(Evil(mark)))
    bench.run(folder, resume=str(folder / "checkpoint-2"))
    return "code was run" if mark.exists() else ""


def over_every_file(folder: Path, content: bytes) -> None:
    for path in folder.iterdir():
        if path.is_file() and path.suffix in (".pt", ".pth", ".bin", ".safetensors"):
            path.write_bytes(content)


def beside(folder: Path, content: bytes) -> None:
    for name in (
        "pytorch_model.bin",
        "optimizer.pt",
        "scheduler.pt",
        "scaler.pt",
        "rng_state.pth",
        "training_args.bin",
    ):
        (folder / name).write_bytes(content)


def traversal(bench: Bench) -> str:
    folder = bench.folder()
    code = (
        "import json, sys; from pathlib import Path; from tests import tiny; f = Path(sys.argv[1]); o = f / 'outside'\n"
        "tiny.causal_lm(arch='gpt2').save_pretrained(o); tiny.tokenizer().save_pretrained(o); m = f / 'model'\n"
        "tiny.tokenizer().save_pretrained(m); (m / 'config.json').write_text((o / 'config.json').read_text())\n"
        "names = list(tiny.causal_lm(arch='gpt2').state_dict())\n"
        "index = {'metadata': {'total_size': 1}, 'weight_map': dict.fromkeys(names, '../outside/model.safetensors')}\n"
        "(m / 'model.safetensors.index.json').write_text(json.dumps(index))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([bench.python, "-c", code, str(folder)], env=environment, check=True, capture_output=True)
    done = bench.run(folder / "run", model=str(folder / "model"))
    return "a file outside of the folder was read" if "error" not in done else ""


def template(bench: Bench) -> str:
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4
    done = bench.run(bench.folder(), rows=rows, chat_template="{{ ''.__class__.__mro__[1].__subclasses__() }}")
    return "" if "error" in done else "attributes were reached"


row("09", "pickles in the place of tensors")(lambda bench: hostile(bench, over_every_file))
row("09", "pickles beside the files")(lambda bench: hostile(bench, beside))
row("09", "an index that leads out of the folder", SFT)(traversal)
row("09", "a chat template that reaches for attributes", SFT)(template)


# ---- 10: arguments that cannot work are refused when the config is made, by name


def bad_argument(bench: Bench, name: str, value: Any) -> str:
    more = {} if name == "max_steps" else {"max_steps": 1}
    more |= {"eval_strategy": "steps"} if name == "metric_for_best_model" else {}
    done = bench.run(bench.folder(), arguments={name: value, **more})
    if "error" not in done:
        return "accepted"
    if done["error"] in RAW or name not in done["message"]:
        return f"{done['error']}: {done['message'][:120]!r}"
    return "" if done["phase"] == "construction" else "only in training"


for name, value in (
    ("per_device_train_batch_size", -4), ("gradient_accumulation_steps", 0), ("gradient_accumulation_steps", -2),
    ("max_steps", 0), ("label_smoothing_factor", 2.0), ("save_steps", 1.5), ("learning_rate", -1.0),
    ("warmup_steps", -5), ("optim_args", "betta=3"), ("save_strategy", "stpes"), ("fp16", True),
    ("num_train_epochs", -1),
):  # fmt: skip
    row("10", f"{name}={value!r}", BASIC)(lambda bench, name=name, value=value: bad_argument(bench, name, value))
for name, value in (
    ("learning_rate", 1e400), ("max_steps", 10**30), ("warmup_steps", 1.5), ("logging_steps", float("inf")),
    ("torch_compile_mode", "max-autotun"), ("label_names", [5]),
    ("gradient_checkpointing_kwargs", {"use_reentrnt": True}), ("resume_from_checkpoint", "/no/checkpoint-3"),
    ("report_to", "tensorbord"), ("output_dir", "/proc/nothing/here"), ("metric_for_best_model", "accuracy"),
):  # fmt: skip
    row("10", f"{name}={value!r}", BASIC)(lambda bench, name=name, value=value: bad_argument(bench, name, value))
for name, value in (
    ("num_generations", 0), ("max_completion_length", None), ("include_for_metrics", ["inputs"]),
    ("generation_kwargs", {"zz": 1}), ("reward_weights", ["a"]), ("loss_type", "gropo"), ("temperature", 0.0),
    ("beta", -1.0),
):  # fmt: skip
    row("10", f"{name}={value!r}", GRPO)(lambda bench, name=name, value=value: bad_argument(bench, name, value))
row("10", "eos_token='<nope>'", SFT)(lambda bench: bad_argument(bench, "eos_token", "<nope>"))
row("10", "dataset_kwargs={'skip_prepare': True}", SFT)(
    lambda bench: bad_argument(bench, "dataset_kwargs", {"skip_prepare": True})
)
row("10", "max_length=-3", SFT)(lambda bench: bad_argument(bench, "max_length", -3))
row("10", "packing_strategy='bdf'", SFT)(lambda bench: bad_argument(bench, "packing_strategy", "bdf"))


# ---- 11: two processes lead to the metrics of one; where one dies, the job ends


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def evaluated(bench: Bench) -> str:
    arguments = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2, "save_strategy": "no", "learning_rate": 0.0}
    alone = bench.run(bench.folder(), arguments=arguments)
    process = bench.start(bench.folder(), launcher=TORCHRUN, arguments=arguments)
    out, err = process.communicate(timeout=300)
    pair = answer_in(out)
    if "log" not in pair or "log" not in alone:
        return f"no result: {(out + err)[-160:]!r}"
    one, two = (next(float(r["eval_loss"]) for r in done["log"] if "eval_loss" in r) for done in (alone, pair))
    return "" if abs(one - two) <= 1e-5 * abs(one) else f"eval_loss {two:.6f}, and {one:.6f} in one process"


def dies(bench: Bench, what: str, seconds: float, says: str = "") -> str:
    fault = {"event": "on_step_begin", "step": 2, "what": what, "rank": 1}
    process = bench.start(bench.folder(), launcher=TORCHRUN, faults=[fault], arguments={"ddp_timeout": 30})
    started = time.monotonic()
    try:
        _out, err = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate()
        return "still there after 240 s"
    # From the start of the program, which is up to ten seconds before the fault.
    spent = time.monotonic() - started - 10
    if process.returncode == 0:
        return "exit code 0"
    if spent > seconds:
        return f"ended after {spent:.0f} s"
    return "" if says in err[-4000:] else f"{says!r} is not in the last lines of what it said"


row("11", "evaluation with an uneven last batch", BASIC)(evaluated)
row("11", "one process is killed", BASIC)(lambda bench: dies(bench, "SIGKILL", 30, "SIGKILL"))
row("11", "one process raises", BASIC)(lambda bench: dies(bench, "raise", 30, "injected"))
row("11", "one process hangs", BASIC)(lambda bench: dies(bench, "hang", 60))


# ---- 12: 600 updates with logging, evaluation and saving: memory, threads and files do not grow


def soak(bench: Bench) -> str:
    folder = bench.folder()
    process = bench.start(folder, arguments={
        "max_steps": 600, "save_steps": 50, "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 50,
        "logging_steps": 5})  # fmt: skip
    seen: list[tuple[float, int, int]] = []
    status = Path(f"/proc/{process.pid}")
    talk = ThreadPoolExecutor(1).submit(process.communicate)  # what is printed must be read, or it waits
    while not talk.done():
        with contextlib.suppress(OSError, TypeError):  # it has ended, and is no more than an entry
            text = (status / "status").read_text()
            newest = checkpoints(folder)[-1:] or [Path("checkpoint-0")]
            step = int(newest[0].name.split("-")[1])
            memory, threads = (int(re.search(rf"{name}:\s+(\d+)", text)[1]) for name in ("VmRSS", "Threads"))
            if step >= 200:
                seen.append((memory / 1024, threads, len(os.listdir(status / "fd"))))
        time.sleep(0.25)
    out, err = talk.result()
    if answer_in(out).get("step") != 600:
        return f"no result: {(out + err)[-160:]!r}"
    if len(seen) < 8:
        return ""  # too fast to be looked at
    quarter = max(len(seen) // 4, 1)
    first, last = seen[:quarter], seen[-quarter:]
    growth = min(m for m, _, _ in last) - min(m for m, _, _ in first)
    if growth > 10 * 0.4:  # 10 MiB in a thousand updates
        return f"+{growth:.1f} MiB from update 200 to 600"
    extra = [min(s[i] for s in last) - max(s[i] for s in first) for i in (1, 2)]
    return "" if max(extra) <= 0 else f"{extra[0]} more threads, {extra[1]} more files"


row("12", "600 updates")(soak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="*", default=["transformers"], choices=["transformers", "trl"])
    parser.add_argument("--peer-python", default=sys.executable, help="The interpreter that has the peers.")
    parser.add_argument("--groups", nargs="*", default=None, help="Such as 01 05; default: all.")
    parser.add_argument(
        "--only", nargs="*", default=None, choices=LIBRARIES, help="Libraries; default: all that there are."
    )
    parser.add_argument("--keep", action="store_true", help="Keep the folders of the runs.")
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        return child(json.loads(args.child))
    peers = {"transformers": ["transformers"], "trl": ["trl-sft", "trl-grpo"]}
    libraries = [*LIBRARIES[:3], *(library for peer in args.peers for library in peers[peer])]
    libraries = [library for library in libraries if args.only is None or library in args.only]
    root = Path(tempfile.mkdtemp(prefix="faults-"))
    benches = {name: Bench(name, sys.executable if name.startswith("posttrain") else args.peer_python, root)
               for name in libraries}  # fmt: skip
    table: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    try:
        for group, name, wanted, judge in ROWS:
            if args.groups is not None and group not in args.groups:
                continue
            for library in [library for library in libraries if library in wanted]:
                try:
                    verdict = judge(benches[library])
                except NotImplementedError as error:
                    print(f"{group} {library:15s} {name}: left out, {error}", flush=True)
                    continue
                except Exception as error:
                    verdict = f"the row itself failed: {type(error).__name__}: {error}"
                table[group][library][name] = verdict
                print(f"{group} {library:15s} {name}: {'passed' if not verdict else 'FAILED, ' + verdict}", flush=True)
    finally:
        if not args.keep:
            shutil.rmtree(root, ignore_errors=True)
    from results import RESULTS, write

    known = json.loads(RESULTS.joinpath("faults.json").read_text()) if RESULTS.joinpath("faults.json").exists() else {}
    current = {(group, library, name) for group, name, wanted, _ in ROWS for library in wanted}
    for group, results in known.get("table", {}).items():  # the table is long: its parts may be run one by one
        for library, rows in results.items():
            kept = {name: verdict for name, verdict in rows.items() if (group, library, name) in current}
            table[group][library] = kept | table[group][library]
    print("\n| group | " + " | ".join(LIBRARIES) + " |\n|---|" + "---|" * len(LIBRARIES))
    for group, results in sorted(table.items()):
        cells = [results.get(library) for library in LIBRARIES]
        shown = ["" if not cell else f"{sum(not v for v in cell.values())}/{len(cell)}" for cell in cells]
        print(f"| {group} | " + " | ".join(shown) + " |")
    write("faults", {"table": {group: table[group] for group in sorted(table)}})


if __name__ == "__main__":
    main()
