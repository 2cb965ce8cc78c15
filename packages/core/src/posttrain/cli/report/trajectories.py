"""The trajectories of a run: as lines in a terminal, one in full, and as ``trajectories.html``, which needs no network.

The page shows each token with what the mask, the log-probability or the version says of it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.core.errors import CheckpointError, ConfigError
from posttrain.core.files import write_text
from posttrain.core.logging.terminal import aligned
from posttrain.lm.generate.trajectories import Filter, Trajectory, files_of, name_of, read

PAGE = "trajectories.html"
#: Trajectories on the page, and tokens of each of their sequences: a browser shows this many at once.
MOST, MOST_TOKENS = 200, 4000


def calls_of(one: Trajectory) -> int:
    """Calls of tools in its messages."""
    messages = one["completion"] if isinstance(one["completion"], list) else []
    return sum(len(message.get("tool_calls") or ()) for message in messages)


def named(name: str, folder: str | Path, wanted: Filter | None = None) -> Trajectory:
    """The trajectory of that name in the output folder of a run; `ConfigError` if none that is `wanted` has it."""
    found = stored(folder, wanted)
    chosen = next((one for one in found if name_of(one) == name), None)
    if chosen is None:
        raise ConfigError("trajectories", [f"{name} is none of the {len(found)} trajectories of {folder} that fit"])
    return chosen


def stored(folder: str | Path, wanted: Filter | None = None) -> list[Trajectory]:
    """Those that are `wanted` in the output folder of a run; `CheckpointError` where it holds none at all."""
    if not files_of(folder):
        raise CheckpointError(
            f"{folder} holds no trajectories; a run with log_trajectories=N stores N of each rollout."
        )
    return read(folder, wanted)


def lines(found: Sequence[Trajectory]) -> str:
    """A line for each trajectory."""
    head = ["name", "step", "turns", "calls", "tokens", "reward", "ending", "completion"]
    rows = [
        [
            name_of(one),
            str(one["step"]),
            str(one["turns"]),
            str(calls_of(one)),
            str(one["tokens"]),
            "none" if one["reward"] is None else f"{one['reward']:.3g}",
            one["ending"],
            _shown(_last(one["completion"]))[:60],
        ]
        for one in found
    ]
    return aligned([head, *rows])


def text(one: Trajectory) -> str:
    """One trajectory in full: its rewards, and its messages."""
    rewards = ", ".join(f"{name} {value}" for name, value in one["rewards"].items())
    of_turns = f"\nrewards of turns: {one['turn_rewards']}" if "turn_rewards" in one else ""
    versions = sorted({version for each in one["sequences"] for version in each["versions"] or ()})
    of_versions = f", weights of steps {versions[0]} to {versions[-1]}" if versions else ""
    return (
        f"trajectory {name_of(one)}, step {one['step']}: {one['ending']}, {one['turns']} turns, {calls_of(one)} calls, "
        f"{one['tokens']} tokens, {len(one['sequences'])} sequences{of_versions}\n"
        f"reward {one['reward']} ({rewards}), advantage {one['advantage']:.4g}{of_turns}\n\n"
        f"{_messages(one['prompt'])}\n{_messages(one['completion'])}"
    )


def page(found: Sequence[Trajectory], title: str) -> str:
    """The page as HTML: of the last `MOST` trajectories, with a note of how many are left out."""
    kept = found[-MOST:]
    note = f"The last {len(kept)} of {len(found)} trajectories." if len(kept) < len(found) else ""
    cut = [one | {"name": name_of(one), "calls": calls_of(one), "sequences": _cut(one["sequences"])} for one in kept]
    values = {
        "title": html.escape(title),
        "note": note,
        "rows": json.dumps(cut, ensure_ascii=False).replace("</", "<\\/"),
    }
    return filled("trajectories.html", values)


def filled(template: str, values: Mapping[str, str]) -> str:
    """The page of that name with the values in the places ``{{name}}``."""
    return re.sub(r"\{\{(\w+)\}\}", lambda name: values[name[1]], asset(template))


def asset(name: str) -> str:
    """The text of a file that pages are made of."""
    return Path(__file__).with_name("report_page").joinpath(name).read_text(encoding="utf-8")


def beside(report: Path, folder: str | Path, name: str) -> str:
    """Write the page of the trajectories of a run beside the page `report`: a link to it; "" if there are none."""
    if not (found := read(folder)):
        return ""
    write_text(report.with_name(PAGE), page(found, f"Trajectories of {name}"))
    return f'<p><a href="{PAGE}">{len(found):,} trajectories, token for token</a></p>'


def _cut(sequences: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the page shows of sequences: texts, without ids."""
    return [
        {key: each[key] and each[key][:MOST_TOKENS] for key in ("tokens", "learn", "logps", "versions")}
        | {"prompt": each["prompt"], "left_out": max(len(each["tokens"]) - MOST_TOKENS, 0)}
        for each in sequences
    ]


def _last(completion: Any) -> str:
    if not isinstance(completion, list) or not completion:
        return str(completion)
    return str(completion[-1].get("content") or "")


def _messages(value: Any) -> str:
    if not isinstance(value, list):
        return _shown(str(value), keeps="\n")
    parts = []
    for message in value:
        calls = "".join(f"\n  calls {json.dumps(call, ensure_ascii=False)}" for call in message.get("tool_calls") or ())
        thoughts = message.get("reasoning_content") or message.get("thinking")
        thoughts = f"<think>{thoughts}</think> " if thoughts else ""
        parts.append(f"[{message.get('role')}] {thoughts}{message.get('content') or ''}{calls}")
    return _shown("\n".join(parts), keeps="\n")


def _shown(words: str, keeps: str = "") -> str:
    """`words` without what would change the terminal."""
    return "".join(c if c.isprintable() or c in keeps else " " if c == "\n" else "\ufffd" for c in words)
