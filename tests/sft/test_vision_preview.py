"""`posttrain preview` of rows with images: a line and a small copy of each."""

from __future__ import annotations

import base64
import io
import json
import re

import pytest

from posttrain.cli import main
from tests import tiny_vision

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    model, processor = tiny_vision.FAMILIES["llava"]()
    model.save_pretrained("model"), processor.save_pretrained("model")
    tiny_vision.image(0, 400, 200).save("big.png"), tiny_vision.image(1).save("small.png")
    stored = io.BytesIO()
    tiny_vision.image(1).save(stored, "PNG")
    inline = f"data:image/png;base64,{base64.b64encode(stored.getvalue()).decode()}"
    rows = [
        {"images": given, "prompt": [{"role": "user", "content": f"which {i} ?"}],
         "completion": [{"role": "assistant", "content": "the first"}]}
        for i, given in enumerate([["big.png", "small.png"], [inline], ["absent.png"], []])
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: model\ndataset_name: rows.jsonl\noutput_dir: out\nmax_length: 128\nuse_cpu: true\n"
        "report_to: none\nbad_images: drop\n"
    )
    return tmp_path / "run.yaml"


def test_each_image_has_a_line_with_its_size_and_its_tokens(run_file, capsys):
    assert main(["preview", "run.yaml", "--rows", "4"]) == 0
    shown = capsys.readouterr().out
    assert "train: 4 rows, which are prepared while batches are made. Of the first 4:" in shown
    assert "4 rows read, 3 kept" in shown and "absent.png does not exist" in shown
    assert "▣ image 1: big.png, 400 x 200, 4 tokens\n▣ image 2: small.png, 16 x 16, 4 tokens\n" in shown
    assert "▣ image 1: data URL, 16 x 16, 4 tokens" in shown and shown.count("▣") == 3
    assert shown.count("⟦the first<|im_end|>") == 3 and "<image>×8which 0 ?" in shown


def test_the_page_has_small_copies(run_file, tmp_path, capsys):
    assert main(["preview", "run.yaml", "--rows", "1", "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    copies = re.findall(r'<img src="data:image/(\w+);base64,([^"]+)"', page)
    assert [kind for kind, _ in copies] == ["jpeg", "png"]
    sizes = [Image.open(io.BytesIO(base64.b64decode(data))).size for _, data in copies]
    assert sizes == [(160, 80), (16, 16)] and len(page) < 30_000
    assert "<figcaption>image 1: big.png, 400 x 200, 4 tokens</figcaption>" in page


def test_packed_rows_are_shown_as_they_are_packed(run_file, capsys):
    assert main(["preview", "run.yaml", "--packing", "true", "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert "packed rows of 128 tokens at most" in shown and "━━ row 0: 3 documents" in shown
    assert shown.count("▣") == 3 and shown.count("── row ") == 3
