"""`posttrain migrate` rewrites the code cells of a notebook and leaves all else as it was."""

import json

import pytest

from posttrain.cli import main
from posttrain.compat.migration import Notebook

MAGICS = [
    "%%capture\n!pip install -q trl peft",
    "%pip install transformers\nfrom trl import SFTTrainer\nfiles = !ls\nfor file in files:\n    !cat {file}\nfile?",
    "%%bash\nfor x in a b; do echo $x; done",
    "x = ('%s'\n    %'a')\nprint(x)",
    "%load_ext autoreload\n%matplotlib inline",
    "",
]


def a_notebook(*cells, indent=1, as_lines=True):
    made = [{"cell_type": "markdown", "metadata": {}, "source": ["from trl import DPOTrainer\n", "é"]}]
    for text in cells:
        source = text.splitlines(keepends=True) if as_lines else text
        made.append(
            {"cell_type": "code", "execution_count": 3, "metadata": {}, "outputs": [{"a": "%"}], "source": source}
        )
    return json.dumps({"cells": made, "nbformat": 4}, indent=indent, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("as_lines", [True, False])
@pytest.mark.parametrize("indent", [1, 2])
def test_a_notebook_that_is_not_edited_comes_back_to_the_letter(indent, as_lines):
    text = a_notebook(*MAGICS, indent=indent, as_lines=as_lines)
    notebook = Notebook(text)
    compile(notebook.script, "script", "exec")  # whatever IPython alone reads
    assert notebook.with_script(notebook.script) == text


def test_the_cells_of_a_notebook_are_rewritten(tmp_path, capsys):
    file = tmp_path / "book.ipynb"
    cell = "from trl import SFTConfig\n!nvidia-smi\nargs = SFTConfig('out', max_seq_length=9)\nargs.nothing = 1"
    file.write_text(a_notebook(*MAGICS[:2], cell), encoding="utf-8")
    file.with_suffix(".txt").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    assert main(["migrate", str(tmp_path)]) == 0  # shows it
    shown = capsys.readouterr().out
    assert "-from trl import SFTConfig" in shown and "+from posttrain.sft import SFTConfig" in shown
    assert file.read_text(encoding="utf-8") == file.with_suffix(".txt").read_text(encoding="utf-8")

    assert main(["migrate", str(file), "--write"]) == 0
    said = capsys.readouterr().out
    assert f"{file}, cell 1, line 2: install posttrain's packages too: !pip install -q trl peft" in said
    now = cell.replace("trl", "posttrain.sft").replace("max_seq_length", "max_length")
    rewritten = MAGICS[1].replace("from trl", "from posttrain.sft")
    assert file.read_text(encoding="utf-8") == a_notebook(MAGICS[0], rewritten, now)


@pytest.mark.parametrize("text", ["{}", "[]", "no json"])
def test_a_file_that_is_no_notebook_is_left_and_named(text, tmp_path, capsys):
    (tmp_path / "book.ipynb").write_text(text)
    assert main(["migrate", str(tmp_path), "--write"]) == 1
    assert "book.ipynb" in capsys.readouterr().out and (tmp_path / "book.ipynb").read_text() == text
