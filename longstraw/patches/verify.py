"""Checks that a patched target still looks as it did when the patch was written.

A patch that no longer fits must stop the program: silently patching something else is how gradients go wrong.
"""

import inspect
from importlib.metadata import version

CHECKED_MEGATRON_CORE = "0.19"
"""The minor version of megatron-core that every patch here was written against and tested on."""


class PatchMismatch(RuntimeError):
    """A target of a patch is not what the patch was written for."""


def require_megatron_version() -> None:
    """Raise PatchMismatch unless the installed megatron-core has the minor version that the patches were checked on."""
    found = version("megatron-core")
    if not found.startswith(CHECKED_MEGATRON_CORE + "."):
        raise PatchMismatch(
            f"LongStraw's patches were checked on megatron-core {CHECKED_MEGATRON_CORE}.x, but {found} is installed"
        )


def require_source(target, *fragments: str) -> None:
    """Raise PatchMismatch unless the source of `target` (function, class or module) contains every fragment."""
    source = inspect.getsource(target)
    missing = [fragment for fragment in fragments if fragment not in source]
    if missing:
        name = getattr(target, "__qualname__", getattr(target, "__name__", repr(target)))
        raise PatchMismatch(f"{name} no longer contains {missing[0]!r}: the patch on it has to be checked again")


def require_attribute(target, name: str) -> None:
    """Raise PatchMismatch unless `target` has the attribute that a patch is about to replace."""
    if not hasattr(target, name):
        raise PatchMismatch(f"{target!r} has no attribute {name!r}: the patch on it has to be checked again")
