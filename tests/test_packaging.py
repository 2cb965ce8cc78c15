"""Each distribution is installable by itself: its wheel holds its own part of the namespace and nothing of a
sibling.
"""

from __future__ import annotations

import email
import os
import re
import runpy
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("core", "seq2seq", "sft", "rl")


def project(path: Path) -> dict:
    return tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    """The five wheels, built from copies so that nothing is written into the checkout."""
    out = tmp_path_factory.mktemp("wheels")
    built = {}
    for name, source in [("posttrain-all", ROOT), *((f"posttrain-{part}", ROOT / "packages" / part) for part in PARTS)]:
        before = set(out.iterdir())
        code = (
            f"import os; os.chdir({str(source)!r}); from hatchling.build import build_wheel; build_wheel({str(out)!r})"
        )
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        (built[name],) = set(out.iterdir()) - before
    return built


def names(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def metadata(wheel: Path) -> email.message.Message:
    archive = zipfile.ZipFile(wheel)
    return email.message_from_bytes(archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))))


@pytest.mark.parametrize("part", PARTS)
def test_a_wheel_holds_its_own_part_of_the_namespace(wheels, part):
    code = [name for name in names(wheels[f"posttrain-{part}"]) if ".dist-info/" not in name]
    assert f"posttrain/{part}/__init__.py" in code and f"posttrain/{part}/py.typed" in code
    own = ("core", "lm", "compat", "cli") if part == "core" else (part,)
    assert {name.split("/")[1] for name in code} == {*own}


def test_the_meta_distribution_holds_no_code_and_needs_all_four(wheels):
    assert [name for name in names(wheels["posttrain-all"]) if ".dist-info/" not in name] == []
    needed = {requirement.split("==")[0] for requirement in metadata(wheels["posttrain-all"]).get_all("Requires-Dist")}
    assert {f"posttrain-{part}" for part in PARTS} <= needed


def test_every_wheel_carries_a_licence_and_a_description(wheels):
    for wheel in wheels.values():
        assert any(name.endswith("licenses/LICENSE") for name in names(wheel))
        assert len(metadata(wheel).get_payload().strip()) > 100, f"{wheel.name} has no README to show"


def test_versions_move_together():
    projects = [project(ROOT)] + [project(ROOT / "packages" / part) for part in PARTS]
    version = projects[0]["version"]
    assert {p["version"] for p in projects} == {version}
    assert f"version: {version}" in (ROOT / "docs/assets/version.svg").read_text(encoding="utf-8")
    pins = {d for p in projects for d in p["dependencies"] if d.startswith("posttrain")}
    assert pins == {f"posttrain-{part}=={version}" for part in PARTS}


def test_every_extra_that_a_page_or_a_message_names_is_there():
    files = [
        path
        for folder in ("docs", "packages", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".md", ".ipynb", ".yaml", ".toml"}
    ]
    named = {
        (part, extra)
        for path in [ROOT / "README.md", *files]
        for part, extras in re.findall(r"posttrain-([a-z0-9]+)\[([a-z0-9,-]+)\]", path.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    there = {(part, extra) for part in PARTS for extra in project(ROOT / "packages" / part)["optional-dependencies"]}
    assert len(named) >= 10 and named <= there, named - there


def test_the_lock_file_has_every_package_and_no_other_version_than_the_tests():
    lock = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("#")[0].strip().split("==") for line in pins if "==" in line.split("#")[0])
    assert {name: version for name, version in lock.items() if pinned.get(name) != version} == {}
    extras = {"core": ["datasets", "peft", "plots", "quantization", "search"], "rl": ["agents"], "seq2seq": ["metrics"]}
    for part in PARTS:
        described = project(ROOT / "packages" / part)
        needed = list(described["dependencies"])
        needed += [one for extra in extras.get(part, ()) for one in described["optional-dependencies"][extra]]
        names = {re.split(r"[>=\[]", one)[0].replace("_", "-").lower() for one in needed}
        assert {name for name in names if not name.startswith("posttrain-")} <= lock.keys()


def test_every_package_of_the_environment_that_make_sets_up_is_pinned():
    """A package that is not pinned comes in the version of the day, and a test fails on one machine alone."""
    lock = runpy.run_path(str(ROOT / ".ci" / "lock.py"))
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {lock["canonical"](line.split("==")[0]) for line in pins if "==" in line.split("#")[0]}
    installed = lock["closure"](groups["dev"])
    assert len(installed) > 150 and set(installed) - pinned == set()


def test_all_distributions_say_who_made_them_and_where_they_are():
    for path in [ROOT, *(ROOT / "packages" / part for part in PARTS)]:
        described = project(path)
        assert described["authors"] and {"Homepage", "Documentation", "Issues"} <= described["urls"].keys()
        assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= {*described["classifiers"]}


def test_siblings_need_only_the_core():
    for part in ("seq2seq", "sft", "rl"):
        ours = [d for d in project(ROOT / "packages" / part)["dependencies"] if d.startswith("posttrain")]
        assert [d.split("==")[0] for d in ours] == ["posttrain-core"]


@pytest.fixture(scope="module")
def python_without_posttrain(tmp_path_factory) -> Path:
    """A fresh environment that sees the dependencies installed here, but none of our packages."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)}))
    # A path that is added by a .pth file is not searched for further .pth files: editable installs stay outside.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return home / ("Scripts" if os.name == "nt" else "bin") / "python"


def install(wheel: Path, python: Path) -> None:
    """What pip does with a pure wheel, less the record: unpack it."""
    site = python.parent.parent / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)


def test_sft_works_without_its_siblings(wheels, python_without_posttrain):
    code = (
        "import importlib.util, posttrain.core, posttrain.sft, sys\n"
        "from posttrain.sft import SFTConfig, SFTTrainer\n"
        "assert issubclass(SFTTrainer, posttrain.core.Trainer) and SFTConfig(output_dir='x', use_cpu=True)\n"
        "assert 'site-packages' in posttrain.core.__file__, posttrain.core.__file__\n"
        "for absent in ('rl', 'seq2seq'):\n"
        "    assert importlib.util.find_spec(f'posttrain.{absent}') is None, absent\n"
    )
    bare = run(python_without_posttrain, "import posttrain.core")
    assert bare.returncode != 0 and "No module named 'posttrain" in bare.stderr, "the environment was not empty"
    install(wheels["posttrain-core"], python_without_posttrain)
    install(wheels["posttrain-sft"], python_without_posttrain)
    done = run(python_without_posttrain, code)
    assert done.returncode == 0, done.stderr


def run(python: Path, code: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([python, "-c", code], capture_output=True, text=True, env=clean, timeout=300)
