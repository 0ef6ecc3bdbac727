from __future__ import annotations

import io
import pickle
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.data.image_files import encoded, picture
from vitrail.data import decode as decode_module
from vitrail.data.decode import decode, image_header
from vitrail.data.types import Array, BadImage


def pillow(content: bytes, mode: str) -> Array:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert(mode))


def png_by_hand(pixels: Array, colour_type: int) -> bytes:
    """A 16-bit PNG of any colour type, which Pillow cannot write: signature, IHDR, IDAT, IEND."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width = pixels.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 16, colour_type, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "PPM"])
def test_every_format_decodes_as_in_pillow(kind: str) -> None:
    content = encoded(picture(1), kind)
    assert np.array_equal(decode(content, channels=3), pillow(content, "RGB"))
    header = image_header(content)
    assert (header.format, header.height, header.width, header.bits) == (kind, 40, 48, 8)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_orientation_is_applied(orientation: int, kind: str) -> None:
    image = Image.fromarray(picture(2, 24, 40))
    exif = image.getexif()
    exif[0x0112] = orientation
    content = encoded(image, kind, exif=exif)
    upright = pillow(content, "RGB")
    assert np.array_equal(decode(content, channels=3), upright)
    header = image_header(content)
    assert (header.height, header.width) == upright.shape[:2]
    if kind != "TIFF":  # Pillow turns those whatever one asks
        assert decode(content, channels=3, exif=False).shape == (24, 40, 3)
        assert header.orientation == orientation


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_every_mode_gives_the_requested_channels(mode: str, channels: int) -> None:
    image = Image.fromarray(picture(3)).convert(mode)
    content = encoded(image, "TIFF" if mode == "CMYK" else "PNG")
    wanted = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
    opened = Image.open(io.BytesIO(content))
    by_colour = opened.convert("RGB") if opened.mode in ("P", "CMYK") else opened
    expected = np.asarray(by_colour.convert(wanted)).reshape(40, 48, channels)
    assert np.array_equal(decode(content, channels=channels), expected)


def test_a_cmyk_jpeg_is_not_inverted() -> None:
    image = picture(4)
    content = encoded(Image.fromarray(image).convert("CMYK"), "JPEG", quality=95)
    assert np.abs(decode(content, channels=3).astype(int) - image).mean() < 8


def test_a_palette_with_transparency_keeps_its_colours() -> None:
    image = Image.fromarray(picture(5)).quantize(16)
    content = encoded(image, "PNG", transparency=3)
    assert np.array_equal(decode(content, channels=3), np.asarray(image.convert("RGB")))
    assert decode(content, channels=4)[:, :, 3].min() == 0


def test_16_bit_grey_is_kept_or_shifted_but_never_clipped() -> None:
    deep = np.linspace(0, 65535, 40 * 48).astype(np.uint16).reshape(40, 48)
    for kind in ("PNG", "TIFF"):
        content = encoded(Image.fromarray(deep), kind)
        assert np.array_equal(decode(content, channels=1, bits=16)[:, :, 0], deep)
        assert np.array_equal(decode(content, channels=1)[:, :, 0], deep >> 8)
        assert np.array_equal(decode(content, channels=3, bits=16), np.repeat(deep[:, :, None], 3, 2))
        assert image_header(content).bits == 16


@pytest.mark.parametrize(("colour_type", "have"), [(2, 3), (6, 4), (4, 2)])
def test_16_bit_colour_keeps_all_bits(colour_type: int, have: int) -> None:
    deep = np.random.default_rng(0).integers(0, 65536, (10, 12, have), dtype=np.uint16)
    content = png_by_hand(deep, colour_type)
    expected = deep[:, :, :3] if have > 2 else np.repeat(deep[:, :, :1], 3, 2)
    assert np.array_equal(decode(content, channels=3, bits=16), expected)
    assert np.array_equal(decode(content, channels=3), expected >> 8)
    assert image_header(content).bits == 16


def test_arrays_follow_the_same_rules_as_files() -> None:
    image = picture(6)
    for channels, mode in ((1, "L"), (3, "RGB"), (4, "RGBA")):
        expected = np.asarray(Image.fromarray(image).convert(mode)).reshape(40, 48, channels)
        assert np.array_equal(decode(image, channels=channels), expected)
    assert np.array_equal(decode(image, channels=3, bits=16), image.astype(np.uint16) * 257)
    assert np.array_equal(decode(image[:, :, 0], channels=3), np.repeat(image[:, :, :1], 3, 2))


def test_many_channels_come_as_npy_files() -> None:
    bands = np.random.default_rng(1).integers(0, 65536, (9, 7, 13), dtype=np.uint16)
    file = io.BytesIO()
    np.save(file, bands)
    assert np.array_equal(decode(file.getvalue(), channels=13, bits=16), bands)
    assert image_header(file.getvalue()).mode == "13 channels"
    with pytest.raises(BadImage, match="13 channels, but the model expects 3"):
        decode(file.getvalue(), channels=3)
    with pytest.raises(BadImage, match="13 channels are expected"):
        decode(encoded(picture(7)), channels=13)


@settings(max_examples=60, deadline=None)
@given(height=st.integers(8, 300), width=st.integers(8, 300), rows=st.integers(1, 120), columns=st.integers(1, 120))
def test_a_downscaled_jpeg_is_not_smaller_than_min_size(height: int, width: int, rows: int, columns: int) -> None:
    content = encoded(picture(8, height, width), "JPEG")
    small = decode(content, channels=3, min_size=(rows, columns))
    full = decode(content, channels=3)
    assert small.shape[0] >= min(rows, height)
    assert small.shape[1] >= min(columns, width)
    scale = next(k for k in (1, 2, 4, 8) if small.shape[:2] == (-(-height // k), -(-width // k)))
    if scale < 8:  # the next smaller scale would not have covered it
        assert height // (2 * scale) < rows or width // (2 * scale) < columns
    if scale == 1:
        assert np.array_equal(small, full)


@pytest.mark.parametrize("orientation", [1, 6, 8, 3])
def test_a_region_is_cropped_from_the_upright_image(orientation: int) -> None:
    image = Image.fromarray(picture(9, 160, 240))
    exif = image.getexif()
    exif[0x0112] = orientation
    content = encoded(image, "JPEG", exif=exif, quality=95)
    upright = decode(content, channels=3)
    top, left, height, width = 32, 48, 64, 96
    assert np.array_equal(
        decode(content, channels=3, region=(top, left, height, width)), upright[top : top + height, left : left + width]
    )
    small = decode(content, channels=3, region=(top, left, height, width), min_size=(16, 24))
    assert small.shape == (16, 24, 3)
    coarse = upright[top : top + height, left : left + width].reshape(16, 4, 24, 4, 3).mean((1, 3))
    assert np.abs(small - coarse).mean() < 4


BROKEN = {
    "empty.jpg": (b"", r"empty file \(0 bytes\)"),
    "page.jpg": (b"<!DOCTYPE html><html>404 not found</html>", "a text file, not an image .*DOCTYPE"),
    "pointer.png": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
    "noise.png": (bytes(range(128, 256)) * 4, "not an image in a format that Pillow can read"),
    "phone.jpg": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + b"\0" * 64, "HEIC"),
    "cut.jpg": (encoded(picture(10, 200, 200), "JPEG")[:2000], "truncated"),
    "cut.png": (encoded(picture(10, 200, 200))[:3000], "truncated|cannot be decoded"),
    "cut.npy": (b"\x93NUMPY\x01\x00v\x00{'descr'", "npy"),
    "float.tif": (encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "floating-point"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_corrupted_file_is_named_with_the_reason(name: str) -> None:
    content, words = BROKEN[name]
    with pytest.raises(BadImage, match=rf"{name}: .*({words})") as caught:
        decode(content, channels=3, name=name)
    again = pickle.loads(pickle.dumps(caught.value))  # as when a worker returns it
    assert (again.name, again.reason, str(again)) == (name, caught.value.reason, str(caught.value))


def test_a_decompression_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = encoded(Image.new("1", (20_000, 10_000)))
    assert len(bomb) < 100_000
    with pytest.raises(BadImage, match="decompression bomb"):
        decode(bomb, channels=3, name="bomb.png")
    with pytest.raises(BadImage, match="decompression bomb"):
        image_header(bomb, name="bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as some programs do; our own limit still applies
    with pytest.raises(BadImage, match=r"10000×20000 pixels, more than"):
        decode(bomb, channels=3, name="bomb.png")
    assert decode_module.MAX_PIXELS < 20_000 * 10_000


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"]))
def test_any_corruption_gives_an_image_or_bad_image(data: st.DataObject, kind: str) -> None:
    content = bytearray(encoded(picture(11, 20, 20), kind))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    try:
        pixels = decode(bytes(content[:cut]), channels=3)
    except BadImage:
        return
    assert pixels.dtype == np.uint8
    assert pixels.shape[2] == 3


@pytest.mark.slow
def test_warnings_of_pillow_are_not_shown(tmp_path: Path) -> None:
    """Of large images, corrupted EXIF and palettes with alpha; filters that a user sets come first."""
    Image.new("1", (10_000, 10_000)).save(tmp_path / "large.png")
    Image.new("P", (8, 8)).save(tmp_path / "palette.png", transparency=bytes(range(256)))
    exif, stream = Image.Exif(), io.BytesIO()
    exif[0x010E] = "a description of more than four bytes"
    Image.new("RGB", (8, 8)).save(stream, "JPEG", exif=exif.tobytes())
    content = stream.getvalue()
    start = content.index(b"Exif\0\0") + 6
    (tmp_path / "exif.jpg").write_bytes(
        content[: start + 8] + b"\xff\x00" + content[start + 10 :]
    )  # 255 entries, of which one is there
    script = (
        "import sys, pathlib, vitrail.data.decode as d\n"
        "for file in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
        "    (d.image_header if 'large' in file.name else lambda data: d.decode(data, channels=3))(file.read_bytes())"
    )
    shown = [
        subprocess.run([sys.executable, *flags, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
        for flags in ([], ["-W", "always"])
    ]
    assert shown[0].returncode == 0 and shown[0].stderr == ""
    assert "DecompressionBombWarning" in shown[1].stderr and "Corrupt EXIF" in shown[1].stderr
