"""Kernels of our own for GPUs. Nothing here decides what is computed, only how; `dispatch.py` says when."""

from __future__ import annotations

import vitrail.models.vit  # noqa: F401 - first, so that it knows the methods of its classes before a kernel asks
