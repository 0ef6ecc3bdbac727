"""`/docs`: the OpenAPI description as a page. It is made here, because FastAPI's own pages load scripts from other servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

# The colours are those of the explorer.
STYLE = """:root{color-scheme:light dark}html{background:light-dark(#f6f5f1,#121117);color:light-dark(#1b1924,#efedf5);
border-top:3px solid #3b6fd4}a{color:light-dark(#2f5fc4,#7ea6ff)}
body{margin:0 auto;max-width:60rem;padding:1rem 1rem 4rem;font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem}h2{margin:2rem 0 .5rem;font-size:1.1rem}
details{background:light-dark(#fff,#1b1a22);border:1px solid light-dark(#e2dfd8,#302e3a);border-radius:8px;margin:.4rem 0;
padding:.5rem .75rem}
summary{cursor:pointer;overflow-wrap:anywhere}code{font:13.5px/1.4 ui-monospace,monospace}
b.method{display:inline-block;min-width:3.2rem;font-size:.8rem;color:light-dark(#2f5fc4,#7ea6ff)}
table{border-collapse:collapse;margin:.75rem 0;width:100%}th,td{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;
border-top:1px solid light-dark(#e2dfd8,#302e3a);overflow-wrap:break-word}"""


def reference_page(description: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI description: every operation by its tag, with parameters, bodies and answers."""
    by_tag: dict[str, list[str]] = {}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault((operation.get("tags") or ["Monitoring"])[0], []).append(_operation(method, path, operation))
    sections = "".join(f"<h2>{escape(tag)}</h2>{''.join(entries)}" for tag, entries in by_tag.items())
    title = escape(description["info"]["title"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}: HTTP reference</title><style>{STYLE}</style></head><body><h1>{title}: HTTP reference</h1>"
        '<p>The same for programs: <a href="/openapi.json">/openapi.json</a>. The page for people: <a href="/">explorer</a>.</p>'
        f"{sections}</body></html>"
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    head = f'<summary><b class="method">{method.upper()}</b> <code>{escape(path)}</code></summary>'
    text = f"<p>{escape(operation.get('description') or operation.get('summary', ''))}</p>"
    return f"<details>{head}{text}{_table(_parameters(operation))}{_body(operation)}{_table(_answers(operation))}</details>"


def _table(rows: Iterator[tuple[str, str, str]]) -> str:
    lines = [f"<tr><th scope=row><code>{escape(a)}</code></th><td>{escape(b)}</td><td>{escape(c)}</td></tr>" for a, b, c in rows]
    return f"<table>{''.join(lines)}</table>" if lines else ""


def _parameters(operation: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for one in operation.get("parameters", ()):
        schema = one.get("schema", {})
        default = f"default: {schema['default']}" if "default" in schema else "required" if one.get("required") else ""
        kind = ", ".join(part for part in (f"in the {one['in']}", type_of(schema), default) if part)
        yield one["name"], kind, one.get("description", "")


def _body(operation: Mapping[str, Any]) -> str:
    content = operation.get("requestBody", {}).get("content", {})
    return "".join(f"<p>Body: <code>{escape(kind)}</code></p>{_fields(one.get('schema', {}))}" for kind, one in content.items())


def _fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = (
        (name, f"{type_of(one)}{', required' if name in required else ''}", one.get("description", ""))
        for name, one in schema.get("properties", {}).items()
    )
    return _table(rows)


def _answers(operation: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for status, one in operation.get("responses", {}).items():
        yield status, one.get("description", ""), ", ".join(one.get("content", {}))


def type_of(schema: Mapping[str, Any]) -> str:
    """Say in words what values a schema allows."""
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(found for one in schema["anyOf"] if (found := type_of(one)) != "null")
    if schema.get("type") == "array":
        return f"list of {type_of(schema.get('items', {}))}"
    limits = [f"{word} {schema[key]}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in schema]
    return " ".join([str(schema.get("type", "any value")), *limits])
