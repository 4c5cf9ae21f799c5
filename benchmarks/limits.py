"""What hostile requests cost a server: its peak memory, and how long others wait for /health meanwhile.

    python benchmarks/limits.py

Starts `topd serve builtin:tiny-teacher` anew for every row and reads its peak memory from /proc (Linux). A row is a body of up to
31 MB, sent once, three times one after the other, or 32 times at the same time; or many connections that do not ask.
"""

import asyncio
import functools
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

MB = 1_000_000
HEAD = "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"


EMOJI = "\U0001f600".encode()
TEXT = 1 << 19
"""The longest text that is tokenized, in bytes."""


def text(content: bytes, *, strings: bool = True) -> Callable[[], tuple[str, bytes]]:
    return lambda: ("/tokenize", b'{"return_token_strs":%b,"prompt":"%b"}' % (b"true" if strings else b"false", content))


def largest(user: bytes) -> Callable[[], tuple[str, bytes]]:
    """All log-probs that one request may ask for."""
    prompts = b",".join([b"[" + b",".join([b"5,6,7,8"] * 60) + b"]"] * 88)
    body = b'{"prompt":[%b],"prompt_logprobs":20,"max_tokens":1,"user":"%b"}' % (prompts, user)
    return lambda: ("/v1/completions", body)


def listed(key: str, value: str, size: int, path: str = "/v1/score") -> Callable[[], tuple[str, bytes]]:
    return lambda: (path, (f'{{"{key}":[' + (value + ",") * ((size - 20) // (len(value) + 1)) + value + "]}").encode())


GROUP = '{"prompt":[5],"completions":[[6]]}'
ROWS = "/v1/completions"
BODIES: dict[str, Callable[[], tuple[str, bytes]]] = {
    "empty groups, 3 MB": listed("groups", "[]", 3 * MB),
    "empty groups, 31 MB": listed("groups", "[]", 31 * MB),
    "groups, 31 MB": listed("groups", GROUP, 31 * MB),
    "ids, 31 MB": listed("prompt", "12345", 31 * MB, ROWS),
    "short prompts, 31 MB": listed("prompt", "[1]", 31 * MB, ROWS),
    "strings, 31 MB": listed("stop", '"a"', 31 * MB, ROWS),
    "one text, 31 MB": text(b"1" * (31 * MB)),
    "one wide text, 31 MB": text(b"\\ud83d\\ude00" + b"1" * (31 * MB)),
    "emoji, 31 MB": text(EMOJI * (31 * MB // 4)),
    "text of the allowed length": text(b"1" * TEXT),
    "spaces of the allowed length": text(b" " * TEXT),
    "emoji of the allowed length": text(EMOJI * (TEXT // 4)),
    "1,048,576 emoji": text(EMOJI * (1 << 20)),
    "nested, 31 MB": lambda: ("/v1/score", b"[" * (31 * MB)),
    "keys, 31 MB": lambda: ("/v1/score", ("{" + ",".join(f'"k{n}":1' for n in range(2_400_000)) + "}").encode()),
    "one long number, 31 MB": lambda: (ROWS, b'{"prompt":[' + b"9" * (31 * MB) + b"]}"),
    "ids to spell, 1 MB": listed("tokens", "5", 2 * TEXT, "/detokenize"),
    "many log-probs": lambda: (ROWS, b'{"prompt":[5],"n":4096,"max_tokens":240,"logprobs":20,"prompt_logprobs":20}'),
    "the largest answer": largest(b""),
    "the largest answer beside a wide text of 30 MB": largest(b"\\ud83d\\ude00" + b"a" * (30 * MB)),
}


async def post(port: int, path: str, body: bytes) -> str:
    """The status, after all of the answer; "cut" where the connection is closed without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(HEAD.format(path=path, size=len(body)).encode() + body)
        status = (await reader.readline()).decode().split(" ")[1]
        while await reader.read(1 << 20):
            pass
        return status
    except (OSError, IndexError):
        return "cut"
    finally:
        writer.close()


async def watch(port: int, waits: list[float]) -> None:
    """How long /health takes, ten times a second."""
    while True:
        start = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"200" in await reader.readline(), "the server is not reachable"
        writer.close()
        waits.append(time.perf_counter() - start)
        await asyncio.sleep(0.1)


async def attack(port: int, path: str, body: bytes, times: int, together: bool) -> tuple[str, float]:
    waits: list[float] = []
    watching = asyncio.create_task(watch(port, waits))
    if together:
        statuses = await asyncio.gather(*(post(port, path, body) for _ in range(times)))
    else:
        statuses = [await post(port, path, body) for _ in range(times)]
    await asyncio.sleep(0.2)
    watching.cancel()
    counted = ", ".join(f"{status} x{count}" for status, count in Counter(statuses).items())
    return counted, max(waits)


def memory(process: subprocess.Popen[str], field: str) -> float:
    """MB: VmHWM is the peak, VmRSS what is there now."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1000


def serve() -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "topd", "serve", "builtin:tiny-teacher", "--port", "0", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline().split(" on ")[1].split()[0].rsplit(":", 1)[1].removesuffix("/v1"))


def idle(port: int, count: int) -> tuple[str, float]:
    """Connections that ask for nothing."""
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    waits: list[float] = []

    async def look() -> None:
        watching = asyncio.create_task(watch(port, waits))
        await asyncio.sleep(1.0)
        watching.cancel()

    asyncio.run(look())
    for one in held:
        one.close()
    return f"{len(waits)} health checks", max(waits)


def main() -> None:
    only = sys.argv[1:]
    print("| request | times | answers | memory beyond rest (MB) | longest wait of another (s) |")
    print("| --- | --- | --- | --- | --- |")

    for name, make in BODIES.items():
        if not only or name in only:
            path, body = make()
            for times, how in ((1, "once"), (3, "3 in turn"), (32, "32 at once")):
                row(name, how, functools.partial(run, path=path, body=body, times=times, together=times > 3))
    if not only:
        row("idle connections", "1,200", functools.partial(idle, count=1200))


def row(name: str, times: str, act: Callable[[int], tuple[str, float]]) -> None:
    """A line of the table, of a server of its own."""
    process, port = serve()
    try:
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak begins anew
        rest = memory(process, "VmRSS")
        answers, wait = act(port)
        print(f"| {name} | {times} | {answers} | {memory(process, 'VmHWM') - rest:.0f} | {wait:.2f} |", flush=True)
    finally:
        process.terminate()
        process.wait()


def run(port: int, path: str, body: bytes, times: int, together: bool) -> tuple[str, float]:
    return asyncio.run(attack(port, path, body, times, together))


if __name__ == "__main__":
    main()
