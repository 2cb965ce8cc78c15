"""Print the share of lines that tests ran, by folder, as a table in Markdown, from the JSON report of coverage.py."""

import json
import sys
from collections import Counter
from pathlib import PurePosixPath


def by_folder(report: dict) -> dict[str, tuple[int, int]]:
    """(lines that ran, lines) of each folder below ``posttrain``."""
    ran, lines = Counter(), Counter()
    for path, file in report["files"].items():
        folder = PurePosixPath(path.partition("/posttrain/")[2] or path).parent
        ran[str(folder)] += file["summary"]["covered_lines"]
        lines[str(folder)] += file["summary"]["num_statements"]
    return {folder: (ran[folder], count) for folder, count in sorted(lines.items()) if count}


def table(folders: dict[str, tuple[int, int]]) -> str:
    """The folders, the least covered first."""
    rows = sorted(folders.items(), key=lambda item: item[1][0] / item[1][1])
    lines = [f"| `{folder}` | {ran} of {count} | {ran / count:.1%} |" for folder, (ran, count) in rows]
    return "\n".join(["| folder | lines | share |", "|---|---|---|", *lines])


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print(table(by_folder(json.load(file))))
