"""Type errors may only become fewer: compares mypy's errors with those on record.

``python .ci/type_errors.py`` fails where a file has more than ``.ci/type_errors.json`` allows, or a folder below
``posttrain`` more in strict mode than ``.ci/strict_errors.json``; ``--write`` records what there is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("core", "seq2seq", "sft", "rl")
ERROR = re.compile(r"^packages/[a-z0-9]+/src/posttrain/(?P<file>(?P<folder>[^:/]+)[^:]*):\d+: error: ")


def errors(*options: str) -> list[re.Match[str]]:
    """Those that mypy finds with these options."""
    command = [sys.executable, "-m", "mypy", *options, *(f"packages/{package}/src" for package in PACKAGES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"{done.stdout}\n{done.stderr}")
    return [match for line in done.stdout.splitlines() if (match := ERROR.match(line))]


def compare(name: str, by: str, found: list[re.Match[str]], write: bool) -> bool:
    """Whether there are no more errors of a file or folder (`by`) than the record ``.ci/<name>.json`` allows."""
    record, kind = Path(__file__).with_name(f"{name}.json"), name.replace("_", " ")
    numbers = Counter(match[by] for match in found)
    if write:
        record.write_text(json.dumps(dict(sorted(numbers.items())), indent=1) + "\n", encoding="utf-8")
        print(f"{numbers.total()} {kind} are on record now.")
        return True
    allowed = Counter(json.loads(record.read_text(encoding="utf-8")))
    more = {place: number for place, number in numbers.items() if number > allowed[place]}
    for match in found:
        if match[by] in more:
            print(match.string)
    for place, number in sorted(more.items()):
        print(f"{place}: {number} {kind}, {allowed[place]} are allowed.")
    print(f"{numbers.total()} {kind}; {allowed.total()} are allowed.")
    if not more and numbers != allowed:
        print("There are fewer than on record: run `python .ci/type_errors.py --write` and commit the result.")
    return not more


def main() -> int:
    write = sys.argv[1:] == ["--write"]
    are_fine = compare("type_errors", "file", errors(), write)
    # In the cache of the first, whose modules of others are the same: seconds.
    return (
        0 if compare("strict_errors", "folder", errors("--config-file", ".ci/strict.toml"), write) and are_fine else 1
    )


if __name__ == "__main__":
    sys.exit(main())
