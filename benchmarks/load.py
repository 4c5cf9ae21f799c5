"""Many clients at once against `topd serve`: every answer right or a declared 429, bounded memory, latencies.

    python benchmarks/load.py [MODEL] [--clients 64 --seconds 60 --sampling 0.25 --max-queue 256]

Every client sends one request after the other: a group to score (prompt 24, 4 completions of 24 tokens) or, with the given share,
a prompt to sample from (2 completions of at most 16 tokens). A 429 is obeyed (Retry-After) and counted. Log-probs of scored
groups are compared with those the server gave for the same group before the load began.
"""

import argparse
import asyncio
import collections
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from topd.endpoint.dialects import TopdScore, read_scores
from topd.endpoint.faults import Busy
from topd.endpoint.replica import Replica, Request
from topd.models.logprobs import Tokens

GROUPS = 16
DIALECT = TopdScore()


def memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def draw(vocab: int) -> list[Tokens]:
    source = random.Random(0)

    def some(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(2, vocab) for _ in range(count))

    return [Tokens(some(24), tuple(some(24) for _ in range(4))) for _ in range(GROUPS)]


class Load:
    """What the clients share: the groups, the right answers, and what happened."""

    def __init__(self, replica: Replica, groups: list[Tokens], sampling: float) -> None:
        self.replica = replica
        self.groups = groups
        self.sampling = sampling
        self.right: list[list[float]] = []
        self.seconds: dict[str, list[float]] = collections.defaultdict(list)
        self.counts: collections.Counter[str] = collections.Counter()
        self.worst = 0.0

    async def score(self, index: int) -> list[float]:
        group = [self.groups[index]]
        response = await self.replica.send(DIALECT.encode(group, model="model", temperature=1.0))
        return read_scores(DIALECT, response, group)

    async def sample(self, index: int) -> None:
        body = {
            "model": "model",
            "prompt": list(self.groups[index].prompt_ids),
            "n": 2,
            "max_tokens": 16,
            "return_token_ids": True,
        }
        response = await self.replica.send(Request(path="/v1/completions", json=body))
        assert all(choice["token_ids"] for choice in response.json()["choices"])

    async def client(self, number: int, until: float) -> None:
        source = random.Random(number)
        while time.monotonic() < until:
            kind = "sampling" if source.random() < self.sampling else "scoring"
            index = source.randrange(GROUPS)
            began = time.monotonic()
            try:
                if kind == "sampling":
                    await self.sample(index)
                else:
                    found = await self.score(index)
                    self.worst = max([self.worst, *(abs(a - b) for a, b in zip(found, self.right[index], strict=True))])
            except Busy as busy:
                self.counts["429"] += 1
                await asyncio.sleep(busy.seconds)
            except Exception as error:
                self.counts[f"error: {error}"] += 1
            else:
                self.counts[kind] += 1
                self.seconds[kind].append(time.monotonic() - began)


async def drive(args: argparse.Namespace, url: str, pid: int, vocab: int) -> None:
    load = Load(Replica(url, api_key=None, timeout_s=120), draw(vocab), args.sampling)
    load.right = [await load.score(index) for index in range(GROUPS)]
    memory = [memory_mb(pid)]
    until = time.monotonic() + args.seconds
    clients = [asyncio.create_task(load.client(number, until)) for number in range(args.clients)]
    while not all(task.done() for task in clients):
        await asyncio.sleep(1)
        memory.append(memory_mb(pid))
    await asyncio.gather(*clients)
    await load.replica.close()
    third = len(memory) // 3
    print(f"{args.clients} clients, {args.seconds} s: " + ", ".join(f"{name} {count}" for name, count in load.counts.items()))
    for kind, seconds in load.seconds.items():
        cuts = statistics.quantiles(seconds, n=100)
        print(
            f"{kind}: {len(seconds) / args.seconds:.0f} requests/s, p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s, "
            f"max {max(seconds):.2f} s"
        )
    print(f"largest difference of a log-prob from the quiet server: {load.worst:.1e} nats")
    print(
        f"resident memory: {memory[0]:.0f} MB before, {max(memory):.0f} MB at most; mean of the second third "
        f"{statistics.mean(memory[third : 2 * third]):.0f} MB, of the last {statistics.mean(memory[2 * third :]):.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="builtin:tiny-teacher")
    parser.add_argument("--vocab", type=int, default=15, help="token ids to draw from")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--sampling", type=float, default=0.25)
    parser.add_argument("--max-queue", type=int, default=256)
    args = parser.parse_args()
    command = [sys.executable, "-m", "topd", "serve", args.model, "--name", "model", "--port", "0", "--threads", "1"]
    server = subprocess.Popen([*command, "--max-queue", str(args.max_queue)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = server.stdout.readline().split(" on ")[1].split()[0]
        asyncio.run(drive(args, url, server.pid, args.vocab))
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()
