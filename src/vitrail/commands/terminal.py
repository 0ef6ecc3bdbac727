"""What commands print with."""

from __future__ import annotations

from vitrail.api.terminal import Console, say

__all__ = ["Console", "say"]
