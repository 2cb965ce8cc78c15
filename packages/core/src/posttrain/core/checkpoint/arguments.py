"""The arguments of saving and resuming."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.core.checkpoint.remote import Remote, is_url, working_folder
from posttrain.core.checkpoint.store import Store
from posttrain.core.config import opt, value_of
from posttrain.core.errors import CheckpointError


@dataclass
class CheckpointArguments:
    """The part of `TrainingArguments` that is about checkpoints."""

    save_strategy: str = opt(
        "steps",
        "When to save: never, every save_steps optimizer steps, after each epoch, or when metric_for_best_model "
        "improved.",
        choices=("no", "steps", "epoch", "best"),
    )
    save_steps: float | str = opt(
        500,
        "Optimizer steps between checkpoints; below 1, a share of all steps; or such as 0.5ep (epochs), 10Mtok "
        "(tokens) or 30min. 0: only the last step is saved.",
        above=0,
        needs="save_strategy=steps",
    )
    save_total_limit: int | None = opt(
        None,
        "How many checkpoints to keep. The oldest go first, never the newest or the best. 0 keeps all, and so does "
        "None, but for save_strategy='best', where it keeps one.",
        min=0,
    )
    save_top_k: int | None = opt(
        None,
        "Keep the checkpoints of this many best evaluations by metric_for_best_model, and the newest. Others are "
        "deleted unless save_total_limit keeps them.",
        min=1,
    )
    save_only_model: bool = opt(
        False, "Save no optimizer, schedule or random state: smaller checkpoints, from which no run resumes exactly."
    )
    max_shard_size: int | str | None = opt(
        None,
        "Largest file of saved weights, in bytes or such as 5GB; None: 50GB. Of a sharded model that needs several "
        "files each process writes some.",
    )
    check_saved_model: bool | None = opt(
        None,
        "Read the model that save_model wrote back with from_pretrained, and compare its weights, and logits of a few "
        "tokens, with the trained model's: needs host memory for a copy. None: where that memory is free and no "
        "model is sharded, the weights of the first checkpoint too, and a difference is a warning instead of an error.",
        flag=True,
    )
    remote_dir: str | None = opt(
        None,
        "Copy checkpoints, log and final model to this URL (s3://, gs://, any of fsspec), and download missing "
        "checkpoints from it. A URL as output_dir is used for this, with a local folder below trainer_output.",
    )
    save_async: bool = opt(
        False,
        "Write checkpoints in the background: training waits only while the state is copied to host memory, which "
        "keeps a buffer of a checkpoint's size.",
    )
    save_on_each_node: bool = opt(
        False, "Write the checkpoint once on every node, for nodes that do not share a file system."
    )
    load_best_model_at_end: bool = opt(
        False, "After training, load the checkpoint whose metric_for_best_model was best. It is never deleted."
    )
    metric_for_best_model: str | None = opt(
        None, "The evaluation metric that decides which checkpoint is best, with or without its `eval_` prefix."
    )
    greater_is_better: bool | None = opt(
        None, "Whether a larger metric_for_best_model is better. None: yes, unless its name ends in `loss`.", flag=True
    )
    ignore_data_skip: bool = opt(
        False, "When resuming, restart the epoch's data instead of continuing at the checkpoint's position."
    )
    restore_callback_states_from_checkpoint: bool = opt(
        True, "When resuming, restore the callbacks' states instead of using their constructor arguments."
    )
    # Not `bool`: HfArgumentParser would make a switch of it.
    resume_from_checkpoint: str | None | Literal[True, False] = opt(
        None,
        "Folder of the checkpoint to resume from; true: the newest whole one in output_dir; auto: that, or a start "
        "from the beginning where there is none, so that one command starts a run and goes on with it.",
        flag=True,
    )
    allow_pickle: bool = opt(
        False,
        "When resuming from a checkpoint of transformers' Trainer or of TRL, read files with Python objects in them, "
        "which can run any code. Checkpoints of posttrain hold none.",
    )

    @property
    def remote(self) -> Remote | None:
        """The place that `remote_dir` names."""
        return None if self.remote_dir is None else Remote(self.remote_dir)

    @property
    def most_checkpoints(self) -> int | None:
        """How many checkpoints are left when older ones have gone; None for all."""
        if self.save_top_k is not None:
            return max(self.save_total_limit or 0, self.save_top_k + 1)
        return 1 if self.save_strategy == "best" and self.save_total_limit is None else self.save_total_limit or None

    def _normalize(self) -> None:
        self.resume_from_checkpoint = asked_for(self.resume_from_checkpoint)
        output_dir = value_of(self, "output_dir")
        if is_url(output_dir) and self.remote_dir in (None, output_dir):
            vars(self).update(remote_dir=output_dir, output_dir=working_folder(output_dir))

    def _problems(self) -> Iterator[str]:
        size, steps = "1" if self.max_shard_size is None else str(self.max_shard_size), self.save_steps
        if not re.fullmatch(r"[1-9]\d*(\.\d+)? ?([KMGT]B)?", size, re.I):
            yield f"max_shard_size={self.max_shard_size!r} must be a number of bytes, or a size such as 5GB or 200MB"
        if self.remote_dir is not None and not is_url(self.remote_dir):
            yield f"remote_dir={self.remote_dir!r} is no url such as s3://bucket/run; for a folder, set output_dir"
        if is_url(output_dir := value_of(self, "output_dir")):
            yield f"output_dir={output_dir!r} and remote_dir={self.remote_dir!r} are two urls; give one"
        if not isinstance(steps, str) and 1 < steps < math.inf and not float(steps).is_integer():
            yield f"save_steps={steps!r} must be a whole number of optimizer steps, or a share below 1"

    def _preflight(self) -> Iterator[str | Exception]:
        try:
            remote = self.remote
        except (ImportError, ValueError) as error:
            yield type(error)(f"remote_dir={self.remote_dir!r} cannot be reached: {error}")
            return
        wanted = self.resume_from_checkpoint
        if wanted and getattr(self, "should_save", True) and not is_url(wanted):
            try:
                store = Store(vars(self)["output_dir"], remote)
                if wanted != AUTO or store.has_begun():
                    store.look_for(wanted == AUTO or wanted)
            except (CheckpointError, TypeError) as error:
                yield type(error)(f"resume_from_checkpoint={self.resume_from_checkpoint!r}: {error}")


#: `resume_from_checkpoint` of a run that resumes if it has begun.
AUTO = "auto"


def asked_for(resume_from_checkpoint: Any) -> Any:
    """Convert `resume_from_checkpoint` from the command line: "true" becomes True, "false" False, "" None."""
    words = {"true": True, "false": False, "": None}
    return words.get(str(resume_from_checkpoint).lower(), resume_from_checkpoint)
