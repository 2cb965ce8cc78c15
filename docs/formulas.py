"""Formulas as MathML, made when the site is built: a page needs no script and nothing from elsewhere to show them.

mkdocs uses this file twice, see mkdocs.yml: as an extension of griffe, which gives ``:math:`` and ``.. math::`` of
docstrings the form that pages have, and as a hook, which turns what arithmatex has marked into MathML.
"""

from __future__ import annotations

import html
import re
import textwrap
from typing import Any

import griffe
from latex2mathml.converter import convert

_INLINE = re.compile(r":math:`([^`]+)`")
# The formula begins behind `::` or on the next line, and goes on while lines are indented more than the directive.
_BLOCK = re.compile(
    r"^(?P<indent>[ ]*)\.\. math::(?P<first>.*)\n(?P<rest>(?:(?P=indent)[ ]+\S.*(?:\n|$))*)", re.MULTILINE
)
_MARKED = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)

# A name such as log stands apart from what follows it, unless that is a bracket.
_NAMED = re.compile(r"(<mi>(?:log|exp|cos)</mi>)(?=<m(?:i|sub|sup|frac|row)\b)")


def as_markdown(docstring: str) -> str:
    """`docstring` with its formulas between dollars."""

    def block(match: re.Match[str]) -> str:
        lines = f"{match['first'].strip()}\n{textwrap.dedent(match['rest'])}".strip()
        body = " ".join(line.strip() for line in lines.splitlines())
        if "&" in body:  # a column, as Sphinx sets one
            body = rf"\begin{{aligned}} {body} \end{{aligned}}"
        return f"\n{match['indent']}$$ {body} $$\n\n"

    return _INLINE.sub(lambda match: f"${' '.join(match[1].split())}$", _BLOCK.sub(block, f"{docstring}\n")).rstrip()


class Formulas(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def on_page_content(content: str, **kwargs: Any) -> str:
    """A hook of mkdocs."""
    return _MARKED.sub(lambda match: mathml(html.unescape(match[2]), match[1] == "div"), content)


def mathml(formula: str, in_its_own_line: bool = False) -> str:
    """A formula in LaTeX as the element ``<math>``."""
    element = convert(formula.strip(), display="block" if in_its_own_line else "inline")
    return _NAMED.sub(r'\1<mspace width="0.17em" />', element)
