"""Project rules: style, types, import layers, file sizes, a light import, and plain words."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "vitrail"

# Words of a private language, and what to write instead. Patterns are regular expressions, chosen so that ordinary uses pass.
PRIVATE_WORDS = {
    r"\brooms?\b": "package",
    r"\b[Ss]eats?\b|\bcontests?\b": "entry, comparison",
    r"\bpeers?\b": "other library, baseline",
    r"\b(Courier|Facts|Ledger|Listener|Shown|Wishes)\b": "what it is: RunInfo, ResultsFile, Callback, Panel, InspectOptions, …",
    r"\bis_heard\b|\b(listen|hear)(s|ers?)?\b|\bheard\b": "has_hooks, callback",
    r"\b(somebody|everybody|nobody|whoever)\b": "user, process, library: what it is",
    r"\bcomes? along\b": "is included",
    r"\b(go|goes|went|going) on\b": "continue, resume",
    r"\bpassed over\b": "skipped",
    r"\b(not|is|are|be) said\b|\bunsaid\b|\b(has|have) no words for\b": "shown, stored, noted; default:",
    r"\b(by|in|take|takes|taking) turns\b": "alternating rounds, ping-pong",
    r"\btaken for\b": "predicted as",
    r"\bspoil(s|t|ed)?\b|\bdamaged\b": "corrupted",
    r"\b[Hh]eads? of zeros\b": "zero-initialised head",
    r"\b[Mm]atrix products?\b|\bends? of (a |the )?products?\b": "matmul, epilogue",
    r"(?<!platform\.)\bprocessors?\b": "CPU, SM",
    r"\b(images|steps|bytes|seconds|times) an? (second|step|round|class|line|image|epoch|token|head|run|file|row)\b": "per",
    r"\beight[- ]bits?\b": "fp8, int8, 8-bit",
    r"\bslopes?\b": "grad_out, gelu_grad",
    r"\bcutting\b|\bturned round\b|\bwaiting branch\b": "patchify, transposed, pending residual",
    r"\bkeeps=|\brecompute[-_]keeps\b": "keep=, recompute_keep",
    r"\b(times-schedule|times-lr|inception-reference)\b": "independent-of-lr, scaled-by-lr, inception-tensorflow",
    r"\bbeside\.png\b|\bbeside\b|[Hh]ow far heads look": "comparison, mean attention distance, next to",
    r"\bdata sets?\b|\blearnt\b": "dataset, learned",
}
UPGRADES = ("train/upgrade.py", "checkpoints/native.py")  # they name old values, to read old files


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        pytest.param(["mypy"], marks=pytest.mark.slow),
        ["importlinter.cli", "lint"],
    ],
    ids=["ruff check", "ruff format", "mypy", "import-linter"],
)
def test_tool(command: list[str]) -> None:
    if command[0] == "importlinter.cli":
        arguments = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    else:
        arguments = [sys.executable, "-m", *command]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_import_is_silent_and_light() -> None:
    code = "import vitrail, sys; assert 'torch' not in sys.modules; vitrail.create_model"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_files_stay_small() -> None:
    limits = {SOURCE / "models": 300, SOURCE: 500}
    for folder, limit in limits.items():
        for file in folder.rglob("*.py"):
            assert len(file.read_text().splitlines()) <= limit, f"{file.relative_to(ROOT)} is longer than {limit} lines"
    assert len((SOURCE / "models" / "vit.py").read_text().splitlines()) <= 170  # it is the paper


@pytest.mark.parametrize("pattern", PRIVATE_WORDS)
def test_plain_words(pattern: str) -> None:
    code = [*SOURCE.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "scripts").glob("*.py")]
    texts = [*code, *(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    found = [
        f"{file.relative_to(ROOT)}:{number}: {match[0]!r} in {line.strip()[:100]!r}"
        for file in texts
        if not file.as_posix().endswith(UPGRADES)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if (match := re.search(pattern, line))
    ]
    assert not found, f"write {PRIVATE_WORDS[pattern]!r} instead:\n" + "\n".join(found)


def test_links_in_the_docs_resolve() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "RESULTS"))]
    broken = []
    for page in pages:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if path.startswith("reference/"):  # generated when the site is built, which checks these links
                continue
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in _anchors(target)):
                broken.append(f"{page.name}: {link}")
    assert not broken


def test_source_files_named_in_the_docs_exist() -> None:
    known = {file.name for folder in ("src", "tests", "benchmarks", "scripts") for file in (ROOT / folder).rglob("*.py")}
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        named = re.findall(r"`(?:[\w./-]*/)?(\w+\.py)`", page.read_text(encoding="utf-8"))
        assert set(named) <= known, f"{page.name} names {sorted(set(named) - known)}"


def _anchors(page: Path) -> list[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings]


def test_ci_runs_the_command_in_the_readme() -> None:
    commands = re.findall(r"^(pip install uv && uv run .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] in commands
