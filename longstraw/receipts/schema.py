"""JSON Schema from frozen dataclasses, and a validator for the part of the standard that it uses.

receipt.schema.json beside this file is `build_schema(Receipt)`, kept in the tree for readers of receipts in other
languages; a test holds the two equal. Written anew by `python -m longstraw.receipts.schema`.

Left out of the validator: every keyword that `build_schema` does not write. An unknown keyword is an error, so that a
schema can never pass by being half understood.
"""

import dataclasses
import functools
import inspect
import json
import math
import re
import sys
import types
import typing
from pathlib import Path

SCHEMA_PATH = Path(__file__).with_name("receipt.schema.json")
_JSON_TYPES = {"string": str, "boolean": bool, "integer": int, "number": (int, float), "null": type(None),
               "array": list, "object": dict}
_LARGEST = sys.float_info.max
"""Of a JSON number: readers in most languages have floats."""
_KEYWORDS = {"$schema", "$defs", "$ref", "title", "description", "type", "properties", "required", "items", "anyOf",
             "additionalProperties", "enum", "const"}


@functools.cache
def build_schema(cls: type) -> dict:
    """The JSON Schema (draft 2020-12) of a dataclass and of every dataclass inside it. The same object again: not to be
    changed."""
    definitions: dict[str, dict] = {}
    root = _describe_dataclass(cls, definitions)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": cls.__name__, **root,
            "$defs": dict(sorted(definitions.items()))}


def _describe_dataclass(cls: type, definitions: dict[str, dict]) -> dict:
    hints, notes = typing.get_type_hints(cls), read_field_notes(cls)
    properties, required = {}, []
    for field in dataclasses.fields(cls):
        properties[field.name] = {**_describe_type(hints[field.name], definitions), "description": notes[field.name]}
        required.append(field.name)
    return {"description": inspect.getdoc(cls), "type": "object", "properties": properties, "required": required,
            "additionalProperties": False}


def _describe_type(hint, definitions: dict[str, dict]) -> dict:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # holds the place, should the type contain itself
            definitions[hint.__name__] = _describe_dataclass(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if origin is typing.Literal:
        return {"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_describe_type(argument, definitions) for argument in arguments]}
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return {"type": "array", "items": _describe_type(arguments[0], definitions)}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _describe_type(arguments[1], definitions)}
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    if hint not in names:
        raise ValueError(f"receipts hold no fields of type {hint}")
    return {"type": names[hint]}


def read_field_notes(cls: type) -> dict[str, str]:
    """The docstring that stands under each field of a dataclass, by field name.

    Raises:
        ValueError: a field has none.
    """
    import ast
    import textwrap

    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    notes = {}
    for statement, following in zip(body, body[1:] + [None]):
        if isinstance(statement, ast.AnnAssign):
            value = getattr(following, "value", None)
            if not (isinstance(following, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str)):
                raise ValueError(f"{cls.__name__}.{statement.target.id} has no docstring under it")
            notes[statement.target.id] = inspect.cleandoc(value.value)
    return notes


def validate(document, schema: dict) -> None:
    """Holds a JSON value to a schema.

    Raises:
        ValueError: it does not fit; the sentence names the place, as in `memory[0].peak_bytes`.
    """
    _validate(document, schema, schema, "")


def _validate(value, schema: dict, root: dict, place: str) -> None:
    where = place.lstrip(".") or "the document"
    if unknown := set(schema) - _KEYWORDS:
        raise ValueError(f"the schema uses {', '.join(sorted(unknown))}, which this validator does not know")
    if "$ref" in schema:
        return _validate(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, place)
    if "anyOf" in schema:
        failures = []
        for option in schema["anyOf"]:
            try:
                return _validate(value, option, root, place)
            except ValueError as error:
                failures.append(str(error))
        raise ValueError(" or ".join(failures))
    if "const" in schema and value != schema["const"]:
        raise ValueError(f"{where} is {value!r}, not {schema['const']!r}")
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f"{where} is {value!r}, not one of {', '.join(map(repr, schema['enum']))}")
    if "type" in schema:
        fits = isinstance(value, _JSON_TYPES[schema["type"]])
        if isinstance(value, bool) and schema["type"] != "boolean":
            fits = False
        if isinstance(value, float) and not math.isfinite(value) or isinstance(value, int) and abs(value) > _LARGEST:
            fits = False
        if not fits:
            raise ValueError(f"{where} is {value!r}, not of type {schema['type']}")
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            _validate(item, schema["items"], root, f"{place}[{index}]")
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for name in schema.get("required", []):
            if name not in value:
                raise ValueError(f"{where} lacks {name}")
        for name, item in value.items():
            inner = f"{place}.{name}" if re.fullmatch(r"[\w-]+", name) else f"{place}[{name!r}]"
            if name in properties:
                _validate(item, properties[name], root, inner)
            elif others is False:
                raise ValueError(f"{where} has {name}, which the schema does not know")
            elif isinstance(others, dict):
                _validate(item, others, root, inner)


if __name__ == "__main__":
    from longstraw.receipts.receipt import Receipt

    SCHEMA_PATH.write_text(json.dumps(build_schema(Receipt), indent=2) + "\n")
