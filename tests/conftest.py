"""Settings that must stand before torch or Triton read them.

One thread a test process: several run side by side (pytest -n), and small models gain nothing from more.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # our kernels are tried where there is no GPU, too

torch.set_num_threads(1)
