"""How good a model is, and what it can be used for: accuracy, few-shot, probes, VTAB, predictions, embeddings.

Names are fetched on first use, so that importing one small part of this room stays cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.lazy import fetched_from

if TYPE_CHECKING:
    from vitrail.evaluate.embeddings import Embeddings as Embeddings
    from vitrail.evaluate.embeddings import embed as embed
    from vitrail.evaluate.embeddings import load_embeddings as load_embeddings
    from vitrail.evaluate.features import FeatureSpec as FeatureSpec
    from vitrail.evaluate.fewshot import FewShot as FewShot
    from vitrail.evaluate.fewshot import FewShotEvaluator as FewShotEvaluator
    from vitrail.evaluate.fewshot import FewShotSpec as FewShotSpec
    from vitrail.evaluate.fewshot import few_shot as few_shot
    from vitrail.evaluate.measuring import Measured as Measured
    from vitrail.evaluate.measuring import measure as measure
    from vitrail.evaluate.predicting import Predicted as Predicted
    from vitrail.evaluate.predicting import predict as predict
    from vitrail.evaluate.probing import Probed as Probed
    from vitrail.evaluate.probing import ProbeSpec as ProbeSpec
    from vitrail.evaluate.probing import probe as probe
    from vitrail.evaluate.ridge import fit_ridge as fit_ridge
    from vitrail.evaluate.ridge import ridge_scores as ridge_scores
    from vitrail.evaluate.running import Running as Running

_HOMES = {
    "Embeddings": "vitrail.evaluate.embeddings",
    "FeatureSpec": "vitrail.evaluate.features",
    "FewShot": "vitrail.evaluate.fewshot",
    "FewShotEvaluator": "vitrail.evaluate.fewshot",
    "FewShotSpec": "vitrail.evaluate.fewshot",
    "Measured": "vitrail.evaluate.measuring",
    "Predicted": "vitrail.evaluate.predicting",
    "ProbeSpec": "vitrail.evaluate.probing",
    "Probed": "vitrail.evaluate.probing",
    "Running": "vitrail.evaluate.running",
    "embed": "vitrail.evaluate.embeddings",
    "few_shot": "vitrail.evaluate.fewshot",
    "fit_ridge": "vitrail.evaluate.ridge",
    "load_embeddings": "vitrail.evaluate.embeddings",
    "measure": "vitrail.evaluate.measuring",
    "predict": "vitrail.evaluate.predicting",
    "probe": "vitrail.evaluate.probing",
    "ridge_scores": "vitrail.evaluate.ridge",
}

__getattr__, __dir__ = fetched_from(__name__, _HOMES)
