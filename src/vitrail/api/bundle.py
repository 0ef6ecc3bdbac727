"""`vitrail.load` and what it returns: a checkpoint that predicts, embeds, evaluates and shows what it has learned."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, Self, TypeAlias

import torch

from vitrail import checkpoints
from vitrail.api.images import Images, is_source, open_images
from vitrail.api.predictions import PredictionList
from vitrail.api.prepared import CachingContext, KeptCopy
from vitrail.api.progress import progress_bar
from vitrail.api.wording import python_errors
from vitrail.checkpoints.conversion import write
from vitrail.data.settings import BadImages
from vitrail.data.trained_on import evaluation_split, overlap
from vitrail.data.types import BadImage, Source, Split
from vitrail.evaluate.context import EvalContext
from vitrail.evaluate.embeddings import Embeddings, embed, embed_tensor
from vitrail.evaluate.evaluator import EvalResult, evaluate, open_data
from vitrail.evaluate.predictor import predict, predict_tensor
from vitrail.evaluate.real_labels import read_real
from vitrail.evaluate.report import check_output_folder, write_report
from vitrail.evaluate.settings import Feature, FeatureSpec, Match, Precision, no_progress
from vitrail.inspect.images import PreprocessedImages, RawImages, denormalise, from_source, from_split, preprocess_images
from vitrail.inspect.inspection import Inspected, Inspection, What, check_amounts, check_reconstruction, inspect_checkpoints
from vitrail.inspect.reconstruction import own_source
from vitrail.inspect.report import InspectOptions
from vitrail.inspect.report import check_output_folder as check_inspection_folder
from vitrail.notebook import Markup, html_lines, html_table
from vitrail.train.parallel import World, choose_device

P = ParamSpec("P")
Reference: TypeAlias = checkpoints.Bundle | str | os.PathLike[str]
_FEW = 64  # images without a progress bar, unless one is asked for


@dataclass(repr=False)
class Bundle(checkpoints.Bundle):
    """A loaded checkpoint: `model`, `preprocess` and `classes`, and what can be done with them.

    Each method computes what the command of the same name does, by the same code. `device` is where the model is unless it is
    given; "auto" takes the GPU if there is one. `progress=False` shows no progress bar.
    """

    _kept: KeptCopy = field(default_factory=KeptCopy, init=False, compare=False)

    @classmethod
    def of(cls, bundle: checkpoints.Bundle) -> Self:
        """Return a loaded checkpoint with these methods; its model is not copied."""
        return cls(**{one.name: getattr(bundle, one.name) for one in dataclasses.fields(checkpoints.Bundle)})

    @python_errors
    def predict(
        self,
        images: Any,
        top: int = 5,
        *,
        tta: bool = False,
        split: str | None = None,
        precision: Precision = "fp32",
        device: str | torch.device | None = None,
        batch: int | None = None,
        workers: int | None = None,
        any_size: bool = False,
        max_size: int | None = None,
        bad_images: BadImages = "error",
        progress: bool | None = None,
    ) -> PredictionList:
        """Return the `top` predictions per image, best first: a list of lists of `Prediction`.

        Args:
            images: One or several of: paths of images, folders (searched recursively) or .txt lists; bytes of files; Pillow
                images; uint8 arrays [height, width, channels]; data sources such as "folder:photos", or a `Split`. All are
                preprocessed by `self.preprocess`. Or float tensors [images, channels, height, width], preprocessed already.
            top: How many predictions per image.
            tta: Test-time augmentation: average the probabilities of each image and its mirror image. Takes twice as long.
            split: Which split of a data source; default: all images of one given by its name.
            precision: "fp32" is exact. "auto" takes int8 or bf16 where the machine is faster with them; `notes` then say so.
            device: "auto", "cpu", "cuda", "mps"; default: where the model is.
            batch: Images per batch. Changes speed and memory, not results.
            workers: Processes that read images for a GPU; on a CPU, threads that read and compute.
            any_size: Let each image keep its aspect ratio (`Preprocess.keep_aspect`), and tensors have any size.
            max_size: With `any_size`: the longest side in pixels; default: twice the short side.
            bad_images: Raise an error for an image that cannot be read, or "skip" it: its list of predictions is then empty.
            progress: Show a progress bar; default: for many images, in notebooks and terminals.
        """
        found = open_images(self, images, split=split, bad_images=bad_images)
        context = self._context(precision, device, batch, workers, any_size, max_size, bad_images)
        note = context.precision_note(self.model)
        notes = [] if note is None else [note]
        if len(found) == 0:
            return PredictionList([], [], task=self.task)
        with _progress("predicting", len(found), progress) as advance:
            context = dataclasses.replace(context, progress=advance)
            if found.tensor is not None:
                rows = predict_tensor(self, found.tensor, top=top, tta=tta, context=context)
                return PredictionList(rows, [f"image {k}" for k in range(len(rows))], task=self.task, notes=notes)
            assert found.split is not None
            results = list(predict(self, found.split, top=top, tta=tta, context=context))
        bad = [BadImage(one.name, one.error) for one in results if one.error is not None]
        rows, names = [list(one.predictions) for one in results], [one.name for one in results]
        return PredictionList(rows, names, task=self.task, bad=bad, notes=notes, images=found.split)

    @python_errors
    def embed(
        self,
        images: Any,
        *,
        feature: Feature = "pre_logits",
        layer: int | None = None,
        norm: bool = True,
        split: str | None = None,
        precision: Precision = "fp32",
        device: str | torch.device | None = None,
        batch: int | None = None,
        workers: int | None = None,
        any_size: bool = False,
        max_size: int | None = None,
        bad_images: BadImages = "error",
        progress: bool | None = None,
    ) -> Embeddings:
        """Return the features of images, which are given as in `predict`. The checkpoint needs no head.

        Args:
            images: As in `predict`.
            feature: "pre_logits" (the input of the head), "pooled", "class" (the class token), "mean" (over patches), "patches".
            layer: Take class, mean or patches after this encoder block, counted from 0; default: the last.
            norm: Apply the final norm to class, mean and patches.
            split: Which split of a data source.
            precision: "fp32" is exact; "bf16", "fp16" and, on a CPU, "int8" are faster; "auto" takes the fastest.
            device: As in `predict`.
            batch: Images per batch.
            workers: As in `predict`.
            any_size: As in `predict`.
            max_size: As in `predict`.
            bad_images: Raise an error for an image that cannot be read, or "skip" it and list it in `bad`.
            progress: As in `predict`.
        """
        spec = FeatureSpec(feature=feature, layer=layer, norm=norm)
        found = open_images(self, images, split=split, bad_images=bad_images)
        with _progress("embedding", len(found), progress) as advance:
            context = self._context(precision, device, batch, workers, any_size, max_size, bad_images, advance)
            if found.tensor is not None:
                return embed_tensor(self, found.tensor, spec, context)
            assert found.split is not None
            return embed(self, found.split, spec, context)

    @python_errors
    def evaluate(
        self,
        data: str | os.PathLike[str] | Source | Split,
        *,
        split: str | None = None,
        image_size: int | tuple[int, int] | None = None,
        match: Match = "name",
        real: str | os.PathLike[str] | None = None,
        ignore_unknown_classes: bool = False,
        tta: bool = False,
        out: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        precision: Precision = "fp32",
        device: str | torch.device | None = None,
        batch: int | None = None,
        workers: int | None = None,
        any_size: bool = False,
        max_size: int | None = None,
        bad_images: BadImages = "error",
        progress: bool | None = None,
    ) -> EvalResult:
        """Return the metrics on labelled images, with 95 % confidence intervals.

        Args:
            data: A source such as "digits", "folder:photos" or a path; or one that is open, or a split of it.
            split: Which split; default: val, else test, else what the run held out.
            image_size: Evaluate a copy of the model at this input size.
            match: Match the dataset's classes to the outputs by "name" or by "order".
            real: A JSON file of reassessed labels, such as ImageNet ReaL's.
            ignore_unknown_classes: Skip images of classes that the checkpoint does not have.
            tta: Test-time augmentation, as in `predict`.
            out: Also write a report to this folder, with report.html.
            overwrite: Replace an existing report.
            precision: As in `embed`.
            device: As in `predict`.
            batch: Images per batch.
            workers: As in `predict`.
            any_size: As in `predict`.
            max_size: As in `predict`.
            bad_images: Raise an error for an image that cannot be read, or "skip" and list it.
            progress: As in `predict`.
        """
        self.check_head()
        if out is not None:
            check_output_folder(Path(out), overwrite)
        seen = None
        if isinstance(data, Split):
            opened = data
        elif isinstance(data, Source):
            opened = evaluation_split(self.trained_on, data, split)
            seen = overlap(self.trained_on, data, opened)
        else:
            skip = ignore_unknown_classes
            opened, seen = open_data(self, os.fspath(data), split, match=match, bad_images=bad_images, ignore_unknown=skip)
        truth = partial(read_real, Path(real), classes=opened.classes) if real is not None else None
        with _progress("evaluating", len(opened), progress) as advance:
            context = self._context(precision, device, batch, workers, any_size, max_size, bad_images, advance)
            result = evaluate(
                self, opened, image_size=image_size, match=match, real=truth, tta=tta, context=context, trained_on=seen
            )
        if out is not None:
            name = opened.name if isinstance(data, Split) else data.reference if isinstance(data, Source) else os.fspath(data)
            about = {"checkpoint": self.report.source, "model": self.model.config.name, "data": name}
            write_report(Path(out), [result], opened, {**about, "assumptions": self.report.assumptions})
        return result

    @python_errors
    def inspect(
        self,
        images: Any = None,
        *,
        out: str | os.PathLike[str] | None = None,
        what: What = "figures",
        split: str | None = None,
        count: int = 128,
        show: int = 16,
        seed: int = 0,
        compare: Reference | Sequence[Reference] = (),
        layers: Sequence[int] | None = None,
        patch: tuple[int, int] | None = None,
        batch: int | None = None,
        overwrite: bool = False,
    ) -> Inspection:
        """Draw the paper's figures that apply to the model: filters, positions, and with images distance, rollout and heads.

        Args:
            images: As in `predict`; of a folder or a source, `count` random images. Without images: figures of the weights.
            out: Also write a folder with index.html, and all figures and their data.
            what: "reconstruction" shows what a run with masked pre-training predicts, by default on its own data.
            split: Which split of a data source.
            count: How many random images of a folder or source to average over.
            show: How many images to draw maps of.
            seed: Seed of the random images.
            compare: Other checkpoints, loaded or not, to compare with; for example the one before fine-tuning.
            layers: Only these layers for distance and heads; negative numbers count from the end.
            patch: Row and column of the query patch for the heads; default: the centre.
            batch: Images per batch.
            overwrite: Replace an existing inspection.
        """
        if out is not None:
            check_inspection_folder(Path(out), overwrite)
        check_amounts(count=count, show=show)
        others = [compare] if isinstance(compare, checkpoints.Bundle | str | os.PathLike) else compare
        bundles = [self, *(one if isinstance(one, checkpoints.Bundle) else load(one) for one in others)]
        references = [one.report.source for one in bundles]
        if what == "reconstruction":
            images, count = own_source(references[0]) if images is None else images, min(count, show)
            check_reconstruction(references, has_images=images is not None, resized=False)
        raw, tensor = self._images_to_inspect(images, split, count, seed)
        inputs = [_inputs(bundle, raw, tensor, show) for bundle in bundles]
        inspection = inspect_checkpoints(
            [Inspected(*one) for one in zip(references, bundles, inputs, strict=True)],
            raw,
            what=what,
            options=InspectOptions(layers=tuple(layers) if layers else None, patch=patch, batch=batch),
            seed=seed,
            data=images if isinstance(images, str) and is_source(images) else None,
        )
        if out is not None:
            inspection.save(Path(out), overwrite=overwrite)
        return inspection

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint folder, which `vitrail.load` and every command read; an existing checkpoint is replaced.

        Class names that are only assumed are not stored: then they would no longer be a guess.
        """
        classes = None if self.classes_assumed else self.classes
        write(dataclasses.replace(self, classes=classes), folder)

    def push(
        self,
        name: str,
        *,
        private: bool = False,
        message: str | None = None,
        token: str | None = None,
        licence: str | None = None,
        card: Literal["keep", "replace"] | None = None,
    ) -> str:
        """Upload the checkpoint to the Hub as `owner/name`, with a model card; return its address.

        Args:
            name: The repository, which is created if it does not exist.
            private: Create a private repository.
            message: The commit message.
            token: A token of the Hub; default: that of the environment.
            licence: The licence of the weights, such as "apache-2.0".
            card: What to do with a card that was edited by hand: "keep" or "replace" it; default: an error.
        """
        from vitrail.checkpoints.push import push

        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "model"
            self.save(folder)
            return push(folder, name, private=private, message=message, token=token, licence=licence, card=card)

    def _repr_html_(self) -> str:
        model, size, outputs, source = self.describe()
        rows = [["model", model], ["input", size], ["outputs", outputs], ["checkpoint", source.removeprefix("from ")]]
        if self.classes:
            rows.append(["classes", ", ".join(self.classes[:10]) + (" …" if len(self.classes) > 10 else "")])
        if self.preprocess is not None:
            rows.append(["preprocessing", self.preprocess.describe()])
        rows.append(["parameters", f"{sum(one.numel() for one in self.model.parameters()):,}"])
        return Markup(html_table(["", ""], rows) + html_lines(f"assumed: {text}" for text in self.report.assumptions))

    def _context(
        self,
        precision: Precision,
        device: str | torch.device | None,
        batch: int | None,
        workers: int | None,
        any_size: bool,
        max_size: int | None,
        bad_images: BadImages,
        progress: Callable[[int], None] = no_progress,
    ) -> EvalContext:
        chosen = next(self.model.parameters()).device if device is None else choose_device(str(device))
        return CachingContext(
            world=World(chosen),
            batch=batch,
            workers=workers,
            any_size=any_size,
            max_size=max_size,
            precision=precision,
            bad_images=bad_images,
            progress=progress,
            kept=self._kept,
        )

    def _images_to_inspect(
        self, images: Any, split: str | None, count: int, seed: int
    ) -> tuple[RawImages | None, torch.Tensor | None]:
        if images is None:
            return None, None
        if isinstance(images, str) and is_source(images):
            return from_source(self, images, split, count, seed), None
        found: Images = open_images(self, images, split=split)
        if found.split is None:
            return None, found.tensor
        return from_split(found.split, None if found.all_named else count, seed), None


def _inputs(bundle: checkpoints.Bundle, raw: RawImages | None, tensor: torch.Tensor | None, show: int) -> PreprocessedImages | None:
    if raw is not None:
        return preprocess_images(bundle, raw, show)
    if tensor is None:
        return None
    preprocess, images = bundle.stored_preprocess(), tensor.float().cpu()
    names = [f"image {k}" for k in range(len(images))]
    return PreprocessedImages(names, images, [denormalise(image, preprocess) for image in images[:show]])


def _progress(description: str, total: int, shown: bool | None) -> Any:
    return progress_bar(description, total, shown=False if shown is None and total <= _FEW else shown)


def _with_methods(load: Callable[P, checkpoints.Bundle]) -> Callable[P, Bundle]:
    @wraps(load)
    def loaded(*args: P.args, **kwargs: P.kwargs) -> Bundle:
        return Bundle.of(load(*args, **kwargs))

    loaded.__module__ = __name__
    return loaded


load = _with_methods(checkpoints.load)
