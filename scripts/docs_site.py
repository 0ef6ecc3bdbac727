"""Hooks of MkDocs: pages from the repository's root, the generated reference, and links to files outside docs/."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docs_recipes
import docs_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

# Files outside docs/ that are pages of the site.
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "RESULTS.md": "results.md",
    "README.md": "index.md",
    "src/vitrail/pretrained/vitrail-ti8-tiny-imagenet/README.md": "model-card.md",
}
MOVED = {"docs/explorer.html": "explorer/saved.html"}  # the page of explorer.md has its name in the site
GENERATED: dict[str, Callable[[], str]] = {
    "reference/api.md": docs_reference.api,
    "reference/commands.md": docs_reference.commands,
    "reference/configuration.md": docs_reference.configuration,
    "reference/errors.md": docs_reference.errors,
    "reference/recipes.md": docs_recipes.recipes,
}
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s#]*)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the files that any page links to."""
    for source, page in PAGES.items():
        if files.get_file_from_path(page) is None:
            text = _without_front_matter((ROOT / source).read_text(encoding="utf-8"))
            files.append(File.generated(config, page, content=text))
    for page, text in GENERATED.items():
        files.append(File.generated(config, page, content=text()))
    for source, name in MOVED.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    for page in list(files.documentation_pages()):
        folder = _folder(page.src_uri)
        for _, link, _ in LINK.findall(page.content_string):
            path = posixpath.normpath(posixpath.join(folder, link))
            if not _is_on_site(path) and (ROOT / path).is_file() and files.get_file_from_path(f"repository/{path}") is None:
                files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to the site's pages, wherever their sources are in the repository."""
    here = page.file.src_uri
    folder = _folder(here)

    def site_link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        if not (ROOT / path).exists():
            return match[0]  # a page of the reference, or a broken link, which MkDocs reports
        target = (
            PAGES.get(path) or MOVED.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}")
        )
        return match[1] + posixpath.relpath(target, posixpath.dirname(here) or ".") + match[3]

    return "".join(
        part if index % 2 else LINK.sub(site_link, part)
        for index, part in enumerate(re.split(r"(^```.*?^```)", markdown, flags=re.M | re.S))
    )


def _folder(page: str) -> str:
    """Return the folder, in the repository, in which the source of a page is."""
    source = next(
        (source for source, name in PAGES.items() if name == page and not (ROOT / "docs" / page).exists()), f"docs/{page}"
    )
    return posixpath.dirname(source)


def _is_on_site(path: str) -> bool:
    return path in PAGES or path.startswith("docs/")


def _without_front_matter(text: str) -> str:
    return re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.S)
