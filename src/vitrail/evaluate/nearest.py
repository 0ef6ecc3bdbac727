"""Exact nearest neighbours in blocks of rows, with faiss where it is installed.

Float32 scores choose some more candidates than asked for; their scores are then computed again in float64, row by row. So results
do not depend on the size of blocks or on faiss, and equal rows have equal scores: the lower row is first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vitrail.errors import VitrailError
from vitrail.evaluate.settings import Metric, check_choice

Array = npt.NDArray[Any]
_MORE = 64  # candidates beyond the count
_ROUNDING = 1e-5  # of float32 scores, relative to the squared norms


def check_vectors(shape: Sequence[int]) -> None:
    """Refuse features of an image that are not one vector."""
    if len(shape) != 1:
        raise VitrailError(
            f"Neighbours need one vector per image; these features have the shape {list(shape)}. Embed again with the feature mean."
        )


def nearest_rows(
    blocks: Iterable[tuple[int, Array]], queries: Array, own: Sequence[int], count: int, metric: Metric
) -> tuple[list[Array], list[Array]]:
    """Find the `count` nearest rows of each query in blocks (number of the first row, rows [n, channels]).

    `own` is the row of each query, which is not its own neighbour. Returns rows and their similarity or distance per query, fewer
    than `count` if there are not as many. Rows with NaN or infinity are near to nothing; as a query they are an error.
    """
    check_choice("metric", metric, Metric)
    search = _search()
    if (unusable := np.flatnonzero(~_finite(queries))).size:
        raise VitrailError(f"The features of row {own[unusable[0]]} contain NaN or infinity; they have no neighbours. Embed again.")
    queries = _prepare(queries, metric)
    rows = [np.empty(0, np.int64) for _ in queries]
    scores = [np.empty(0, np.float32) for _ in queries]
    for first, values in blocks:
        numbers = first + np.flatnonzero(_finite(values))
        block = _prepare(values if len(numbers) == len(values) else values[numbers - first], metric)
        wanted = min(len(block), count + _MORE + 1)  # 1: the query itself
        for k, candidates in enumerate(search(queries, block, wanted, metric) if wanted else ()):
            found, their = _exact(queries[k], block, np.sort(candidates), count, metric)
            others = numbers[found] != own[k]
            rows[k], scores[k] = _best(
                np.concatenate([rows[k], numbers[found][others]]), np.concatenate([scores[k], their[others]]), count
            )
    return rows, scores if metric == "cosine" else [-line for line in scores]


def _finite(values: Array) -> Array:
    return np.asarray(np.isfinite(values).all(axis=1))


def _prepare(values: Array, metric: Metric) -> Array:
    rows = np.ascontiguousarray(values, np.float32)
    return rows if metric == "euclidean" else rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def _exact(query: Array, block: Array, rows: Array, count: int, metric: Metric) -> tuple[Array, Array]:
    """Return rows of a block and their scores. All rows, if rounding may have left out one that belongs to the candidates."""
    scores = _scores(query, block[rows], metric)
    if len(rows) < len(block):
        last, least = np.sort(scores)[::-1][min(count, len(scores) - 1)], scores.min()
        gap = last - least if metric == "cosine" else least**2 - last**2
        scale = 1.0 if metric == "cosine" else float(query @ query) + float((block[rows] ** 2).sum(1).max())
        if gap <= _ROUNDING * scale:
            rows = np.arange(len(block))
            scores = _scores(query, block, metric)
    return rows, scores


def _scores(query: Array, rows: Array, metric: Metric) -> Array:
    """Return cosine similarity, or negative distance, of one query. Each row is summed alone, in the same order."""
    wide, one = rows.astype(np.float64), query.astype(np.float64)
    if metric == "cosine":
        return np.asarray(np.einsum("nc,c->n", wide, one).astype(np.float32))
    wide -= one
    return np.asarray(-np.sqrt(np.einsum("nc,nc->n", wide, wide)).astype(np.float32))


def _best(rows: Array, scores: Array, count: int) -> tuple[Array, Array]:
    order = np.lexsort((rows, -scores))[:count]
    return rows[order], scores[order]


def _search() -> Any:
    try:
        import faiss
    except ImportError:
        return _with_numpy

    def with_faiss(queries: Array, block: Array, count: int, metric: Metric) -> Array:
        kind = faiss.METRIC_INNER_PRODUCT if metric == "cosine" else faiss.METRIC_L2
        return np.asarray(faiss.knn(queries, block, count, metric=kind)[1])

    return with_faiss


def _with_numpy(queries: Array, block: Array, count: int, metric: Metric) -> Array:
    """Return the rows of a block with the `count` best scores per query, in any order."""
    scores = queries @ block.T
    if metric == "euclidean":
        scores *= 2
        scores -= (block**2).sum(1)
    return np.argpartition(scores, len(block) - count, axis=1)[:, len(block) - count :]
