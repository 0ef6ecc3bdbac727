"""Read multipart forms (RFC 7578) that are in memory already, so that a form costs no more than its bytes."""

from __future__ import annotations

import re

from vitrail.errors import counted
from vitrail.serve.errors import ServiceError

_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_FILE = re.compile(rb";\s*filename\*?=", re.IGNORECASE)
_MAX_HEADERS = 4096  # bytes per part


def is_form(content_type: str) -> bool:
    return content_type.lower().startswith("multipart/form-data")


def lost_bytes(body: bytes, content_type: str) -> bool:
    """Whether a body is what curl sends for `-d @FILE`, without zero bytes and line ends, or for a name without @.

    No image is like that, except a PPM, whose header may have spaces only.
    """
    urlencoded = content_type.lower().startswith("application/x-www-form-urlencoded")
    return urlencoded and bool(body) and not any(byte in body for byte in b"\0\r\n") and not re.match(rb"P\d\s", body)


def files_of_form(body: bytes, content_type: str, most: int) -> list[bytes]:
    """Return the contents of the files in order. Their names are ignored, and so are parts that are not files."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise ServiceError(400, "The form cannot be read: Content-Type has no boundary. Let your HTTP library set it.")
    line = b"\r\n--" + (found[1] or found[2]).encode("latin-1")
    body = b"\r\n" + body  # so that the first boundary looks like the others
    if body.count(line) > 2 * most + 1:  # before anything is split; as many other fields are allowed
        raise ServiceError(413, f"The form has too many parts; send at most {counted(most, 'file')} at a time.")
    parts = body.split(line)[1:]
    if not parts or not parts[-1].startswith(b"--"):
        raise ServiceError(400, "The form cannot be read: its last boundary is missing. Send the whole form.")
    files = [content for part in parts[:-1] if (content := _file(part)) is not None]
    if len(files) > most:
        raise ServiceError(413, f"The form has {len(files)} files; send at most {most} at a time.")
    return files


def _file(part: bytes) -> bytes | None:
    """Return the content of a part if it is a file. After the boundary there may be spaces, then the line ends."""
    start = part.find(b"\r\n")
    end = part.find(b"\r\n\r\n", max(start, 0), _MAX_HEADERS)
    if start < 0 or end < 0 or part[:start].strip(b" \t"):
        raise ServiceError(400, f"The form cannot be read: a part has no headers, or more than {_MAX_HEADERS:,} bytes of them.")
    headers = part[start:end].split(b"\r\n")
    disposition = next((one for one in headers if one.lower().startswith(b"content-disposition:")), None)
    if disposition is None:
        raise ServiceError(
            400, "The form cannot be read: a part has no Content-Disposition, such as form-data; name=a; filename=a.jpg."
        )
    return part[end + 4 :] if _FILE.search(disposition) else None
