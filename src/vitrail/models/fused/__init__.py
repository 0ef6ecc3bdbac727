"""Kernels of our own for GPUs. Nothing here decides what is computed, only how; `can_fuse` says when it can be."""

from __future__ import annotations

import vitrail.models.vit  # noqa: F401 - first, so that it knows the methods of its classes before a kernel asks
