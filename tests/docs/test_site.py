"""The documentation site builds without a warning, and its pages are whole: no empty part, nothing from another server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks import ROOT
from tests.serve.chromium import chromium
from vitrail.cli import COMMANDS

sys.path.insert(0, str(ROOT / "scripts"))
import docs_reference

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """What the tests look at in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.requests: list[str] = []
        self.headings: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.tables = self.highlighted = 0
        self.text: list[str] = []
        self._heading: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if "id" in given:
            self.ids.add(given["id"])
        if tag in ("script", "img", "iframe") and "src" in given:
            self.requests.append(given["src"])
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.requests.append(given["href"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "table":
            self.tables += 1
        if tag == "div" and "highlight" in given.get("class", "").split():
            self.highlighted += 1
        if re.fullmatch(r"h[1-6]", tag):
            self._heading = []

    def handle_endtag(self, tag: str) -> None:
        if re.fullmatch(r"h[1-6]", tag) and self._heading is not None:
            self.headings.append("".join(self._heading).replace("¶", "").strip())
            self._heading = None

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._heading is not None:
            self._heading.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # a notice of the theme on its end of life
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {
        file.relative_to(site).as_posix(): Page(file.read_text(encoding="utf-8"))
        for file in site.rglob("*.html")
        if "repository" not in file.parts and file.name != "saved.html"
    }


def _navigation(entries: Any) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    children = entries.values() if isinstance(entries, dict) else entries
    return [page for child in children for page in _navigation(child)]


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, in which one value is a Python function."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def test_every_page_of_the_navigation_is_there_and_no_other(pages: dict[str, Page]) -> None:
    entries = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]
    assert [next(iter(group)) for group in entries] == ["Start", "Guides", "Paper", "Reference", "Results", "Project"]
    expected = {page.removesuffix(".md") + ".html" for page in _navigation(entries)}
    studies = [file for file in (ROOT / "docs/results/studies").rglob("*") if file.suffix in (".md", ".html")]
    tables = {str(file.relative_to(ROOT / "docs").with_suffix(".html")) for file in studies}
    assert tables and set(pages) == expected | tables | {"404.html"}  # RESULTS.md links to the tables of studies


def test_nothing_is_fetched_from_another_server(site: Path, pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        assert page.requests
        for address in page.requests:
            assert not re.match(r"(https?:)?//", address), f"{name} requests {address}"
            if name != "404.html" and not address.startswith("data:"):
                assert (site / name).parent.joinpath(address.partition("?")[0]).resolve().exists(), f"{name} requests {address}"
    for file in [*site.rglob("*.css")]:
        assert not re.search(r"url\(['\"]?https?:|@import", file.read_text(encoding="utf-8")), file


def test_links_lead_somewhere(site: Path, pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        for link in page.links:
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or name == "404.html" or path == ".":
                continue
            target = (site / name).parent.joinpath(path).resolve() if path else site / name
            assert target.exists(), f"{name} links to {link}"
            known = pages.get(target.relative_to(site.resolve()).as_posix() if path else name)
            assert not anchor or known is None or anchor in known.ids or anchor == "__skip", f"{name} links to {link}"


def test_headings_tables_and_code_are_rendered(pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        assert all(page.headings), f"{name} has an empty heading"
        if name != "404.html":
            assert page.headings
        shown = "".join(page.text)
        assert not re.search(r"^\|.*\|$|^```|\]\([\w/.#-]+\)", shown, re.MULTILINE), f"{name} shows Markdown that is not rendered"
        source = ROOT / "docs" / name.replace(".html", ".md")
        if source.exists():
            text = source.read_text(encoding="utf-8")
            assert page.tables >= len(re.findall(r"^\|[-|:]+\|$", text, re.MULTILINE)), name
            assert page.highlighted >= len(re.findall(r"^```\w*$", text, re.MULTILINE)) // 2, name
            assert "not run:" not in shown


def test_the_reference_has_every_public_name_command_and_field(pages: dict[str, Page]) -> None:
    api = pages["reference/api.html"]
    for package, names in docs_reference.public_packages():
        for name in names:
            assert f"{package.__name__}.{name}" in api.ids
    commands = pages["reference/commands.html"]
    for name in COMMANDS:
        assert f"vitrail {name}" in commands.headings
    assert "".join(commands.text).count("usage: vitrail") >= len(COMMANDS)
    configuration = "".join(pages["reference/configuration.html"].text)
    for kinds in docs_reference.configurations().values():
        for kind in kinds:
            assert kind.__name__ in configuration
            for name, *_ in docs_reference.config_fields(kind):
                assert name in configuration


def test_the_site_works_as_files_without_a_network(site: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark", offline=True)
        page = context.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
        for name in ("index", "start", "paper", "reference/errors"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than a phone"
        assert page.evaluate("getComputedStyle(document.body).getPropertyValue('--md-hue')").strip()  # the dark scheme's
        page.click("label.md-header__button[for=__search]")
        page.locator("input.md-search__input").press_sequentially("rollout", delay=20)  # as a user types
        page.wait_for_selector(".md-search-result__item", timeout=10_000)
        assert "rollout" in page.inner_text(".md-search-result__list").lower()
        browser.close()
    assert not problems


def test_public_names_are_not_hidden_by_modules() -> None:
    """A module with the name of a function would replace it in its package once it is imported."""
    for package, names in docs_reference.public_packages():
        for name in names:
            value = getattr(package, name)
            assert not isinstance(value, types.ModuleType) or hasattr(value, "__path__"), f"{package.__name__}.{name} is a module"
