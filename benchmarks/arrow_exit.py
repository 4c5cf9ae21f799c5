"""Aborts at the exit of short processes that read rollouts, on a loaded machine: a Python file against the project's own reader.

    python benchmarks/arrow_exit.py --processes 300

An Arrow thread that lets go of a Python-owned buffer while the interpreter ends calls std::terminate, and the process ends by
SIGABRT after its work was done. Both ways read the same file as often; the table counts how the processes ended.
"""

import argparse
import collections
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

WAYS = {
    "Python file, pq.read_table": "import sys, pyarrow.parquet as pq; pq.read_table(open(sys.argv[1], 'rb'))",
    "Python file, use_threads=False": (
        "import sys, pyarrow.parquet as pq; pq.read_table(open(sys.argv[1], 'rb'), use_threads=False)"
    ),
    "topd.run.parquet": "import sys; from pathlib import Path; from topd.run import parquet; parquet.read(Path(sys.argv[1]))",
}
BURN = "while True: pass"


def make_file(path: Path, rows: int, tokens: int) -> None:
    """A table of the shape of stored rollouts: ragged streams of float32."""
    streams = {f"stream_{i}": [[float(i + t) for t in range(tokens)] for _ in range(rows)] for i in range(8)}
    table = pa.table({name: pa.array(values, pa.list_(pa.float32())) for name, values in streams.items()})
    pq.write_table(table, path, compression="zstd")


def count(code: str, path: Path, processes: int, at_once: int) -> collections.Counter[int]:
    """Exit statuses of the processes; -6 is SIGABRT."""
    ended: collections.Counter[int] = collections.Counter()
    running: list[subprocess.Popen[bytes]] = []
    for _ in range(processes):
        while len(running) >= at_once:
            done = [process for process in running if process.poll() is not None]
            ended.update(process.returncode for process in done)
            running = [process for process in running if process not in done]
            time.sleep(0.005)
        running.append(subprocess.Popen([sys.executable, "-c", code, str(path)], stderr=subprocess.DEVNULL))
    ended.update(process.wait() for process in running)
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=200, help="for each way of reading")
    parser.add_argument("--at-once", type=int, default=4 * (os.cpu_count() or 1))
    parser.add_argument("--burners", type=int, default=2 * (os.cpu_count() or 1), help="processes that only keep the CPUs busy")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step_000001.parquet"
        make_file(path, arguments.rows, arguments.tokens)
        burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(arguments.burners)]
        try:
            for name, code in WAYS.items():
                ended = count(code, path, arguments.processes, arguments.at_once)
                others = arguments.processes - ended[0] - ended[-6]
                print(f"{name:<32} {arguments.processes} processes, {ended[-6]} aborted, {others} ended otherwise", flush=True)
        finally:
            for burner in burners:
                burner.kill()
                burner.wait()


if __name__ == "__main__":
    main()
