"""MLflow: a SQLite file in the run folder's trackers/mlflow, unless the user sets MLFLOW_TRACKING_URI."""

import contextlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from topd.trackers.tracker import Start, Tracker
from topd.trackers.values import Table, flat

EXPERIMENT = "topd"
BATCH = 100
"""Parameters that the server takes in one request."""
FIRST_TRIES = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""For the first requests: a server that is not there is noticed within seconds."""
LONGEST_VALUE = 6000
LONGEST_TAG = 5000

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class Run(Tracker):
    @staticmethod
    def where(folder: Path) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        return os.environ.get("MLFLOW_TRACKING_URI", "here")

    def __init__(self, start: Start) -> None:
        from mlflow.tracking import MlflowClient

        here = "MLFLOW_TRACKING_URI" not in os.environ
        self._client = MlflowClient(tracking_uri=f"sqlite:///{start.folder / 'mlflow.db'}" if here else None)
        with _impatient(self._client.tracking_uri):
            if start.run_id is None:
                experiment = self._experiment(str(start.folder / "artifacts") if here else None)
                self.run_id = self._client.create_run(experiment, run_name=start.name).info.run_id
            else:
                self.run_id = start.run_id
                self._client.update_run(self.run_id, status="RUNNING")
        self._configure(start)

    def _experiment(self, artifacts: str | None) -> str:
        if os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name, artifact_location=artifacts)

    def _configure(self, start: Start) -> None:
        """Parameters cannot change: what a resumed run sets anew becomes a tag."""
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self.run_id).data.params
        config = {_name(key): json.dumps(value)[:LONGEST_VALUE] for key, value in flat(start.config).items()}
        for batch in _batches(Param(key, value) for key, value in config.items() if key not in known):
            self._client.log_batch(self.run_id, params=batch)
        tags = {f"config.{key}": value for key, value in config.items() if key in known and known[key] != value}
        tags |= {f"environment.{_name(key)}": json.dumps(value) for key, value in flat(start.environment).items()}
        for batch in _batches(RunTag(key, value[:LONGEST_TAG]) for key, value in tags.items()):
            self._client.log_batch(self.run_id, tags=batch)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for batch in _batches(Metric(_name(name), x, now, step) for name, x in numbers.items()):
            self._client.log_batch(self.run_id, metrics=batch)

    def summarise(self, step: int, numbers: Mapping[str, float], table: Table) -> None:
        self.log(step, numbers)
        content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        self._client.log_dict(self.run_id, content, "final.json")  # the form of mlflow.log_table, which would need pandas
        self._client.set_tag(self.run_id, "mlflow.loggedArtifacts", json.dumps([{"path": "final.json", "type": "table"}]))

    def finish(self, status: str) -> None:
        self._client.set_tag(self.run_id, "status", status)
        self._client.set_terminated(self.run_id, _STATUS[status])


@contextlib.contextmanager
def _impatient(server: str) -> Iterator[None]:
    """Few and short tries, unless the user's environment says how many. Later requests outlast a server's restart."""
    from mlflow.exceptions import MlflowException

    ours = {name: value for name, value in FIRST_TRIES.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    except MlflowException as error:
        if "Max retries exceeded" not in str(error):
            raise
        raise ConnectionError(f"no answer from {server}") from error
    finally:
        for name in ours:
            del os.environ[name]


def _name(name: str) -> str:
    """A name with nothing in it that MLflow refuses."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-./ ") else "_" for c in name)


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(items)
    while batch := list(islice(rest, BATCH)):
        yield batch
