"""Every code block and command of README and docs/ works, or says why it is not run."""

from __future__ import annotations

import ast
import contextlib
import doctest
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import REASONS, Mark, Piece, pages, pieces
from tests.docs.workplace import make_workplace
from vitrail.cli import main

PAGES = [page for page in pages() if any(not piece.skipped for piece in pieces(page))]
MARKS = {"tour.md": pytest.mark.long, "training.md": pytest.mark.long}


def test_every_mark_has_a_known_reason() -> None:
    marked = [piece for page in pages() for piece in pieces(page) if piece.skipped]
    assert marked
    for piece in marked:
        assert piece.skipped is not None
        assert piece.skipped.reason in REASONS, (
            f"{piece.page}:{piece.line}: {piece.skipped.text!r} begins with none of {list(REASONS)}"
        )


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workplace(tmp_path_factory.mktemp("workplace"))


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, marks=MARKS.get(page.name, ())) for page in PAGES], ids=lambda page: page.name)
def test_the_page_runs(
    page: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "work"
    shutil.copytree(prepared, place)
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.argv", ["page"])
    names: dict[str, Any] = {"__name__": "__page__"}
    with contextlib.ExitStack() as servers:
        for piece in pieces(page):
            if piece.skipped:
                continue
            try:
                _run(piece, names, servers)
            except BaseException as error:
                shown = capfd.readouterr()
                pytest.fail(f"{piece.page}:{piece.line}: {piece.code}\n{type(error).__name__}: {error}\n{shown.out}\n{shown.err}")
            shown = capfd.readouterr()
            if piece.output:
                _compare(piece, shown.out + shown.err)


def _run(piece: Piece, names: dict[str, Any], servers: contextlib.ExitStack) -> None:
    if piece.language == "python" and piece.code.startswith(">>> "):
        _run_session(piece, names)
        return
    if piece.language == "python":
        exec(compile(piece.before, piece.page, "exec"), names)
        exec(compile(_with_arguments("\n" * piece.line + piece.code, piece.marks), piece.page, "exec"), names)
        return
    words = shlex.split(f"{piece.code.partition(' # ')[0]} {piece.extra}", comments=True)
    words = [_here(word) for word in words]
    if words[:2] == ["vitrail", "serve"]:
        servers.enter_context(_serving(words[2:]))
    elif words[0] == "vitrail":
        words, target = (words[:-2], words[-1]) if ">" in words else (words, "")
        with pytest.raises(SystemExit) as end, _written_to(target):
            main(words[1:])
        assert not end.value.code, f"exit status {end.value.code}"
    elif words[0] == "curl":
        subprocess.run(["curl", "--silent", "--show-error", "--fail", *words[1:]], check=True, timeout=30)
    elif words[0] in ("ls", "cat", "mkdir", "cp"):
        subprocess.run(words, check=True, timeout=30)
    else:
        raise ValueError("The tests can run Python and the command vitrail, ls, cat, mkdir, cp and curl. Mark what is not run.")


def _with_arguments(code: str, marks: Sequence[Mark]) -> ast.Module:
    """Add the arguments of `run with` to the calls that it names."""
    tree = ast.parse(code)
    for mark in marks:
        if mark.kind == "run with":
            added = ast.parse(f"call({mark.extra})", mode="eval").body
            calls = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and ast.unparse(one.func) == mark.where]
            assert calls and isinstance(added, ast.Call), f"{mark.where!r} is not called in this block."
            for call in calls:
                call.keywords += added.keywords
    return tree


def _run_session(piece: Piece, names: dict[str, Any]) -> None:
    """Run a session with prompts, and compare what each line returns with the page."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    session = doctest.DocTestParser().get_doctest(f"{piece.code}\n", names, piece.page, piece.page, piece.line)
    report: list[str] = []
    result = doctest.DocTestRunner(_Checker(), optionflags=flags).run(session, out=report.append, clear_globs=False)
    assert not result.failed, "".join(report)


class _Checker(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        same = super().check_output(_SHARE.sub("%", want), _SHARE.sub("%", got), optionflags)
        return same and _close(_SHARE.findall(want), _SHARE.findall(got))


@contextlib.contextmanager
def _written_to(file: str) -> Iterator[None]:
    """Write what is printed to a file, as `> FILE` does."""
    if not file:
        yield
        return
    with Path(file).open("w", encoding="utf-8") as stream, contextlib.redirect_stdout(stream):
        yield


_PORT: list[int] = []


def _here(word: str) -> str:
    """Let the service be on a free port instead of 8000, which another process may have."""
    return word.replace("127.0.0.1:8000", f"127.0.0.1:{_PORT[0]}") if _PORT else word


@contextlib.contextmanager
def _serving(words: list[str]) -> Iterator[None]:
    """Run `vitrail serve` with these words in a thread until the page ends."""
    from vitrail.serve.service import Service

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        _PORT[:] = [free.getsockname()[1]]
    stop: list[Callable[[], None]] = []
    original = Service.start

    def start(self: Any, on_failure: Callable[[], None]) -> None:
        stop.append(on_failure)
        original(self, on_failure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Service, "start", start)
        patch.setattr("os._exit", lambda status: None)
        thread = threading.Thread(target=_quietly, args=(["serve", *words, "--port", str(_PORT[0])],), daemon=True)
        thread.start()
        try:
            _wait_until_ready(thread)
            yield
        finally:
            for end in stop:
                end()
            thread.join(20)
            _PORT.clear()


def _quietly(words: list[str]) -> None:
    with contextlib.suppress(SystemExit):
        main(words)


def _wait_until_ready(thread: threading.Thread) -> None:
    from urllib.error import URLError
    from urllib.request import urlopen

    for _ in range(400):
        with contextlib.suppress(URLError, ConnectionError), urlopen(f"http://127.0.0.1:{_PORT[0]}/v2/health/ready", timeout=2):
            return
        assert thread.is_alive(), "the service has ended"
        time.sleep(0.05)
    raise TimeoutError("the service did not become ready")


def _compare(piece: Piece, shown: str) -> None:
    """Compare what a command printed with the page; … stands for anything."""
    assert piece.output is not None
    for line in piece.output.strip().splitlines():
        pattern = ".*".join(map(re.escape, line.strip().split("…")))
        pattern = re.sub(r"\d+\\\.\d+%", lambda share: _SHARE.pattern, pattern)
        match = re.search(pattern, shown)
        assert match, f"{piece.page}:{piece.line}: {line!r} is not in what {piece.code!r} prints:\n{shown}"
        assert _close(_SHARE.findall(line), match.groups()), f"{line!r}, but found {match[0]!r}"


_SHARE = re.compile(r"(\d+\.\d+)%")


def _close(expected: Sequence[str], found: Sequence[str]) -> bool:
    """Whether shares differ by less than a point: devices round differently."""
    return all(abs(float(one) - float(other)) < 1 for one, other in zip(expected, found, strict=True))
