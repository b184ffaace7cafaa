"""Whether the data has the columns that the command line names, before any model is loaded."""

import json
import os
from typing import Any

SUFFIXES = (".json", ".jsonl", ".parquet")


def check_columns(args: Any) -> None:
    """Look at the first row of every local .json, .jsonl or .parquet file (or folder of these) of the command line.

    Raises:
        ValueError: a file without `--data.input_key`, or without `--data.label_key` where one is given.
    """
    keys = {"--data.input_key": args.data.input_key, "--data.label_key": args.data.label_key}
    for flag, datasets in (("--data.prompt_dataset", args.data.prompt_dataset), ("--eval.dataset", args.eval.dataset)):
        for name in (datasets or "").split(","):
            path = _first_file(name.split("@")[0].strip())  # OpenRLHF: dataset@data_dir, comma separated
            if path is None:
                continue
            columns = _columns(path)
            for key_flag, key in keys.items():
                if key is not None and key not in columns:
                    raise ValueError(
                        f"{key_flag} {key}: {flag} {name.strip()} has no such column, but {', '.join(columns)}; "
                        f"set {key_flag} to one of these"
                    )


def _first_file(path: str) -> str | None:
    """`path` itself, or the first data file in the folder `path`; None for what is not local."""
    if os.path.isdir(path):
        names = sorted(
            n for n in os.listdir(path) if n.endswith(SUFFIXES) and "dataset_info" not in n and n != "state.json"
        )
        return os.path.join(path, names[0]) if names else None
    return path if os.path.isfile(path) and path.endswith(SUFFIXES) else None


def _columns(path: str) -> list[str]:
    if path.endswith(".parquet"):
        import pyarrow.parquet

        return list(pyarrow.parquet.read_schema(path).names)
    with open(path, encoding="utf-8") as file:
        start = next((line for line in file if line.strip()), "")
        try:
            if start.lstrip().startswith("["):  # one JSON array
                file.seek(0)
                row = json.load(file)[0]
            else:
                row = json.loads(start)
        except (json.JSONDecodeError, IndexError):
            row = None
    columns = list(row) if isinstance(row, dict) else []
    if not columns:
        raise ValueError(f"{path} does not begin with a JSON object; write one object per line, with a key per column")
    return columns
