"""The notebooks run from top to bottom on tiny models, as a user runs them, in a kernel of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import tiny

nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")

NOTEBOOKS = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
DATA = NOTEBOOKS.parent / "data"
GSM8K = {"TRAIN": f"{DATA}/gsm8k/train.jsonl", "TEST": f"{DATA}/gsm8k/test.jsonl", "STEPS": 2, "LENGTH": 128}
SMALLER = {
    "sft": GSM8K,
    "dpo": {"STEPS": 2, "PAIRS": 48},
    "grpo": {"STEPS": 2, "TOKENS": 8, "GROUP": 2},
    "agent": {"STEPS": 2, "GAMES": 28, "GROUP": 4},
    "own_trainer": {"ROWS": f"{DATA}/gsm8k/test.jsonl", "STEPS": 2, "LENGTH": 64},
}


def run(name: str, folder: Path, parameters: dict) -> list[str]:
    """The texts that the cells of a notebook put out, run in `folder` with `parameters` in place of its own."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    known = [line.split(" = ")[0] for line in cell.source.splitlines()]
    assert set(parameters) <= {word.strip() for names in known for word in names.split(",")}, "a parameter is unknown"
    cell.source += "\n" + "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return texts_of(notebook)


def texts_of(notebook) -> list[str]:
    """What the cells have put out, without pictures."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [str(output.get("text") or output.get("data", {}).get("text/plain", "")) for output in outputs]


LONG = [pytest.param(name, marks=pytest.mark.slow) for name in SMALLER if name != "own_trainer"]


@pytest.mark.parametrize("name", ["own_trainer", *LONG])
def test_notebooks_run_from_top_to_bottom(name, tmp_path, monkeypatch):
    model = tmp_path / "model"
    tiny.causal_lm(vocab_size=384).save_pretrained(model)
    tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS).save_pretrained(model)
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    texts = run(name, tmp_path, ({} if name == "agent" else {"MODEL": str(model)}) | SMALLER[name])  # it makes its own
    assert list(tmp_path.glob("out/*/report.html")), "no run was reported"
    if name == "own_trainer":
        assert any("resumed equals uninterrupted: True" in text for text in texts)


def test_every_notebook_is_run_here():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(SMALLER)


@pytest.mark.parametrize("name", SMALLER)
def test_a_notebook_is_stored_with_what_its_cells_put_out(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    first, *others = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert f"colab.research.google.com/github/posttrain/posttrain/blob/main/examples/notebooks/{name}.ipynb" in (
        notebook.cells[0].source
    )
    code = "\n".join(cell.source for cell in others)
    for package in re.findall(r"^from posttrain\.(sft|rl|seq2seq) ", code, re.MULTILINE):
        assert f"posttrain/packages/{package}" in first.source, f"the first cell does not install {package}"
    assert "from peft" not in code or "[peft]" in first.source
    assert [cell.execution_count for cell in (first, *others)] == list(range(1, len(others) + 2)), "run it in one go"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert outputs and all(output.output_type != "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs), "no figure"
    assert not any(re.search(r"/(home|root|tmp|work|content)/", text) for text in texts_of(notebook))
