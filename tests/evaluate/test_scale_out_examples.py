"""The examples for Slurm and Kubernetes: parsed, and those that embed run as two nodes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.processes import free_port
from vitrail.checkpoints import load
from vitrail.evaluate.shards import embed_shards

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted((EXAMPLES / "slurm").glob("*.sbatch"))
JOBS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))

# srun starts its command on every node, here twice on this machine, and fails if one of them does.
SRUN = """#!/bin/bash
"$@" & first=$!
"$@" & second=$!
wait $first; one=$?
wait $second; two=$?
exit $(( one > two ? one : two ))
"""


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def documents(file: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the service, the job and its container."""
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(file.read_text())
    return service, job, job["spec"]["template"]["spec"]["containers"][0]


def test_there_are_examples() -> None:
    assert [file.name for file in SCRIPTS] == ["embed.sbatch", "train.sbatch"]
    assert [file.name for file in JOBS] == ["embed.yaml", "train.yaml"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_scripts_are_valid_bash(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    options = [line.split()[1].partition("=")[0] for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--requeue"} <= set(options) and len(options) == len(set(options))


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.name)
def test_jobs_are_indexed_and_reach_their_first_pod(file: Path) -> None:
    service, job, container = documents(file)
    name, spec = job["metadata"]["name"], job["spec"]
    assert (service["kind"], service["spec"]["clusterIP"], service["spec"]["selector"]) == ("Service", "None", {"job-name": name})
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    values = {one["name"]: one["value"] for one in container["env"]}
    assert values["FIRST_NODE"] == f"{name}-0.{service['metadata']['name']}" == f"{name}-0.{spec['template']['spec']['subdomain']}"
    assert int(values["NODES"]) == spec["completions"]
    assert int(values["GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    done = subprocess.run(["bash", "-n"], input=container["args"][0], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def alone(checkpoint: Path, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process writes."""
    folder = tmp_path_factory.mktemp("alone") / "out"
    assert embed_shards(load(checkpoint), [photos / "val"], folder, shard_size=4) is not None
    return content(folder)


@pytest.fixture
def environment() -> dict[str, str]:
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    return {**os.environ, "PATH": ":".join(paths), "OMP_NUM_THREADS": "1", "PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
def test_the_slurm_script_runs_on_two_nodes(
    checkpoint: Path, photos: Path, tmp_path: Path, alone: dict[str, bytes], environment: dict[str, str]
) -> None:
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/bash\necho 127.0.0.1; echo 127.0.0.1\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_ID": "7"}
    environment |= {**slurm, "PATH": f"{tmp_path}:{environment['PATH']}"}
    words = [str(checkpoint), str(photos / "val"), "--out", str(tmp_path / "out"), "--shard-size", "4"]
    command = ["bash", str(EXAMPLES / "slurm" / "embed.sbatch"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "of 36 images in 9 shards" in done.stdout and content(tmp_path / "out") == alone


@pytest.mark.slow
def test_the_kubernetes_job_runs_on_two_nodes(
    checkpoint: Path, photos: Path, tmp_path: Path, alone: dict[str, bytes], environment: dict[str, str]
) -> None:
    container = documents(EXAMPLES / "kubernetes" / "embed.yaml")[2]
    values = {one["name"]: one["value"] for one in container["env"]}
    given = {"GPUS": "1", "FIRST_NODE": "127.0.0.1", "PORT": environment["PORT"], "SHARD_SIZE": "4", "OUT": str(tmp_path / "out")}
    environment |= {**values, **given, "CHECKPOINT": str(checkpoint), "IMAGES": str(photos / "val")}
    command = [*container["command"], *container["args"]]
    pods = [
        subprocess.Popen(command, env={**environment, "JOB_COMPLETION_INDEX": str(index)}, stderr=subprocess.PIPE, text=True)
        for index in range(2)
    ]
    try:
        errors = [pod.communicate(timeout=240)[1] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert [pod.returncode for pod in pods] == [0, 0], errors
    assert content(tmp_path / "out") == alone
    again = subprocess.run(command, env=environment | {"JOB_COMPLETION_INDEX": "1"}, check=False, timeout=20)
    assert again.returncode == 0  # there is a manifest: nothing to do
