"""Images from everything that a row may hold, and a reason for each that cannot be read."""

import base64
import io
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from posttrain.lm.images.images import ImageError, ImageReader, NumberedRows, has_images, images_of
from tests.tiny_vision import image

Image = pytest.importorskip("PIL.Image")


def encoded(picture, kind="PNG"):
    file = io.BytesIO()
    picture.save(file, kind)
    return file.getvalue()


def test_an_image_is_the_same_however_it_is_given(tmp_path):
    shown = image(0)
    data, path = encoded(shown), tmp_path / "with space.png"
    path.write_bytes(data)
    given = [
        shown, np.asarray(shown), data, io.BytesIO(data), path, str(path), path.as_uri(),
        f"data:image/png;base64,{base64.b64encode(data).decode()}", {"bytes": data, "path": None},
        {"bytes": None, "path": str(path)},
    ]  # fmt: skip
    for value in given:
        found = ImageReader()(value)
        assert found.mode == "RGB" and np.array_equal(np.asarray(found), np.asarray(shown)), value
    grey = ImageReader()(Image.new("L", (4, 2), 7))
    assert grey.mode == "RGB" and grey.getpixel((0, 0)) == (7, 7, 7)


def test_a_file_is_turned_as_its_camera_was_held():
    turned = Image.new("RGB", (4, 2), (9, 9, 9))
    exif = turned.getexif()
    exif[0x0112] = 6
    file = io.BytesIO()
    turned.save(file, "JPEG", exif=exif)
    assert ImageReader()(file.getvalue()).size == (2, 4)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "has 0 bytes"),
        (b"text", "is not an image that can be opened"),
        ({"bytes": None, "path": None}, "neither bytes nor a path"),
        ("no/such.png", "no/such.png does not exist"),
        ("", "path is empty"),
        ("https://example.com/a.png", "is remote.*fetch_remote_images=True"),
        ("data:image/png;base64,%%", "not valid base64"),
        (np.zeros((2, 2, 3), dtype=np.float32), "float32 .* is no image"),
        (np.zeros((0, 2, 3), dtype=np.uint8), "is empty"),
        (7, "of type int"),
    ],
)
def test_what_cannot_be_read_has_a_reason(value, reason):
    with pytest.raises(ImageError, match=reason):
        ImageReader()(value)


def test_a_truncated_file_and_a_folder_are_refused(tmp_path):
    whole = encoded(image(0, 64, 64))
    with pytest.raises(ImageError, match="truncated or damaged"):
        ImageReader()(whole[: len(whole) // 2])
    with pytest.raises(ImageError, match="is a folder"):
        ImageReader()(str(tmp_path))


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch):
    bomb = encoded(Image.new("1", (4000, 3000)))
    assert len(bomb) < 4000
    decoded = []
    monkeypatch.setattr(Image.Image, "load", lambda self: decoded.append(self))
    with pytest.raises(ImageError, match="4000 x 3000 pixels, more than max_image_pixels=1000000"):
        ImageReader(max_pixels=10**6)(bomb)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10**6)  # PIL's own limit comes first
    with pytest.raises(ImageError, match="too large .*decompression bomb"):
        ImageReader(max_pixels=10**9)(bomb)
    assert not decoded


def test_a_remote_image_is_fetched_where_that_is_allowed():
    data = encoded(image(3))

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        found = ImageReader(fetch_remote=True)(f"{address}/a.png")
        assert np.array_equal(np.asarray(found), np.asarray(image(3)))
        with pytest.raises(ImageError, match="cannot be fetched .*404"):
            ImageReader(fetch_remote=True)(f"{address}/b.png")
        server.shutdown()


def test_rows_are_numbered_and_stored_images_are_not_decoded(tmp_path):
    import datasets

    (tmp_path / "broken.png").write_bytes(b"no image")
    image(1).save(tmp_path / "good.png")
    paths = [str(tmp_path / name) for name in ("broken.png", "good.png")]
    table = datasets.Dataset.from_dict({"image": paths, "text": ["a", "b"]})
    table = table.cast_column("image", datasets.Image())
    found = NumberedRows(table)
    assert [found[i]["row_number"] for i in range(2)] == [0, 1] and found[1]["text"] == "b"
    assert np.array_equal(np.asarray(ImageReader()(found[1]["image"])), np.asarray(image(1)))
    with pytest.raises(ImageError, match="broken.png is not an image"):
        ImageReader()(found[0]["image"])
    with pytest.raises(Exception, match="identify"):
        table[0]
    assert len(NumberedRows([{"a": 1}])) == 1 and has_images(table)


def test_images_are_found_in_columns_and_in_parts_of_messages():
    part = {"type": "image_url", "image_url": {"url": "a.png"}}
    assert has_images([{"messages": [{"role": "user", "content": [part]}]}])
    assert has_images([{"text": "a"}, {"text": "b", "image": None}])
    assert not has_images([{"messages": [{"role": "user", "content": "image"}]}]) and not has_images(None)
    assert images_of({"image": "a"}) == ["a"] == images_of({"images": ["a"]}) and images_of({"images": None}) == []
