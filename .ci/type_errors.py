"""Type errors may only become fewer: compares mypy's errors, file by file, with those on record.

``python .ci/type_errors.py`` fails where a file has more than ``.ci/type_errors.json`` allows; ``--write`` records what
there is.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("type_errors.json")
PACKAGES = ("core", "seq2seq", "sft", "rl")
ERROR = re.compile(r"^packages/[a-z0-9]+/src/posttrain/(?P<file>[^:]+):\d+: error: ")


def main() -> int:
    command = [sys.executable, "-m", "mypy", *(f"packages/{package}/src" for package in PACKAGES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        return done.returncode
    lines = done.stdout.splitlines()
    found = Counter(match["file"] for line in lines if (match := ERROR.match(line)))
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")
        print(f"{found.total()} type errors in {len(found)} files are on record now.")
        return 0
    allowed = Counter(json.loads(RECORD.read_text(encoding="utf-8")))
    more = {file: number for file, number in found.items() if number > allowed[file]}
    for line in lines:
        if (match := ERROR.match(line)) and match["file"] in more:
            print(line)
    for file, number in sorted(more.items()):
        print(f"{file}: {number} type errors, {allowed[file]} are allowed.")
    print(f"{found.total()} type errors; {allowed.total()} are allowed.")
    if not more and found != allowed:
        print("There are fewer than on record: run `python .ci/type_errors.py --write` and commit the result.")
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
