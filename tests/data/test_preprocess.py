from __future__ import annotations

import dataclasses
import json
import warnings
from typing import Any

import numpy as np
import pytest
import timm.data
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torchvision import transforms

from tests.data.image_files import encoded, picture
from vitrail.data.preprocess import PRESETS, Preprocess, preset
from vitrail.data.resize import resize
from vitrail.errors import VitrailError

SIZES = [(375, 500), (500, 333), (64, 64), (231, 230), (100, 999)]


@pytest.mark.parametrize("shape", SIZES)
def test_imagenet_equals_torchvision_exactly(shape: tuple[int, int]) -> None:
    image = picture(1, *shape)
    theirs = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    assert torch.equal(preset("imagenet")(image), theirs(Image.fromarray(image)))


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("size", [224, 384])
def test_deit_equals_its_evaluation_exactly(shape: tuple[int, int], size: int) -> None:
    image = picture(2, *shape)
    theirs = transforms.Compose(
        [
            transforms.Resize(int(size / 0.875), interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(size),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    assert torch.equal(preset("deit", size=size)(image), theirs(Image.fromarray(image)))


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("size", [224, 384])
def test_timm_equals_timm_exactly(shape: tuple[int, int], size: int) -> None:
    image = picture(2, *shape)
    theirs = timm.data.create_transform(
        input_size=(3, size, size), interpolation="bicubic", crop_pct=0.9, mean=(0.5,) * 3, std=(0.5,) * 3, is_training=False
    )
    assert torch.equal(preset("timm", size=size)(image), theirs(Image.fromarray(image)))


def brute_bilinear(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """tf.image.resize from its definition: half-pixel centres, two taps per axis, edges repeated."""
    result = np.empty((height, width, image.shape[2]))
    for y in range(height):
        for x in range(width):
            v, u = (y + 0.5) * image.shape[0] / height - 0.5, (x + 0.5) * image.shape[1] / width - 0.5
            total = np.zeros(image.shape[2])
            for row in (int(np.floor(v)), int(np.floor(v)) + 1):
                for column in (int(np.floor(u)), int(np.floor(u)) + 1):
                    pixel = image[min(max(row, 0), image.shape[0] - 1), min(max(column, 0), image.shape[1] - 1)]
                    total += (1 - abs(v - row)) * (1 - abs(u - column)) * pixel
            result[y, x] = total
    return result


def brute_area(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """TensorFlow's area method from its definition: every input pixel weighted by its covered fraction."""

    def coverage(old: int, new: int) -> np.ndarray:
        table = np.zeros((new, old))
        for k in range(new):
            low, high = k * old / new, (k + 1) * old / new
            for j in range(old):
                table[k, j] = max(0.0, min(high, j + 1) - max(low, j))
        return table / table.sum(1, keepdims=True)

    return np.einsum("yh,hwc,xw->yxc", coverage(image.shape[0], height), image.astype(np.float64), coverage(image.shape[1], width))


@pytest.mark.parametrize("shape", [(37, 51), (16, 16), (9, 70)])
def test_google_vit_stretches_with_tensorflow_bilinear(shape: tuple[int, int]) -> None:
    image = picture(3, *shape)
    expected = (brute_bilinear(image, 24, 24) - 127.5) / 127.5
    result = preset("google-vit", size=24)(image).permute(1, 2, 0).numpy()
    np.testing.assert_allclose(result, expected, atol=2e-6)


@pytest.mark.parametrize("shape", [(37, 51), (60, 33), (20, 20)])
def test_big_vision_resizes_by_area_truncates_and_crops_the_centre(shape: tuple[int, int]) -> None:
    image = picture(4, *shape)
    short, cut = 32, 28
    factor = short / min(shape)
    height, width = (round(side * factor) for side in shape)
    resized = np.floor(brute_area(image, height, width) + 1e-6)
    top, left = (height - cut) // 2, (width - cut) // 2
    expected = resized[top : top + cut, left : left + cut] / 127.5 - 1
    result = preset("big-vision", size=28)(image).permute(1, 2, 0).numpy()
    # A value within 1e-4 of an integer may be truncated either way.
    assert (np.abs(result - expected) > 1e-5).mean() < 0.002
    assert np.abs(result - expected).max() < 1.01 / 127.5


def test_presets_have_the_published_numbers() -> None:
    assert preset("big-vision").resize_to == 256
    assert preset("big-vision", size=384).resize_to == 448
    assert preset("timm").resize_to == 248
    assert preset("imagenet").resize_to == 256
    assert preset("cifar").size == (32, 32)
    image = picture(5, 32, 32)
    moments = torch.tensor(image).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))
    torch.testing.assert_close(preset("cifar")(image), (moments - mean) / std)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos", "area", "nearest"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_antialiased_resizing_equals_pillow_per_channel(interpolation: Any, channels: int) -> None:
    image = picture(6, 33, 47, channels)
    filters = {"area": "BOX"}.get(interpolation, interpolation.upper())
    planes = [Image.fromarray(image[:, :, c]).resize((20, 25), Image.Resampling[filters]) for c in range(channels)]
    ours = resize(image, (25, 20), interpolation=interpolation, antialias=True, rounding="nearest")
    assert np.array_equal(ours, np.stack([np.asarray(plane) for plane in planes], axis=2))


@pytest.mark.parametrize(("interpolation", "mode"), [("bilinear", "bilinear"), ("nearest", "nearest-exact")])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_resizing_without_antialias_equals_interpolate(interpolation: Any, mode: str, channels: int) -> None:
    """Its centres are those of TensorFlow. Of more than four channels it rounds them otherwise."""
    for old, new in (((33, 47), (20, 25)), ((7, 90), (31, 30)), ((1, 300), (5, 40)), ((200, 1), (9, 9)), ((480, 640), (224, 224))):
        image = picture(6, *old, channels)
        expected = nn.functional.interpolate(torch.from_numpy(image).permute(2, 0, 1)[None].float(), new, mode=mode)[0]
        found = resize(image, new, interpolation=interpolation, antialias=False, rounding="none")
        np.testing.assert_allclose(found, expected.permute(1, 2, 0), rtol=0, atol=0 if interpolation == "nearest" else 0.01)


@pytest.mark.parametrize("interpolation", ["bicubic", "lanczos"])
def test_antialias_makes_no_difference_when_upscaling(interpolation: Any) -> None:
    image = picture(7, 21, 30)
    with_, without = (
        resize(image, (64, 50), interpolation=interpolation, antialias=antialias, rounding="none") for antialias in (True, False)
    )
    np.testing.assert_allclose(with_, without, atol=0.05)


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    interpolation=st.sampled_from(["nearest", "bilinear", "bicubic", "area", "lanczos"]),
    antialias=st.booleans(),
    rounding=st.sampled_from(["none", "truncate", "nearest"]),
    grey=st.integers(0, 255),
)
def test_a_constant_image_stays_constant(
    height: int, width: int, rows: int, columns: int, interpolation: Any, antialias: bool, rounding: Any, grey: int
) -> None:
    image = np.full((height, width, 3), grey, np.uint8)
    result = resize(image, (rows, columns), interpolation=interpolation, antialias=antialias, rounding=rounding)
    assert result.shape == (rows, columns, 3)
    np.testing.assert_allclose(result, grey, atol=0 if rounding != "none" else 1e-3)


@settings(max_examples=80, deadline=None)
@given(
    height=st.integers(1, 120),
    width=st.integers(1, 120),
    name=st.sampled_from(PRESETS),
    size=st.tuples(st.integers(1, 48), st.integers(1, 48)),
    channels=st.sampled_from([1, 3, 4]),
)
def test_every_image_has_the_requested_size(height: int, width: int, name: str, size: tuple[int, int], channels: int) -> None:
    result = preset(name, size=size, channels=channels)(picture(8, height, width))
    assert result.shape == (channels, *size)
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    assert bool(torch.isfinite(result).all())


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_json_round_trip_keeps_value_and_fingerprint(name: str, channels: int) -> None:
    spec = preset(name, size=(96, 128), channels=channels, bits=16)
    again = Preprocess.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert again.fingerprint() == spec.fingerprint()
    assert hash(again) == hash(spec)


def test_every_field_but_the_name_changes_the_fingerprint() -> None:
    spec = Preprocess()
    others: dict[str, Any] = {
        "size": (32, 32),
        "resize": "none",
        "interpolation": "area",
        "antialias": False,
        "rounding": "none",
        "geometry": "tensorflow",
        "pad": True,
        "mean": (0.1, 0.5, 0.5),
        "std": (0.1, 0.5, 0.5),
        "bits": 16,
        "exif": False,
    }
    prints = {dataclasses.replace(spec, **{key: value}).fingerprint() for key, value in others.items()}
    assert len(prints | {spec.fingerprint()}) == len(others) + 1
    assert dataclasses.replace(spec, name="other").fingerprint() == spec.fingerprint()
    kept = spec.keep_aspect((16, 16))  # its fields must agree with each other, so cannot change alone
    assert len({one.fingerprint() for one in (spec, kept, spec.keep_aspect((8, 16)), spec.keep_aspect((16, 16), 300))}) == 4
    covered = {*others, "name", "resize_to", "channels", "max_size", "multiple"}
    assert covered == {field.name for field in dataclasses.fields(Preprocess)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resize": "sqare"}, "it must be one of square, short-side, none"),
        ({"resize": "short-side"}, "Give the length of the short side"),
        ({"resize": "none", "resize_to": 256}, "Leave it out, or use resize='short-side'"),
        ({"resize": "short-side", "resize_to": 100}, "smaller than the 224×224"),
        ({"resize": "short-side", "resize_to": 256, "pad": True}, "has no effect"),
        ({"mean": (0.5,)}, "1 value for 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, "above 0"),
        ({"bits": 12}, "one of 8, 16"),
        ({"size": (0, 4)}, "at least 1"),
        ({"size": 224}, r"size is 224; it must be \(height, width\)"),
        ({"mean": 0.5}, "mean is 0.5; it must be one number per channel"),
        ({"std": ("a", "b", "c")}, "it must be one number per channel"),
        ({"multiple": 16}, r"multiple is 16; it must be \(height, width\)"),
    ],
)
def test_invalid_values_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(VitrailError, match=words):
        Preprocess(**changes)


def test_unknown_keys_and_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(VitrailError, match=r"'interpolatoin'.*interpolation"):
        Preprocess.from_dict({**Preprocess().to_dict(), "interpolatoin": "area"})
    with pytest.raises(VitrailError, match="google-vit"):
        preset("google_vit")


def test_a_new_size_scales_resize_to() -> None:
    assert preset("imagenet").with_size(112).resize_to == 128
    assert preset("imagenet").with_size((112, 224)).size == (112, 224)
    assert preset("google-vit").with_size(384) == preset("google-vit", size=384)


def test_padding_keeps_the_aspect_ratio_and_fills_with_the_mean() -> None:
    spec = Preprocess(size=(32, 32), resize="square", pad=True, interpolation="nearest", mean=(0.3, 0.4, 0.5))
    result = spec(np.full((10, 40, 3), 255, np.uint8))
    bright = (1 - torch.tensor(spec.mean)) / torch.tensor(spec.std)
    torch.testing.assert_close(result[:, 12:20], bright[:, None, None].expand(3, 8, 32))
    torch.testing.assert_close(result[:, :12], torch.zeros(3, 12, 32), atol=1e-6, rtol=0)


def test_without_resizing_a_small_image_is_refused_and_a_large_one_cropped() -> None:
    spec = Preprocess(size=(8, 8), resize="none")
    image = picture(9, 12, 14)
    assert np.array_equal(spec.pixels(image), image[2:10, 3:11])
    with pytest.raises(VitrailError, match=r"6×20.*expects 8×8.*resize is 'none'"):
        spec(picture(9, 6, 20))


def test_bytes_files_arrays_and_pillow_images_give_the_same(tmp_path: Any) -> None:
    image = picture(10, 50, 60)
    file = tmp_path / "a.png"
    file.write_bytes(encoded(image))
    spec = preset("timm", size=32)
    results = [spec(each) for each in (image, file.read_bytes(), file, str(file), Image.open(file))]
    assert all(torch.equal(results[0], other) for other in results)
    with pytest.raises(VitrailError, match="No such file"):
        spec(tmp_path / "b.png")


def test_16_bits_keep_what_8_would_lose() -> None:
    deep = np.arange(0, 64, dtype=np.uint16).reshape(8, 8, 1) * 3 + 30_000
    spec = Preprocess(size=(8, 8), channels=1, bits=16, mean=(0.5,), std=(0.5,))
    expected = (deep[:, :, 0] / 65535 - 0.5) / 0.5
    np.testing.assert_allclose(spec(deep)[0].numpy(), expected, atol=1e-6)
    assert len(np.unique(dataclasses.replace(spec, bits=8)(deep).numpy())) <= 2


def test_normalise_accepts_batches_and_refuses_a_wrong_order() -> None:
    spec = preset("cifar", size=8)
    batch = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    one_by_one = torch.stack([spec(image.permute(1, 2, 0).numpy()) for image in batch])
    assert torch.equal(spec.normalise(batch), one_by_one)
    with pytest.raises(VitrailError, match="channels, height, width"):
        spec.normalise(batch.permute(0, 2, 3, 1))


def test_normalise_copies_its_constants_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To copy them waits for all that a GPU computes, so that no batch could be launched while it computes another."""
    preprocess, pixels = preset("imagenet", size=8), torch.arange(192, dtype=torch.uint8).reshape(3, 8, 8)
    expected = preprocess.normalise(pixels)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("This is a copy to the device.")

    monkeypatch.setattr(torch, "tensor", refuse)
    assert torch.equal(preprocess.normalise(pixels), expected)


def test_normalise_computes_after_it_was_traced_without_values() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    preprocess, images = Preprocess(mean=(0.3, 0.1, 0.2), std=(0.6, 0.5, 0.4)), torch.ones(3, 2, 2)
    with FakeTensorMode() as mode:
        assert preprocess.normalise(mode.from_tensor(images)).shape == (3, 2, 2)
    assert type(preprocess.normalise(images)) is torch.Tensor
    preprocess = Preprocess(mean=(0.4, 0.1, 0.2), std=(0.6, 0.5, 0.4))
    with FakeTensorMode(allow_non_fake_inputs=True):
        preprocess.normalise(images)  # which has values, but the constants have none
    expected = (1 / 255 - torch.tensor(preprocess.mean)) / torch.tensor(preprocess.std)
    torch.testing.assert_close(preprocess.normalise(images)[:, 0, 0], expected)


def test_normalise_is_traced_alike_each_time() -> None:
    """torch traces twice and compares: constants that are kept from the first time would be missing in the second."""
    preprocess, images = Preprocess(mean=(0.2, 0.2, 0.4), std=(0.7, 0.5, 0.4)), torch.ones(3, 2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and our check of channels is not traced
        traced = torch.jit.trace(preprocess.normalise, (images,))  # type: ignore[no-untyped-call]
    assert torch.equal(traced(2 * images), preprocess.normalise(2 * images))


@pytest.mark.filterwarnings("error")
def test_normalise_is_compiled_without_a_warning() -> None:
    preprocess, images = preset("imagenet", size=2), torch.ones(3, 2, 2)
    compiled = torch.compile(preprocess.normalise, backend="eager", fullgraph=True)
    assert torch.equal(compiled(images), preprocess.normalise(images))


def test_normalise_has_gradients_after_a_call_in_inference_mode() -> None:
    preprocess, images = Preprocess(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)), torch.ones(3, 2, 2)
    with torch.inference_mode():
        preprocess.normalise(images)
    preprocess.normalise(images.requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]
    assert images.grad is not None
    assert torch.allclose(images.grad[:, 0, 0] * 255, 1 / torch.tensor(preprocess.std))


def test_area_resizing_in_blocks_equals_that_of_the_whole_image(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitrail.data import resize as module

    image = np.random.default_rng(0).integers(0, 255, (70, 90, 3)).astype(np.float32)
    whole = module._area(module._area(image, 20, 0), 30, 1)
    monkeypatch.setattr(module, "_BLOCK", 7)
    assert np.array_equal(module._area(module._area(image, 20, 0), 30, 1), whole)
