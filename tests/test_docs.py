"""What the documentation shows works: its Python runs, and its commands name things that exist.

The Python blocks of one page run in order, in one namespace and an empty folder. Names of models and datasets on the
Hub are replaced by tiny local ones, listed below. What a page leaves to the reader (a dataset, a reward function) is
set up in a comment that readers do not see::

    <!-- test-setup
    dataset = ...
    -->

The pages of tests/documents hold code that was written for another trainer: what a reader brings along runs too.

A YAML block whose first line is a comment with a file name (``# run.yaml``) becomes that file.
"""

from __future__ import annotations

import logging
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
PAGES += [*sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("skills/*/SKILL.md"))]
DOCUMENTS = sorted(ROOT.glob("tests/documents/*.md"))

# Models that pages name, and what stands in for them.
MODELS = {
    "Qwen/Qwen3-0.6B": tiny.causal_lm,
    "Qwen/Qwen3-0.6B-Base": tiny.causal_lm,
    "Qwen/Qwen3-4B": tiny.causal_lm,
    "HuggingFaceTB/SmolLM2-135M-Instruct": tiny.causal_lm,
    "zai-org/GLM-4.5-Air": lambda: tiny.mixture_of_experts(arch="glm4_moe"),
    "google-t5/t5-small": tiny.seq2seq_lm,
    "google-bert/bert-base-uncased": tiny.classifier,
    "google/gemma-2b": lambda: tiny.causal_lm("gemma"),
}
_problems = [(f"What is {n} + {n}?", f"{n} + {n} = {2 * n}\n#### {2 * n}") for n in range(8)]
_talk = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in _problems]
_pairs = [{"prompt": q, "chosen": a, "rejected": "I do not know."} for q, a in _problems]
# Datasets that pages load by name, and the rows that stand in for them.
DATASETS = {
    "imdb": [{"text": text, "label": number % 2} for number, text in enumerate(tiny.CORPUS)],
    "openai/gsm8k": [{"question": q, "answer": a} for q, a in _problems],
    "trl-lib/Capybara": [{"messages": talk} for talk in _talk],
    "trl-lib/ultrafeedback_binarized": _pairs,
    "trl-lib/tldr": [{"prompt": q, "completion": a} for q, a in _problems],
}

WIDEST_CODE = 78

# Commands that are right wherever their program is installed.
PLAIN = {"vllm", "cd", "git", "harbor", "hf", "source", "export", "python3", "tensorboard", "nvidia-smi"}
PLAIN |= {"tar", "ls", "cat"}
LAUNCHERS = {"torchrun", "accelerate"}


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int


def blocks(text: str) -> Iterator[Block]:
    """Fenced blocks and ``test-setup`` comments, in order, with the line that their code starts at."""
    pattern = r"^( *)```(\w+)[^\n]*\n(.*?)^\1```|^<!-- test-setup\n(.*?)^-->"
    for match in re.finditer(pattern, text, flags=re.DOTALL | re.MULTILINE):
        group = 3 if match[2] else 4
        line = text.count("\n", 0, match.start(group)) + 1
        yield Block(match[2] or "setup", textwrap.dedent(match[group]), line)


def of_pages(*languages: str, pages: list[Path] = PAGES) -> list:
    """One parameter for each page that has a block in one of `languages`."""
    found = []
    for page in pages:
        if page.is_file():
            chosen = [block for block in blocks(page.read_text(encoding="utf-8")) if block.language in languages]
            if chosen:
                found.append(pytest.param(page, id=str(page.relative_to(ROOT))))
    return found


@pytest.fixture(scope="module")
def local_models(tmp_path_factory) -> dict[str, str]:
    """``{name on the Hub: folder}``."""
    base = tmp_path_factory.mktemp("models")
    folders = {}
    for name, make in MODELS.items():
        folders[name] = str(base / name.replace("/", "--"))
        make().save_pretrained(folders[name])
        tiny.tokenizer().save_pretrained(folders[name])
    return folders


def test_code_on_a_page_is_no_wider_than_the_site_shows():
    wide = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        for match in re.finditer(r"^( *)```.*?\n(.*?)^\1```", text, flags=re.DOTALL | re.MULTILINE):
            for line in match[2].splitlines():
                if len(line) - len(match[1]) > WIDEST_CODE:
                    wide.append(f"{page.relative_to(ROOT)} ({len(line)} characters): {line}")
    assert wide == [], f"code wider than {WIDEST_CODE} characters is cut by the site"


@pytest.mark.parametrize("page", of_pages("python", "py"))
def test_python_on_a_page_runs(page, local_models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page, local_models, monkeypatch)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("page", of_pages("python", "py", pages=DOCUMENTS))
def test_code_written_for_another_trainer_runs(page, local_models, tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    logging.getLogger("posttrain").setLevel(logging.NOTSET)  # as a program finds it
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    # Stands in for the package of that name, which downloads its metrics.
    accuracy = SimpleNamespace(compute=lambda predictions, references: {"accuracy": (predictions == references).mean()})
    monkeypatch.setitem(sys.modules, "evaluate", SimpleNamespace(load=lambda name: accuracy))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    device = "0" if torch.cuda.is_available() else "'cpu'"
    changes = {".to(0)": f".to({device})", "max_steps=1000": "max_steps=3", "max_steps=100,": "max_steps=3,"}
    run(page, local_models, monkeypatch, changes)


def run(page: Path, local_models: dict[str, str], monkeypatch, changes: dict[str, str] | None = None) -> None:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    namespace = {"__name__": "__main__"}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language in ("python", "py", "setup"):
            code = with_local(block.code, local_models)
            for old, new in (changes or {}).items():
                code = code.replace(old, new)
            # Empty lines in front: a traceback then shows the line of the page.
            exec(compile("\n" * (block.line - 1) + code, str(page), "exec", dont_inherit=True), namespace)


def with_local(code: str, local_models: dict[str, str]) -> str:
    for name, folder in local_models.items():
        code = code.replace(f'"{name}"', repr(folder)).replace(f"'{name}'", repr(folder))
    return code


def stand_in(path: str, name: str | None = None, *, split: str | None = None, **_):
    """`datasets.load_dataset`, for the datasets that pages name."""
    from datasets import Dataset, DatasetDict

    assert path in DATASETS, f"{path!r} has no stand-in in tests/test_docs.py"
    rows = Dataset.from_list(DATASETS[path])
    return rows if split is not None else DatasetDict({"train": rows, "test": rows})


@pytest.mark.parametrize("page", of_pages("bash", "sh", "console"))
def test_commands_on_a_page_exist(page, tmp_path, monkeypatch):
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for block in blocks(text):
        if block.language in ("yaml", "yml") and (name := re.match(r"# *([\w./-]+\.ya?ml)", block.code)):
            Path(name[1]).write_text(block.code, encoding="utf-8")
    for block in blocks(text):
        if block.language in ("bash", "sh", "console"):
            for line in block.code.replace("\\\n", " ").splitlines():
                for command in re.split(r"&&|\|\||;|\|", line):
                    if words := shlex.split(command.removeprefix("$ "), comments=True):
                        check(words, f"{page.name}:{block.line}: {' '.join(words)}")


def check(words: list[str], where: str) -> None:
    """Fail where a command names a target, a method, a flag, a file or a package that does not exist."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    program, rest = Path(words[0]).name if words else "", words[1:]
    if program == "make":
        targets = [word for word in rest if "=" not in word and not word.startswith("-")]
        assert set(targets) <= make_targets(), where
    elif program == "posttrain":
        check_posttrain(rest, where)
    elif program in ("python", *LAUNCHERS):
        check_script(rest, where)
    elif program in ("pip", "uv"):
        assert [word for word in rest if word.startswith("posttrain") and not is_distribution(word)] == [], where
    elif program == "docker":
        assert all((ROOT / word).is_file() for word in rest if word.endswith("Dockerfile")), where
    else:
        assert program in PLAIN | {""}, f"{where}: teach tests/test_docs.py to check {program!r}"


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def is_distribution(requirement: str) -> bool:
    name, _, extras = re.sub(r"[=<>~!].*", "", requirement).rstrip("]").partition("[")
    path = ROOT if name == "posttrain" else ROOT / "packages" / name.removeprefix("posttrain-")
    if not (path / "pyproject.toml").is_file():
        return False
    known = tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {extra for extra in extras.split(",") if extra} <= set(known.get("optional-dependencies", {}))


def check_script(words: list[str], where: str) -> None:
    """``[options] script.py ...`` or ``-m module ...``, behind Python or a launcher."""
    if "-m" in words:
        module = words[words.index("-m") + 1]
        if module.startswith("posttrain"):
            return check_posttrain(words[words.index("-m") + 2 :], where)
        assert module in ("pytest", "ruff", "pip", "build") or (ROOT / module.replace(".", "/")).exists(), where
    scripts = [word for word in words if word.endswith(".py")]
    # A reader's own script is called train.py.
    assert [s for s in scripts if s != "train.py" and not (ROOT / s).is_file()] == [], where
    return None


def check_posttrain(words: list[str], where: str) -> None:
    from posttrain.cli import COMMANDS, parse
    from posttrain.cli.method import configs_of, settings_of
    from posttrain.core import registry

    if not words or words[0] in COMMANDS or words[0] in ("--help", "--version"):
        return
    assert words[0] in registry.methods(), f"{where}: no method or command {words[0]!r}"
    if "--help" in words:
        return
    method = registry.method(words[0])
    settings, problems = settings_of(method, [word for word in words[1:] if word != "--smoke"])
    # Raises with every wrong name, value and missing file.
    parse.configs(configs_of(method), settings, problems, method.needs)


def test_blocks_are_found_with_their_place():
    text = "x\n<!-- test-setup\na = 1\n-->\n```python\nb = a\n```\ntext\n```bash\nmake test\n```\n"
    assert list(blocks(text)) == [
        Block("setup", "a = 1\n", 3),
        Block("python", "b = a\n", 6),
        Block("bash", "make test\n", 10),
    ]


@pytest.mark.parametrize(
    "command",
    ["make supper", "posttrain sft --learning_rat 1", "python examples/none.py", "frobnicate", "posttrain sfd"],
)
def test_a_command_that_does_not_exist_is_found(command):
    with pytest.raises((AssertionError, ValueError)):
        check(shlex.split(command), "page")


@pytest.mark.parametrize("command", ["pip install posttrain-none", "pip install 'posttrain-core[none]'"])
def test_a_package_that_does_not_exist_is_found(command):
    with pytest.raises(AssertionError):
        check(shlex.split(command), "page")


def test_links_between_pages_lead_somewhere():
    wrong = []
    for page in PAGES:
        if page.is_file():
            for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
                if not (page.parent / target).exists():
                    wrong.append(f"{page.relative_to(ROOT)}: {target}")
    assert wrong == []


def test_the_index_for_language_models_names_pages_that_are_there():
    named = re.findall(r"\]\(([^)]+)\)", (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8"))
    assert all((ROOT / "docs" / name).is_file() for name in named)
    guides = re.search(r"- Guides:\n(.*?)\n  - Recipes", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.DOTALL)
    pages = set(re.findall(r": (\S+\.md)", guides[1]))
    assert len(pages) > 20 and pages <= set(named), pages - set(named)


def test_the_places_that_contributing_names_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("### Where is")[2].partition("The maps")[0]
    named = re.findall(r"`((?:core|lm|rl|compat)/[\w/]+\.py)`", text)
    homes = [ROOT / "packages" / part / "src" / "posttrain" for part in ("core", "rl")]
    assert len(named) >= 15 and [name for name in named if not any((home / name).is_file() for home in homes)] == []
