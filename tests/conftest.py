"""Settings that must stand before torch or Triton read them.

One thread per test process: several run side by side (pytest -n), and small models gain nothing from more.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start

if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    # Container images often set this. About fifty processes would each compile torch's sources again, for seconds; with a folder of
    # its own for bytecode, none is written next to the sources.
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    sys.dont_write_bytecode = False

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # our kernels are tried where there is no GPU, too

torch.set_num_threads(1)
_freeze, _unfreeze = gc.freeze, gc.unfreeze
gc.disable()  # until all is imported: what modules hold is not garbage, however often it is looked at


@pytest.hookimpl(trylast=True)  # after the fixtures have ordered them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest tests first: at the end of a run one worker would be left with one of them."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Exempt all that was imported from garbage collection: each full one would look at millions of objects again."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # A server freezes what it has loaded and thaws everything at its end. In this process that would be all that was imported, too.
    gc.freeze = gc.unfreeze = lambda: None


def pytest_unconfigure() -> None:
    gc.freeze, gc.unfreeze = _freeze, _unfreeze
    gc.unfreeze()  # or some extension modules report leaks at exit


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the code blocks of the documentation: how many the tests run, and why others are not run."""
    from tests.docs.blocks import counts

    terminalreporter.write_line(counts())
