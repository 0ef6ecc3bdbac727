"""The report of `vitrail doctor --report`: what a user can send, without anything private."""

from __future__ import annotations

import dataclasses
import getpass
import os
import platform
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vitrail.bench import BenchPlan, run
from vitrail.bench.machine import hardware
from vitrail.bench.plan import Task
from vitrail.checkpoints.public_provenance import public_text
from vitrail.errors import VitrailError
from vitrail.files import write_text
from vitrail.models.fused.trials import try_kernels, why_no_kernels
from vitrail.text import markdown, markdown_table, to_json

TITLE = "# Vitrail report"
MODELS = ("Ti/16", "B/16")
_TASKS: tuple[Task, ...] = ("infer", "train")
_BENCH_COLUMNS = ("device", "model", "task", "mode", "batch", "precision", "images_per_s", "peak_memory_gib", "status", "note")
Log = Callable[[str], None]


def make_report(found: Mapping[str, Any], *, log: Log = lambda _: None) -> dict[str, Any]:
    """Extend what `doctor` found by driver versions, a trial of every kernel on each device, and a short benchmark."""
    devices = []
    for device in found["devices"]:
        here = torch.device(device["device"])
        log(f"trying kernels on {device['device']}")
        trials = [dataclasses.asdict(one) for one in try_kernels(here)]
        devices.append(
            {**device, "name": hardware(here), **_capability(here), "no_kernels": why_no_kernels(here) or None, "trials": trials}
        )
    work = [(kind, model, task) for kind in _kinds(found["devices"]) for model in MODELS for task in _TASKS]
    rows = [row for kind, model, task in work for row in _bench(kind, model, task, log)]
    report = {**found, "drivers": _drivers(), "devices": devices, "bench": rows}
    return {key: _public(value) for key, value in report.items()}


def write_report(report: Mapping[str, Any], file: Path) -> None:
    """Write the report as Markdown. Only an older report is replaced."""
    check_report_file(file)
    write_text(file, to_markdown(report))


def check_report_file(file: Path) -> None:
    """Raise an error if the file exists and is not a report."""
    if file.is_dir():
        raise VitrailError(f"{file} is a folder. Give --report a file, such as {file / 'vitrail-report.md'}.")
    if file.exists() and not file.read_text(encoding="utf-8", errors="replace").startswith(TITLE):
        raise VitrailError(f"{file} exists and is not a report of `vitrail doctor`. Choose another name.")


def to_markdown(report: Mapping[str, Any]) -> str:
    """Return tables for people, then everything as JSON."""
    system = [("system", report["system"]), ("Python", report["python"]), ("CPU cores", report["cpus"])]
    parts = [
        TITLE,
        "Written by `vitrail doctor --report`. It has no name of a user or a machine, and no path. Read it before you send it.",
        markdown_table(("", ""), [*system, *report["versions"].items(), *report["drivers"].items()]),
    ]
    for device in report["devices"]:
        parts += [f"## {device['device']}: {markdown(device['name'])}", markdown_table(("", ""), _about(device))]
        if device["trials"]:
            rows = [(one["kernel"], one["result"], f"{one['seconds']:.1f}", one["reason"]) for one in device["trials"]]
            parts.append(markdown_table(("kernel", "result", "seconds", "reason"), rows))
    measured = [["" if row[key] is None else row[key] for key in _BENCH_COLUMNS] for row in report["bench"]]
    parts += [
        "## Short benchmark",
        "Two or three short rounds on random images at 224 pixels; any other load on the machine makes it slower.",
    ]
    parts += [markdown_table(tuple(name.replace("_", " ") for name in _BENCH_COLUMNS), measured)]
    parts += ["## All values", f"```json\n{to_json(report, indent=1)}\n```"]
    return "\n\n".join(parts) + "\n"


def _about(device: Mapping[str, Any]) -> list[tuple[str, Any]]:
    def works(found: Mapping[str, bool]) -> str:
        return ", ".join(name for name, yes in found.items() if yes) or "none"

    rows = [("precisions", works(device["precisions"])), ("torch's attention", works(device["kernels"]))]
    rows += [("torch.compile", "works" if device["compile"] else "does not work")]
    for key, title in (("memory_gib", "memory, GiB"), ("capability", "compute capability"), ("sms", "SMs")):
        rows += [(title, device[key])] if device.get(key) else []
    rows += [("inference", f"{device['inference']['precision']}: {device['inference']['why']}")] if device["inference"] else []
    rows += [("Vitrail's kernels", f"none: {device['no_kernels']}")] if device["no_kernels"] else []
    return rows


def _capability(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "") if torch.version.hip else f"{properties.major}.{properties.minor}"
    return {"capability": name, "sms": properties.multi_processor_count}


def _drivers() -> dict[str, str]:
    """Return the versions of what torch runs on."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    found = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "cuDNN": cudnn, "NVIDIA driver": _nvidia_driver()}
    if platform.system() == "Darwin":
        found["macOS"] = platform.mac_ver()[0]
    return {name: str(value) for name, value in found.items() if value}


def _nvidia_driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None


def _kinds(devices: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one device of each type: of several GPUs the first, and the CPU."""
    return list(dict.fromkeys(str(device["device"]).partition(":")[0] for device in devices))


def _bench(device: str, model: str, task: Task, log: Log) -> list[dict[str, Any]]:
    """Measure one model, ours only. What fails is a row with the reason."""
    gpu = device == "cuda"
    modes = ("fast", "plain") if task == "infer" else ("loop", "plain") if gpu else ("default",)
    plan = BenchPlan(
        model=(model,),
        task=(task,),
        against=(),
        mode=modes,
        batch=128 if gpu else 2,
        device=device,
        rounds=3 if gpu else 2,
        steps=None if gpu else 1,
    )
    log(f"measuring {model}, {task}, on {device}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = run(plan)
    columns = (*_BENCH_COLUMNS[1:], "rounds", "first_step_s", "peak_tflops")
    return [{"device": device, **{key: getattr(row, key) for key in columns}} for row in rows]


def _public(value: Any) -> Any:
    """Return a value without local paths, the user's name and the machine's."""
    if isinstance(value, Mapping):
        return {key: _public(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_public(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if not isinstance(value, str):
        return value
    for name in _private_names():
        value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", value)
    return public_text(value)


def _private_names() -> list[str]:
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container without one
        user = ""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises an error for a user without one
    return [name for name in (home, platform.node(), user) if len(name) > 2]
