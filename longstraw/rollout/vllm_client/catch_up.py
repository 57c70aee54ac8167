"""Give a server that has started the updates that the folder it loaded lacks.

    python -m longstraw.rollout.vllm_client.catch_up --ready-file PATH FOLDER...

Folders in order, each a version that builds on the one before. One that the server has already is passed over. Exit codes: 0
when the server holds the last one's version; 1, after a sentence, where it refuses one or is gone.
"""

import argparse
import sys

from longstraw.rollout.vllm_client.engine import EngineError, VllmEngine
from longstraw.rollout.weight_folder import read_manifest


def catch_up(ready_file: str, folders: list[str]) -> None:
    """Sync folder after folder. Raises EngineError, or ValueError for a folder that is not whole or does not fit."""
    with VllmEngine(ready_file) as engine:
        for folder in folders:
            version = read_manifest(folder).version
            if engine.weight_version is not None and engine.weight_version >= version:
                continue
            result = engine.sync(folder, version)
            print(
                f"version {version}: {result.kind}, {result.bytes:,} bytes in {result.seconds:.3g} s", flush=True,
            )


def main() -> int:
    """The program; returns the exit code."""
    parser = argparse.ArgumentParser(prog="catch_up", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ready-file", required=True, help="the file that the server wrote once it could answer")
    parser.add_argument("folders", nargs="+", help="folders of a trainer's --weight-sync-dir, oldest first")
    arguments = parser.parse_args()
    try:
        catch_up(arguments.ready_file, arguments.folders)
    except (EngineError, ValueError) as error:
        print(f"catch_up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
