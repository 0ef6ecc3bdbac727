"""The code blocks of README and docs/: what each is, and how the tests treat it.

A comment before a block, which the rendered page does not show, changes how it is run:

    <!-- not run: GPU, it trains for an hour -->              the block is not run, for one of REASONS
    <!-- not run where "torchrun": GPU -->                    only its commands with this text are not run
    <!-- run with "--steps 2": it would take minutes -->      its commands are run with these arguments added
    <!-- run with "--steps 2" where "finetune": … -->         some of them
    <!-- run with "steps=2" where "vitrail.finetune": … -->   in Python, the calls of this function
    <!-- before: paths = ["cat.jpg"] -->                      Python that the block needs, run before it

Blocks without a language, `sh` and `console` are commands. In a `console` block, or after a first line with `$`, only lines
with `$` are commands and the rest is their output. `text`, `json`, `yaml`, `toml` and `dockerfile` are no code.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
REASONS = {
    "GPU": "needs a GPU, or several",
    "Slurm": "needs a cluster's scheduler",
    "network": "needs the network",
    "data": "needs a dataset that cannot be stood in for",
    "time": "takes minutes",
    "server": "serves until it is stopped",
    "tool": "needs another program",
    "install": "installs software, or runs all tests",
    "fragment": "shows a part of a file",
}
DATA = ("text", "json", "yaml", "toml", "dockerfile", "ini")
SHELL = ("", "sh", "bash", "console")
_MARK = re.compile(r'^<!-- (not run|run with "(?P<extra>[^"]*)"|before)(?: where "(?P<where>[^"]*)")?: (?P<text>.*?) ?-->$', re.S)


@dataclass(frozen=True)
class Mark:
    """A comment before a block."""

    kind: str
    text: str
    extra: str = ""
    where: str = ""

    @property
    def reason(self) -> str:
        return re.split(r"[,.:; ]", self.text, maxsplit=1)[0]


@dataclass(frozen=True)
class Piece:
    """One command, or one block of Python: `how` is run, run with other arguments, or not run."""

    page: str
    line: int
    language: str
    code: str
    marks: tuple[Mark, ...] = ()
    output: str | None = None

    @property
    def skipped(self) -> Mark | None:
        return next((mark for mark in self.marks if mark.kind == "not run"), None)

    @property
    def extra(self) -> str:
        return " ".join(mark.extra for mark in self.marks if mark.kind == "run with")

    @property
    def changed(self) -> bool:
        """Whether it is run otherwise than written: with other arguments, or a service on another port."""
        return not self.skipped and bool(self.extra or self.code.startswith("vitrail serve") or "127.0.0.1:8000" in self.code)

    @property
    def before(self) -> str:
        return "\n".join(mark.text for mark in self.marks if mark.kind == "before")


def pages() -> list[Path]:
    """Return the pages whose blocks are run."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "RESULTS.md", *sorted((ROOT / "docs").glob("*.md"))]


def pieces(page: Path) -> list[Piece]:
    """Return the commands and Python blocks of a page in order."""
    name = page.relative_to(ROOT).as_posix()
    found: list[Piece] = []
    marks: list[Mark] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        line, start = lines[number].strip(), number
        if line.startswith("<!--"):
            while not lines[number].rstrip().endswith("-->"):
                number += 1
            mark = _MARK.match("\n".join(lines[start : number + 1]).strip())
            if mark:
                kind = "run with" if mark[1].startswith("run with") else mark[1]
                marks.append(Mark(kind, mark["text"].strip(), mark["extra"] or "", mark["where"] or ""))
        elif line.startswith("```"):
            number += 1
            while not lines[number].strip().startswith("```"):
                number += 1
            indent = len(lines[start]) - len(lines[start].lstrip())
            body = [text[indent:] for text in lines[start + 1 : number]]
            found += _of_block(name, start + 1, line.strip("`").split(" ")[0], body, marks)
            marks = []
        elif line and marks:
            raise ValueError(f"{name}:{start + 1}: a mark must stand right before a code block.")
        number += 1
    return found


def _of_block(page: str, line: int, language: str, body: list[str], marks: list[Mark]) -> list[Piece]:
    if language in DATA:
        return []
    if language == "python":
        return [Piece(page, line, language, "\n".join(body), tuple(marks))]
    if language not in SHELL:
        raise ValueError(f"{page}:{line}: the tests do not know the language {language!r}.")
    prompted = language == "console" or body[0].startswith("$ ")
    found: list[Piece] = []
    for offset, command, output in _commands(body, prompted):
        chosen = tuple(mark for mark in marks if mark.where in command)
        found.append(Piece(page, line + 1 + offset, "sh", command, chosen, output))
    return found


def _commands(body: list[str], prompted: bool) -> list[tuple[int, str, str | None]]:
    """Split a block into commands: (line, command, output that the page shows)."""
    found: list[tuple[int, str, str | None]] = []
    continued = False
    for offset, text in enumerate(body):
        if continued:
            begin, command, output = found[-1]
            found[-1] = (begin, f"{command[:-1].rstrip()} {text.strip()}", output)
        elif prompted and not text.startswith("$ "):
            begin, command, output = found[-1]
            found[-1] = (begin, command, f"{output}{text}\n")
            continue
        elif text.strip() and not text.startswith("#"):
            found.append((offset, text.removeprefix("$ ").strip(), "" if prompted else None))
        continued = bool(found) and found[-1][1].endswith("\\")
    return found


def counts() -> str:
    """Return one line that counts all pieces, as the test session prints it."""
    every = [piece for page in pages() for piece in pieces(page)]
    skipped = Counter(piece.skipped.reason for piece in every if piece.skipped)
    other = sum(piece.changed for piece in every)
    python = sum(piece.language == "python" for piece in every)
    reasons = ", ".join(f"{reason} {count}" for reason, count in skipped.most_common())
    written = len(every) - other - skipped.total()
    return (
        f"documentation: {python} Python blocks and {len(every) - python} commands: {written} run as written, "
        f"{other} run with other arguments, {skipped.total()} not run ({reasons})"
    )
