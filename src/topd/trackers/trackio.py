"""trackio: a SQLite file in the run folder's trackers/trackio, unless the user's environment names another place."""

import os
import secrets
import warnings
from collections.abc import Mapping
from pathlib import Path

from topd.trackers.tracker import Start, Tracker
from topd.trackers.values import Table, flat

PROJECT = "topd"


class Run(Tracker):
    @staticmethod
    def where(folder: Path) -> str:
        os.environ.setdefault("TRACKIO_DIR", str(folder))
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        if not (os.environ.get("TRACKIO_SERVER_URL") or os.environ.get("TRACKIO_SPACE_ID")):
            os.environ.setdefault("HF_HUB_OFFLINE", "1")  # else trackio asks the Hub for the user's name
        return next(
            (os.environ[name] for name in ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID") if os.environ.get(name)),
            "here" if os.environ["TRACKIO_DIR"] == str(folder) else os.environ["TRACKIO_DIR"],
        ).partition("?")[0]  # a server's URL may carry a token

    def __init__(self, start: Start) -> None:
        import trackio

        # trackio goes on with the latest run of a name: in a store that others write to, the name must be this run's alone
        alone = self.where(start.folder) == "here"
        self._table = trackio.Table
        self._run = trackio.init(
            project=PROJECT,
            name=start.run_id or (start.name if alone else f"{start.name}-{secrets.token_hex(3)}"),
            resume="never" if start.run_id is None else "allow",
            config={**flat(start.config), **flat(start.environment, "environment.")},
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        self.run_id = self._run.name
        self._step = start.steps_done
        self._warned: list[str] = []
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest, **more: self._warned.append(str(message))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._step = step
        self._run.log({name: x for name, x in numbers.items() if name != "step"}, step=step)
        self._check()

    def summarise(self, step: int, numbers: Mapping[str, float], table: Table) -> None:
        self.log(step, numbers)
        rows = self._table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._run.log({"final": rows}, step=step)

    def finish(self, status: str) -> None:
        self._run.log({"status": status}, step=self._step)
        self._run.finish()
        self._check()

    def _check(self) -> None:
        """trackio only warns of what it could not write."""
        for message in self._warned:
            if "could not" in message.lower() or "failed" in message.lower():
                raise RuntimeError(message)
