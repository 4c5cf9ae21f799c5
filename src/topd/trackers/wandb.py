"""Weights & Biases: offline below the run folder's trackers/wandb, unless the user is logged in or sets WANDB_MODE."""

import netrc
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from topd.trackers.tracker import Start, Tracker
from topd.trackers.values import Table

PROJECT = "topd"


class Run(Tracker):
    @staticmethod
    def where(folder: Path) -> str:
        _settle(folder)
        names = ("WANDB_MODE", "WANDB_BASE_URL", "WANDB_ENTITY", "WANDB_PROJECT")
        return " ".join(f"{name}={os.environ.get(name, '')}" for name in names)

    def __init__(self, start: Start) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", start.name),
            id=start.run_id,
            resume=None if start.run_id is None else "allow",
            config={**start.config, "environment": start.environment},
            allow_val_change=True,
        )
        self._teardown = wandb.teardown
        self._table = wandb.Table
        self.run_id = self._run.id
        self.by_hand = f"wandb sync {shlex.quote(self._run.settings.sync_dir)}"
        self._calls = start.calls
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._log(step, numbers)

    def summarise(self, step: int, numbers: Mapping[str, float], table: Table) -> None:
        rows = self._table(columns=list(table.columns), data=[list(row) for row in table.rows])
        self._log(step, {**numbers, "final": rows})

    def _log(self, step: int, content: Mapping[str, Any]) -> None:
        """wandb's own step counts calls, on over a resume; the x-axis is the number called step (`define_metric`)."""
        self._run.log({**content, "step": step}, step=self._calls, commit=True)
        self._calls += 1

    def finish(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "finished" else 1)
        self._teardown()


def _settle(folder: Path) -> None:
    """Settings for whatever the user's environment says nothing about."""
    settings = {
        "WANDB_DIR": str(folder),
        "WANDB_DATA_DIR": str(folder / "data"),
        "WANDB_CACHE_DIR": str(folder / "cache"),
        "WANDB_ARTIFACT_DIR": str(folder / "artifacts"),
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "WANDB_DISABLE_GIT": "true",
        "WANDB_DISABLE_CODE": "true",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_X_DISABLE_STATS": "true",
        "WANDB_X_DISABLE_META": "true",
        "WANDB_X_SAVE_REQUIREMENTS": "false",
        "WANDB_HOST": "-",
        "WANDB_INIT_TIMEOUT": "30",
        "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "1",  # else rows are lost when its process ends early
    }
    if not _is_logged_in():
        settings["WANDB_MODE"] = "offline"
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _is_logged_in() -> bool:
    """Whether a key is at hand, in the environment or where `wandb login` puts it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
