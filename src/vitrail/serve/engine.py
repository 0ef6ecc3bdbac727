"""`Engine`: a model for inference that computes batches. On a GPU a second one can be prepared while one is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints import Bundle
from vitrail.data.types import Array
from vitrail.errors import VitrailError
from vitrail.evaluate.settings import FeatureSpec
from vitrail.models.inference import InferenceModel, for_inference
from vitrail.models.inference.capture import WARMUP_CALLS
from vitrail.serve.errors import ServiceError, not_finite
from vitrail.serve.model_input import ModelInput
from vitrail.serve.settings import ServeSettings
from vitrail.train.parallel import choose_device

Kind = Literal["logits", "embedding"]
Analysis = Callable[[Bundle, Tensor], Any]
Image = Array | Tensor
"""Decoded pixels that are not normalised yet, or the model's input: both [channel, height, width]."""


class Launched:
    """Outputs of a batch that are computed already or, on a GPU, will be.

    They are copied to the host as soon as they are computed, before anything that is launched later.
    """

    def __init__(self, outputs: Tensor) -> None:
        self._host = outputs.float().to("cpu", non_blocking=True)  # pinned, if it comes from a GPU
        self._copied: torch.cuda.Event | None = None
        if outputs.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(outputs.device))

    def rows(self) -> list[Array | ServiceError]:
        """Wait for the outputs of each image."""
        if self._copied is not None:
            self._copied.synchronize()
        found = self._host.numpy()
        finite = np.isfinite(found).all(axis=1)
        return [row if good else not_finite() for row, good in zip(found, finite, strict=True)]


class Engine:
    """Used by one thread, which waits for a batch before it launches the next but one: only two have memory for their input."""

    def __init__(self, bundle: Bundle, settings: ServeSettings) -> None:
        self._bundle, self._max_batch = bundle, settings.max_batch
        device = choose_device(settings.device)
        bundle.model.to(device)  # for attention maps, which the copy for inference does not have
        self._model = for_inference(bundle.model, settings.precision, device)
        self._input = ModelInput(bundle.preprocess, self._model.device, settings.max_batch)
        self.overlaps = device.type == "cuda"  # a CPU computes in the thread that launches

    def warm_up(self) -> float:
        """Compute every batch size once, and return the seconds per image: on a GPU this captures them before any request."""
        config, preprocess = self._model.config, self._bundle.preprocess
        shape = preprocess.size if preprocess is not None else config.image_size  # a ResNet accepts several
        found = 0.0
        for size in self._sizes() if self._model.device.type == "cuda" else (1,):
            images, seconds = torch.zeros(size, config.channels, *shape), []
            for _ in range(WARMUP_CALLS + 1):
                began = time.monotonic()
                self._model(images).cpu()
                seconds.append(time.monotonic() - began)
            found = min(seconds) / size
        return found

    def launch(self, kind: Kind, images: Sequence[Image]) -> Launched:
        """Compute images of one type and shape; on a GPU only begin to."""
        cuda = self._model.device.type == "cuda"
        size = next(size for size in self._sizes() if size >= len(images)) if cuda else len(images)  # one that was captured
        return Launched(_outputs(self._model, kind, self._input(images, size))[: len(images)])

    def analyse(self, analysis: Analysis, image: Image) -> Any:
        return analysis(self._bundle, self._input.alone(image))

    def check(self) -> None:
        """Raise an error if a GPU computes nothing any more in this process, as after an illegal access: every image would fail."""
        if self._model.device.type == "cuda":
            try:
                # Only the stream: to wait for the whole GPU breaks a capture that another model's thread has begun.
                torch.cuda.current_stream(self._model.device).synchronize()
            except RuntimeError as error:
                reason = str(error).partition("\n")[0]
                raise VitrailError(
                    f"The GPU computes nothing any more ({reason}). Start the service again; its log says more."
                ) from error

    def _sizes(self) -> list[int]:
        sizes = [1]
        while sizes[-1] < self._max_batch:
            sizes.append(min(2 * sizes[-1], self._max_batch))
        return sizes


def _outputs(model: InferenceModel, kind: Kind, images: Tensor) -> Tensor:
    found: Tensor = model(images) if kind == "logits" else FeatureSpec().compute(model, images)
    return found
