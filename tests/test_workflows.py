"""The workflows of GitHub call what this repository has: targets of make, files, and the versions that it claims."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


def steps(path):
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    return [(job, step) for job in jobs.values() for step in job["steps"]]


def values(job, command):
    """`command` with each value of the job's matrix in the place of its expression."""
    matrix = job.get("strategy", {}).get("matrix", {})
    rows = matrix.get("include") or [{name: value} for name, found in matrix.items() for value in found]
    for row in rows or [{}]:
        yield re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found, row=row: str(row.get(found[1], found[0])), command)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_of_workflows_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = [one for job, step in steps(path) if "run" in step for one in values(job, step["run"])]
    assert commands
    for command in commands:
        words = command.split()
        if words[0] == "make":
            assert words[1] in targets, command
        files = [word.partition("=")[2] or word for word in words if ".ci/" in word]
        assert [name for name in files if not (ROOT / name).is_file()] == [], command


def test_there_are_workflows_with_the_same_command_as_here():
    assert [path.stem for path in WORKFLOWS] == ["ci", "nightly"]
    assert ".ci/run" in [step.get("run") for _, step in steps(WORKFLOWS[0])]


@pytest.mark.parametrize("path", sorted(ROOT.glob("docker/*.Dockerfile")), ids=lambda path: path.stem)
def test_docker_files_copy_what_there_is_and_run_the_command(path):
    text = path.read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for word in line.split()]
    installed = re.findall(r"\./(packages/\w+)", text)
    assert copied and all((ROOT / name).exists() for name in (*copied, *installed))
    assert {*installed} == {f"packages/{part.name}" for part in (ROOT / "packages").iterdir()}
    assert '["posttrain"]' in text and re.search(r"^USER \d+$", text, re.MULTILINE)


def test_the_oldest_versions_are_those_that_the_packages_claim():
    claimed = {}
    for path in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        claimed |= dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(project["dependencies"]), re.MULTILINE))
    pinned = dict(
        re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / ".ci/oldest.txt").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert {"torch", "transformers", "accelerate"} <= set(pinned)
    for name in set(pinned) & set(claimed):
        assert pinned[name].startswith(claimed[name]), name


def test_coverage_is_added_up_by_folder():
    spec = importlib.util.spec_from_file_location("coverage_by_folder", ROOT / ".ci/coverage_by_folder.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    counts = {"a/posttrain/core/x.py": (3, 4), "a/posttrain/core/y.py": (1, 4), "a/posttrain/rl/z.py": (4, 4)}
    summaries = {path: {"covered_lines": ran, "num_statements": lines} for path, (ran, lines) in counts.items()}
    report = {"files": {path: {"summary": summary} for path, summary in summaries.items()}}
    assert module.by_folder(report) == {"core": (4, 8), "rl": (4, 4)}
    assert module.table(module.by_folder(report)).splitlines()[2] == "| `core` | 4 of 8 | 50.0% |"
