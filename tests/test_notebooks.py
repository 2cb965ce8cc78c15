"""The notebooks run from top to bottom on tiny models, as a user runs them, in a kernel of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny

nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")

NOTEBOOKS = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
DATA = NOTEBOOKS.parent / "data"
GSM8K = {"TRAIN": f"{DATA}/gsm8k/train.jsonl", "TEST": f"{DATA}/gsm8k/test.jsonl", "STEPS": 2, "LENGTH": 128}
PAIRS = {"TRAIN": f"{DATA}/gsm8k_preferences/test.jsonl", "TEST": f"{DATA}/gsm8k_preferences/test.jsonl"}
SMALLER = {
    "sft": GSM8K,
    "dpo": PAIRS | {"STEPS": 2, "LENGTH": 512},
    "grpo": {"STEPS": 2, "TOKENS": 8, "GROUP": 2},
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
    return [str(output.get("text") or output.get("data", {}).get("text/plain", "")) for cell in notebook.cells
            for output in cell.get("outputs", ())]  # fmt: skip


LONG = [pytest.param(name, marks=pytest.mark.slow) for name in SMALLER if name != "own_trainer"]


@pytest.mark.parametrize("name", ["own_trainer", *LONG])
def test_notebooks_run_from_top_to_bottom(name, tmp_path, monkeypatch):
    model = tmp_path / "model"
    tiny.causal_lm(vocab_size=384).save_pretrained(model)
    tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS).save_pretrained(model)
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    texts = run(name, tmp_path, {"MODEL": str(model)} | SMALLER[name])
    assert list(tmp_path.glob("out/*/report.html")), "no run was reported"
    if name == "own_trainer":
        assert any("resumed equals uninterrupted: True" in text for text in texts)


def test_every_notebook_is_run_and_stored_without_outputs():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(SMALLER)
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells), path
