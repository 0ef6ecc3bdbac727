"""What commands import: `--help` and lists nothing heavy, and a prediction only what it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "torchvision", "matplotlib", "sklearn", "PIL", "scipy", "transformers", "huggingface_hub", "pandas")

# In one interpreter: what a command imported stays, so that the first command is named that a module was found after.
HELP = """
import contextlib, io, json, sys
from vitrail.cli import main
from vitrail.commands.table import COMMANDS
found = {}
for name in ["", *COMMANDS, *json.loads(sys.argv[2])]:
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            main([*name.split(), "--help"])
    except SystemExit as end:
        assert not end.code and "vitrail" in text.getvalue().lower(), name
    for module in json.loads(sys.argv[1]):
        if module in sys.modules:
            found.setdefault(module, name)
print(json.dumps(found))
"""

RUN = """
import json, sys
from vitrail.cli import main
try:
    main(sys.argv[2:])
except SystemExit as end:
    assert not end.code
print(json.dumps([name for name in json.loads(sys.argv[1]) if name in sys.modules]))
"""


def last_line(script: str, *words: str) -> object:
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_help_imports_neither_torch_nor_numpy() -> None:
    recipes = json.dumps(["train vit-b16-imagenet", "plan mae-vit-b16-imagenet"])
    assert last_line(HELP, json.dumps(HEAVY), recipes) == {}


def test_a_list_of_the_studies_imports_neither_torch_nor_numpy() -> None:
    assert last_line(RUN, json.dumps(HEAVY), "study", "--list") == []


@pytest.mark.slow
def test_a_prediction_imports_only_what_it_needs(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (80, 60), (200, 30, 30)).save(tmp_path / "red.png")
    spared = [name for name in HEAVY if name not in ("torch", "numpy", "PIL")]
    spared += ["torch._dynamo", "torch.distributed.tensor", "torch.utils.flop_counter", "triton", "sympy", "tensorboard", "timm"]
    assert last_line(RUN, json.dumps(spared), "predict", str(tmp_path / "red.png")) == []
