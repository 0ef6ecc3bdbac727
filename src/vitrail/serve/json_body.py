"""Read the JSON body of a request into a pydantic model."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vitrail.serve.errors import ServiceError

_MAX_LISTS = 1 << 17  # the rows of 64 images of 3 channels and 384 pixels are half of this
Body = TypeVar("Body", bound=BaseModel)


def check_values(data: bytes, length: int, most: int) -> int:
    """Return about how many values `length` bytes of JSON have; more than `most` are refused before they are parsed.

    Ten million empty lists take 32 MB and, parsed, 13 seconds.
    """
    values = data.count(b",", 0, length)
    if values > most or data.count(b"[", 0, length) + data.count(b"{", 0, length) > min(most, _MAX_LISTS):
        raise ServiceError(413, f"The JSON has too many values; at most {most:,} are read here. Send fewer images.")
    return values


def parse_json(data: bytes, model: type[Body], most: int) -> Body:
    """Validate JSON of at most so many values; what is wrong first is the error. Depth and lone surrogates are pydantic's."""
    check_values(data, len(data), most)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        raise ServiceError(400, first_problem(problems)) from None


def first_problem(errors: Any) -> str:
    """Say what is wrong first, without repeating what was sent."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"][:6] if len(str(part)) <= 40)
    return f"{where or 'The body'}: {str(first['msg'])[:200]}."


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return what OpenAPI says about a body that is read with `parse_json`."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(one) for one in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return resolved(definitions[value["$ref"].rpartition("/")[2]])
        return {key: resolved(one) for key, one in value.items()}

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": resolved(schema)}}}}
