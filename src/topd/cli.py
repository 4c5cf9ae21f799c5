"""The command line: parse, call, print. `topd VERB --help` explains each verb; every setting is `--section.key value`."""

import argparse
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence

EXIT_INTERRUPTED = 130

OVERRIDES = """
settings:
  Any setting of the configuration may follow as --section.key value (or --section.key=value), for example
    --algorithm.alpha 0.1  --run.directory runs/alpha01  --eval.every_steps 0
  Values are read as TOML; what is not TOML is a string. `topd config --keys` lists all keys.

exit codes: 0 done; 2 the input cannot be used; 3 stopped by a failure, resumable; 130 interrupted, saved, resumable
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words, overrides = _split(sys.argv[1:] if argv is None else argv)
    arguments, rest = _parser().parse_known_args(words)
    rest += overrides
    if arguments.command is None:
        _parser().print_help()
        return 0
    _quiet_libraries()
    from topd.errors import TopdError

    try:
        return int(arguments.command(arguments, rest))
    except TopdError as error:
        if arguments.debug:
            raise
        print(f"topd: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if arguments.debug:
            raise
        print("topd: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and the overrides `--a.b value` and `--a.b=value`, which may stand anywhere."""
    own: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        is_override = re.match(r"--[\w-]+\.[\w.-]+(=|$)", word) is not None
        (overrides if is_override else own).append(word)
        if is_override and "=" not in word and rest:
            overrides.append(rest.pop(0))
    return own, overrides


def _train(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from topd import config_file, loop

    loop.run(config_file.load(arguments.config, rest))
    return 0


def _eval(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from topd import config_file
    from topd.eval.standalone import evaluate_model

    for row in evaluate_model(arguments.model, config_file.load(arguments.config, rest)):
        print(json.dumps(row, indent=2))
    return 0


def _probe(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from topd import config_file
    from topd.assemble import assemble, probe
    from topd.errors import ConfigError

    checks = probe(assemble(config_file.load(arguments.config, rest)))
    if not checks:
        raise ConfigError("there is nothing to probe: this algorithm neither samples nor asks a teacher.")
    for check in checks:
        print(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}")
    return 0 if all(check.ok for check in checks) else ConfigError.exit_code


def _config(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from topd import config_file
    from topd.errors import ConfigError

    if arguments.keys:
        for key, info in config_file.all_settings():
            print(f"{key:<36} {config_file.describe(info)}")
        return 0
    if arguments.config is None:
        raise ConfigError("give a configuration (`topd config CONFIG.toml`), or --keys for the list of all settings.")
    print(config_file.dump(config_file.load(arguments.config, rest)), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    from topd import __version__

    parser = argparse.ArgumentParser(
        prog="topd",
        description="Train a small language model from a bigger one by Trust Region Policy Distillation.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"topd {__version__}")
    parser.set_defaults(command=None, debug=False)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")

    def verb(name: str, command: Callable[[argparse.Namespace, Sequence[str]], int], summary: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=OVERRIDES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        added.set_defaults(command=command)
        return added

    config_help = "a TOML file, or the name of a shipped configuration (quickstart, smollm2, ...)"
    verb("train", _train, "The main job: train the student, evaluate before and after, write the run folder.").add_argument(
        "config", metavar="CONFIG", help=config_help
    )
    evaluation = verb("eval", _eval, "avg@k and pass@k of a model, with intervals, on the configuration's held-out problems.")
    evaluation.add_argument("model", metavar="MODEL", help="model folder, hub id, .gguf file or builtin:NAME")
    evaluation.add_argument("--config", required=True, metavar="CONFIG", help=config_help)
    verb("probe", _probe, "Prove that teacher, student, tokenizer and task fit, before anything is spent.").add_argument(
        "config", metavar="CONFIG", help=config_help
    )
    resolved = verb("config", _config, "Print the resolved configuration, or the list of all keys.")
    resolved.add_argument("config", metavar="CONFIG", nargs="?", help=config_help)
    resolved.add_argument("--keys", action="store_true", help="list every key with its meaning and default")
    return parser


def _quiet_libraries() -> None:
    """Only our own words on the terminal; a library's warnings show with TOPD_VERBOSE=1."""
    logging.basicConfig(format="topd: %(message)s", level=logging.WARNING)
    if not os.environ.get("TOPD_VERBOSE"):
        warnings.filterwarnings("ignore")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
