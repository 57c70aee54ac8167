"""Checks of flags that the measuring tools share: made before anything is measured, each refusal one sentence."""

import argparse
from collections.abc import Iterable
from pathlib import Path

SEEDS = 2**63
"""Seeds are below this."""


def check_at_least_1(parser: argparse.ArgumentParser, args: argparse.Namespace, names: Iterable[str]) -> None:
    """End with the parser's error where one of the numbers is below 1."""
    for name in names:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is at least 1, not {getattr(args, name)}")


def check_seed(parser: argparse.ArgumentParser, seed: int) -> None:
    """End with the parser's error where --seed is out of range."""
    if not 0 <= seed < SEEDS:
        parser.error(f"--seed lies between 0 and 2^63 - 1, not {seed}")


def check_report_path(parser: argparse.ArgumentParser, path: str) -> None:
    """End with the parser's error where --json names no file that could be written; - is standard output."""
    if path == "-":
        return
    if Path(path).is_dir():
        parser.error(f"--json {path} is a folder: name a file in it")
    if not Path(path).parent.is_dir():
        parser.error(f"--json {path}: there is no folder {Path(path).parent}")
