"""Evaluate and use models: metrics, few-shot, probes, VTAB, predictions, embeddings.

Names are imported on first use, so importing one small part of this package stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.lazy import lazy_attributes

if TYPE_CHECKING:
    from vitrail.evaluate.context import EvalContext as EvalContext
    from vitrail.evaluate.embeddings import Embeddings as Embeddings
    from vitrail.evaluate.embeddings import embed as embed
    from vitrail.evaluate.embeddings import load_embeddings as load_embeddings
    from vitrail.evaluate.embeddings import open_embeddings as open_embeddings
    from vitrail.evaluate.evaluator import EvalResult as EvalResult
    from vitrail.evaluate.evaluator import evaluate as evaluate
    from vitrail.evaluate.fewshot import FewShotEvaluator as FewShotEvaluator
    from vitrail.evaluate.fewshot import FewShotResult as FewShotResult
    from vitrail.evaluate.fewshot import few_shot as few_shot
    from vitrail.evaluate.predictor import ImagePredictions as ImagePredictions
    from vitrail.evaluate.predictor import predict as predict
    from vitrail.evaluate.probes import ProbeResult as ProbeResult
    from vitrail.evaluate.probes import probe as probe
    from vitrail.evaluate.reproduction import Reproduction as Reproduction
    from vitrail.evaluate.reproduction import reproduce as reproduce
    from vitrail.evaluate.ridge import fit_ridge as fit_ridge
    from vitrail.evaluate.ridge import ridge_scores as ridge_scores
    from vitrail.evaluate.settings import FeatureSpec as FeatureSpec
    from vitrail.evaluate.settings import FewShotSpec as FewShotSpec
    from vitrail.evaluate.settings import ProbeSpec as ProbeSpec
    from vitrail.evaluate.shards import ShardResult as ShardResult
    from vitrail.evaluate.shards import embed_shards as embed_shards
    from vitrail.evaluate.shards import predict_shards as predict_shards

_MODULES = {
    "Embeddings": "vitrail.evaluate.embeddings",
    "FeatureSpec": "vitrail.evaluate.settings",
    "FewShotResult": "vitrail.evaluate.fewshot",
    "FewShotEvaluator": "vitrail.evaluate.fewshot",
    "FewShotSpec": "vitrail.evaluate.settings",
    "EvalResult": "vitrail.evaluate.evaluator",
    "ImagePredictions": "vitrail.evaluate.predictor",
    "ProbeSpec": "vitrail.evaluate.settings",
    "ProbeResult": "vitrail.evaluate.probes",
    "EvalContext": "vitrail.evaluate.context",
    "embed": "vitrail.evaluate.embeddings",
    "few_shot": "vitrail.evaluate.fewshot",
    "fit_ridge": "vitrail.evaluate.ridge",
    "load_embeddings": "vitrail.evaluate.embeddings",
    "evaluate": "vitrail.evaluate.evaluator",
    "predict": "vitrail.evaluate.predictor",
    "probe": "vitrail.evaluate.probes",
    "Reproduction": "vitrail.evaluate.reproduction",
    "reproduce": "vitrail.evaluate.reproduction",
    "ridge_scores": "vitrail.evaluate.ridge",
    "ShardResult": "vitrail.evaluate.shards",
    "embed_shards": "vitrail.evaluate.shards",
    "open_embeddings": "vitrail.evaluate.embeddings",
    "predict_shards": "vitrail.evaluate.shards",
}

__all__ = [
    "Embeddings", "EvalContext", "EvalResult", "FeatureSpec", "FewShotEvaluator", "FewShotResult", "FewShotSpec",
    "ImagePredictions", "ProbeResult", "ProbeSpec", "Reproduction", "ShardResult", "embed", "embed_shards", "evaluate", "few_shot",
    "fit_ridge", "load_embeddings", "open_embeddings", "predict", "predict_shards", "probe", "reproduce", "ridge_scores",
]  # fmt: skip

__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
