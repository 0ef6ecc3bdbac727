"""What `vitrail fewshot` and `vitrail probe` write and print alike: scores of frozen features, and what they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.commands.options import show_skipped, show_trained_on
from vitrail.commands.terminal import Console, say
from vitrail.files import write_text
from vitrail.text import to_json

if TYPE_CHECKING:
    from vitrail.checkpoints import Bundle
    from vitrail.evaluate.fewshot import FewShotResult
    from vitrail.evaluate.probes import ProbeResult


def write_scores(
    result: FewShotResult | ProbeResult, bundle: Bundle, about: dict[str, Any], out: Path | None, *, as_json: bool
) -> None:
    """Write the scores and all settings to a JSON file, if one was named, and print them as JSON, if that was asked for."""
    values = {**about, "model": bundle.model.config.name, "assumptions": bundle.report.assumptions, **result.to_dict()}
    content = to_json(values, indent=2)
    if out is not None:
        write_text(out, content + "\n")
    if as_json:
        say(content)


def show_settings(console: Console, result: FewShotResult | ProbeResult) -> None:
    """Print how images were preprocessed, which of them the model was trained on, and which were skipped."""
    console.print(f"preprocessing: {result.preprocess.describe()}", highlight=False, soft_wrap=True)
    show_trained_on(console, result.trained_on)
    show_skipped(console, result.bad)
