"""Kernels of our own for GPUs. Nothing here decides what is computed, only how; `can_fuse` says when it can be."""
