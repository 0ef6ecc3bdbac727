"""Build the HTML page of an inspection. It links to files in the same folder by relative paths and needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.inspect.report import Panel, Section

NOT_IN_PAPER = "not in the paper"


def page(sections: Sequence[Section], about: Mapping[str, Any]) -> str:
    """Build the whole page."""
    title = f"Inspection of {' · '.join(about['titles'])}"
    links = "".join(
        f'<a href="#{_anchor(section, panel)}">{escape(panel.heading)}</a>' for section in sections[:1] for panel in section.panels
    )
    if len(sections) > 1:
        links = "".join(f'<a href="#{escape(section.folder)}">{escape(section.title)}</a>' for section in sections)
    return _PAGE.format(
        title=escape(title), style=STYLE, links=links, version=escape(about["version"]), sections="".join(map(_section, sections))
    )


def _section(section: Section) -> str:
    info = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in section.info.items())
    notes = "".join(f"<li>{escape(note)}</li>" for note in section.notes)
    callout = f'<ul class="notes">{notes}</ul>' if notes else ""
    figures = "".join(_figure(section, panel) for panel in section.panels)
    return f'<section id="{escape(section.folder)}"><h2>{escape(section.title)}</h2><dl>{info}</dl>{callout}{figures}</section>'


def _figure(section: Section, panel: Panel) -> str:
    extensions = ["png", "svg", "npz", *(["csv"] if panel.table is not None else [])]
    stem = f"{section.folder}/{panel.name}".removeprefix("./")
    files = " ".join(f'<a href="{escape(stem)}.{extension}">{extension.upper()}</a>' for extension in extensions)
    kind = "badge" if panel.badge == NOT_IN_PAPER else "badge paper"
    badge = f'<span class="{kind}">{escape(panel.badge)}</span>' if panel.badge else ""
    return (
        f'<figure id="{_anchor(section, panel)}"><h3>{escape(panel.heading)} {badge}</h3>'
        f'<a class="sheet" href="{escape(stem)}.png"><img src="{escape(stem)}.png" alt="{escape(panel.heading)}"></a>'
        f'<figcaption>{escape(panel.caption)} <span class="files">{files}</span></figcaption></figure>'
    )


def _anchor(section: Section, panel: Panel) -> str:
    return escape(f"{section.folder}-{panel.name}".removeprefix(".-"))


STYLE = """
:root { color-scheme: light dark; --ink: #22272e; --faint: #66707b; --line: #e2e5e9; --ground: #fbfbf9; --sheet: #fff;
  --blue: #2b5f8e; --note: #fff6dd; --note-line: #e3b341; }
@media (prefers-color-scheme: dark) { :root { --ink: #dde2e8; --faint: #98a2ad; --line: #32383f; --ground: #15181c;
  --sheet: #f4f4f2; --blue: #7db3e3; --note: #2c2614; --note-line: #a8842c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2.2rem 1.4rem 4rem; color: var(--ink); background: var(--ground);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; padding-top: 1.4rem; border-top: 1px solid var(--line); overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 0 0 .7rem; }
a { color: var(--blue); } nav { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; }
nav a, .files a { text-decoration: none; } nav a:hover, .files a:hover { text-decoration: underline; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0 0 1rem; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
.notes { margin: 1rem 0; padding: .7rem 1rem .7rem 2rem; background: var(--note); border-left: 3px solid var(--note-line);
  border-radius: 3px; }
figure { margin: 2.2rem 0 0; }
.sheet { display: block; background: var(--sheet); border: 1px solid var(--line); border-radius: 6px; padding: 1rem;
  text-align: center; }
.sheet img { max-width: 100%; max-height: 56rem; height: auto; vertical-align: middle; }
@media (prefers-color-scheme: dark) { .sheet { background: #fff; } .sheet img { filter: none; } }
figcaption { color: var(--faint); margin: .6rem 0 0; max-width: 50rem; }
.files { white-space: nowrap; } .files a { margin-left: .5rem; font-size: .8rem; letter-spacing: .03em; }
.badge { font-size: .72rem; font-weight: 500; padding: .1rem .5rem; border: 1px solid var(--line); border-radius: 1rem;
  color: var(--faint); margin-left: .4rem; vertical-align: .1em; white-space: nowrap; }
.badge.paper { color: var(--blue); border-color: currentColor; }
footer { margin-top: 3rem; color: var(--faint); font-size: .85rem; }
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><header><h1>{title}</h1><nav>{links}</nav></header>
<main>{sections}</main>
<footer>Made with Vitrail {version}. Every figure is available as PNG and SVG, and its data as NPZ.</footer></body></html>
"""
