"""Bring a server that has started to a version of a trainer's weights, as a program that ends.

    python -m longstraw.rollout.vllm_client.catch_up --ready-file PATH --weight-sync-dir DIR --version K

Exit codes: 0 when the server holds the version; 1, after a sentence, where it cannot be had or the server is gone.
"""

import argparse
import sys

from longstraw.rollout.vllm_client.engine import EngineError, VllmEngine


def main() -> int:
    """The program; returns the exit code."""
    parser = argparse.ArgumentParser(prog="catch_up", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ready-file", required=True, help="the file that the server wrote once it could answer")
    parser.add_argument("--weight-sync-dir", required=True, help="the trainer's folder of weight versions")
    parser.add_argument("--version", required=True, type=int, help="the version that the server is to hold")
    flags = parser.parse_args()
    try:
        with VllmEngine(flags.ready_file) as engine:
            for done in engine.follow(flags.weight_sync_dir, flags.version):
                print(f"version {done.weight_version}: {done.kind}, {done.bytes:,} bytes in {done.seconds:.3g} s", flush=True)
            if engine.weight_version != flags.version:
                raise EngineError(f"the server holds version {engine.weight_version}, not {flags.version}")
    except (EngineError, ValueError) as error:
        print(f"catch_up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
