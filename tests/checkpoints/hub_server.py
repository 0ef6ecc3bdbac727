"""A small server on this machine with the layout of the Hugging Face Hub: its API, `resolve` with ETags, and a CDN with ranges.

It also takes uploads: a repository is created, large files are sent by Git LFS, and a commit adds and deletes files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789" * 4
LARGE = 4096  # bytes from which a file is in LFS


class HubServer(ThreadingHTTPServer):
    """`repositories` maps owner/name to a folder, `files` any path to bytes, as a bucket of Google's has them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Path] = {}
        self.files: dict[str, bytes] = {}
        self.gated: set[str] = set()
        self.root: Path | None = None
        """Where new repositories are created."""
        self.tokens: dict[str, tuple[str, ...]] = {}
        """Token → owners for which it may write."""
        self.private: set[str] = set()
        self.commits: dict[str, str] = {}
        """Last commit of each repository that was pushed to; `COMMIT` of others."""
        self.messages: list[str] = []
        self.uploaded: dict[str, bytes] = {}
        """Large files by SHA-256, until a commit names them."""
        self.cut_after: list[int] = []
        """Bytes after which each of the next downloads of a large file is cut off."""
        self.corrupt = False
        self.honours_if_range = True
        self.sends_hash = True
        self.redirects: dict[str, str] = {}
        """Path → Location."""
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and Range of every request."""
        self.headers: list[dict[str, str]] = []
        """Headers of every request, in the same order."""

    @property
    def address(self) -> str:
        """The CDN has another host name, as the real one has: a login must not be sent there."""
        return f"http://127.0.0.1:{self.server_port}"

    def ranges(self) -> list[str]:
        """Return the Range of each download of a large file."""
        return [asked for method, path, asked in self.requests if method == "GET" and path.startswith(("/cdn/", "/bucket/"))]


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_POST(self) -> None:
        path = self._record()
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path.endswith("/objects/batch"):
            return self._lfs_batch(path.lstrip("/").partition(".git/")[0], json.loads(content))
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            values = json.loads(content)
            return self._create(f"{values['organization']}/{values['name']}", values)
        if path.startswith("/api/models/"):
            parts = path.removeprefix("/api/models/").split("/")
            name, action = "/".join(parts[:2]), parts[2]
            if not self._may_write(name):
                return None
            if action == "preupload":
                return self._json({"files": [self._upload_mode(name, one) for one in json.loads(content)["files"]]})
            return self._commit(name, [json.loads(line) for line in content.splitlines()])
        return self._error(404, "EntryNotFound")

    def do_PUT(self) -> None:
        path = self._record()
        content = self.rfile.read(int(self.headers["Content-Length"]))
        digits = path.removeprefix("/upload/")
        if hashlib.sha256(content).hexdigest() != digits:
            return self._error(400, "")
        self.server.uploaded[digits] = content
        return self._send(200, b"", {}, body=True)

    def _may_write(self, name: str) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        owners = self.server.tokens.get(token)
        if owners is None:
            self._error(401, "", "Invalid credentials in Authorization header")
        elif name.partition("/")[0] not in owners:
            self._error(403, "", "You don't have the rights to create a model under this namespace")
        else:
            return True
        return False

    def _create(self, name: str, values: dict[str, Any]) -> None:
        if not self._may_write(name):
            return None
        url = {"url": f"{self.server.address}/{name}"}
        if name in self.server.repositories:
            return self._send(409, json.dumps(url).encode(), {"Content-Type": "application/json"}, body=True)
        assert self.server.root is not None
        folder = self.server.root / name.replace("/", "--")
        folder.mkdir()
        (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
        self.server.repositories[name] = folder
        if values.get("private") or values.get("visibility") == "private":
            self.server.private.add(name)
        return self._json(url)

    def _upload_mode(self, name: str, file: dict[str, Any]) -> dict[str, Any]:
        old = self.server.repositories[name] / file["path"]
        oid = hashlib.sha256(old.read_bytes()).hexdigest() if old.is_file() and file["path"].endswith(".safetensors") else None
        mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _lfs_batch(self, name: str, values: dict[str, Any]) -> None:
        if not self._may_write(name):
            return None
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.server.address}/upload/{one['oid']}"}}} for one in values["objects"]
        ]
        return self._json({"transfer": "basic", "objects": objects})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        folder, header = self.server.repositories[name], lines[0]["value"]
        if header.get("parentCommit", self._head(name)) != self._head(name):
            return self._error(412, "", "A commit has happened since. Please refresh and try again.")
        for line in lines[1:]:
            file = folder / line["value"]["path"]
            if line["key"] == "deletedFile":
                file.unlink()
            elif line["key"] == "file":
                file.write_bytes(base64.b64decode(line["value"]["content"]))
            else:
                file.write_bytes(self.server.uploaded[line["value"]["oid"]])
        self.server.messages.append(header["summary"])
        self.server.commits[name] = hashlib.sha1(f"{self._head(name)}{header['summary']}".encode()).hexdigest()
        url = f"{self.server.address}/{name}/commit/{self._head(name)}"
        return self._json({"commitUrl": url, "commitOid": self._head(name), "success": True})

    def _head(self, name: str) -> str:
        return self.server.commits.get(name, COMMIT)

    def _record(self) -> str:
        path = self.path.partition("?")[0]
        self.server.requests.append((self.command, path, self.headers.get("Range", "")))
        self.server.headers.append(dict(self.headers))
        return path

    def _answer(self, *, body: bool) -> None:
        path = self._record()
        if path in self.server.redirects:
            self._send(302, b"", {"Location": self.server.redirects[path]}, body)
        elif path.startswith("/api/models/"):
            self._api(path.removeprefix("/api/models/"))
        elif path.startswith("/cdn/"):
            self._large(self._blob(path.removeprefix("/cdn/")), {"ETag": '"cdn"'}, body)
        elif path in self.server.files:
            content = self.server.files[path]
            digest = hashlib.md5(content)
            md5 = base64.b64encode(digest.digest()).decode()
            goog = {"x-goog-hash": f"crc32c=AAAAAA==,md5={md5}"} if self.server.sends_hash else {}
            self._large(content, {"ETag": f'"{digest.hexdigest()}"', **goog}, body)
        elif "/resolve/" in path:
            self._resolve(path, body)
        else:
            self._error(404, "EntryNotFound")

    def _api(self, rest: str) -> None:
        name = "/".join(rest.split("/")[:2])
        folder = self.server.repositories.get(name)
        if folder is None:
            return self._error(401, "RepoNotFound")
        files = sorted(file for file in folder.iterdir() if file.is_file())
        if "/tree/" in rest:
            return self._json([self._entry(file) for file in files])
        siblings = [{"rfilename": file.name} for file in files]
        private = name in self.server.private
        return self._json(
            {"id": name, "modelId": name, "sha": self._head(name), "siblings": siblings, "private": private, "tags": []}
        )

    def _entry(self, file: Path) -> dict[str, Any]:
        content = file.read_bytes()
        entry: dict[str, Any] = {"type": "file", "path": file.name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        if len(content) >= LARGE:
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return entry

    def _resolve(self, path: str, body: bool) -> None:
        name, _, rest = path.lstrip("/").partition("/resolve/")
        revision, _, file_name = rest.partition("/")
        folder = self.server.repositories.get(name)
        if folder is None:
            return self._error(401, "RepoNotFound")
        if revision not in ("main", self._head(name)):
            return self._error(404, "RevisionNotFound")
        if name in self.server.gated:
            return self._error(403, "GatedRepo")
        file = folder / file_name
        if not file.is_file():
            return self._error(404, "EntryNotFound")
        content = file.read_bytes()
        headers = {"X-Repo-Commit": self._head(name), "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if len(content) < LARGE:
            return self._send(200, content, headers, body)
        digits = hashlib.sha256(content).hexdigest()
        linked = {"X-Linked-Etag": f'"{digits}"', "X-Linked-Size": str(len(content))}
        return self._send(
            302, b"", {**headers, **linked, "Location": f"http://localhost:{self.server.server_port}/cdn/{digits}"}, body
        )

    def _blob(self, digits: str) -> bytes:
        for folder in self.server.repositories.values():
            for file in folder.iterdir():
                if hashlib.sha256(file.read_bytes()).hexdigest() == digits:
                    return file.read_bytes()
        raise AssertionError(digits)

    def _large(self, content: bytes, headers: dict[str, str], body: bool) -> None:
        if self.server.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        changed = self.server.honours_if_range and self.headers.get("If-Range", headers["ETag"]) != headers["ETag"]
        asked = "" if changed else self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").partition("-")[0] or 0)
        if start >= len(content):
            return self._error(416, "")
        status = 206 if asked else 200
        headers["Content-Length"] = str(len(content) - start)
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.server.cut_after.pop(0) if body and self.server.cut_after else None
        return self._send(status, content[start:][:cut], headers, body)

    def _json(self, values: Any) -> None:
        self._send(200, json.dumps(values).encode(), {"Content-Type": "application/json"}, body=True)

    def _error(self, status: int, code: str, message: str = "") -> None:
        headers = {**({"X-Error-Code": code} if code else {}), **({"X-Error-Message": message} if message else {})}
        self._send(status, json.dumps({"error": message}).encode() if message else b"", headers, body=True)

    def _send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)
        self.close_connection = True


@contextmanager
def hub_server() -> Iterator[HubServer]:
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
