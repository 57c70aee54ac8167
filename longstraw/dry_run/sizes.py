"""Bytes with their units, as people write them: 96GB (10^9), 80GiB (2^30), 1.5TB, 1000B."""

import re

UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}
"""By name in capitals."""


def read_size(text: str) -> int:
    """Bytes. Raises ValueError for what is no size above 0."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = None if found is None else UNITS.get(found[2].upper())
    size = 0 if unit is None else round(float(found[1]) * unit)
    if size < 1:
        raise ValueError(f"{text!r} is no size: write bytes with a unit, such as 96GB (10^9 each) or 80GiB (2^30 each)")
    return size
