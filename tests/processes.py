"""`topd` in a process of its own, forked from one that has imported it: the command without its seconds of imports."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("topd.assemble", "topd.loop", "topd.report.page", "topd.run.checkpoint", "topd.serve.server"),
        *("uvicorn", "transformers.models.qwen3.modeling_qwen3"),
    ]
)


class Topd:
    """What the tests use of `subprocess.Popen`; `stdout` holds stderr too. `limit`: of the size of files it writes, in bytes."""

    def __init__(self, *words: str, limit: int | None = None) -> None:
        reader, writer = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=_run, args=(words, {"OMP_NUM_THREADS": "1"}, writer, limit))
        self._process.start()
        writer.close()
        self.stdout = os.fdopen(os.dup(reader.fileno()))
        reader.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code; None if it has not ended after that time."""
        self._process.join(seconds)
        return self.returncode

    def communicate(self) -> tuple[str, None]:
        """The rest of what it prints, once it has ended."""
        with self.stdout:
            output = self.stdout.read()
        self.wait()
        return output, None


def _run(words: tuple[str, ...], environment: Mapping[str, str], output: Connection, limit: int | None) -> None:
    import resource

    from topd.cli import main

    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    output.close()
    # the old ones remember what was there
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", 1, errors="backslashreplace") for descriptor in (1, 2))
    os.environ.update(environment)
    sys.argv = ["topd", *words]
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    sys.exit(main())
