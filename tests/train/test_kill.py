"""kill -9 at random moments, twenty times over: the run that survives them all ends where an undisturbed one does.

VITRAIL_KILLS=50 does it fifty times.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.small import losses, same, small, train, weights
from vitrail.train.run import RunFolder

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("VITRAIL_KILLS", "20"))
# With a best checkpoint to keep on the way, and validations to count.
SETTINGS = {"steps": 4 * KILLS, "checkpoint_every": 1, "log_every": 1, "eval_every": 0.1, "keep_best": "loss", "patience": 99}
# A server that has everything imported forks a run for each life: twenty cold starts would take minutes.
SERVER = """
import gc, os, sys
from tests.train.small import small, train
import torch.optim, torch._dynamo
torch.set_num_threads(1)
recipe = small(**{settings})
gc.collect()
gc.freeze()  # or every life looks at all that was imported again
for line in sys.stdin:
    life = os.fork()
    if life == 0:
        result = train(recipe, sys.argv[1])
        os._exit(0 if result.ended_by is None else 1)
    print(life, flush=True)
    _, status = os.waitpid(life, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    chance = random.Random(0)
    out = tmp_path / "run"
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER.format(settings=SETTINGS), str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    reached, kills = [0], 0
    try:
        while True:
            server.stdin.write("live\n")
            server.stdin.flush()
            life = int(server.stdout.readline())
            if kills < KILLS:
                wait_for_progress(out, reached[-1])
                time.sleep(chance.uniform(0, 0.05))
                os.kill(life, signal.SIGKILL)
            status = int(server.stdout.readline())
            if status == 0:
                break
            assert status == -signal.SIGKILL
            kills += 1
            reached.append(newest(out))
    finally:
        server.kill()
    assert kills == KILLS
    assert reached == sorted(reached) and reached[-1] > 0
    whole = train(small(**SETTINGS), tmp_path / "whole")
    assert same(weights(out), weights(tmp_path / "whole"))
    assert losses(out) == losses(tmp_path / "whole")
    validations, expected = (
        [one for one in RunFolder(run).records() if one["kind"] != "train"] for run in (out, tmp_path / "whole")
    )
    assert [{**one, "seconds": 0} for one in validations] == [{**one, "seconds": 0} for one in expected]
    assert whole.model is not None and whole.model.checkpoint == "best"


def newest(out: Path) -> int:
    steps = [int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*")]
    return max(steps, default=0)


def wait_for_progress(out: Path, since: int) -> None:
    """Until the run has gone on from where the last life ended."""
    deadline = time.monotonic() + 120
    while newest(out) < since + 1:
        assert time.monotonic() < deadline, "the run does not continue"
        time.sleep(0.005)
