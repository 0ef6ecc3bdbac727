"""Reading images for training: decode no more than the crop needs, and put it where the batch will be.

A random crop is scaled anyway, so a JPEG is decoded at the smallest scale (1/2, 1/4, 1/8) at which the crop still has
at least the pixels asked for. (libjpeg's scales in between, such as 5/8, take longer than the full one.) Plain JPEGs go
to libjpeg-turbo directly through simplejpeg, a fifth faster than by way of Pillow; without that package, and for any
other file, Pillow reads. Evaluation never comes here: it decodes fully.
"""

from __future__ import annotations

import struct
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.augment.apply import randaugment
from vitrail.data.augment.crop import draw_boxes, draw_flips
from vitrail.data.augment.randaugment import Operations, draw_operations
from vitrail.data.augment.spec import Augment
from vitrail.data.augment.streams import Stream, uniforms
from vitrail.data.batch import HostBatch
from vitrail.data.decode import MAX_PIXELS, decode, image_header
from vitrail.data.memory import BatchMemory
from vitrail.data.preprocess import Preprocess
from vitrail.data.sampler import Slice
from vitrail.data.types import Array, BadImage, Payload, Split
from vitrail.errors import VitrailError

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

_SUBSTITUTES = 16
_ANTIALIASED = {
    "bilinear": torch.ops.aten._upsample_bilinear2d_aa.out,
    "bicubic": torch.ops.aten._upsample_bicubic2d_aa.out,
}


@dataclass(frozen=True)
class _Read:
    """One image, read but not decoded."""

    payload: Payload
    name: str
    height: int
    width: int
    plain_jpeg: bool


class TrainReader:
    """Makes a worker's batches: from a `Slice` to uint8 images, cropped, flipped and (on the CPU) RandAugmented."""

    def __init__(self, split: Split, preprocess: Preprocess, augment: Augment, seed: int, *, skip_bad: bool, pieces: int) -> None:
        self.split, self.preprocess, self.augment, self.seed = split, preprocess, augment, seed
        self.skip_bad = skip_bad
        self.memory = BatchMemory(pieces)
        self._arrays: Tensor | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_arrays": None}  # a worker maps the file itself

    def __getitem__(self, where: Slice) -> HostBatch:
        arrays = self._common_arrays()
        indices, bad = where.indices, tuple[BadImage, ...]()
        if arrays is not None and self.augment.device == "gpu" and self.augment.crop != "none":
            images, whole = self._gather(arrays, indices), True
        else:
            whole = False
            if arrays is not None and self.augment.crop != "none":
                images = self._crop_arrays(arrays, where)
            elif arrays is not None and tuple(arrays.shape[1:3]) == self.preprocess.size:
                images = self._mirror(self._gather(arrays, indices), where)
            else:
                images, indices, bad = self._read_files(where)
            images = images.permute(0, 3, 1, 2)
            if self.augment.randaugment != "none" and self.augment.device == "cpu":
                randaugment(images, operations_of(self.augment, self.seed, where))
        targets = torch.from_numpy(self.split.targets[indices])
        return HostBatch(images, targets, torch.from_numpy(indices[-where.count :]), where, whole, bad)

    def _common_arrays(self) -> Tensor | None:
        """All images as one tensor, where the split has them so and in the model's own channels."""
        if self._arrays is None and self.preprocess.bits == 8:
            arrays = self.split.arrays
            if arrays is not None and arrays.dtype == np.uint8 and arrays.shape[3] == self.preprocess.channels:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a file mapped for reading is not writable, and need not be
                    self._arrays = torch.from_numpy(arrays)
        return self._arrays

    def _crop_arrays(self, arrays: Tensor, where: Slice) -> Tensor:
        rows = np.full(len(where.indices), arrays.shape[1])
        columns = np.full(len(where.indices), arrays.shape[2])
        boxes = boxes_of(self.augment, self.seed, where, rows, columns).tolist()
        flips = flips_of(self.augment, self.seed, where).tolist()
        images = self._empty(len(boxes))
        for row, (index, box, flip) in enumerate(zip(where.indices.tolist(), boxes, flips, strict=True)):
            top, left, height, width = box
            self._place(images[row], arrays[index, top : top + height, left : left + width], flip)
        return images

    def _mirror(self, images: Tensor, where: Slice) -> Tensor:
        flips = torch.from_numpy(flips_of(self.augment, self.seed, where))
        images[flips] = images[flips].flip(2)
        return images

    def _read_files(self, where: Slice) -> tuple[Tensor, Array, tuple[BadImage, ...]]:
        """Read, then decode, image by image; a bad one is replaced by another of the split, always the same."""
        indices, bad = where.indices.copy(), list[BadImage]()
        read = [self._try_open(int(index)) for index in indices]
        boxes: Array | None = None
        if self.augment.crop != "none":
            sizes = np.array([(1, 1) if isinstance(one, BadImage) else (one.height, one.width) for one in read])
            boxes = boxes_of(self.augment, self.seed, where, sizes[:, 0], sizes[:, 1])
        flips = flips_of(self.augment, self.seed, where).tolist()
        images = self._empty(len(indices))
        for row, one in enumerate(read):
            try:
                if isinstance(one, BadImage):
                    raise one
                pixels = self._pixels(one, None if boxes is None else tuple(boxes[row].tolist()))
            except BadImage as error:
                indices[row], pixels = self._another(where, row, error, bad)
            self._place(images[row], pixels, flips[row])
        return images, indices, tuple(bad)

    def _try_open(self, index: int) -> _Read | BadImage:
        try:
            return self._open(index)
        except BadImage as error:
            return error

    def _another(self, where: Slice, row: int, error: BadImage, bad: list[BadImage]) -> tuple[int, Tensor]:
        """An image in place of a bad one, chosen by the position alone, so the batch stays the same everywhere."""
        if not self.skip_bad:
            raise error
        bad.append(error)
        place = _place(where, row)
        for number in uniforms(self.seed, where.epoch, Stream.SUBSTITUTE, place, 1, _SUBSTITUTES)[0]:
            index = int(number * len(self.split))
            try:
                one, box = self._open(index), None
                if self.augment.crop != "none":
                    sizes = np.array([one.height]), np.array([one.width])
                    box = tuple(draw_boxes(self.augment, self.seed, where.epoch, place, *sizes)[0].tolist())
                return index, self._pixels(one, box)
            except BadImage as another:
                bad.append(another)
        raise VitrailError(
            f"{_SUBSTITUTES} images chosen in place of {error.name} were bad as well; the last: {bad[-1]} "
            "Run `vitrail data check` to see how many are."
        )

    def _open(self, index: int) -> _Read:
        payload, name = self.split.payload(index), self.split.image_name(index)
        if isinstance(payload, bytes):
            size = plain_jpeg_size(payload, exif=self.preprocess.exif)
            if size is not None and self.preprocess.channels == 3 and self.preprocess.bits == 8:
                return _Read(payload, name, *size, plain_jpeg=True)
        header = image_header(payload, name=name)
        turned = not self.preprocess.exif and header.orientation >= 5
        height, width = (header.width, header.height) if turned else (header.height, header.width)
        return _Read(payload, name, height, width, plain_jpeg=False)

    def _pixels(self, one: _Read, box: tuple[int, int, int, int] | None) -> Tensor:
        """The crop as [height, width, channels], at least as large as asked for unless the image itself is smaller."""
        if box is None:
            pixels = self.preprocess.pixels(one.payload, name=one.name)
            if pixels.dtype == np.float32 and self.preprocess.bits == 8:
                pixels = np.rint(pixels).astype(np.uint8)
            return _tensor(pixels)
        size = self.preprocess.size
        # Scaled decoding is a filter of its own: fine before an antialiased resize, wrong where none is wanted.
        shrunk = jpeg_scale(box, size) if self.augment.antialias else 1
        if one.plain_jpeg and simplejpeg is not None:
            least = {"min_height": -(-one.height // shrunk), "min_width": -(-one.width // shrunk)} if shrunk > 1 else {}
            try:
                whole = torch.from_numpy(simplejpeg.decode_jpeg(one.payload, **least))
                return whole[_part(box[0], box[2], shrunk), _part(box[1], box[3], shrunk)]
            except ValueError:
                pass  # the general decoder says in words what is wrong with the file, or copes with it
        return _tensor(
            decode(
                one.payload,
                channels=self.preprocess.channels,
                bits=self.preprocess.bits,
                exif=self.preprocess.exif,
                cover=size if shrunk > 1 else None,
                region=box,
                name=one.name,
            )
        )

    def _place(self, target: Tensor, pixels: Tensor, flip: bool) -> None:
        """Resize into the batch's own memory."""
        # In this order, torch sees that the channels of a pixel lie together and takes its fastest way.
        planes = (pixels.flip(1) if flip else pixels)[None].permute(0, 3, 1, 2)
        place, augment = target[None].permute(0, 3, 1, 2), self.augment
        if tuple(planes.shape[2:]) == self.preprocess.size:
            place.copy_(planes)
        elif planes.dtype == torch.uint8 and augment.antialias:
            # What `interpolate` does in this case, straight into its place, which saves a copy.
            _ANTIALIASED[augment.interpolation](planes, self.preprocess.size, False, None, None, out=place)
        else:
            planes = F.interpolate(planes, self.preprocess.size, mode=augment.interpolation, antialias=augment.antialias)
            # A cubic filter may overshoot.
            place.copy_(planes.clamp_(0, self.preprocess.brightest) if planes.is_floating_point() else planes)

    def _gather(self, arrays: Tensor, indices: Array) -> Tensor:
        images = self.memory.empty((len(indices), *arrays.shape[1:]), torch.uint8)
        return torch.index_select(arrays, 0, torch.from_numpy(indices), out=images)

    def _empty(self, count: int) -> Tensor:
        shape = (count, *self.preprocess.size, self.preprocess.channels)
        return self.memory.empty(shape, torch.uint8 if self.preprocess.bits == 8 else torch.float32)


def boxes_of(augment: Augment, seed: int, where: Slice, heights: Array, widths: Array) -> Array:
    """Crop boxes for all images of a slice, of the given sizes."""
    parts, done = [], 0
    for first, count in where.runs:
        some = slice(done, done + count)
        parts.append(draw_boxes(augment, seed, where.epoch, first, heights[some], widths[some]))
        done += count
    return np.concatenate(parts)


def flips_of(augment: Augment, seed: int, where: Slice) -> Array:
    return np.concatenate([draw_flips(augment, seed, where.epoch, first, count) for first, count in where.runs])


def operations_of(augment: Augment, seed: int, where: Slice) -> Operations:
    parts = [draw_operations(augment, seed, where.epoch, first, count) for first, count in where.runs]
    codes, signs, spots = (np.concatenate([getattr(part, field) for part in parts]) for field in ("codes", "signs", "spots"))
    return Operations(parts[0].variant, parts[0].magnitude, codes, signs, spots)


def jpeg_scale(box: tuple[int, int, int, int], size: tuple[int, int]) -> int:
    """By how much (1, 2, 4 or 8) a JPEG may come out smaller so that the crop still covers the size it is resized to."""
    return next((scale for scale in (8, 4, 2) if box[2] >= scale * size[0] and box[3] >= scale * size[1]), 1)


def _part(start: int, length: int, shrunk: int) -> slice:
    """Where a run of pixels lies in the image decoded smaller, outer edges kept."""
    return slice(start // shrunk, -(-(start + length) // shrunk))


def plain_jpeg_size(payload: bytes, *, exif: bool = True) -> tuple[int, int] | None:
    """(height, width) of a three-channel JPEG that stands upright (or may lie, without `exif`); None for all others."""
    if payload[:2] != b"\xff\xd8":
        return None
    place, end = 2, len(payload) - 9
    while place < end and payload[place] == 0xFF:
        marker = payload[place + 1]
        if marker == 0xFF:  # fill byte
            place += 1
            continue
        if marker == 0xE1 and exif and _turned(payload[place + 4 : place + 10 + 65536]):
            return None
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            bits, height, width, channels = struct.unpack_from(">BHHB", payload, place + 4)
            plain = marker in (0xC0, 0xC1, 0xC2) and bits == 8 and channels == 3
            return (height, width) if plain and 0 < height * width <= MAX_PIXELS else None
        place += 2 + int.from_bytes(payload[place + 2 : place + 4], "big")
    return None


def _turned(segment: bytes) -> bool:
    """Whether an APP1 segment is EXIF that says the image lies otherwise than upright, or cannot be understood."""
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
    # Pillow's arrays are for reading only, which torch does not know of.
    return torch.from_numpy(np.ascontiguousarray(pixels) if pixels.flags.writeable else pixels.copy())


def _place(where: Slice, row: int) -> int:
    for first, count in where.runs:
        if row < count:
            return first + row
        row -= count
    raise VitrailError("An image outside its slice was asked for.")
