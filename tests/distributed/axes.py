"""Which trainer is tested on which axis of a device mesh, as the tests of this folder have it: the table of
docs/distributed.md.

    python -m tests.distributed.axes        # prints it
"""

from __future__ import annotations

from tests.contract.trainers import EXACT
from tests.distributed import test_equal, test_experts, test_resume_axes

#: The axes, by the name of their size; "dp" is of processes with rows of their own.
AXES = {
    "dp_replicate": set(EXACT),
    "dp_shard": set(EXACT),
    "tp": set(EXACT) - test_equal.NOT_SPLIT,
    "cp": set(EXACT) - test_equal.NOT_SLICED,
    "ep": {label.split()[0] for label in test_experts.RUNS},
}
#: What cannot be, and is refused with a sentence.
REFUSED = {
    "tp": test_equal.NOT_SPLIT - {"grpo-adaptive"} | {name for name in EXACT if name.endswith("-images")},
    "cp": test_equal.NOT_SLICED | {name for name in EXACT if name.endswith("-images")},
    "ep": {"classifier", "seq2seq"} | {name for name in EXACT if name.endswith("-images")},
}
SAMPLES = {"grpo", "rloo", "reinforce++", "online-dpo", "distillation", "gkd", "seq2seq"}


def cell(axis: str, name: str) -> str:
    """Letters of what is tested: E equal, V evaluate, G generate, R resume."""
    if name not in AXES[axis]:
        return "refused" if name in REFUSED.get(axis, ()) else "–"
    generates = any(name.split("-images")[0].startswith(kind) for kind in SAMPLES)
    resumes = name in test_resume_axes.NAMES.get(axis, ())
    return "E V" + " G" * generates + " R" * resumes


def table() -> str:
    """The table, in Markdown."""
    lines = [f"| trainer | {' | '.join(AXES)} |", "|---" * (len(AXES) + 1) + "|"]
    lines += [f"| `{name}` | {' | '.join(cell(axis, name) for axis in AXES)} |" for name in EXACT]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
