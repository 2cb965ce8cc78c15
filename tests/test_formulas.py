"""Formulas of docstrings and pages become MathML when the documentation is built."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

pytest.importorskip("latex2mathml")
pytest.importorskip("griffe")

ROOT = Path(__file__).resolve().parents[1]
DOLLARS = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$", re.DOTALL)


@pytest.fixture(scope="module")
def formulas():
    spec = importlib.util.spec_from_file_location("formulas", ROOT / "docs/formulas.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def docstrings():
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text and re.search(r":math:`|\.\. math::", text):
                    yield f"{path.name}:{getattr(node, 'name', 'module')}", text


def test_every_formula_of_a_docstring_becomes_mathml(formulas):
    found = dict(docstrings())
    assert len(found) > 20
    for where, text in found.items():
        markdown = formulas.as_markdown(text)
        assert "math::" not in markdown and ":math:" not in markdown, where
        written = [block or inline for block, inline in DOLLARS.findall(markdown)]
        assert written, where
        for formula in written:
            assert formulas.mathml(formula).startswith("<math") and "`" not in formula, (where, formula)


def test_a_formula_of_several_lines_is_one_block_between_paragraphs(formulas):
    text = "Before:\n\n    .. math::\n        a &= b \\\\\n        c &= d\n\n    After :math:`x\n    y`."
    expected = "Before:\n\n\n    $$ \\begin{aligned} a &= b \\\\ c &= d \\end{aligned} $$\n\n\n    After $x y$."
    assert formulas.as_markdown(text) == expected


def test_what_arithmatex_marked_is_replaced_and_the_rest_stays(formulas):
    page = '<p>a <span class="arithmatex">\\(x &lt; 1\\)</span> b</p>\n<div class="arithmatex">\\[\n\\log y\n\\]</div>'
    done = formulas.on_page_content(page, page=None)
    assert done.startswith('<p>a <math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">')
    assert "arithmatex" not in done and 'display="block"' in done and done.count("<mi>x</mi>") == 1
    assert '<mi>log</mi><mspace width="0.17em" /><mi>y</mi>' in done
