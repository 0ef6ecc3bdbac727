from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from tests.data.memory_splits import MemorySplit, jpeg, picture
from vitrail.data.thumbnails import split_thumbnail, thumbnail
from vitrail.data.types import BadImage


def npy(channels: int) -> bytes:
    content = io.BytesIO()
    np.save(content, picture(0, 60, 90, channels))
    return content.getvalue()


def test_the_whole_image_fits_into_a_square() -> None:
    image = picture(0, 60, 90)
    for payload in (image, jpeg(image), npy(3), npy(5), npy(2), Image.fromarray(image)):
        assert thumbnail(payload, 48).size == (48, 32)
    assert thumbnail(picture(0, 600, 1), 48).size == (1, 48)


def test_the_pixels_of_tiny_images_are_not_blurred() -> None:
    image = picture(0, 8, 8)
    assert (np.asarray(thumbnail(image, 32)) == image.repeat(4, 0).repeat(4, 1)).all()


def test_a_bad_image_has_no_thumbnail() -> None:
    with pytest.raises(BadImage, match="a text file"):
        thumbnail(b"I am a text", 48)
    assert split_thumbnail(MemorySplit([b"unreadable"]), 0, 48) is None
