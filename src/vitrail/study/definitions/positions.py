"""Table 8: position embeddings; and what the models have learned about positions (Fig. 7).

vitrail study positions --budget 5
"""

from __future__ import annotations

from vitrail.study.definition import Agreement, Finding, Outcome, Plot, Point, Study
from vitrail.study.judge import NOT_MEASURED, agreement, caution, difference, gap, noise, noise_text, reasons, written
from vitrail.study.ladders import Ladder, with_model
from vitrail.study.summary import Entry, Summary

_KINDS = {"none": "none", "learned": "1-d learned", "learned-2d": "2-d learned", "relative": "relative", "sincos2d": "2-d fixed"}
"""The last is not in the paper's table."""


def points(ladder: Ladder) -> list[Point]:
    return [
        Point(
            series="ViT",
            label=label,
            pretrain=with_model(ladder.model(), position=kind),
            priority={"sincos2d": 2, "learned-2d": 1, "relative": 1}.get(kind, 0),
        )
        for kind, label in _KINDS.items()
    ]


def judge_kinds(summary: Summary) -> Outcome:
    for metric in summary.metrics:
        values = {label: value for label in _KINDS.values() if (entry := summary.find(label)) and (value := entry.value(metric))}
        without = values.pop("none", None)
        if without is None or not values:
            continue
        gains = {label: difference(value, without) for label, value in values.items()}
        ours = f"none {without.text()}; " + ", ".join(f"{label} {value.text()}" for label, value in values.items())
        smallest = min(gains.values(), key=lambda one: one[0])
        verdict, why = agreement(smallest), written(smallest[0])
        compared = sorted((value for label, value in values.items() if label != _KINDS["sincos2d"]), key=lambda one: one.mean)
        if len(compared) > 1:
            spread, least = difference(compared[-1], compared[0])[0], noise((1, compared[-1]), (1, compared[0]))
            if verdict == "yes" and spread > smallest[0]:
                return Outcome(ours, "partly", f"positions matter, but the paper's kinds differ by {spread:.1f} points")
            why = f"at least {why}; the paper's kinds differ by {spread:.1f}"
            if verdict == "yes" and spread + least > smallest[0]:  # they may differ by as much as positions bring
                verdict, why = "unclear", reasons(why, noise_text(least))
        elif verdict == "yes":
            verdict, why = "partly", reasons(why, "fewer than two of the paper's kinds were compared")
        return Outcome(ours, verdict, reasons(why, caution([without, *values.values()])))
    return NOT_MEASURED


def judge_similarity(summary: Summary) -> Outcome:
    entry = summary.find("1-d learned")
    near = entry.number("neighbour_similarity") if entry else None
    mean = entry.number("mean_similarity") if entry else None
    if entry is None or near is None or mean is None:
        return NOT_MEASURED
    line, off = entry.number("line_similarity"), entry.number("off_line_similarity")
    ours = f"cosine similarity {near:.2f} between adjacent patches, {mean:.2f} between any two"
    if line is not None and off is not None:
        ours += f"; {line:.2f} within a row or column, {off:.2f} for others as far apart"
    ours = ours.replace(" -", " −")
    if near - mean < 0.05:
        return Outcome(ours, "no", "the table is still near its random start")
    weak = "" if near - mean > 0.2 else "adjacent patches are only a little more similar than any two"
    shown, least = gap(summary, entry, "line_similarity", "off_line_similarity") or (0.0, 0.0)
    lines = "" if shown > 0 else "rows and columns do not show"
    seeds = _one_seed(entry)
    if not weak and abs(shown) <= least:
        return Outcome(ours, "unclear", reasons("rows and columns do not clearly show", seeds))
    return Outcome(ours, "partly" if weak or lines else "yes", reasons(weak, lines, seeds))


def judge_distance(summary: Summary) -> Outcome:
    entry = summary.find("1-d learned")
    growth = gap(summary, entry, "last_layer_distance", "first_layer_distance") if entry else None
    columns = ("first_layer_distance", "last_layer_distance", "first_layer_nearest", "first_layer_farthest")
    numbers = [entry.number(column) for column in columns] if entry else [None]
    if entry is None or growth is None or any(one is None for one in numbers):
        return NOT_MEASURED
    first, last, nearest, farthest = (float(one or 0) for one in numbers)
    ours = (
        f"of the distance of uniform attention: heads of the first layer {nearest:.2f} to {farthest:.2f}, mean {first:.2f}; "
        f"last layer {last:.2f}"
    )
    if nearest > 0.9:
        return Outcome(ours, "unclear", "attention is still nearly uniform, as before training")
    grown, least = growth
    seeds, reaches = _one_seed(entry), farthest > 0.8
    why = "" if reaches else "no head of the first layer attends globally"
    if abs(grown) <= least:
        noisy = f"growth with depth {grown:+.2f}, differences up to {least:.2f} are noise".replace("-", "−")
        return Outcome(ours, "unclear", reasons(why, noisy, seeds))
    if grown < 0:
        why = reasons(why, "the mean does not grow with depth")
    agrees: Agreement = "yes" if reaches and grown > 0 else "partly" if reaches or grown > 0 else "no"
    return Outcome(ours, agrees, reasons(why, seeds))


def _one_seed(entry: Entry) -> str:
    return "one seed" if len(entry.rows) == 1 else ""


STUDY = Study(
    name="positions",
    title="Position embeddings",
    mirrors="Table 8 and Fig. 7",
    about="The same ViT with no position embedding and with four kinds of them.",
    points=points,
    plot=Plot(kind="categories"),
    inspect=True,
    findings=(
        Finding(
            number=5,
            claim="Having position embeddings matters much, which kind hardly",
            where="Table 8",
            paper="none .614, 1-d .642, 2-d .640, relative .640 (5-shot ImageNet, ViT-B/16)",
            judge=judge_kinds,
        ),
        Finding(
            number=6,
            claim="Nearby patches get similar position embeddings; rows and columns show",
            where="Fig. 7",
            paper="shown for ViT-L/32",
            judge=judge_similarity,
        ),
        Finding(
            number=7,
            claim="Some heads attend globally in the lowest layers; attention distance grows with depth",
            where="Fig. 7, 11",
            paper="shown for ViT-L/16",
            judge=judge_distance,
        ),
    ),
)
