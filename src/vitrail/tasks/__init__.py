"""What is trained: for each kind of target a loss, its metrics, and how its outputs are read."""

from __future__ import annotations

from vitrail.tasks.base import Meter, Task
from vitrail.tasks.classify import Classify
from vitrail.tasks.distill import Distill
from vitrail.tasks.masked import Masked
from vitrail.tasks.multilabel import MultiLabel
from vitrail.tasks.regress import Regress

__all__ = ["Classify", "Distill", "Masked", "Meter", "MultiLabel", "Regress", "Task"]
