"""Images as text: `data:` URIs and base64."""

from __future__ import annotations

import base64
import binascii
import re

from vitrail.serve.errors import ServiceError

# Bounded, because re needs 80 bytes of memory for each repetition: 32 MB of parameters took 2.5 GB.
_DATA_URI = re.compile(r"(?i:data):(?P<type>[\w.+/-]{0,200})(?P<parameters>(;[\w=.+-]{1,200}){0,20}?)(?P<base64>;(?i:base64))?,")

_BETWEEN_LINES = "\r\n\t "


def bytes_of_text(text: str) -> bytes:
    """Return the bytes of a `data:` URI or of plain base64, also in lines, as MIME and `base64 cat.jpg` have it.

    An address is refused: the service fetches nothing.
    """
    if re.match(r"(?i)[a-z][a-z0-9+.-]*://", text):
        raise ServiceError(400, "URLs are not fetched; send the image itself as a data: URI or base64.")
    found = _DATA_URI.match(text)
    if text[:5].lower() == "data:" and (found is None or not found["base64"]):
        raise ServiceError(400, "This is not a data: URI with base64, such as data:image/jpeg;base64,…")
    encoded = text[found.end() if found else 0 :]
    for character in _BETWEEN_LINES:
        encoded = encoded.replace(character, "")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ServiceError(400, "The image is not valid base64; send the bytes of its file in base64.") from error
