"""A folder of weights that a trainer has written for whoever generates from them, and its manifest.

    full         a Hugging Face folder: safetensors shards, config.json
    delta        an update: delta.safetensors (`weight_delta`), weight_map.json (`weight_map`), and shards with the whole
                 tensors of what moved besides
    lora         a low-rank adapter in PEFT's format
    unchanged    nothing but the manifest: the step left the weights alone

manifest.json is written last, whole or not at all: a folder without one is none. It has the size and the SHA-256 of each
file, and of a full folder's tensors (and a delta's whole ones) the checksum of each by name, dtype, shape and bits.

Left out: writing the tensors (`weight_export`, `weight_delta`).
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

from safetensors import SafetensorError, safe_open

from longstraw.durable_files import write_whole
from longstraw.receipts.collect import checksum_tensors, join_checksums

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
DELTA_FILE = "delta.safetensors"
MAP_FILE = "weight_map.json"
_NAMES_SHOWN = 3

Kind = Literal["full", "delta", "lora", "unchanged"]


@dataclass(frozen=True)
class FileEntry:
    """A file of the folder: bytes, and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: the file that it is in, and `checksum_tensors` of it under its name."""

    file: str
    checksum: str


@dataclass(frozen=True, kw_only=True)
class FolderManifest:
    """Everything about a folder but its content."""

    kind: Kind
    version: int
    """The weight version that the folder gives."""

    base_version: int | None = None
    """The one that it builds on: of a delta, an adapter's frozen weights, or the weights that were left alone."""

    base_checksum: str | None = None
    """Of an adapter: `FolderManifest.checksum` of the weights it belongs to."""

    identity: str | None = None
    """Checksum of the trainer's own weights: by it a trainer that goes on knows whether the folder is of its run."""

    lineage: str | None = None
    """Which weights these are, whatever the trainer's parallel sizes: by it engines, stores and trainers know that they
    speak of the same ones. None where the writer does not say."""

    full_precision: bool = False
    """Of a full folder: matrices are in float32 where the model computes in bfloat16, as updates need them."""

    files: Mapping[str, FileEntry] = field(default_factory=dict)
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)

    @property
    def checksum(self) -> str:
        """One for all tensors."""
        return join_tensor_checksums({name: entry.checksum for name, entry in self.tensors.items()})

    @property
    def payload_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.bytes for entry in self.files.values())


def join_tensor_checksums(checksums: Mapping[str, str]) -> str:
    """One checksum for tensors by name, whatever their order."""
    return join_checksums(checksums[name] for name in sorted(checksums))


def version_folder(root: str | Path, version: int) -> Path:
    """Where a trainer puts a version."""
    return Path(root) / f"version-{version}"


def list_versions(root: str | Path) -> dict[int, FolderManifest]:
    """The complete versions under a trainer's folder, by number; `read_version` says which are."""
    names = [folder.name.removeprefix("version-") for folder in Path(root).glob("version-*")]
    found = {int(name): read_version(root, int(name)) for name in names if name.isdecimal()}
    return {number: manifest for number, manifest in found.items() if manifest is not None}


def read_version(root: str | Path, version: int) -> FolderManifest | None:
    """A version's manifest; None where its folder is missing, unfinished, cut short or holds another version: it is to be
    written again."""
    try:
        manifest = read_manifest(version_folder(root, version))
    except (ValueError, FileNotFoundError):
        return None
    return manifest if manifest.version == version else None


def hash_file(path: Path) -> FileEntry:
    """A file's entry, from its content."""
    with open(path, "rb") as file:
        return FileEntry(bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def write_manifest(folder: Path, manifest: FolderManifest) -> None:
    """Make a folder complete: a reader sees the whole manifest or none."""
    write_whole(folder / MANIFEST, json.dumps({"format_version": FORMAT_VERSION} | asdict(manifest), indent=1) + "\n")


def read_manifest(folder: str | Path) -> FolderManifest:
    """The manifest of a folder whose files have the sizes that it says.

    Raises ValueError, in one sentence: no manifest (the folder was not finished), one of another format, or a file that is
    missing or of another size.
    """
    folder = Path(folder)
    try:
        plain = json.loads((folder / MANIFEST).read_text())
        found = plain.pop("format_version")
        if found != FORMAT_VERSION:
            raise ValueError(f"{folder} has format version {found}, and this program reads version {FORMAT_VERSION}.")
        files = {name: FileEntry(**entry) for name, entry in plain.pop("files").items()}
        tensors = {name: TensorEntry(**entry) for name, entry in plain.pop("tensors").items()}
        manifest = FolderManifest(**plain, files=files, tensors=tensors)
    except FileNotFoundError:
        raise ValueError(f"{folder} holds no complete weights: it has no {MANIFEST}.") from None
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder / MANIFEST} does not read: {error}.") from None
    if manifest.kind not in get_args(Kind) or any(Path(name).name != name for name in files):
        raise ValueError(f"{folder / MANIFEST} does not read: kind {manifest.kind!r}, files {_show(files)}.")
    for name, entry in files.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != entry.bytes:
            found = "is missing" if size is None else f"has {size} bytes instead of {entry.bytes}"
            raise ValueError(f"{folder} is damaged: {name} {found}.")
    return manifest


def check_files(folder: str | Path, manifest: FolderManifest) -> None:
    """Read every file. Raises ValueError that names those whose content is not what was written."""
    wrong = [name for name, entry in manifest.files.items() if hash_file(Path(folder) / name) != entry]
    if wrong:
        raise ValueError(f"{folder} is damaged: the content of {_show(wrong)} is not what was written.")


def tensor_files(folder: str | Path) -> dict[str, Path]:
    """Tensor name -> file, of a Hugging Face folder with or without a manifest.

    Raises ValueError where the folder has no safetensors or its index names files that are not there.
    """
    folder = Path(folder)
    if (folder / INDEX).is_file():
        files = {name: folder / file for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items()}
        missing = sorted({path.name for path in files.values() if not path.is_file()})
        if missing:
            raise ValueError(f"{folder} is not whole: {_show(missing)} of its index is missing.")
        return files
    try:
        with safe_open(str(folder / SINGLE_FILE), framework="pt") as file:
            return dict.fromkeys(file.keys(), folder / SINGLE_FILE)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{folder} holds no weights: {SINGLE_FILE}: {error}.") from None


def checksum_folder(folder: str | Path) -> dict[str, str]:
    """Tensor name -> checksum, from the tensors of a Hugging Face folder."""
    names_by_file: dict[Path, list[str]] = {}
    for name, path in tensor_files(folder).items():
        names_by_file.setdefault(path, []).append(name)
    found = {}
    for path, names in names_by_file.items():
        with safe_open(str(path), framework="pt") as file:
            found |= {name: checksum_tensors([(name, file.get_tensor(name))]) for name in names}
    return found


def plan_syncs(root: str | Path, held: Collection[int], wanted: int) -> list[Path]:
    """The folders under a trainer's --weight-sync-dir that bring an engine to version `wanted`, in order.

    held: the versions that the engine can build on; none where it holds no weights. Where no chain of updates leads from
    one of them, the engine starts from the last weights that are there whole.

    Raises ValueError where the folders are not all there.
    """
    folders: list[Path] = []
    version = wanted
    while version not in held:
        folder = version_folder(root, version)
        try:
            manifest = read_manifest(folder)
        except ValueError as error:
            raise ValueError(f"version {wanted} cannot be had from {root}: {error}") from None
        folders.insert(0, folder)
        if manifest.kind == "full":
            break
        version = manifest.base_version
    return folders


def is_same_version(root: str | Path, version: int, lineage: str | None) -> bool:
    """Whether weights of this number and lineage are those of a trainer's folder, which has them whole."""
    manifest = read_version(root, version)
    return manifest is not None and manifest.lineage == lineage


def compare_checksums(wanted: Mapping[str, str], found: Mapping[str, str], of: str) -> None:
    """Raise ValueError that names tensors which are missing, too many, or of other bits than they should be."""
    wrong = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if wrong:
        raise ValueError(f"{of}: {_show(wrong)} {'is' if len(wrong) == 1 else 'are'} not as written.")


def _show(names) -> str:
    names = list(names)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
