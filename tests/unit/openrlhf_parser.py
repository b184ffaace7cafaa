"""OpenRLHF's own command-line parser and namespace, without running or importing its training code."""

import argparse
import ast
import importlib.util
import os
from datetime import datetime
from types import SimpleNamespace


def _openrlhf_folder() -> str:
    (folder,) = importlib.util.find_spec("openrlhf").submodule_search_locations
    return folder


def openrlhf_parser() -> argparse.ArgumentParser:
    """OpenRLHF's parser without our options, whether or not its file is patched.

    It is built under `if __name__ == "__main__"`, so the statements that build it are taken from there and run.
    """
    path = os.path.join(_openrlhf_folder(), "cli", "train_ppo_ray.py")
    with open(path, encoding="utf-8") as file:
        main = next(node for node in ast.parse(file.read()).body if isinstance(node, ast.If))
    build = []
    for statement in main.body:
        source = ast.unparse(statement)
        if "parse_args" in source:
            break
        if "gapo_megatron" not in source and "add_arguments(" not in source:
            build.append(statement)
    names = {"argparse": argparse, "datetime": datetime}
    exec(compile(ast.Module(build, []), path, "exec"), names)  # noqa: S102 - the parser exists nowhere else
    return names["parser"]


def hierarchize(args: argparse.Namespace) -> SimpleNamespace:
    """`openrlhf.utils.config.hierarchize`, from its file: importing its package imports DeepSpeed."""
    spec = importlib.util.spec_from_file_location(
        "openrlhf_config", os.path.join(_openrlhf_folder(), "utils", "config.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.hierarchize(args)
