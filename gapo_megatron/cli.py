"""The `gapo` command: a table of sub-commands, each a module with `add_arguments(parser)` and `run(args) -> exit code`."""

import argparse
import importlib
import sys

COMMANDS = {
    "patch": ("gapo_megatron.openrlhf.patching", "put the patches on the installed OpenRLHF, or take them off"),
    "demo": ("gapo_megatron.demo.run", "train SmolLM2-135M with GAPO on a Megatron actor, on this machine"),
    "evaluate": ("gapo_megatron.evaluation.evaluate", "pass@k of a model on a file of problems, with vLLM"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a sub-command; only its module is imported."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="gapo", description="GAPO and a Megatron-Core actor for OpenRLHF.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        if argv[:1] == [name]:
            loaded = importlib.import_module(module)
            loaded.add_arguments(command)
            command.set_defaults(run=loaded.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except ValueError as error:
        print(f"gapo {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
