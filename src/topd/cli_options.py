"""Options of the verbs that take more than a configuration. Imports only argparse, so that `topd --help` is fast."""

import argparse

DEFAULT_TOKEN_ENV = "TOPD_SERVE_TOKEN"
REPORT_PORT = 8400


def report_options(report: argparse.ArgumentParser) -> None:
    report.add_argument("runs", metavar="RUN", nargs="+", help="run folders: finished, running or interrupted")
    report.add_argument("--output", metavar="FILE", help="the page (report.html in the folder of a single run, else here)")
    report.add_argument(
        "--watch", action="store_true", help="serve the page on this machine and refresh it while the run goes on"
    )
    report.add_argument("--port", type=int, metavar="N", help=f"port of --watch; 0 picks a free one ({REPORT_PORT})")
    report.add_argument("--tokens", type=_positive, metavar="N", help="tokens of rollouts in the page (100000)")
    report.add_argument("--steps", type=_steps, metavar="N,N,...", help="steps whose rollouts are in the page (an even spread)")


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, found {text!r}")
    return int(text)


def _steps(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() and len(part) < 10 and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"must be numbers from 1 with commas between them, such as 1,8,16; found {text!r}")
    return sorted({int(part) for part in parts})


def rescore_options(rescore: argparse.ArgumentParser) -> None:
    rescore.add_argument("run", metavar="RUN", help="a run folder: finished, running or interrupted")
    rescore.add_argument("--steps", type=_steps, metavar="N,N,...", help="the steps (all that are stored)")
    rescore.add_argument("--name", help="name of the file in RUN/rescores (from the settings and the steps)")


def explain_options(explain: argparse.ArgumentParser) -> None:
    explain.add_argument("run", metavar="RUN", help="a run folder: finished, running or interrupted")
    explain.add_argument("--step", type=int, metavar="N", help="the step (the last one with rollouts)")
    explain.add_argument("--group", metavar="K", help="index in the step, or prompt id (the group with the worst-rejected token)")
    explain.add_argument(
        "--rollout", type=int, metavar="I", help="the rollout whose tokens are listed (the one with the worst token)"
    )
    explain.add_argument(
        "--color",
        choices=("log_ratio", "token_reward", "return", "advantage"),
        help="quantity that colours the tokens (log_ratio)",
    )
    explain.add_argument("--tokens", action="store_true", help="list the tokens of every rollout")


def serve_options(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("model", metavar="MODEL", help="model folder, hub id, .gguf file or builtin:NAME")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s: this machine alone)")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on; 0 picks a free one (%(default)s)")
    serve.add_argument("--name", help="name of the model for clients (MODEL)")
    serve.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="precision (%(default)s)")
    serve.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (%(default)s)")
    serve.add_argument("--threads", type=int, metavar="N", help="compute threads (torch's default)")
    serve.add_argument(
        "--max-queue", type=int, default=256, metavar="N", help="requests that may wait; more get 429 (%(default)s)"
    )
    serve.add_argument(
        "--max-tokens-per-microbatch", type=int, default=16384, metavar="N", help="padded tokens of one pass (%(default)s)"
    )
    serve.add_argument(
        "--max-body-mb", type=float, default=32.0, metavar="N", help="size of a request; more gets 413 (%(default)s)"
    )
    serve.add_argument(
        "--token-env",
        metavar="VARIABLE",
        help=f"environment variable with a bearer token ({DEFAULT_TOKEN_ENV}, if there is one)",
    )
    serve.add_argument(
        "--batch-invariant", action="store_true", help="compute every request alone: results do not depend on other requests"
    )
    serve.add_argument("--allow-reload", action="store_true", help="let clients pause the server and replace its weights")
