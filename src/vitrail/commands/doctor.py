"""`vitrail doctor`: show what this machine supports, by trying it."""

from __future__ import annotations

import importlib.util
import logging
import platform
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich import box
from rich.table import Table

from vitrail.commands.options import Json
from vitrail.commands.output import check_place
from vitrail.commands.terminal import Console, say
from vitrail.cpus import usable_cpus
from vitrail.errors import VitrailError
from vitrail.models import model_config
from vitrail.text import to_json

if TYPE_CHECKING:
    import torch


EXTRAS = {
    "export": ("onnx", "onnxscript", "onnxruntime"),
    "serve": ("fastapi", "uvicorn"),
    "hub": ("datasets",),
    "web": ("fsspec", "aiohttp"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "faiss": ("faiss",),
}
KERNELS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}
PACKAGES = ("vitrail", "torch", "torchvision", "numpy", "pillow", "safetensors", "huggingface-hub", "triton")


def doctor(
    *,
    report: Annotated[tuple[Path, ...] | None, tyro.conf.arg(metavar="[FILE]")] = None,
    json_: Json = False,
) -> None:
    """Show what this machine supports: versions, devices, precisions and attention kernels that run, missing extras.

    With --report, every kernel is also compiled, run and compared with torch, and small models are timed, on each device; that
    takes a minute or two. The report has no name of a user or a machine, and no path: send it with a question about speed.

    Example: vitrail doctor

    Example: vitrail doctor --json

    Example: vitrail doctor --report

    Args:
        report: Write a report to this file, in Markdown with all values as JSON. Without a name: vitrail-report.md.
        json_: Print JSON instead of a table; with --report, the values of the report.
    """
    if report is not None:
        _report(report, json_)
        return
    found = _examine()
    if json_:
        say(to_json(found, indent=2))
        return
    console = Console()
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_row("system", f"{found['system']}, Python {found['python']}, {found['cpus']} CPU cores")
    for name, number in found["versions"].items():
        table.add_row(name, number)
    for device in found["devices"]:
        table.add_section()
        memory = f", {device['memory_gib']:.0f} GiB" if device["memory_gib"] else ""
        table.add_row("device", f"{device['device']}: {device['name']}{memory}")
        table.add_row("  precision", _marks(device["precisions"]))
        table.add_row("  attention", _marks(device["kernels"]))
        if device["inference"]:
            table.add_row("  inference", f"ViT-B/16 in {device['inference']['precision']}: {device['inference']['why']}")
        table.add_row("  torch.compile", "ready" if device["compile"] else "no working compiler found: models run in eager mode")
    table.add_section()
    for extra, missing in found["extras"].items():
        status = "installed" if not missing else f"needs {', '.join(missing)}: pip install 'vitrail[{extra}]'"
        table.add_row(f"extra {extra}", status)
    console.print(table)


def _report(files: tuple[Path, ...], as_json: bool) -> None:
    from vitrail.commands.doctor_report import check_report_file, make_report, write_report

    if len(files) > 1:
        raise VitrailError(f"--report takes one file, not {len(files)}.")
    file = files[0] if files else Path("vitrail-report.md")
    check_report_file(file)
    check_place(file)
    stderr = Console(stderr=True)
    found = make_report(_examine(), log=lambda message: stderr.print(message, style="dim", highlight=False, soft_wrap=True))
    write_report(found, file)
    say(to_json(found, indent=2) if as_json else f"written to {file}: read it, then send it with your question")


def _examine() -> dict[str, Any]:
    """Call `examine`, and say in a terminal that it takes a while: it starts torch and a compiler."""
    with Console(stderr=True).status("trying devices, precisions, attention kernels and the compiler"):
        return examine()


def examine() -> dict[str, Any]:
    """Return everything `doctor` reports, as plain values."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cpus": usable_cpus(),
        "versions": {name: _version(name) for name in PACKAGES},
        "devices": [_device(device) for device in _devices()],
        "extras": {extra: [name for name in names if importlib.util.find_spec(name) is None] for extra, names in EXTRAS.items()},
    }


def _devices() -> list[torch.device]:
    import torch

    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append(torch.device("mps"))
    return [*devices, torch.device("cpu")]


def _device(device: torch.device) -> dict[str, Any]:
    import torch

    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    precisions = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    low = torch.float32 if device.type == "cpu" else torch.bfloat16
    return {
        "device": str(device),
        "name": properties.name if properties else _cpu_name(),
        "memory_gib": properties.total_memory / 2**30 if properties else None,
        "precisions": {name: _matmul_works(device, dtype) for name, dtype in precisions.items()},
        "kernels": {name: _attention_works(device, low, kernel) for name, kernel in KERNELS.items()},
        "inference": _inference(device) if device.type == "cpu" else None,
        "compile": _compile_works(device),
    }


def _cpu_name() -> str:
    import torch

    return f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"


def _inference(device: torch.device) -> dict[str, str]:
    """Return what `--precision auto` chooses for ViT-B/16."""
    from vitrail.models.inference import choose

    chosen = choose(model_config("B/16"), "auto", device)
    return {"precision": chosen.precision, "why": chosen.why}


def _matmul_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a matmul and its gradient run in this dtype with finite results."""
    import torch

    try:
        weight = torch.randn(32, 32, device=device, dtype=dtype, requires_grad=True)
        (weight @ weight.T).sum().backward()
        return weight.grad is not None and bool(weight.grad.isfinite().all())
    except RuntimeError:
        return False


def _attention_works(device: torch.device, dtype: torch.dtype, kernel: str) -> bool:
    """Return whether an attention kernel runs on this device and agrees with the plain formula."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    try:
        q, k, v = torch.randn(3, 2, 4, 16, 32, device=device, dtype=dtype)
        with warnings.catch_warnings(), sdpa_kernel(getattr(SDPBackend, kernel)):
            warnings.simplefilter("ignore")  # torch warns at length about each unsupported kernel
            out = F.scaled_dot_product_attention(q, k, v)
        expected = torch.softmax(q.float() @ k.float().mT / 32**0.5, dim=-1) @ v.float()
        return bool((out.float() - expected).abs().max() < 0.05)
    except RuntimeError:
        return False


def _compile_works(device: torch.device) -> bool:
    import torch

    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns about missing GPUs, which are reported above
    try:
        compiled = torch.compile(lambda x: torch.sin(x) + 1, dynamic=False)
        return bool(compiled(torch.ones(8, device=device)).isfinite().all())
    except Exception:  # a missing compiler raises different errors on different systems
        return False


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _marks(found: dict[str, bool]) -> str:
    return "  ".join(f"{name} {'✓' if works else '✗'}" for name, works in found.items())
