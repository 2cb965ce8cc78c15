"""The pages in docs/arguments say what the configs say."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_pages_of_arguments_are_what_the_fields_give():
    written = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "arguments").glob("*.md")}
    made = runpy.run_path(str(DOCS / "make_arguments.py"))["pages"]()
    assert written == made, "run: python docs/make_arguments.py"
