"""The fast paths of the training reader must give the same crops as the slow path."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import vitrail.data.train_reader as reading
from tests.data.memory_splits import MemorySplit, StoredSplit, jpeg, picture
from vitrail.data.augment import Augment
from vitrail.data.augment.crop import draw_boxes, draw_flips
from vitrail.data.batch import HostBatch
from vitrail.data.decode import decode
from vitrail.data.preprocess import preset
from vitrail.data.sampler import BatchSlice
from vitrail.data.train_reader import TrainReader, jpeg_downscale, plain_jpeg_size
from vitrail.data.types import Payload, Split


def read(split: Split, augment: Augment | None = None, size: int = 32) -> HostBatch:
    preprocess = preset("imagenet+exif", size=size)
    reader = TrainReader(split, preprocess, augment or Augment(), 1, skip_bad=False, num_buffers=4)
    n = len(split)
    return reader[BatchSlice(0, 0, 0, 1, np.arange(n), ((0, n),), 0, n, n)]


def expected(payloads: list[Payload], size: int = 32) -> np.ndarray:
    """Compute the same crops by the slow path: fully decoded by Pillow, cropped, resized in float, flipped."""
    images = [decode(payload, channels=3) for payload in payloads]
    heights, widths = (np.array([image.shape[k] for image in images]) for k in (0, 1))
    boxes = draw_boxes(Augment(), 1, 0, 0, heights, widths)
    flips = draw_flips(Augment(), 1, 0, 0, len(images))
    result = []
    for image, (top, left, tall, wide), flip in zip(images, boxes, flips, strict=True):
        cut = torch.from_numpy(image[top : top + tall, left : left + wide].copy()).permute(2, 0, 1)[None].float()
        small = F.interpolate(cut, (size, size), mode="bilinear", antialias=True)[0]
        result.append((small.flip(2) if flip else small).numpy())
    return np.stack(result)


def rotated(image: np.ndarray, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg(image, exif=exif.tobytes())


@pytest.mark.parametrize("fast", [True, False])
def test_every_kind_of_jpeg_is_decoded_correctly(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(reading, "simplejpeg", None)
    colour = picture(3, 70, 90)
    cmyk = io.BytesIO()
    Image.fromarray(colour).convert("CMYK").save(cmyk, "JPEG", quality=92)
    png = io.BytesIO()
    Image.fromarray(colour).save(png, "PNG")
    payloads: list[Payload] = [
        *(jpeg(colour), jpeg(colour, progressive=True), jpeg(colour, subsampling=0), jpeg(colour[..., :1])),
        *(rotated(colour, 1), rotated(colour, 3), rotated(colour, 6), cmyk.getvalue(), png.getvalue(), colour),
    ]
    images = read(MemorySplit(payloads), size=40).images.float().numpy()  # too large for scaled decoding
    assert np.abs(images - expected(payloads, size=40)).max() <= 1.01


def test_a_downscaled_jpeg_gives_the_same_crop() -> None:
    payloads: list[Payload] = [jpeg(picture(i, 420 + i, 500)) for i in range(8)]
    boxes = draw_boxes(Augment(), 1, 0, 0, np.array([420 + i for i in range(8)]), np.full(8, 500))
    assert max(jpeg_downscale(tuple(box), (32, 32)) for box in boxes.tolist()) >= 4
    images = read(MemorySplit(payloads)).images.float().numpy()
    # The other filter differs by a few levels. A wrong crop would differ by dozens.
    assert np.abs(images - expected(payloads)).mean() < 5
    assert np.abs(images - expected(payloads)[..., ::-1]).mean() > 20
    exact = read(MemorySplit(payloads), Augment(antialias=False)).images
    assert exact.shape == (8, 3, 32, 32)


@settings(max_examples=100, deadline=None)
@given(tall=st.integers(1, 3000), wide=st.integers(1, 3000), size=st.integers(8, 300))
def test_downscaling_never_makes_a_crop_smaller_than_the_target(tall: int, wide: int, size: int) -> None:
    scale = jpeg_downscale((7, 13, tall, wide), (size, size))
    if scale > 1:
        assert tall / scale >= size and wide / scale >= size
    if scale < 8:
        assert tall < 2 * scale * size or wide < 2 * scale * size


def test_size_of_plain_jpegs_only() -> None:
    colour = picture(0, 30, 50)
    assert plain_jpeg_size(jpeg(colour)) == (30, 50)
    assert plain_jpeg_size(jpeg(colour, progressive=True, comment=b"x" * 500)) == (30, 50)
    assert plain_jpeg_size(rotated(colour, 1)) == (30, 50)
    assert plain_jpeg_size(rotated(colour, 6)) is None
    assert plain_jpeg_size(rotated(colour, 6), exif=False) == (30, 50)
    assert plain_jpeg_size(jpeg(colour[..., :1])) is None
    whole = jpeg(colour)
    for length in (0, 1, 2, 3, 10, 20, 100):
        assert plain_jpeg_size(whole[:length]) is None
    for broken in (b"\x89PNG" + bytes(40), b"\xff\xd8" + b"\xff" * 60, b"\xff\xd8" + bytes(60)):
        assert plain_jpeg_size(broken) is None


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_crash_the_jpeg_header_parser(tail: bytes) -> None:
    plain_jpeg_size(b"\xff\xd8" + tail)
    plain_jpeg_size(b"\xff\xd8\xff\xe1\x00\x40Exif\0\0" + tail)


def test_stored_images_and_files_give_the_same_crops() -> None:
    arrays = np.stack([picture(i, 60, 60) for i in range(8)])
    stored, single = read(StoredSplit(arrays)).images, read(MemorySplit(list(arrays))).images
    assert torch.equal(stored, single)
    assert np.abs(stored.float().numpy() - expected(list(arrays))).max() <= 1.01


def test_stored_images_are_sent_uncropped_to_the_gpu() -> None:
    arrays = np.stack([picture(i, 40, 40) for i in range(6)])
    host = read(StoredSplit(arrays), Augment(device="gpu"))
    assert host.uncropped and (host.images.numpy() == arrays).all()
    photographs = read(MemorySplit([jpeg(image) for image in arrays]), Augment(device="gpu"))
    assert not photographs.uncropped and photographs.images.shape == (6, 3, 32, 32)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_part_of_a_stored_split_is_read_from_its_array(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scattered images of a packed dataset have no contiguous array of their own; reading them one by one would be slow."""
    images = np.stack([picture(seed, 40, 40) for seed in range(6)])
    whole = StoredSplit(images)
    part = whole.subset([5, 0, 3])
    assert part.arrays is None
    monkeypatch.setattr(TrainReader, "_read_files", lambda *_: pytest.fail("read one by one"))
    augment = Augment(device=device)  # type: ignore[arg-type]
    found, same = read(part, augment), read(StoredSplit(images[[5, 0, 3]]), augment)
    assert torch.equal(found.images, same.images)
