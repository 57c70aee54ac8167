"""Read the weights of a Hugging Face folder, tensor by tensor, from safetensors.

Names, shapes and dtypes come from the files' headers; a tensor's bytes are read when it is asked for.

Left out: `.bin` checkpoints, which are pickles (loading one can run code).
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of a tensor; dtype as safetensors names it ("BF16", "F8_E4M3", ...)."""

    shape: tuple[int, ...]
    dtype: str
    file: str


class HFReader:
    """The tensors of a Hugging Face folder, as a context manager; `headers` maps every name to its header.

    Raises ValueError when the folder holds no config.json or no safetensors, or its index and files disagree.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.config = read_config(self.folder)
        self._open_files = ExitStack()
        self._handles: dict[str, Any] = {}
        self.headers: dict[str, TensorHeader] = {}
        try:
            self._read_headers()
        except BaseException:
            self._open_files.close()
            raise

    def __enter__(self) -> "HFReader":
        return self

    def __exit__(self, *exception) -> None:
        self._open_files.close()

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, in its stored dtype."""
        return self._handles[self.headers[name].file].get_tensor(name)

    def _read_headers(self) -> None:
        index = self._read_index()
        for file in list_weight_files(self.folder) if index is None else sorted(set(index.values())):
            path = self.folder / file
            if Path(file).name != file or not path.is_file():
                raise ValueError(f"{self.folder / INDEX} names {file!r}, which is not a file in that folder")
            try:
                handle = self._open_files.enter_context(safe_open(path, "pt"))
            except SafetensorError as error:
                raise ValueError(f"{path} is not a readable safetensors file ({error})") from error
            self._handles[file] = handle
            for name in handle.keys():
                if name in self.headers:
                    raise ValueError(f"{name} is in both {self.headers[name].file} and {file} of {self.folder}")
                part = handle.get_slice(name)
                self.headers[name] = TensorHeader(tuple(part.get_shape()), part.get_dtype(), file)
        if index is not None:
            self._check_index(index)

    def _read_index(self) -> dict[str, str] | None:
        path = self.folder / INDEX
        return json.loads(path.read_text())["weight_map"] if path.exists() else None

    def _check_index(self, index: dict[str, str]) -> None:
        found = {name: header.file for name, header in self.headers.items()}
        wrong = sorted(name for name in index.keys() | found.keys() if index.get(name) != found.get(name))
        if wrong:
            raise ValueError(f"{self.folder / INDEX} and its files disagree on {list_names(wrong)}")


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder. Raises ValueError where there is none."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a Hugging Face folder: it has no config.json")
    return json.loads(path.read_text())


def list_weight_files(folder: Path) -> list[str]:
    """The safetensors file of a folder without an index. Raises ValueError, naming what is there, without exactly one."""
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if files:
        raise ValueError(f"{folder} holds {list_names(files)} and no {INDEX} that says which of them form the model")
    pickles = sorted(path.name for suffix in ("*.bin", "*.pt", "*.pth") for path in folder.glob(suffix))
    if pickles:
        raise ValueError(
            f"{folder} holds {list_names(pickles)} and no safetensors; only safetensors are read, since loading a pickle "
            "can run code: save the model with transformers' save_pretrained first"
        )
    raise ValueError(f"{folder} holds no safetensors")


def list_names(names: list[str], limit: int = 20) -> str:
    """Names in a sentence: at most `limit` of them, then how many more."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
