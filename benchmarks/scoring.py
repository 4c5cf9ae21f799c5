"""Scoring throughput of `topd serve` against vLLM: same model, same rows, same machine, one thread each, taken in turns.

    python benchmarks/scoring.py MODEL --vllm .venv-vllm/bin/python [--prompt 512 --completion 128 --group 8 --rounds 5]

A round asks each server once for the same groups, the order changing from round to round; every round has new tokens, so no
cache can help. Reported: completion tokens per second, each server's median over the rounds with its range, the ratio within each
round (what a shared machine does to both cancels), the largest difference of the log-probs, and the growth of peak memory.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from topd.endpoint.dialects import DIALECTS, Dialect, TopdScore, VllmEcho, VllmPromptLogprobs, read_scores
from topd.endpoint.replica import Replica, Request
from topd.models.logprobs import Tokens

START_S = 300


@contextmanager
def running(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server on one thread, until it is healthy and after that until the block ends."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(START_S):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None:
                sys.exit(f"{command[0]} ended with {process.returncode}")
            time.sleep(1)
        yield process
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def peak_memory_mb(process: subprocess.Popen[bytes]) -> int:
    """Sum of the peak resident memory of a process and its descendants, in MB (Linux)."""
    found, todo = 0, [process.pid]
    while todo:
        pid = todo.pop()
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            children = [
                int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in (task / "children").read_text().split()
            ]
        except FileNotFoundError:
            continue
        found += next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024
        todo += children
    return found


def draw(args: argparse.Namespace, seed: int, vocab: int) -> list[Tokens]:
    source = random.Random(seed)
    return [
        Tokens(
            tuple(source.randrange(vocab) for _ in range(args.prompt)),
            tuple(tuple(source.randrange(vocab) for _ in range(args.completion)) for _ in range(args.group)),
        )
        for _ in range(args.groups)
    ]


async def ask(replica: Replica, dialect: Dialect, groups: list[Tokens]) -> tuple[float, list[float]]:
    """Seconds and numbers of one request for all groups."""
    began = time.perf_counter()
    response = await replica.send(dialect.encode(groups, model="model", temperature=1.0), timeout_s=3600)
    found = read_scores(dialect, response, groups)
    return time.perf_counter() - began, found


async def wait_healthy(url: str) -> Replica:
    replica = Replica(url, api_key=None, timeout_s=60)
    for _ in range(START_S):
        try:
            await replica.send(Request(path="/v1/models", method="GET"))
            return replica
        except Exception:
            await asyncio.sleep(1)
    sys.exit(f"{url} did not become healthy")


async def measure(args: argparse.Namespace, servers: dict[str, tuple[str, Dialect]], vocab: int) -> dict[str, list[float]]:
    replicas = {name: await wait_healthy(url) for name, (url, _) in servers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in servers}
    worst = 0.0
    for round_ in range(-1, args.rounds):  # the first is for warming up
        groups = draw(args, round_, vocab)
        names = list(servers)[:: 1 if round_ % 2 else -1]
        answers = {}
        for name in names:
            took, answers[name] = await ask(replicas[name], servers[name][1], groups)
            if round_ >= 0:
                seconds[name].append(took)
        first, *others = (torch.tensor(answers[name]) for name in servers)
        worst = max([worst, *(float((first - other).abs().max()) for other in others)])
    for replica in replicas.values():
        await replica.close()
    seconds["largest difference, nats"] = [worst]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--vllm", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    for name, default in (("prompt", 512), ("completion", 128), ("group", 8), ("groups", 1), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    ports = {"topd": free_port(), "vllm": free_port()}
    topd = [sys.executable, "-m", "topd", "serve", args.model, "--name", "model", "--port", str(ports["topd"])]
    vllm = [args.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model, "--served-model-name", "model"]
    vllm += ["--host", "127.0.0.1", "--port", str(ports["vllm"]), "--max-model-len", str(args.prompt + args.completion + 8)]
    with (
        running([*topd, "--dtype", args.dtype, "--threads", "1"], ports["topd"]) as ours,
        running([*vllm, "--dtype", args.dtype, "--enforce-eager"], ports["vllm"]) as theirs,
    ):
        servers: dict[str, tuple[str, Dialect]] = {
            "topd serve, /v1/score": (f"http://127.0.0.1:{ports['topd']}", TopdScore()),
            "topd serve, echo": (f"http://127.0.0.1:{ports['topd']}", VllmEcho()),
            "vLLM, prompt_logprobs": (f"http://127.0.0.1:{ports['vllm']}", VllmPromptLogprobs()),
            "vLLM, echo": (f"http://127.0.0.1:{ports['vllm']}", VllmEcho()),
        }
        assert all(type(dialect) in map(type, DIALECTS) for _, dialect in servers.values())
        found = asyncio.run(measure(args, servers, vocab))
        memory = {"topd serve": peak_memory_mb(ours), "vLLM": peak_memory_mb(theirs)}
    report(args, found, memory)


def report(args: argparse.Namespace, found: dict[str, list[float]], memory: dict[str, int]) -> None:
    tokens = args.groups * args.group * args.completion
    (worst,) = found.pop("largest difference, nats")
    base = found["vLLM, prompt_logprobs"]
    print(
        f"{args.groups} groups of {args.group}, prompt {args.prompt}, completion {args.completion}, {args.dtype}, "
        f"{args.rounds} rounds"
    )
    print("| server and form | completion tokens/s, median (range) | times vLLM prompt_logprobs, median (range) |")
    print("| --- | --- | --- |")
    for name, seconds in found.items():
        rates = sorted(tokens / s for s in seconds)
        ratios = sorted(b / s for b, s in zip(base, seconds, strict=True))
        print(
            f"| {name} | {statistics.median(rates):.0f} ({rates[0]:.0f} to {rates[-1]:.0f}) | {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )
    print(
        f"largest difference between any two: {worst:.2g} nats; peak memory: "
        + ", ".join(f"{k} {v} MB" for k, v in memory.items())
    )


if __name__ == "__main__":
    main()
