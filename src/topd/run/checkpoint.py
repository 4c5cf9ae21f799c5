"""Save and resume, exactly: weights, optimizer, and how far the step in progress has come.

A checkpoint folder is named after its contents: step_000010 (ten steps done), step_000010_update_000003 (and three updates of
the eleventh), so names sort by time. It is written under a temporary name, its marker last, and renamed; only folders with the
marker are read. The marker holds the digests of the other files, and a checkpoint that differs from them is refused. Only
safetensors and JSON are loaded. The rollouts of a step in progress are in rollouts/.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from topd.errors import ConfigError, RunStopped, first_line
from topd.models.logprobs import Tokens
from topd.models.proof import TOLERANCE, distance, make_probe, probe_logprobs
from topd.run import digests
from topd.run.files import PARTIAL, remove, replacing
from topd.run.interrupt import uninterrupted
from topd.trainer.step import Trainer
from topd.types import UpdateReport

MARKER = "COMPLETE"

_NUMBERS, _STREAMS = ("loss", "grad_norm", "learning_rate"), ("log_importance", "clipped")
"""Fields of an UpdateReport: numbers, and tensors per token."""


def name_of(steps_done: int, num_updates: int) -> str:
    """Folder name for whole steps and, if not 0, updates made in the next step."""
    return f"step_{steps_done:06d}" + (f"_update_{num_updates:06d}" if num_updates else "")


def save(folder: Path, trainer: Trainer, *, steps_done: int, keep: int, probe: Sequence[Tokens] = ()) -> Path:
    """Write a checkpoint, then remove all but the newest `keep`. Raises RunStopped if the disk refuses; older ones stay.

    `steps_done` are whole steps. The policy's log-probs of `probe` (default: the canary) are included.
    """
    path = folder / name_of(steps_done, len(trainer.reports))
    if (path / MARKER).is_file():
        return path
    with uninterrupted():
        with replacing(path) as partial:
            partial.mkdir()
            save_file(trainer.policy.saved_weights(), partial / "policy.safetensors")
            save_file(trainer.policy.saved_optimizer(), partial / "optimizer.safetensors")
            streams = {f"{i}/{name}": getattr(report, name) for i, report in enumerate(trainer.reports) for name in _STREAMS}
            save_file(streams, partial / "reports.safetensors")
            state = {
                "steps_done": steps_done,
                "policy_version": trainer.policy.version,
                "reports": [{name: getattr(report, name) for name in _NUMBERS} for report in trainer.reports],
                "probe": _probe(trainer, probe or make_probe(trainer.policy.model.tokenizer)),
                "digests": True,  # with this an empty marker is damage, not an older version
            }
            (partial / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")
            (partial / MARKER).write_text(json.dumps({"sha256": digests.of_folder(partial)}, indent=2), encoding="utf-8")
        for old in complete(folder)[:-keep]:
            (old / MARKER).unlink()  # first, so that no kill leaves half a checkpoint with its marker
            remove(old)
    return path


def _folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_[0-9]*") if not path.name.endswith(PARTIAL))


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return [path for path in _folders(folder) if (path / MARKER).exists()]


def passed_over(folder: Path) -> list[Path]:
    """Folders newer than any complete checkpoint, whose marker is lost: saving creates both at once."""
    last = max((path.name for path in complete(folder)), default="")
    return [path for path in _folders(folder) if path.name > last and not (path / MARKER).is_file()]


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint, if there is one."""
    return next(reversed(complete(folder)), None)


def is_proven(path: Path) -> bool:
    """True if a checkpoint holds digests of its files; those of older versions do not."""
    return (path / MARKER).stat().st_size > 0


def damage(path: Path) -> str:
    """Difference between a checkpoint and the saved one; "" if there is none, or if it was saved without digests."""
    try:
        marker = (path / MARKER).read_text(encoding="utf-8")
        if not marker:
            had_digests = "digests" in json.loads((path / "state.json").read_text(encoding="utf-8"))
            return f"{MARKER} is empty, but held digests" if had_digests else ""
        return digests.difference(dict(json.loads(marker)["sha256"]), digests.of_folder(path, but=MARKER))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        return f"{type(error).__name__}: {first_line(error)}"


def _refusal(path: Path, reason: str) -> ConfigError:
    before = [other for other in complete(path.parent) if other.name < path.name and not damage(other)]
    remedy = (
        "No undamaged one precedes it. Delete that folder, and the run restarts from the first step with its stored rollouts."
    )
    if before:
        unproven = "" if is_proven(before[-1]) else " (it has no digests to prove that)"
        remedy = f"Delete that folder to continue from {before[-1].name}, which is undamaged{unproven}."
    return ConfigError(f"the checkpoint {path} is damaged, or another version wrote it: {reason}. {remedy}")


def restore(path: Path, trainer: Trainer) -> int:
    """Load a checkpoint; returns the whole steps done. Raises ConfigError for a damaged one, RunStopped if the policy differs."""
    if reason := damage(path):
        raise _refusal(path, reason)
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        saved = load_file(path / "policy.safetensors")
        optimizer, streams = load_file(path / "optimizer.safetensors"), load_file(path / "reports.safetensors")
        streams = {name.replace("log_ratio", "log_importance"): stream for name, stream in streams.items()}  # of earlier versions
        reports = tuple(
            UpdateReport(**row, **{name: streams[f"{i}/{name}"] for name in _STREAMS}) for i, row in enumerate(state["reports"])
        )
        steps_done, policy_version = int(state["steps_done"]), int(state["policy_version"])
        probe = [Tokens(tuple(ids[:1]), (tuple(ids[1:]),)) for ids in state["probe"]["token_ids"]]
        expected = torch.tensor(state["probe"]["logprobs"])
        trainer.policy.restore(saved)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        raise _refusal(path, f"{type(error).__name__}: {first_line(error)}") from error
    off = distance(probe_logprobs(trainer.policy.model, probe), expected)
    if not off <= TOLERANCE:
        raise RunStopped(
            f"the checkpoint {path} was restored, but the policy differs from the saved one: its log-probs of fixed tokens are "
            f"off by {off:.3g} nats on average (at most {TOLERANCE:g} allowed). Nothing was written. Check whether the folder of "
            "student.name holds other weights than before (a checkpoint with adapters holds only theirs), and whether "
            "transformers or peft changed. Then run the same command, or delete that folder to continue from the one before."
        )
    trainer.policy.restore_optimizer(optimizer)
    trainer.reports, trainer.policy.version = reports, policy_version
    return steps_done


def _probe(trainer: Trainer, groups: Sequence[Tokens]) -> dict[str, object]:
    """Fixed tokens, one sequence per group, and the policy's log-probs of them."""
    return {
        "token_ids": [[*group.prompt_ids, *group.completions[0]] for group in groups],
        "logprobs": probe_logprobs(trainer.policy.model, groups).tolist(),
    }
