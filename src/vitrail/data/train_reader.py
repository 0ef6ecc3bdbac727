"""Read images for training: decode no more than the crop needs, directly into the buffer of the batch.

A random crop is resized anyway, so a JPEG is decoded at the smallest scale (1/2, 1/4, 1/8) at which the crop is still at
least as large as the model's input. (libjpeg's other scales, such as 5/8, take longer than full size.) Plain JPEGs are
decoded by libjpeg-turbo through simplejpeg, which is a fifth faster than Pillow. Pillow decodes all other files, and
everything if simplejpeg is not installed. Evaluation does not use this module: it decodes at full size.
"""

from __future__ import annotations

import struct
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.augment.apply import apply_operations, draw_operations
from vitrail.data.augment.crop import draw_boxes, draw_flips
from vitrail.data.augment.operations import Operations, concatenate
from vitrail.data.augment.rng import Purpose, uniforms
from vitrail.data.augment.spec import Augment
from vitrail.data.batch import HostBatch
from vitrail.data.buffers import BatchBuffers
from vitrail.data.decode import MAX_PIXELS, decode, image_header
from vitrail.data.preprocess import Preprocess
from vitrail.data.sampler import BatchSlice
from vitrail.data.types import Array, BadImage, Payload, Split, Subset
from vitrail.errors import VitrailError

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

_MAX_SUBSTITUTES = 16
_ANTIALIASED = {
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
}


@dataclass(frozen=True)
class _EncodedImage:
    """An image that is read but not decoded, with its size."""

    payload: Payload
    name: str
    height: int
    width: int
    plain_jpeg: bool


class TrainReader:
    """Build a worker's batches: uint8 images, cropped, flipped and, with device="cpu", changed by RandAugment and the like."""

    def __init__(
        self, split: Split, preprocess: Preprocess, augment: Augment, seed: int, *, skip_bad: bool, num_buffers: int
    ) -> None:
        self.split, self.preprocess, self.augment, self.seed = split, preprocess, augment, seed
        self.skip_bad = skip_bad
        self.buffers = BatchBuffers(num_buffers)
        self._arrays: Tensor | None = None
        self._rows: Array | None = None  # the rows of `_arrays` that the split consists of; None: all

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_arrays": None}  # each worker maps the file itself

    def __getitem__(self, batch_slice: BatchSlice) -> HostBatch:
        arrays = self._common_arrays()
        indices, bad = batch_slice.indices, tuple[BadImage, ...]()
        if arrays is not None and self.augment.device == "gpu" and self.augment.crop != "none":
            images, uncropped = self._gather(arrays, indices), True
        else:
            uncropped = False
            if arrays is not None and self.augment.crop != "none":
                images = self._crop_arrays(arrays, batch_slice)
            elif arrays is not None and tuple(arrays.shape[1:3]) == self.preprocess.size:
                images = self._flip(self._gather(arrays, indices), batch_slice)
            else:
                images, indices, bad = self._read_files(batch_slice)
            images = images.permute(0, 3, 1, 2)
            if self.augment.changes_pixels and self.augment.device == "cpu":
                apply_operations(images, slice_operations(self.augment, self.preprocess, self.seed, batch_slice))
        targets = torch.from_numpy(self.split.targets[indices])
        return HostBatch(images, targets, torch.from_numpy(indices[-batch_slice.count :]), batch_slice, uncropped, bad)

    def _common_arrays(self) -> Tensor | None:
        """Return all images as one tensor, if the split stores them so and with the model's channels.

        For part of such a split, these are the images of the whole, to be indexed by `_rows`.
        """
        if self._arrays is None and self.preprocess.bits == 8:
            arrays = self.split.arrays
            if arrays is None and isinstance(self.split, Subset):
                arrays, self._rows = self.split.parent.arrays, self.split.indices
            if arrays is not None and arrays.dtype == np.uint8 and arrays.shape[3] == self.preprocess.channels:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns that a read-only memory map is not writable
                    self._arrays = torch.from_numpy(arrays)
        return self._arrays

    def _crop_arrays(self, arrays: Tensor, batch_slice: BatchSlice) -> Tensor:
        rows = np.full(len(batch_slice.indices), arrays.shape[1])
        columns = np.full(len(batch_slice.indices), arrays.shape[2])
        boxes = slice_boxes(self.augment, self.seed, batch_slice, rows, columns).tolist()
        flips = slice_flips(self.augment, self.seed, batch_slice).tolist()
        images = self._empty(len(boxes))
        for row, (index, box, flip) in enumerate(zip(self._stored(batch_slice.indices).tolist(), boxes, flips, strict=True)):
            top, left, height, width = box
            self._write(images[row], arrays[index, top : top + height, left : left + width], flip)
        return images

    def _flip(self, images: Tensor, batch_slice: BatchSlice) -> Tensor:
        flips = torch.from_numpy(slice_flips(self.augment, self.seed, batch_slice))
        images[flips] = images[flips].flip(2)
        return images

    def _read_files(self, batch_slice: BatchSlice) -> tuple[Tensor, Array, tuple[BadImage, ...]]:
        """Read and decode each image. A bad one is replaced by another image of the split, always the same one."""
        indices, bad = batch_slice.indices.copy(), list[BadImage]()
        encoded = [self._try_open(int(index)) for index in indices]
        boxes: Array | None = None
        if self.augment.crop != "none":
            sizes = np.array([(1, 1) if isinstance(image, BadImage) else (image.height, image.width) for image in encoded])
            boxes = slice_boxes(self.augment, self.seed, batch_slice, sizes[:, 0], sizes[:, 1])
        flips = slice_flips(self.augment, self.seed, batch_slice).tolist()
        images = self._empty(len(indices))
        for row, image in enumerate(encoded):
            try:
                if isinstance(image, BadImage):
                    raise image
                pixels = self._pixels(image, None if boxes is None else tuple(boxes[row].tolist()))
            except BadImage as error:
                indices[row], pixels = self._substitute(batch_slice, row, error, bad)
            self._write(images[row], pixels, flips[row])
        return images, indices, tuple(bad)

    def _try_open(self, index: int) -> _EncodedImage | BadImage:
        try:
            return self._open(index)
        except BadImage as error:
            return error

    def _substitute(self, batch_slice: BatchSlice, row: int, error: BadImage, bad: list[BadImage]) -> tuple[int, Tensor]:
        """Choose an image to replace a bad one, by its position in the epoch alone, so that all workers and ranks agree."""
        if not self.skip_bad:
            raise error.skippable() from None
        bad.append(error)
        position = _epoch_position(batch_slice, row)
        for number in uniforms(self.seed, batch_slice.epoch, Purpose.SUBSTITUTE, position, 1, _MAX_SUBSTITUTES)[0]:
            index = int(number * len(self.split))
            try:
                image, box = self._open(index), None
                if self.augment.crop != "none":
                    sizes = np.array([image.height]), np.array([image.width])
                    box = tuple(draw_boxes(self.augment, self.seed, batch_slice.epoch, position, *sizes)[0].tolist())
                return index, self._pixels(image, box)
            except BadImage as another:
                bad.append(another)
        raise VitrailError(
            f"The {_MAX_SUBSTITUTES} images tried instead of {error.name} are bad too. The last one: {bad[-1]} "
            "Run `vitrail data check` to list all bad images."
        )

    def _open(self, index: int) -> _EncodedImage:
        payload, name = self.split.payload(index), self.split.image_name(index)
        if isinstance(payload, bytes):
            size = plain_jpeg_size(payload, exif=self.preprocess.exif)
            if size is not None and self.preprocess.channels == 3 and self.preprocess.bits == 8:
                return _EncodedImage(payload, name, *size, plain_jpeg=True)
        header = image_header(payload, name=name)
        swapped = not self.preprocess.exif and header.orientation >= 5
        height, width = (header.width, header.height) if swapped else (header.height, header.width)
        return _EncodedImage(payload, name, height, width, plain_jpeg=False)

    def _pixels(self, encoded: _EncodedImage, box: tuple[int, int, int, int] | None) -> Tensor:
        """Decode the crop as [height, width, channels], not smaller than the model's input unless the image is."""
        if box is None:
            pixels = self.preprocess.pixels(encoded.payload, name=encoded.name)
            if pixels.dtype == np.float32 and self.preprocess.bits == 8:
                pixels = np.rint(pixels).astype(np.uint8)
            return _tensor(pixels)
        size = self.preprocess.size
        # Decoding at a smaller scale is itself a low-pass filter, so it is only right before an antialiased resize.
        downscale = jpeg_downscale(box, size) if self.augment.antialias else 1
        if encoded.plain_jpeg and simplejpeg is not None:
            min_size = (
                {"min_height": -(-encoded.height // downscale), "min_width": -(-encoded.width // downscale)}
                if downscale > 1
                else {}
            )
            try:
                image = torch.from_numpy(simplejpeg.decode_jpeg(encoded.payload, **min_size))
                return image[_scaled_range(box[0], box[2], downscale), _scaled_range(box[1], box[3], downscale)]
            except ValueError:
                pass  # Pillow may decode it, or else says what is wrong
        return _tensor(
            decode(
                encoded.payload,
                channels=self.preprocess.channels,
                bits=self.preprocess.bits,
                exif=self.preprocess.exif,
                min_size=size if downscale > 1 else None,
                region=box,
                name=encoded.name,
            )
        )

    def _write(self, target: Tensor, pixels: Tensor, flip: bool) -> None:
        """Resize an image into the buffer of the batch."""
        # Permuting last keeps the channels_last strides, for which torch's resize is fastest.
        planes = (pixels.flip(1) if flip else pixels)[None].permute(0, 3, 1, 2)
        output, augment = target[None].permute(0, 3, 1, 2), self.augment
        if tuple(planes.shape[2:]) == self.preprocess.size:
            output.copy_(planes)
        elif planes.dtype == torch.uint8 and augment.antialias:
            # The kernel that `interpolate` calls in this case, with `out` to save a copy.
            _ANTIALIASED[augment.interpolation](planes, self.preprocess.size, False, None, None, out=output)
        else:
            planes = F.interpolate(planes, self.preprocess.size, mode=augment.interpolation, antialias=augment.antialias)
            # Bicubic interpolation may overshoot.
            output.copy_(planes.clamp_(0, self.preprocess.max_value) if planes.is_floating_point() else planes)

    def _gather(self, arrays: Tensor, indices: Array) -> Tensor:
        images = self.buffers.empty((len(indices), *arrays.shape[1:]), torch.uint8)
        return torch.index_select(arrays, 0, torch.from_numpy(self._stored(indices)), out=images)

    def _stored(self, indices: Array) -> Array:
        return indices if self._rows is None else self._rows[indices]

    def _empty(self, count: int) -> Tensor:
        shape = (count, *self.preprocess.size, self.preprocess.channels)
        return self.buffers.empty(shape, torch.uint8 if self.preprocess.bits == 8 else torch.float32)


def slice_boxes(augment: Augment, seed: int, batch_slice: BatchSlice, heights: Array, widths: Array) -> Array:
    """Draw the crop boxes of all images of a slice, given their sizes."""
    parts, done = [], 0
    for first, count in batch_slice.ranges:
        rows = slice(done, done + count)
        parts.append(draw_boxes(augment, seed, batch_slice.epoch, first, heights[rows], widths[rows]))
        done += count
    return np.concatenate(parts)


def slice_flips(augment: Augment, seed: int, batch_slice: BatchSlice) -> Array:
    return np.concatenate([draw_flips(augment, seed, batch_slice.epoch, first, count) for first, count in batch_slice.ranges])


def slice_operations(augment: Augment, preprocess: Preprocess, seed: int, batch_slice: BatchSlice) -> list[Operations]:
    drawn = [
        draw_operations(augment, preprocess.mean, preprocess.size, seed, batch_slice.epoch, first, count)
        for first, count in batch_slice.ranges
    ]
    return [concatenate(parts) for parts in zip(*drawn, strict=True)]


def jpeg_downscale(box: tuple[int, int, int, int], size: tuple[int, int]) -> int:
    """Return the largest factor (1, 2, 4 or 8) to decode a JPEG smaller by, such that the crop is not smaller than `size`."""
    return next((scale for scale in (8, 4, 2) if box[2] >= scale * size[0] and box[3] >= scale * size[1]), 1)


def _scaled_range(start: int, length: int, downscale: int) -> slice:
    """Convert a range of pixels to the downscaled image, rounding outwards."""
    return slice(start // downscale, -(-(start + length) // downscale))


def plain_jpeg_size(payload: bytes, *, exif: bool = True) -> tuple[int, int] | None:
    """Return (height, width) of a three-channel JPEG that needs no EXIF rotation (ignored without `exif`), else None."""
    if payload[:2] != b"\xff\xd8":
        return None
    offset, end = 2, len(payload) - 9
    while offset < end and payload[offset] == 0xFF:
        marker = payload[offset + 1]
        if marker == 0xFF:  # fill byte
            offset += 1
            continue
        if marker == 0xE1 and exif and _is_rotated(payload[offset + 4 : offset + 10 + 65536]):
            return None
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            bits, height, width, channels = struct.unpack_from(">BHHB", payload, offset + 4)
            plain = marker in (0xC0, 0xC1, 0xC2) and bits == 8 and channels == 3
            return (height, width) if plain and 0 < height * width <= MAX_PIXELS else None
        offset += 2 + int.from_bytes(payload[offset + 2 : offset + 4], "big")
    return None


def _is_rotated(segment: bytes) -> bool:
    """Whether an APP1 segment holds an EXIF orientation other than upright, or EXIF that cannot be parsed."""
    if segment[:6] != b"Exif\0\0":
        return False
    order = {b"II": "<", b"MM": ">"}.get(segment[6:8])
    try:
        if order is None:
            return True
        directory = 6 + struct.unpack_from(f"{order}I", segment, 10)[0]
        for entry in range(struct.unpack_from(f"{order}H", segment, directory)[0]):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", segment, directory + 2 + 12 * entry)
            if tag == 0x0112:
                return bool(value != 1)
    except struct.error:
        return True
    return False


def _tensor(pixels: Array) -> Tensor:
    if pixels.dtype == np.uint16:
        pixels = pixels.astype(np.float32)  # torch has few operations for uint16
    # Arrays from Pillow are read-only, and torch has no read-only tensors.
    return torch.from_numpy(np.ascontiguousarray(pixels) if pixels.flags.writeable else pixels.copy())


def _epoch_position(batch_slice: BatchSlice, row: int) -> int:
    """Return the position in the epoch of a row of a slice."""
    for first, count in batch_slice.ranges:
        if row < count:
            return first + row
        row -= count
    raise AssertionError
