"""A Hugging Face folder as a lazy reader, and as an atomic writer."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


# Pages of a mapped file stay resident until it is closed, so it is opened afresh after this many bytes.
MAPPED_BYTES = 256 << 20


class HFReader:
    """Reads single tensors of a folder with safetensors files, without ever holding the model: one file is open at a time.

    Raises:
        ValueError: the folder has no safetensors file, or not the tensor asked for.
    """

    def __init__(self, path: str) -> None:
        self.path = resolve(path)
        self._file_of = self._read_index()
        self._open_name, self._open_file, self._bytes_read = "", None, 0

    def _read_index(self) -> dict[str, str]:
        index = self.path / INDEX
        if index.exists():
            return json.loads(index.read_text())["weight_map"]
        if not (self.path / SINGLE).exists():
            raise ValueError(
                f"--actor.model_name_or_path: {self.path} has no {SINGLE} or {INDEX}; save the model as safetensors"
            )
        with safe_open(self.path / SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)

    def names(self) -> set[str]:
        """Names of all tensors in the folder."""
        return set(self._file_of)

    def tensor(self, name: str) -> torch.Tensor:
        """The full tensor `name`, on the CPU; its pages are read when it is used."""
        tensor = self._file(name).get_tensor(name)
        self._bytes_read += tensor.nbytes
        return tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, from the files' headers."""
        names = sorted(self._file_of, key=self._file_of.__getitem__)
        return {name: tuple(self._file(name).get_slice(name).get_shape()) for name in names}

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise ValueError(f"--actor.model_name_or_path: {self.path} has no tensor {name}")
        file = self._file_of[name]
        if file != self._open_name or self._bytes_read > MAPPED_BYTES:
            self._open_name, self._open_file, self._bytes_read = file, safe_open(self.path / file, framework="pt"), 0
        return self._open_file


def resolve(path: str) -> Path:
    """`path` itself when it is a folder, else the cached snapshot of that name on the model hub."""
    if os.path.isdir(path):
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]))


def write(folder: str, stream: Iterable[tuple[str, torch.Tensor]], config, tokenizer, max_shard_bytes: int) -> None:
    """Write a Hugging Face folder from a stream of tensors; other files in the folder stay.

    At most `max_shard_bytes` of weights are held at one time. Everything is written to a sub-folder first and moved in
    place at the end, the weights last, so that an interrupted write leaves the earlier model.
    """
    target = Path(folder)
    temporary = target / ".incomplete"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    config.save_pretrained(temporary)
    if tokenizer is not None:
        tokenizer.save_pretrained(temporary)
    small_files = list(temporary.iterdir())
    _write_index(temporary, _write_shards(temporary, stream, max_shard_bytes))
    weights = sorted(set(temporary.iterdir()) - set(small_files))
    stale = {file for file in target.iterdir() if file.suffix == ".safetensors" or file.name == INDEX}
    for file in (*small_files, *weights):
        os.replace(file, target / file.name)
    for file in stale - {target / file.name for file in weights}:
        file.unlink()
    temporary.rmdir()


def _write_shards(folder: Path, stream: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> list[dict[str, int]]:
    """Files `shard-<i>` of at most `max_bytes`; returns the names and sizes of the tensors in each."""
    shards: list[dict[str, int]] = []
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if pending:
            save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
            shards.append({name: t.nbytes for name, t in pending.items()})
            pending.clear()

    size = 0
    for name, tensor in stream:
        if size + tensor.nbytes > max_bytes:
            flush()
            size = 0
        pending[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    flush()
    return shards


def _write_index(folder: Path, shards: list[dict[str, int]]) -> None:
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE)
        return
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    total = sum(sum(names.values()) for names in shards)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
