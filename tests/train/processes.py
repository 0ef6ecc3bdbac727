"""Start the ranks of a process group from one process that has imported everything: imports take longer than small runs."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
LATER = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "vitrail.checkpoints")
"""What training imports only when it needs it."""


def run_module(module: str, out: Path) -> None:
    """Run `python -m module out`, a fresh process which has computed nothing, so that it can fork."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    subprocess.run([sys.executable, "-m", module, str(out)], cwd=ROOT, env=environment, check=True)


def run_ranks(ranks: int, work: Callable[[Path], None], out: Path, on_one_machine: bool = True) -> None:
    """Do this work on so many ranks, with the variables that torchrun would set."""
    for module in LATER:
        importlib.import_module(module)
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks if on_one_machine else 1}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    started = [
        context.Process(target=_rank, args=({**common, "RANK": rank, "LOCAL_RANK": rank}, work, out)) for rank in range(ranks)
    ]
    try:
        for process in started:
            process.start()
        for process in started:
            process.join(400)
        assert [process.exitcode for process in started] == [0] * ranks
    finally:
        for process in started:
            if process.is_alive():
                process.kill()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _rank(variables: dict[str, object], work: Callable[[Path], None], out: Path) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    dist.init_process_group("gloo")
    work(out)
    dist.destroy_process_group()
