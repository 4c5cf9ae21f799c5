"""The command line: parse, call, print. `topd VERB --help` explains each verb; every setting is `--section.key value`."""

import argparse
import atexit
import contextlib
import dataclasses
import errno
import json
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from types import FrameType

from topd.cli_options import DEFAULT_TOKEN_ENV, REPORT_PORT, explain_options, report_options, rescore_options, serve_options
from topd.config_words import SECTIONS
from topd.run.interrupt import handling, stopping_signals

EXIT_INTERRUPTED = 130
EXIT_STOPPED = 3
EXIT_UNREAD = 128 + signal.SIGPIPE
"""A shell's exit code for a command whose reader closed the pipe, as in `topd config --keys | head -1`."""
_OUTPUT_FAULTS = (errno.ENOSPC, errno.EIO)
_SECTIONS = (*SECTIONS, "teachers")

OVERRIDES = """
settings:
  Any setting of the configuration may follow as --section.key value (or --section.key=value), for example
    --algorithm.alpha 0.1  --run.directory runs/alpha01  --eval.every_steps 0
  Values are read as TOML; what is not TOML is a string. A table, as --run '{ directory = "a", steps = 4 }', sets the keys that
  it holds; one of another type, as --task '{ type = "jsonl", path = "a.jsonl" }', replaces the section. Of two words that set
  the same, the later one holds. `topd config --keys` lists all keys.

exit codes: 0 done; 2 the input cannot be used; 3 stopped by a failure, resumable; 130 interrupted, saved, resumable
"""

EXPLAIN_EPILOG = """
exit codes: 0 printed; 2 the folder is not a run, or lacks the requested step, group or rollout
"""

REPORT_EPILOG = """
exit codes: 0 written, or served until SIGINT or SIGTERM; 2 a folder, an option or the output cannot be used
"""

RESCORE_EPILOG = """
settings:
  Settings that differ from the run, as --algorithm.key value; at least one. For example
    topd rescore RUN --algorithm.alpha 0.1
    topd rescore RUN --algorithm.type opd
  A new algorithm.type begins with that algorithm's defaults. Only the credit is recomputed, so other sections are refused.

exit codes: 0 done, RUN/rescores/NAME.json is written; 2 the input cannot be used
"""

SERVE_EPILOG = """
routes: /v1/completions /v1/score /v1/models /tokenize /detokenize /health /metrics
exit codes: 0 stopped by SIGINT or SIGTERM; 2 the model, the port or an option cannot be used
"""


def command() -> None:
    """Entry point of `topd`. A signal that arrives while Python exits does not change the exit code."""
    code = main()
    for signum in stopping_signals():
        signal.signal(signum, lambda *_: os._exit(code))  # while Python waits for threads
        atexit.register(signal.signal, signum, signal.SIG_IGN)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    with handling(_stop):
        try:
            return _end_output(_main(sys.argv[1:] if argv is None else argv))
        except SystemExit as end:  # of argparse
            sys.exit(_end_output(int(end.code or 0)))


def _main(words: Sequence[str]) -> int:
    words, overrides = _split(words)
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
    except BrokenPipeError:
        _drop_output()
        return EXIT_UNREAD
    except OSError as error:
        if arguments.debug or (error.errno not in _OUTPUT_FAULTS and error.filename is None):
            raise
        if error.filename is not None:  # a file error without its own message
            print(f"topd: {error.filename}: {error.strerror}. Fix that and try again; --debug shows where.", file=sys.stderr)
            return EXIT_STOPPED
        return _output_lost(error)
    except KeyboardInterrupt:
        if arguments.debug:
            raise
        print("topd: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _end_output(code: int) -> int:
    """Flush the output and return the exit code. A reader that closes the pipe (`| head`) is not a failure."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        return _output_lost(error)
    return code


def _output_lost(error: OSError) -> int:
    print(f"topd: the output could not be written: {error.strerror}. Free some space, or send it elsewhere.", file=sys.stderr)
    _drop_output()
    return EXIT_STOPPED


def _drop_output() -> None:
    """Discard buffered output, which would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stop(signum: int, frame: FrameType | None) -> None:
    """End the command with a message. Runs, servers and watched reports install other handlers of the stopping signals."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):  # an import may swallow an exception, or crash from it
            os.write(2, b"topd: interrupted\n")
            os._exit(EXIT_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's words without overrides, and the overrides `--a.b value`, `--a.b=value` and `--a {...}`, in any position."""
    plain: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, _, value = word.removeprefix("--").partition("=")
        is_section = word.startswith("--") and key in _SECTIONS and (value or "".join(rest[:1])).startswith(("{", "["))
        is_override = re.match(r"--[\w-]+\.[\w.-]+(=|$)", word) is not None or is_section
        (overrides if is_override else plain).append(word)
        if is_override and "=" not in word and rest:
            overrides.append(rest.pop(0))
    return plain, overrides


def _train(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from topd import api

    api.train(arguments.config, *rest)
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
    from topd.run.directory import check_unused
    from topd.trackers import check_installed

    config = config_file.load(arguments.config, rest)
    check_unused(config)
    check_installed(config.run.trackers)
    with contextlib.closing(assemble(config)) as parts:
        checks = probe(parts)
        for notice in parts.notices:
            print(f"note  {notice}")
    if not checks:
        raise ConfigError("there is nothing to probe: this algorithm neither samples nor asks a teacher.")
    for check in checks:
        verdict = "FAIL" if not check.ok else "WARN" if check.warning else "note" if check.unproven else "ok  "
        print(f"{verdict}  {check.name}: {check.detail}")
    return 0 if all(check.ok for check in checks) else ConfigError.exit_code


def _grade(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from topd import config_file
    from topd.errors import ConfigError
    from topd.tasks.regrade import grade_rows, read_rows

    config = config_file.load(arguments.config, rest)
    remedy = "Give a file of JSON lines in UTF-8, or -."
    with contextlib.ExitStack() as stack:
        try:
            lines = sys.stdin if arguments.file == "-" else stack.enter_context(open(arguments.file, encoding="utf-8-sig"))
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise ConfigError(f"'{arguments.file[:200]}' cannot be read: {getattr(error, 'strerror', error)}. {remedy}") from None
        try:
            for row in grade_rows(config, read_rows(lines, arguments.file)):
                print(json.dumps(row, ensure_ascii=False), flush=True)
        except UnicodeDecodeError as error:
            raise ConfigError(f"'{arguments.file}' cannot be read: {error}. {remedy}") from None
    return 0


def _serve(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from topd.errors import ConfigError

    _nothing_more("serve", rest)
    try:
        from topd.serve.server import ServeOptions, serve
    except ImportError as error:
        raise ConfigError(f"topd serve needs the serve extra: pip install 'topd[serve]' ({error}).") from error
    names = {option.name for option in dataclasses.fields(ServeOptions)}
    options = {name: value for name, value in vars(arguments).items() if name in names}
    token = os.environ.get(arguments.token_env or DEFAULT_TOKEN_ENV)
    if token is None and arguments.token_env:
        raise ConfigError(f"--token-env {arguments.token_env}: this environment variable is not set. Export the token.")
    return serve(ServeOptions(**options, token=token))


def _explain(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from topd.report.explain import explain

    _nothing_more("explain", rest)
    names = ("step", "group", "rollout", "color", "tokens")
    explain(arguments.run, **{name: getattr(arguments, name) for name in names})
    return 0


def _report(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from topd.errors import ConfigError
    from topd.report.page import write
    from topd.report.watch import watch

    _nothing_more("report", rest)
    options = {"max_tokens": arguments.tokens, "steps": arguments.steps}
    options = {name: value for name, value in options.items() if value is not None}
    if arguments.watch:
        if arguments.output is not None:
            raise ConfigError("--output would be ignored with --watch, which serves the page. Remove one of the two.")
        watch(arguments.runs, port=REPORT_PORT if arguments.port is None else arguments.port, **options)
        return 0
    if arguments.port is not None:
        raise ConfigError("--port would be ignored without --watch. Add --watch, or remove it.")
    path = write(arguments.runs, arguments.output, say=lambda note: print(f"WARNING    {note}", file=sys.stderr), **options)
    print(f"report     {path}  ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def _nothing_more(verb: str, rest: Sequence[str]) -> None:
    """Raise ConfigError for extra words after a verb without settings."""
    from topd.errors import ConfigError

    if rest:
        word = rest[0]
        remedy = "It takes one run folder." if verb == "explain" and not word.startswith("-") else f"See `topd {verb} --help`."
        raise ConfigError(f"topd {verb} does not know '{word}'. {remedy}")


def _rescore(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from topd.report.rescoring.rescore import rescore
    from topd.report.rescoring.table import show

    show(arguments.run, rescore(arguments.run, rest, steps=arguments.steps, name=arguments.name))
    return 0


def _config(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from topd import config_file, config_keys
    from topd.errors import ConfigError

    if arguments.keys:
        section = arguments.config or ""
        settings = [setting for setting in config_keys.listing() if f"{setting.key}.".startswith(section and f"{section}.")]
        if not settings:
            raise ConfigError(f"there is no section or key '{section}'. `topd config --keys` lists all.")
        width = max(len(setting.key) for setting in settings)
        for setting in settings:
            print(f"{setting.key:<{width}} {setting}")
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

    def verb(
        name: str, command: Callable[[argparse.Namespace, Sequence[str]], int], summary: str, epilog: str = OVERRIDES
    ) -> argparse.ArgumentParser:
        added = verbs.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        added.set_defaults(command=command)
        return added

    config_help = "a TOML file, or the name of a shipped configuration (quickstart, smollm2, ...)"
    training = verb("train", _train, "The main job: train the student, evaluate before and after, write the run folder.")
    evaluation = verb("eval", _eval, "avg@k and pass@k of a model, with intervals, on the configuration's held-out problems.")
    evaluation.add_argument("model", metavar="MODEL", help="model folder, hub id, .gguf file or builtin:NAME")
    evaluation.add_argument("--config", required=True, metavar="CONFIG", help=config_help)
    probing = verb("probe", _probe, "Check that teacher, student, tokenizer and task fit, before any training.")
    grading = verb("grade", _grade, "Grade given completions by the configuration's task: one JSON object per line.")
    for configured in (training, probing, grading):
        configured.add_argument("config", metavar="CONFIG", help=config_help)
    grading.add_argument("file", metavar="FILE", help='lines of {"answer": ..., "completion": ...}; - reads standard input')
    serve_options(verb("serve", _serve, "Serve a model over HTTP: log-probs and completions, with vLLM's API.", SERVE_EPILOG))
    report_options(verb("report", _report, "One HTML file: result, health, curves, comparison and tokens.", REPORT_EPILOG))
    explain_options(verb("explain", _explain, "One group of a run, token by token, in the terminal.", EXPLAIN_EPILOG))
    recomputed = "Recompute the credit of a run's stored rollouts under other settings, without sampling or scoring."
    rescore_options(verb("rescore", _rescore, recomputed, RESCORE_EPILOG))
    resolved = verb("config", _config, "Print the resolved configuration, or the list of all keys.")
    resolved.add_argument("config", metavar="CONFIG", nargs="?", help=f"{config_help}; with --keys: a section")
    resolved.add_argument("--keys", action="store_true", help="list every key, or those of a section, with meaning and default")
    return parser


def _quiet_libraries() -> None:
    """Print only topd's messages; TOPD_VERBOSE=1 shows warnings of libraries."""
    logging.basicConfig(format="topd: %(message)s", level=logging.WARNING)
    if not os.environ.get("TOPD_VERBOSE"):
        warnings.filterwarnings("ignore")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
