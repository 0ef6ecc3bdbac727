"""How many CPUs may be used: affinity, and quotas as Linux writes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitrail import cpus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


V1 = "sys/fs/cgroup/cpu,cpuacct"
FILES: dict[str, tuple[dict[str, str], float | None]] = {
    "no control groups, as on macOS and Windows": ({}, None),
    "version 2, no limit": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
    "version 2, in a container": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "250000 100000"}, 2.5),
    "version 2, a quota around the group": (
        {
            "proc/self/cgroup": "0::/pods/one",
            "sys/fs/cgroup/pods/cpu.max": "150000 100000",
            "sys/fs/cgroup/pods/one/cpu.max": "max 100000",
        },
        1.5,
    ),
    "version 1, no limit": (
        {"proc/self/cgroup": "4:cpu,cpuacct:/", f"{V1}/cpu.cfs_quota_us": "-1", f"{V1}/cpu.cfs_period_us": "100000"},
        None,
    ),
    "version 1, its path is that outside the container": (
        {
            "proc/self/cgroup": "12:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc",
            f"{V1}/cpu.cfs_quota_us": "50000",
            f"{V1}/cpu.cfs_period_us": "100000",
        },
        0.5,
    ),
    "version 1 beside version 2": (
        {
            "proc/self/cgroup": "1:cpu:/jobs\n2:cpuset:/\n0::/",
            "sys/fs/cgroup/cpu/jobs/cpu.cfs_quota_us": "400000",
            "sys/fs/cgroup/cpu/jobs/cpu.cfs_period_us": "100000",
        },
        4.0,
    ),
    "a file that says something else": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "much"}, None),
}


@pytest.mark.parametrize("name", FILES)
def test_the_quota_is_read_as_linux_writes_it(name: str, tmp_path: Path) -> None:
    files, expected = FILES[name]
    assert cpus.cpu_quota(write(tmp_path, files)) == expected


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (0.2, 1), (1.0, 1), (1.5, 2), (64.0, 8)])
def test_a_quota_is_rounded_up_and_never_adds_cpus(quota: float | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "visible_cpus", lambda: 8)
    monkeypatch.setattr(cpus, "cpu_quota", lambda: quota)
    assert cpus.usable_cpus() == expected


@pytest.mark.slow
@pytest.mark.parametrize(("given", "expected"), [(None, "1 1"), ("2", "2")])
def test_commands_give_torch_as_many_threads_as_the_quota_has_cpus(given: str | None, expected: str) -> None:
    code = (
        "import os\n"
        "from vitrail import cli, cpus\n"
        "cli.visible_cpus = cpus.visible_cpus = lambda: 64\n"
        "cpus.cpu_quota = lambda: 0.5\n"
        "try: cli.main(['--version'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in __import__('sys').modules, 'too late'\n"
        "import torch\n"
        "print(os.environ['OMP_NUM_THREADS'], torch.get_num_threads())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {} if given is None else {"OMP_NUM_THREADS": given}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=True)
    assert done.stdout.splitlines()[-1].startswith(expected)
