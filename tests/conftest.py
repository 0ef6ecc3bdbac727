"""One thread a test process: several run side by side (pytest -n), and small models gain nothing from more."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start

import torch

torch.set_num_threads(1)
