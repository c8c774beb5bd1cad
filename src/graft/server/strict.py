"""The base of request bodies, which refuses unknown fields by name, and the types that several of them share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
Text = Annotated[str, Field(strict=True)]
Bool = Annotated[bool, Field(strict=True)]


def _is_valid_json(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse NaN and 1e999, which Python reads and valid JSON cannot hold."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ValueError("it holds a number that is not finite") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _check_in_parts(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check an object's entries a few at a time, up to the first bad ones."""
    if not isinstance(given, dict):
        return check(given)
    entries = iter(given.items())
    checked: dict[Any, Any] = {}
    while part := dict(islice(entries, 16)):
        checked |= check(part)
    return checked


def _parsed(value: Any) -> Any:
    """A JSON schema that is given as text, parsed."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("this text is not JSON") from None


JsonObject = Annotated[dict[str, Any], AfterValidator(_is_valid_json)]
SchemaObject = Annotated[JsonObject, BeforeValidator(_parsed, json_schema_input_type=dict[str, Any] | str)]
# Unbounded lists and objects fail at the first bad entries: errors for all entries would take much time and memory.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
InParts = WrapValidator(_check_in_parts)  # not every version of pydantic has fail_fast for objects
Metadata = Annotated[dict[Text, Text], InParts]


class Strict(BaseModel):
    # In the JSON schema, unknown fields may be null, which means absent.
    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, json_schema_extra={"additionalProperties": {"type": "null"}}
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        """Remove nulls: clients send them for fields that they do not set, even unknown ones."""
        if not isinstance(given, dict):
            return given
        present = {name: value for name, value in given.items() if value is not None}
        unknown = present.keys() - cls._known_names()
        if len(unknown) > 1:  # keep only the first: one error is enough
            first = next(name for name in present if name in unknown)
            return {name: value for name, value in present.items() if name == first or name not in unknown}
        return present

    @classmethod
    @cache
    def _known_names(cls) -> frozenset[str]:
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


@dataclass(eq=False)  # `typing` would take 0 for False: it keeps one of equal annotations
class Only:
    """Annotation of a field that may have one of these JSON values, or be absent."""

    values: tuple[Any, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [*self.values, None]}

    def _check(self, given: Any) -> Any:
        # A bool is not a number here, although 1 == True.
        if any(given == value and isinstance(given, bool) == isinstance(value, bool) for value in self.values):
            return given
        words = " or ".join(json.dumps(value) for value in self.values)
        raise ValueError(f"only {words} is supported here")


def only(*values: Any) -> Only:
    return Only(values)
