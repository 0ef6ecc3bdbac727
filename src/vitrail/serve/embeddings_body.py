"""The body of a request for embeddings, as OpenAI's clients send it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from vitrail.serve.base64_text import bytes_of_text
from vitrail.serve.json_body import parse_json


class ImageUrl(BaseModel):
    url: str


class ImagePart(BaseModel):
    image_url: ImageUrl


def _checked(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(value)
    except ValidationError:  # its text names only the first of the forms
        raise PydanticCustomError("images", "Send an image as a data: URI or as base64, or a list of such strings") from None


Input = Annotated[str, Field(description="data:image/jpeg;base64,…")]
Images = Annotated[Input | ImagePart | list[Input | ImagePart], WrapValidator(_checked)]


class EmbeddingsRequest(BaseModel):
    input: Images
    model: str | None = Field(None, max_length=200)
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, description="If given, the length of the model's vectors; others are refused.")


def read_embeddings(body: bytes, most: int) -> tuple[EmbeddingsRequest, list[bytes]]:
    """Parse a body of at most so many values; return the request without its images, and these."""
    request = parse_json(body, EmbeddingsRequest, most)
    parts = request.input if isinstance(request.input, list) else [request.input]
    images = [bytes_of_text(part if isinstance(part, str) else part.image_url.url) for part in parts]
    return request.model_copy(update={"input": []}), images
