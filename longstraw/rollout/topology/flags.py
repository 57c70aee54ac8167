"""Flags from frozen config dataclasses: a field is a flag, the docstring under it the help. Without Megatron's parser,
whose import takes ten seconds.
"""

import argparse
import ast
import inspect
from dataclasses import MISSING, fields
from typing import Any, Literal, Optional, Union, get_args, get_origin


def add_flags(parser: argparse.ArgumentParser, config_class: type, title: str) -> None:
    """Add a group with a flag for each field. Types: str, int, float, bool, Literal of str, and Optional of one."""
    group, texts = parser.add_argument_group(title), _field_texts(config_class)
    for field in fields(config_class):
        flag, text = f"--{field.name.replace('_', '-')}", texts[field.name].replace("%", "%%")
        if field.type is bool:
            group.add_argument(flag, action="store_true", help=text)
            continue
        kind, required = _strip_optional(field.type), field.default is MISSING
        choices = get_args(kind) if get_origin(kind) is Literal else None
        default = "" if required or field.default is None else f" (default: {field.default})"
        group.add_argument(
            flag, type=str if choices else kind, choices=choices, required=required, help=text + default,
            default=None if required else field.default,
        )


def build_config(config_class: type, namespace: argparse.Namespace) -> Any:
    """The config of a namespace. Raises ValueError as the config does."""
    return config_class(**{field.name: getattr(namespace, field.name) for field in fields(config_class)})


def _strip_optional(kind: Any) -> Any:
    return next(a for a in get_args(kind) if a is not type(None)) if get_origin(kind) in (Union, Optional) else kind


def _field_texts(config_class: type) -> dict[str, str]:
    """The docstring under each field."""
    body = ast.parse(inspect.getsource(config_class)).body[0].body
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
