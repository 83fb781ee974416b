import base64
import http.server
import io
import struct
import threading
import zlib

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from jaxrl_llm.config import ConfigError
from jaxrl_llm.data.images import ImageLimits, read_image, row_images

LIMITS = ImageLimits()
RED, BLUE = (255, 0, 0), (0, 0, 255)


def png(color=RED, size=(4, 3), form="PNG"):
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, form)
    return file.getvalue()


def colors(images):
    return [image.read().getpixel((0, 0)) for image in images]


def user(content):
    return [{"role": "user", "content": content}]


def bomb(width=60_000, height=60_000):
    """A PNG whose header says more pixels than memory holds."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_every_form_of_an_image_is_read(tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    encoded = base64.b64encode(png()).decode()
    forms = [
        png(), bytearray(png()), str(tmp_path / "a.png"), tmp_path / "a.png", f"file://{tmp_path}/a.png",
        f"data:image/png;base64,{encoded}", Image.new("RGB", (4, 3), RED), {"bytes": png(), "path": None},
        {"bytes": None, "path": str(tmp_path / "a.png")}, {"image": png()}, {"base64": encoded},
        {"image_url": {"url": f"data:image/png;base64,{encoded}"}},
    ]  # fmt: skip
    for form in forms:
        image = read_image(form, LIMITS)
        assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (4, 3), RED), form


@pytest.fixture
def address():
    """An HTTP server on loopback that gives a red image, and behind /moved redirects to it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(302 if self.path == "/moved" else 200 if self.path == "/a.png" else 404)
            self.send_header("Location", "/a.png")
            self.end_headers()
            self.wfile.write(png())

        def log_message(self, *_):
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield "http://{}:{}".format(*server.server_address)
    server.shutdown()
    server.server_close()


def test_urls_are_fetched_where_they_are_allowed(address):
    allowed = ImageLimits(urls=True)
    for path in ("a.png", "moved"):
        assert read_image(f"{address}/{path}", allowed).getpixel((0, 0)) == RED
    with pytest.raises(ConfigError, match=r"data\.image_bytes=20"):
        read_image(f"{address}/a.png", ImageLimits(urls=True, bytes=20))
    with pytest.raises(ConfigError, match="nowhere cannot be fetched: HTTPStatusError"):
        read_image(f"{address}/nowhere", allowed)
    with pytest.raises(ConfigError, match=r"is a URL, and data\.image_urls=False"):
        read_image(f"{address}/a.png", LIMITS)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode):
    """As in transformers: black writing on nothing was black on black."""
    drawn = Image.new("RGBA", (4, 3), (0, 0, 0, 0))
    drawn.putpixel((1, 2), (0, 0, 0, 255))
    drawn.putpixel((2, 1), (40, 40, 40, 128))
    file = io.BytesIO()
    drawn.convert(mode).save(file, "PNG")
    for given in (file.getvalue(), Image.open(io.BytesIO(file.getvalue()))):
        found = np.asarray(read_image(given, ImageLimits()))
        expected = convert_to_rgb(Image.open(io.BytesIO(file.getvalue())), return_numpy=True)
        np.testing.assert_array_equal(found, expected)
        assert (found[0, 0] == 255).all() and (found[2, 1] == 0).all()


def test_base64_in_lines_is_read():
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "BMP")
    lines = base64.encodebytes(file.getvalue()).decode()
    assert lines.count("\n") > 2
    for given in ({"base64": lines}, f"data:image/bmp;base64,{lines}"):
        assert read_image(given, ImageLimits()).getpixel((0, 0)) == (255, 0, 0)


def test_a_photograph_is_turned_as_its_file_says():
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (4, 3)).save(file, "JPEG", exif=exif)
    assert read_image(file.getvalue(), LIMITS).size == (3, 4)


@pytest.mark.parametrize(
    ("value", "limits", "message"),
    [
        (bomb(), LIMITS, "exceeds limit"),
        (bomb(9000, 9000), LIMITS, "9000 x 9000 pixels, and data.image_pixels=33554432"),
        (Image.new("L", (100, 100)), ImageLimits(pixels=9999), "100 x 100 pixels, and data.image_pixels=9999"),
        (png(size=(90, 90))[:-40], LIMITS, "is truncated or broken"),
        (b"no image at all", LIMITS, "of 15 bytes is no image that can be read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", LIMITS, "is no image that can be read"),
        (png(), ImageLimits(bytes=20), "has more than data.image_bytes=20 bytes"),
        ("https://example.com/a.png", LIMITS, "is a URL, and data.image_urls=False"),
        ("HTTP://example.com/a.png", LIMITS, "is a URL, and data.image_urls=False"),
        ("http://[::1]/a.png", LIMITS, "is a URL, and data.image_urls=False"),
        ("~nobody-here/a.png", LIMITS, "'~nobody-here/a.png' is no file here"),
        ("nowhere.png", LIMITS, "'nowhere.png' is no file here"),
        ("iVBORw0KGgo" * 99, LIMITS, "is no file here; .* base64 with data:image/png;base64,"),
        ("data:image/png;base64,???", LIMITS, "is no base64"),
        ("data:image/png", LIMITS, "without a comma"),
        ({"bytes": None, "path": None}, LIMITS, "a dictionary of bytes, path"),
        (7, LIMITS, "an image is int"),
        (Image.new("I;16", (2, 2)), LIMITS, "more than 8 bits a channel"),
    ],
)
def test_what_is_no_image_is_refused_by_name(value, limits, message):
    with pytest.raises(ConfigError, match=message):
        read_image(value, limits)


def test_verls_rows_have_marks_in_the_text():
    row = {"prompt": user("<image>what? <image>"), "images": [{"bytes": png()}, {"bytes": png(BLUE)}]}
    made, images = row_images(row, ["prompt"], None, LIMITS)
    image = {"type": "image"}
    assert made["prompt"] == user([image, {"type": "text", "text": "what? "}, image])
    assert colors(images) == [RED, BLUE]
    assert row["prompt"] == user("<image>what? <image>")


@pytest.mark.parametrize("column", ["image", "images"])
def test_trls_columns_come_before_the_text_of_the_user(column):
    row = {"prompt": [{"role": "system", "content": "s"}, *user("what?")], column: Image.new("RGB", (2, 2), BLUE)}
    made, images = row_images(row, ["prompt"], None, LIMITS)
    assert made["prompt"][1]["content"] == [{"type": "image"}, {"type": "text", "text": "what?"}]
    assert made["prompt"][0] == {"role": "system", "content": "s"} and colors(images) == [BLUE]


def test_parts_that_hold_an_image_keep_their_place():
    parts = [
        {"type": "image", "text": None},
        {"type": "image_url", "image_url": {"url": "data:;base64," + base64.b64encode(png(BLUE)).decode()}},
        {"type": "text", "text": "?", "image_url": None},
    ]
    made, images = row_images({"prompt": user(parts), "image": png()}, ["prompt"], None, LIMITS)
    assert colors(images) == [RED, BLUE]
    assert made["prompt"] == user([{"type": "image"}, {"type": "image"}, {"type": "text", "text": "?"}])


def test_a_column_of_another_name():
    _, images = row_images({"prompt": "<image>?", "picture": [png()], "images": []}, ["prompt"], "picture", LIMITS)
    assert colors(images) == [RED]
    with pytest.raises(ConfigError, match=r"no column 'photo', which data\.image_key names"):
        row_images({"prompt": "?"}, ["prompt"], "photo", LIMITS)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": user("<image><image>"), "images": [png()]}, "2 placeholders .* and 1 image in column 'images'"),
        ({"prompt": "what?", "images": [png()]}, "0 placeholders .* and 1 image"),
        ({"prompt": user([{"type": "image"}])}, "1 placeholder .* and 0 images in no column"),
        ({"prompt": user("?"), "images": [png()] * 17}, r"17 images, more than data\.images_per_row=16"),
        ({"prompt": user("<image><image>"), "images": [png(), b"x"]}, "image 1: an image of 1 bytes"),
        ({"prompt": user([{"type": "video"}])}, "a content part is {'type': 'video'}"),
        ({"prompt": [{"role": "system", "content": "s"}], "image": png()}, "no message of the user"),
    ],
)
def test_rows_that_do_not_fit_their_images_are_refused(row, message):
    with pytest.raises(ConfigError, match=message):
        row_images(row, ["prompt"], None, LIMITS)


def test_rows_of_text_stay_as_they_are():
    for prompt in (user("an <image> tag"), "an <image> tag"):
        assert row_images({"prompt": prompt}, ["prompt"], None, LIMITS) == ({"prompt": prompt}, [])
