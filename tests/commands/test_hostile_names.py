"""Names of files and classes that are not UTF-8, contain control characters, or look like markup."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.table import Table
from rich.text import Text

from tests.checkpoints.small_models import bundle_of
from vitrail.checkpoints import load, write
from vitrail.cli import main
from vitrail.commands.terminal import Console
from vitrail.data.sources import open_source
from vitrail.data.sources.files import FileSplit
from vitrail.data.split import lowest_hashes
from vitrail.evaluate import plots
from vitrail.evaluate.embeddings import Embeddings, load_embeddings
from vitrail.models import ViTConfig
from vitrail.text import csv_line, printable, to_bytes, to_json

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
SRC = Path(__file__).parents[2] / "src/vitrail"
CLASSES = (b"caf\xe9", b"\x1b[31mred", "back\u202ewards".encode(), b"[/bold]$x$ :smile:".replace(b"/", b""), b"tab\there\nnew")
FILES = (b"\xff.png", b"a\r2.png", b"new\nline.png", b"\x1b]0;title\x07.png", 'x\x85,"y.png'.encode())
TINY = ViTConfig(name="tiny", width=8, depth=1, heads=2, mlp=8, patch=(4, 4), image_size=(8, 8), outputs=len(CLASSES))
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    for k, label in enumerate(CLASSES):
        os.makedirs(os.path.join(os.fsencode(root), label))  # noqa: PTH103, PTH118
        for j, name in enumerate(FILES):
            Path(os.fsdecode(os.path.join(os.fsencode(root), label, name))).write_bytes(_png(k * len(FILES) + j))  # noqa: PTH118
    return root


def _png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(value).integers(0, 255, (8, 8, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def checkpoint(tmp_path: Path) -> Path:
    bundle = bundle_of(TINY)
    bundle.classes = tuple(os.fsdecode(name) for name in CLASSES)
    write(bundle, tmp_path / "model", "vitrail")
    return tmp_path / "model"


def run(*arguments: str | Path, status: int = 0) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([str(one) for one in arguments])
    assert exit_.value.code == status


def test_a_split_table_of_any_names_reads_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "split", folder, tmp_path / "table.csv", "--val", "0.2")
    source = open_source(f"csv:{tmp_path}/table.csv")
    assert set(source.classes) == {os.fsdecode(name) for name in CLASSES}
    assert {name: len(split) for name, split in source.splits.items()} == {"train": 20, "val": 5}
    assert all(split.payload(k) for split in source.splits.values() for k in range(len(split)))
    run("data", "check", f"csv:{tmp_path}/table.csv", "--sheet", tmp_path / "sheet.png", "--workers", "1")
    shown = capsys.readouterr().out
    assert not UNSAFE.search(shown)
    assert r"caf\xe9" in shown
    assert r"\x1b[31mred" in shown
    run("data", "check", folder, "--json", "--workers", "1")
    assert set(json.loads(capsys.readouterr().out)["splits"]["train"]["per_class"]) == {os.fsdecode(name) for name in CLASSES}


def test_predict_keeps_every_row_and_name(folder: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    model = checkpoint(tmp_path)
    assert load(model).classes == tuple(os.fsdecode(name) for name in CLASSES)
    label = folder / os.fsdecode(CLASSES[0])
    (label / os.fsdecode(b"bad\xfe\x1b.jpg")).write_bytes(b"text")
    names = {str(file) for file in label.iterdir()}
    arguments = ("predict", model, label, "--device", "cpu", "--workers", "0")
    run(*arguments, "--csv", tmp_path / "out.csv", status=1)
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    assert {row["image"] for row in rows} == names
    assert {row["label_1"] for row in rows if not row["error"]} <= {os.fsdecode(name) for name in CLASSES}
    capsysbinary.readouterr()
    run(*arguments, "--json", status=1)
    lines = capsysbinary.readouterr().out.decode().splitlines()
    assert {json.loads(line)["image"] for line in lines} == names
    run(*arguments, status=1)
    shown = capsysbinary.readouterr()
    assert not UNSAFE.search((shown.out + shown.err).decode())
    assert len(shown.out.splitlines()) == len(names) - 1
    run(*arguments, "--csv", "-", status=1)
    assert {
        row["image"]
        for row in csv.DictReader(io.StringIO(capsysbinary.readouterr().out.decode("utf-8", "surrogateescape"), newline=""))
    } == names


@pytest.mark.slow
def test_eval_report_inspect_and_finetune_take_any_names(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = checkpoint(tmp_path)
    run("eval", model, "--data", f"folder:{folder}", "--out", tmp_path / "report", "--device", "cpu", "--workers", "0")
    assert not UNSAFE.search((tmp_path / "report" / "report.html").read_text(encoding="utf-8"))
    run("inspect", model, folder, "--out", tmp_path / "inspected", "--device", "cpu")
    out = tmp_path / "run"
    run("finetune", "--data", folder, "--from", model, "--out", out, "--steps", "2", "--schedule.warmup", "0", "--device", "cpu")
    assert set(load(out).classes or ()) == {os.fsdecode(name) for name in CLASSES}
    shown = capsys.readouterr()
    assert not UNSAFE.search(shown.out + shown.err)


def test_an_error_message_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("data", "check", f"csv:{tmp_path}/\x1b[2J\udcff.csv", status=1)
    run("predict", tmp_path / "no\x1b[2Jthing", "x.png", status=2)
    captured = capsys.readouterr()
    assert not UNSAFE.search(captured.out + captured.err)


@pytest.mark.parametrize(("to", "suffix"), [("vitrail", ""), ("timm", ".safetensors"), ("timm", ".pth"), ("google", ".npz")])
def test_checkpoints_of_any_name(to: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """safetensors and torch take paths in UTF-8 only; this was reported as a corrupted file."""
    (tmp_path / os.fsdecode(b"caf\xe9\x1b[2J")).mkdir()
    target = tmp_path / os.fsdecode(b"caf\xe9\x1b[2J/x\xff" + suffix.encode())
    bundle = bundle_of(TINY)
    write(bundle, target, to)
    weights = load(target, **({"heads": 2} if to == "timm" else {})).model.state_dict()
    assert all(weights[name].equal(tensor) for name, tensor in bundle.model.state_dict().items())
    run("convert", target, tmp_path / os.fsdecode(b"\xfe"), "--heads", "2")
    run("info", tmp_path / os.fsdecode(b"\xfe"))
    shown = capsys.readouterr()
    assert not UNSAFE.search(shown.out + shown.err)


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_embeddings_keep_names(suffix: str, tmp_path: Path) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    names = tuple(os.fsdecode(name) for name in FILES)
    file = tmp_path / os.fsdecode(b"\xff" + suffix.encode())
    Embeddings(np.zeros((len(names), 2), np.float32), names, {"checkpoint": "\udcff"}).save(file)
    assert load_embeddings(file).names == names


def test_plots_of_any_class_names() -> None:
    assert plots.confusion(np.eye(len(CLASSES)), [os.fsdecode(name) for name in CLASSES])


def test_the_console_escapes_text_but_not_its_own_codes() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    table = Table("a\x1b[31mb")
    table.add_row("[red]\x07")
    console.print(Text("\udcff"))
    console.print("x\x1b[2J [/] :smile:", style="bold", highlight=False)
    console.print(table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1mx\\x1b[2J [/] :smile:\x1b[0m" in shown
    assert r"a\x1b[31mb" in shown
    assert r"[red]\x07" in shown
    assert r"\xff" in shown


@pytest.mark.parametrize("text", ["caf\udce9", "\ud800", "a\r\nb,\"c'", "\x1b\x7f\x9b", "日本"])
def test_text_reads_back_from_json_and_csv(text: str) -> None:
    assert json.loads(to_json({text: [text]}).encode()) == {text: [text]}
    assert next(csv.reader(io.StringIO(csv_line([text, "z"]), newline=""))) == [text, "z"]
    assert to_bytes(text)
    assert printable(printable(text)) == printable(text)
    assert not UNSAFE.search(printable(text, one_line=True))


def test_only_one_module_writes_to_the_terminal() -> None:
    # `vitrail.load` shows downloads from Python, too, below the commands; it escapes its one line itself.
    allowed = {SRC / "api/terminal.py", SRC / "cli.py", SRC / "checkpoints/download_progress.py"}
    assert "printable(" in (SRC / "checkpoints/download_progress.py").read_text()
    found = [
        file
        for file in SRC.rglob("*.py")
        if file not in allowed
        and re.search(r"^\s*print\(|import .*\bConsole\b(?<!terminal import Console)", file.read_text())
        and not re.search(r"from vitrail\.(api|commands)\.terminal import .*Console", file.read_text())
    ]
    assert found == []


def test_bytes_of_file_names_are_restored_next_to_other_surrogates() -> None:
    assert to_bytes("\udcff\ud800é") == b"\xff" + "\ud800é".encode("utf-8", "surrogatepass")
    assert to_bytes("a\udcffb") == b"a\xffb"


def test_class_names_with_lone_surrogates_can_be_held_out() -> None:
    split = FileSplit("train", "classify", Path(), [f"{k}.png" for k in range(20)], np.zeros(20, np.int64), ("\ud800x",))
    assert len(lowest_hashes(split, 0.1)) == 2


def test_an_error_is_reported_when_nobody_reads_stdout(tmp_path: Path) -> None:
    code = """
from vitrail import cli
from vitrail.errors import VitrailError

def fail(arguments):
    print("half of the answer")
    raise VitrailError("The other half is missing.")

cli._run = fail
cli.main([])
"""
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}  # unbuffered, print itself would fail
    command = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env=environment
    )
    assert command.stdout is not None and command.stderr is not None
    command.stdout.close()
    said = command.stderr.read().decode()
    assert command.wait(60) == 2 and "vitrail: The other half is missing." in said and "Traceback" not in said
