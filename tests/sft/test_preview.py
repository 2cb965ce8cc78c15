"""`posttrain preview` shows what is trained on, as it is trained on."""

import html
import json
import re

import pytest

from posttrain.cli import main
from posttrain.cli.tools import preview
from posttrain.sft import SFTConfig, SFTTrainer
from posttrain.sft.preview import show_row
from tests import tiny

CHATS = [
    {"messages": [{"role": "user", "content": f"Größe 你 {i}?"},
    {"role": "assistant", "content": f"🙂 <b>où</b>\n{text[:30]}"}]}
    for i, text in enumerate(tiny.CORPUS)
]  # fmt: skip
GREEN = re.compile(r"\x1b\[30;(?:42|102)m(.*?)\x1b\[0m", re.DOTALL)
COLOR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    tiny.causal_lm().save_pretrained("model")
    tiny.tokenizer().save_pretrained("model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: model\ndataset_name: rows.jsonl\noutput_dir: out\nmax_length: 128\ntrain_on: assistant\n"
        "use_cpu: true\nreport_to: none\n"
    )
    return tmp_path / "run.yaml"


def prepared(**changes):
    """The rows as the trainer has them, and the texts that it trains on."""
    args = SFTConfig("out", train_on="assistant", max_length=128, report_to="none", use_cpu=True, **changes)
    made = SFTTrainer(tiny.causal_lm(), args, train_dataset=CHATS, processing_class=tiny.tokenizer())
    rows = list(made.train_dataset)
    return rows, [tiny.tokenizer().decode([label for label in row["labels"] if label != -100]) for row in rows]


def test_the_colour_is_on_what_the_trainer_trains_on(run_file, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["preview", "run.yaml", "--rows", "2"]) == 0
    shown = capsys.readouterr().out
    assert "5 rows read, 5 kept" in shown and shown.count("━━ row ") == 2
    _, trained = prepared()
    parts = shown.split("━━ row ")[1:]
    assert ["".join(GREEN.findall(part)).replace("↵", "\n") for part in parts] == trained[:2]
    rows, _ = prepared()
    whole = COLOR.sub("", parts[0]).partition("\n")[2].replace("↵\n", "\n")
    assert whole.strip() == tiny.tokenizer().decode(rows[0]["input_ids"]).strip()


@pytest.mark.parametrize("setting", [{}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}])
def test_without_colour_brackets_stand_around_it(run_file, monkeypatch, capsys, setting):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    assert main(["preview", "sft", "run.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert re.findall("⟦(.*?)⟧", shown, re.DOTALL)[1:] == prepared()[1][:3]  # the first is that of the legend


def test_a_page_shows_the_same(run_file, tmp_path, capsys):
    assert main(["preview", "run.yaml", "--html", "pages/seen.html", "--rows=1"]) == 0
    assert "The first 1 rows are shown in pages/seen.html" in capsys.readouterr().out
    page = (tmp_path / "pages" / "seen.html").read_text()
    spans = re.findall(r'<span class="t" title="([\d ]+)">(.*?)</span>', page, re.DOTALL)
    text = html.unescape("".join(text for _, text in spans)).replace("<i>↵</i>", "")
    rows, trained = prepared()
    assert text == trained[0] and "<b>" not in page.partition("</style>")[2]
    ids = [int(token) for tokens, _ in spans for token in tokens.split()]
    assert ids == [label for label in rows[0]["labels"] if label != -100]
    assert "http" not in page  # it fetches nothing


def test_packed_rows_show_where_documents_begin(run_file, capsys):
    assert main(["preview", "run.yaml", "--packing", "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    (row, *_), _ = prepared(packing=True)
    assert f"row 0: {len(row['seq_lengths'])} documents, {sum(row['seq_lengths'])} tokens" in shown
    assert shown.count("── document ") == len(row["seq_lengths"]) > 1
    assert f"── document 1: {row['seq_lengths'][0]} tokens" in shown and "packed into" in shown


def test_the_documents_of_a_mixture_name_their_dataset():
    row = {"input_ids": [9, 8, 7, 6, 5], "labels": [-100, 8, -100, 6, -100], "seq_lengths": [2, 3], "sources": [1, 0]}
    shown = show_row(row, 4, tiny.tokenizer(), ("maths", "tales"))
    assert shown.title == "row 4: 2 documents, 5 tokens"
    assert [document.title for document in shown.documents] == [
        "document 1: tales, 2 tokens, 1 trained on",
        "document 2: maths, 3 tokens, 1 trained on",
    ]
    plain = show_row({"input_ids": [9, 8], "labels": [9, 8], "source": 0}, 0, tiny.tokenizer(), ("maths",))
    assert plain.title == "row 0: maths, 2 tokens, 1 trained on"  # nothing predicts the first
    assert [cell.trained for cell in plain.documents[0].cells] == [False, True]


def test_letters_across_tokens_are_one_cell_and_other_labels_are_shown():
    tok = tiny.tokenizer()
    ids = tok("a🙂b")["input_ids"]
    cells = preview.cells_of(ids, ids, tok)
    assert [cell.text for cell in cells] == ["a", "🙂", "b"] and len(cells[1].ids) == len(ids) - 2 > 1
    a, b = (tok(letter)["input_ids"][0] for letter in "ab")
    (_, cell) = preview.cells_of([a, a], [-100, b], tok)
    assert (cell.text, cell.label) == ("a", "b")
    assert "⟦a→b⟧" in preview.as_text([preview.Row("r", [preview.Document("d", [cell])])], color=False)


def test_data_does_not_steer_the_terminal():
    cell = preview.Cell("a\x1b[2Jb\u202e\u0007", (1,), True)
    row = preview.Row("r", [preview.Document("d", [cell])])
    assert "a\\x1b[2Jb\\x202e\\x07" in preview.as_text([row], color=False)
    assert "\x1b[2J" not in preview.as_text([row], color=True) and "\x1b" not in preview.as_html([row], [])


def test_colours_are_for_terminals(monkeypatch):
    class Stream:
        def __init__(self, terminal):
            self.isatty = lambda: terminal

    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert preview.wants_color(Stream(True)) and not preview.wants_color(Stream(False))
    monkeypatch.setenv("TERM", "dumb")
    assert not preview.wants_color(Stream(True))


def test_help_says_what_it_takes(capsys):
    assert main(["preview", "--help"]) == 0
    assert "--html FILE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["run.yaml", "--rows", "0"], 2, "--rows 0 must be a whole number above 0"),
        (["run.yaml", "--html"], 2, "--html  must be the name of a file"),
        (["sfd", "run.yaml"], 2, "did you mean 'sft'"),
        (["run.yaml", "--trian_on", "user"], 2, "did you mean 'train_on'"),
        (["run.yaml", "--train_on", "tool"], 1, "no row can be trained on"),
    ],
)
def test_what_cannot_be_shown_says_why(run_file, capsys, words, status, message):
    assert main(["preview", *words]) == status
    assert message in capsys.readouterr().err


def test_the_space_before_a_word_is_shown_where_a_tokenizer_hides_it_at_a_beginning():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    tok = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = tok("a b a b b a a")["input_ids"]
    assert tok.decode([1]) == "b"  # alone, its space is gone
    assert [cell.text for cell in preview.cells_of(ids, ids, tok)] == ["a", " b", " a", " b", " b", " a", " a"]
