"""The command ``posttrain preview``, which shows the tokens of rows, their loss mask and document borders.

It prints colours on a terminal, or brackets without colours, or writes a self-contained HTML page.
"""

from __future__ import annotations

import base64
import io
import itertools
import os
import sys
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, TextIO

from posttrain.cli import parse
from posttrain.cli.method import of_words, read
from posttrain.core import registry
from posttrain.core.errors import ConfigError
from posttrain.core.files import write_text
from posttrain.core.logging.terminal import is_terminal
from posttrain.lm.text import layouts

ROWS = 3
HELP = f"""usage: posttrain preview [<method>] [run.yaml ...] [--rows N] [--html FILE] [--name value ...]

Prepares the data of a run as in training and shows its first rows: trained tokens, context tokens, and the beginnings
of documents. Takes all arguments of the method (posttrain <method> --help); nothing is trained.

  --rows N     how many rows to show [default {ROWS}]
  --html FILE  write a page instead of showing them here

There are no colours if NO_COLOR is set or the output is no terminal, unless FORCE_COLOR is set."""


def run(words: list[str]) -> None:
    """Prepare the data of a run as training does, and show its first rows below the data report."""
    known = {"rows": (ROWS, parse.whole(), "a whole number above 0"), "html": (None, _file_name, "the name of a file")}
    words, options = parse.take_options("preview", words, known)
    found, words = of_words(words, "preview")
    if found.preview is None:
        having = ", ".join(name for name, one in registry.methods().items() if one.preview) or "no method"
        raise ConfigError("posttrain preview", [f"{found.name} has no preview; {having} has"])
    from posttrain.core.models.wrapping import replaced  # which imports torch

    with replaced(layouts.logger, "disabled", True):  # how rows are read is in the report
        needs = ("model_", "dataset_")  # rewards and a teacher may be missing
        rows, report = found.preview(read(found, words, needs=needs), options["rows"])
    if options["html"] is not None:
        path = Path(options["html"]).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, as_html(rows, report))
        print("\n".join(report))
        print(f"The first {len(rows)} rows are shown in {path}.")
        return
    color = wants_color(sys.stdout)
    print("\n".join([*report, "", legend(color), as_text(rows, color)]))


def wants_color(stream: TextIO) -> bool:
    """Whether to colour `stream`: not with NO_COLOR (https://no-color.org); else with FORCE_COLOR, or on a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (is_terminal(stream) and os.environ.get("TERM") != "dumb")


def _file_name(text: str) -> str | None:
    return None if not text or text.startswith("--") else text


TRAINED = ("\x1b[30;42m", "\x1b[30;102m")  # two greens in turn, so that the borders of tokens show
READ = ("\x1b[90m", "\x1b[37m")  # and two greys
RULE, RESET = "\x1b[36m", "\x1b[0m"


@dataclass(frozen=True)
class Cell:
    """One token; or several, where letters of several bytes lie across them.

    text: what it reads. ids: its tokens. trained: the loss predicts it. label: what the loss wants instead, where the
    label is another token.
    """

    text: str
    ids: tuple[int, ...]
    trained: bool
    label: str | None = None


@dataclass(frozen=True)
class Picture:
    """An image that a document shows: what there is to say about it, and a small copy as a data URL."""

    caption: str
    thumbnail: str


@dataclass
class Document:
    """A text of a row: `title` says which it is."""

    title: str
    cells: list[Cell] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)


@dataclass
class Row:
    """A row of a batch: one document, or several that are packed."""

    title: str
    documents: list[Document]


def cells_of(ids: Sequence[int], labels: Sequence[int], tokenizer: Any) -> list[Cell]:
    """The cells of one document.

    Args:
        ids: its tokens. labels: aligned with them, -100 where nothing is trained; nothing predicts the first.
        tokenizer: has ``decode``.
    """
    cells: list[Cell] = []
    start = 0
    for i, token in enumerate(ids):
        trained = i > 0 and labels[i] != -100
        # Some tokenizers drop the space that a text begins with: it is decoded after a few tokens more, which are taken
        # off.
        before = list(ids[max(0, start - 4) : start])
        text = tokenizer.decode([*before, *ids[start : i + 1]])[len(tokenizer.decode(before)) :]
        last = i + 1 == len(ids)
        next_differs = not last and (labels[i + 1] != -100) != trained
        if text.endswith("\N{REPLACEMENT CHARACTER}") and i - start < 4 and not last and not next_differs:
            continue  # the first bytes of a letter
        other = tokenizer.decode([labels[i]]) if trained and labels[i] != token else None
        cells.append(Cell(text, tuple(int(one) for one in ids[start : i + 1]), trained, other))
        start = i + 1
    return cells


#: Pixels of the longer side of a thumbnail.
THUMBNAIL = 160


def picture(image: Any, caption: str) -> Picture:
    """A `Picture` of a PIL image in RGB."""
    small, stored = image.copy(), io.BytesIO()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    small.save(stored, "PNG" if max(image.size) <= THUMBNAIL else "JPEG")
    kind = "png" if max(image.size) <= THUMBNAIL else "jpeg"
    return Picture(caption, f"data:image/{kind};base64,{base64.b64encode(stored.getvalue()).decode()}")


def joined(cells: Sequence[Cell], tokens: Collection[int]) -> list[Cell]:
    """`cells` with each run of one of `tokens`, of which an image has many, as one."""
    found: list[Cell] = []
    for cell, run in itertools.groupby(cells):
        number = len(list(run))
        is_run = number > 1 and set(cell.ids) <= set(tokens)
        found += [replace(cell, text=f"{cell.text}×{number}")] if is_run else [cell] * number
    return found


def as_text(rows: Sequence[Row], color: bool) -> str:
    """The rows for a terminal; without `color` what is trained on stands between ⟦ and ⟧."""
    lines = []
    for row in rows:
        lines.append(_rule(f"━━ {row.title} ", "━", color))
        for document in row.documents:
            if len(row.documents) > 1:
                lines.append(_rule(f"── {document.title} ", "─", color))
            lines += [f"▣ {_visible(picture.caption)}" for picture in document.pictures]
            lines.append(_colored(document.cells) if color else _bracketed(document.cells))
    return "\n".join(lines)


def legend(color: bool) -> str:
    """What the colours or brackets of `as_text` mean."""
    if color:
        return (
            f"{TRAINED[0]} trained {TRAINED[1]} on {RESET}  {READ[0]}read {READ[1]}only{RESET}  (a change of shade "
            "is a token's end)"
        )
    return "⟦trained on⟧  read only"


def _rule(text: str, line: str, color: bool) -> str:
    text += line * max(3, 78 - len(text))
    return f"{RULE}{text}{RESET}" if color else text


def _colored(cells: Sequence[Cell]) -> str:
    parts = []
    for number, cell in enumerate(cells):
        style = (TRAINED if cell.trained else READ)[number % 2]
        # A style ends before a line break and begins again after it: terminals paint the rest of the line else.
        text = _visible(_with_label(cell)).replace("\n", f"↵{RESET}\n{style}")
        parts.append(f"{style}{text}{RESET}")
    return "".join(parts)


def _bracketed(cells: Sequence[Cell]) -> str:
    text, inside = "", False
    for cell in cells:
        if cell.trained != inside:
            text, inside = text + ("⟦" if cell.trained else "⟧"), cell.trained
        text += _visible(_with_label(cell))
    return text + ("⟧" if inside else "")


def _with_label(cell: Cell) -> str:
    return cell.text if cell.label is None else f"{cell.text}→{cell.label}"


def _visible(text: str) -> str:
    """`text` with control characters as their codes: data must not steer the terminal."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf") else f"\\x{ord(c):02x}" for c in text
    )


def as_html(rows: Sequence[Row], report: Sequence[str], title: str = "What is trained on") -> str:
    """The rows as a page, under the lines of a `report`; pointing at a token shows its id."""
    body = [f"<h1>{escape(title)}</h1>", f"<pre>{escape(chr(10).join(report))}</pre>"]
    body.append('<p><span class="t">trained on</span> <span>read only</span></p>')
    for row in rows:
        body.append(f"<h2>{escape(row.title)}</h2>")
        for document in row.documents:
            if len(row.documents) > 1:
                body.append(f"<h3>{escape(document.title)}</h3>")
            body += [_figure(picture) for picture in document.pictures]
            body.append(f'<div class="row">{"".join(_span(cell) for cell in document.cells)}</div>')
    return PAGE.format(title=escape(title), style=STYLE, body="\n".join(body))


def _figure(picture: Picture) -> str:
    caption = escape(_visible(picture.caption))
    return f'<figure><img src="{escape(picture.thumbnail)}" alt=""><figcaption>{caption}</figcaption></figure>'


def _span(cell: Cell) -> str:
    text = escape(_visible(_with_label(cell))).replace("\n", "<i>↵</i>\n")
    kind = ' class="t"' if cell.trained else ""
    return f'<span{kind} title="{" ".join(map(str, cell.ids))}">{text}</span>'


STYLE = """
:root { color-scheme: light dark; --ink: #1a1d21; --soft: #6a7076; --page: #fff; --trained: #b7ebc3; --edge: #8fd3a0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --soft: #9aa0a6; --page: #16181b; --trained: #1f5b31; --edge: #2f7d47; }
}
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.25rem; } h2 { font-size: 1rem; margin: 1.5rem 0 .5rem; } h3 { font-size: .85rem; color: var(--soft); }
pre, .row { font-family: ui-monospace, monospace; font-size: 13px; white-space: pre-wrap; overflow-wrap: anywhere; }
.row span { color: var(--soft); border-right: 1px dotted var(--soft); }
span.t, .row span.t { background: var(--trained); color: var(--ink); border-right: 1px solid var(--edge); }
i { opacity: .5; font-style: normal; }
figure { display: inline-block; margin: .25rem 1rem .25rem 0; } figcaption { font-size: .85rem; color: var(--soft); }
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
