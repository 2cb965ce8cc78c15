"""docs/arguments.md says what the configs say."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_of_arguments_is_what_the_fields_give():
    written = (DOCS / "arguments.md").read_text(encoding="utf-8")
    made = runpy.run_path(str(DOCS / "make_arguments.py"))["page"]()
    assert written == made, "run: python docs/make_arguments.py"
