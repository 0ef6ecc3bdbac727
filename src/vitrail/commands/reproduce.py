"""`vitrail reproduce`: compare published weights with their published accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich import box
from rich.table import Table

from vitrail.api.progress import image_progress
from vitrail.checkpoints.published import FIGURES, published_weights
from vitrail.commands.options import DEFAULT, Json, Options
from vitrail.commands.output import check_output_file
from vitrail.commands.published import show_published
from vitrail.commands.terminal import Console, say
from vitrail.errors import VitrailError
from vitrail.files import write_csv
from vitrail.text import to_json

if TYPE_CHECKING:
    from vitrail.evaluate.reproduction import Reproduction


def reproduce(
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = (),
    /,
    *,
    imagenet: Path | None = None,
    real: Path | None = None,
    v2: Path | None = None,
    a: Path | None = None,
    r: Path | None = None,
    sketch: Path | None = None,
    c: Path | None = None,
    list_: Annotated[bool, tyro.conf.arg(name="list")] = False,
    csv_: Annotated[Path | None, tyro.conf.arg(name="csv")] = None,
    overwrite: bool = False,
    options: Options = DEFAULT,
    json_: Json = False,
) -> None:
    """Evaluate published weights with their own preprocessing, next to their published accuracy with a 95 % interval.

    The verdict is `within` if the published value is in the interval of what was measured here. Sets are read in the layouts of
    their distributions: class folders named by WordNet IDs, ImageNet-V2's by numbers, ImageNet-C's below corruption and severity.
    On ImageNet-A and -R only the 200 classes of the set compete.

    Example: vitrail reproduce ViT-B/16 --imagenet imagenet --real real.json

    Example: vitrail reproduce ViT-B/16@deit3-in1k --v2 imagenetv2-matched-frequency-format-val --a imagenet-a --csv b16.csv

    Example: vitrail reproduce --list

    Args:
        names: The weights: NAME or NAME@TAG, see --list. A checkpoint of your own with ImageNet-1k's classes works, too.
        imagenet: ImageNet's folder, or that of its validation images.
        real: The file real.json of the reassessed labels (ImageNet ReaL).
        v2: ImageNet-V2: folders 0 to 999.
        a: ImageNet-A.
        r: ImageNet-R.
        sketch: ImageNet-Sketch.
        c: ImageNet-C: CORRUPTION/SEVERITY/CLASS. With all of them, mCE is relative to AlexNet's errors.
        list_: List the weights with published accuracies and stop.
        csv_: Also write the metrics to this file.
        overwrite: Replace an existing file.
        options: How images are loaded and computed.
        json_: Print JSON instead of a table.
    """
    from vitrail.evaluate.reproduction import ReproducedMetric
    from vitrail.evaluate.reproduction import reproduce as reproduce_weights
    from vitrail.train.parallel import joined

    if list_:
        show_published([one for one in published_weights() if one.top1 is not None], json_)
        return
    check_output_file(csv_, overwrite=overwrite)
    if len(names) != 1:
        raise VitrailError(
            f"Give one name, not {len(names)}, such as `vitrail reproduce ViT-B/16 --imagenet DIR`; --list shows the names."
        )
    given = {"imagenet": imagenet, "v2": v2, "a": a, "r": r, "sketch": sketch, "c": c}
    folders = {key: folder for key, folder in given.items() if folder is not None}
    console = Console(stderr=json_)
    with joined(options.device) as world:
        with image_progress(console, hidden=not world.main or not console.is_terminal) as bars:
            task = bars.add_task("loading")

            def announce(title: str, images: int) -> None:
                bars.reset(task, description=title, total=images)

            context = options.eval_context(world, lambda images: bars.advance(task, images * world.ranks))
            found = reproduce_weights(
                names[0],
                folders,
                real=real,
                load_bundle=lambda: options.bundle(names[0], world),
                context=context,
                compare=options.preprocess is None,
                announce=announce,
            )
        if not world.main:
            return
    if csv_ is not None:
        write_csv(csv_, ReproducedMetric, found.metrics)
    if json_:
        say(to_json(found.to_dict(), indent=2))
    else:
        _show(console, found)


def _show(console: Console, found: Reproduction) -> None:
    table = Table(box=box.SIMPLE_HEAD, title=found.checkpoint, title_justify="left", padding=(0, 1), pad_edge=False)
    for heading in ("set", "metric", "here", "95 % interval", "published", "verdict", "images"):
        left = heading in ("set", "metric", "verdict")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "set")
    for one in found.metrics:
        interval = f"{one.low:.2f}–{one.high:.2f}" if one.low is not None else "–"
        reported = f"{one.published:.2f} ({one.difference:+.2f})" if one.published is not None else "–"
        table.add_row(one.benchmark, one.metric, f"{one.value:.2f}", interval, reported, one.verdict or "–", f"{one.images:,}")
    console.print(table)
    console.print(f"preprocessing: {found.preprocess}", highlight=False, soft_wrap=True)
    if any(one.published is not None for one in found.metrics):
        console.print(f"published: {FIGURES}", highlight=False, soft_wrap=True)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
