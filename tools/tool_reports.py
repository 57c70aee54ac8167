"""Reports of the measuring tools."""

import json
import sys
from pathlib import Path


def write_report(report: dict, path: str) -> None:
    """The report as JSON to a file, or as all of standard output where the path is -."""
    text = json.dumps(report, indent=1)
    if path == "-":
        print(text, flush=True)
    else:
        Path(path).write_text(text + "\n")
        print(f"written to {path}", file=sys.stderr)
