"""report.html: one file that needs no network, and in which nothing that a model wrote can execute.

Every text goes through the template's escaping or, in the compressed data, through textContent; the page's policy allows only its
own script, by its hash, and no connection at all (but to the server that `--watch` starts).
"""

import base64
import contextlib
import functools
import gzip
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from topd import __version__
from topd.errors import ConfigError, RunStopped, first_line
from topd.report.charts import COLORS, axes, charts, legend
from topd.report.health.checks import verdicts
from topd.report.lens import MAX_TOKENS, Held, hold
from topd.report.rescoring.figures import rescored
from topd.report.stored import StoredRun, folder_at, names, number, read_run
from topd.report.stored_step import StoredStep
from topd.run.files import flat, spans, write_text
from topd.run.gaps import excluded

SECTIONS = (("result", "Result"), ("health", "Health"), ("curves", "Curves"), ("tokens", "Tokens"), ("settings", "Settings"))
_SCRIPTS = ("dom.js", "token_text.js", "card.js", "lens.js", "curves.js", "report.js")
_CHART_SECTIONS = ("Result", "Teacher", "Update", "Completions", "Speed", "Other")


def write(
    paths: Sequence[Path | str],
    output: Path | str | None = None,
    *,
    max_tokens: int = MAX_TOKENS,
    steps: Sequence[int] | None = None,
    say: Callable[[str], object] = lambda note: None,
) -> Path:
    """Write the report of some run folders and return where: `output`, or report.html in the folder of a single run, or here.

    `say` is given what the folders lack or what is damaged in them, which the page shows too.
    Raises ConfigError for a folder that holds no run, or an output that cannot be written.
    """
    runs = read_runs(paths)
    target = _target(runs, output)
    check_steps(runs, steps)
    text = render(runs, max_tokens=max_tokens, steps=steps)
    try:
        write_text(target.resolve(), text)
    except RunStopped as error:
        raise ConfigError(
            f"{target} could not be written: {first_line(error.__cause__ or error)}. Give another with --output."
        ) from error
    for run in runs:
        for note in run.notes:
            say(f"{run.name}: {note}")
    return target


def read_runs(paths: Sequence[Path | str]) -> list[StoredRun]:
    """Every folder once, however it is named. Raises ConfigError for one that holds no run."""
    unique: dict[Path, Path | str] = {}
    for path in paths:
        unique.setdefault(folder_at(path).resolve(), path)
    return [read_run(path) for path in unique.values()]


def check_steps(runs: Sequence[StoredRun], steps: Sequence[int] | None) -> None:
    """Raise ConfigError for steps that no run holds, or will hold."""
    for step in steps or ():
        if not any(
            step in run.steps or (not run.finished and len(run.metrics) < step <= (run.planned_steps or 0)) for run in runs
        ):
            stored = sorted({number for run in runs for number in run.steps})
            raise ConfigError(f"--steps: there are no rollouts of step {step}. Stored are: {spans(stored) or 'none'}.")


def _target(runs: Sequence[StoredRun], output: Path | str | None) -> Path:
    """Path of the page: through links, and never over anything but a plain file."""
    target = folder_at(output) if output is not None else (runs[0].path if len(runs) == 1 else Path()) / "report.html"
    if target.exists() and not target.is_file():
        raise ConfigError(f"--output {target} is a folder or a device. Give the name of a file.")
    if not target.resolve().parent.is_dir():
        raise ConfigError(f"--output {target}: there is no folder {target.parent}. Make it, or give another.")
    return target


def render(
    runs: Sequence[StoredRun],
    *,
    max_tokens: int = MAX_TOKENS,
    steps: Sequence[int] | None = None,
    watch: float | None = None,
    state: str = "",
) -> str:
    """The page as a string. `steps`: whose rollouts it holds. `watch`: seconds after which it looks for news, if it is served;
    `state`: what it then compares with what the server says."""
    held = hold(runs, max_tokens=max_tokens, steps=steps)
    labels = names(runs)
    other = [entry for run, label in zip(runs, labels, strict=True) for entry in rescored(run, label)]
    data = {
        "charts": [*charts(runs), *(chart for entry in other for chart in entry["charts"])],
        "axes": axes(runs),
        "legend": legend(labels),
        "lens": {"runs": [each.data for each in held]},
    }
    script = _script()
    shown = [
        _run(run, label, COLORS[i % len(COLORS)], each.steps)
        for i, (run, label, each) in enumerate(zip(runs, labels, held, strict=True))
    ]
    headline = [row for run, label in zip(runs, labels, strict=True) for row in _headline(run, label)]
    page = _template().render(
        title=" and ".join(labels) if len(runs) < 4 else f"{len(runs)} runs",
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M"),
        policy=_policy(script, served=watch is not None),
        watch=watch,
        state=state,
        css=Markup(_asset("report.css") + _asset("lens.css")),
        js=Markup(script),
        plotly=_library(),
        data=_packed(json.dumps(data, cls=PlotlyJSONEncoder, separators=(",", ":"))),
        sections=[*SECTIONS[:4], *([("rescored", "Rescored")] if other else []), SECTIONS[4]],
        chart_sections=_CHART_SECTIONS,
        runs=shown,
        headline=headline,
        benchmarks=len({row["benchmark"] for row in headline}),
        differences=differences(runs),
        sampling=_sampling(held, runs),
        has_teacher=any(each.data["has_teacher"] for each in held),
        rescores=other,
    )
    return str(page)


def differences(runs: Sequence[StoredRun]) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs, but for the folder: (dotted key, value in each run)."""
    settings = [flat(run.config) for run in runs]
    keys = sorted({key for each in settings for key in each} - {"run.directory", "run.resume"})
    rows = [(key, [_written_out(each[key]) if key in each else "-" for each in settings]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _written_out(setting: Any) -> str:
    return json.dumps(setting, ensure_ascii=False, default=str)


def _template() -> Any:
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(_asset("report.html.j2"))


def _asset(name: str) -> str:
    return files("topd.report").joinpath("assets", name).read_text(encoding="utf-8")


def _script() -> str:
    """The page's one script: its files in one scope."""
    return "\n".join(('(() => {\n"use strict";', *map(_asset, _SCRIPTS), "})();"))


@functools.cache
def _library() -> str:
    return _packed(get_plotlyjs())


def _packed(text: str) -> str:
    """gzip and base64: what report.js unpacks. The same text gives the same bytes."""
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def _policy(script: str, *, served: bool) -> str:
    """Content-Security-Policy: our script, what it loads itself (the plotting library), and nothing else."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{digest}' 'strict-dynamic'",
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "connect-src 'self'" if served else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _run(run: StoredRun, label: str, color: str, steps: Sequence[StoredStep]) -> dict[str, Any]:
    judged = verdicts(run, steps)
    good = sum(verdict.level == "good" for verdict in judged)
    levels = [f"{sum(verdict.level == level for verdict in judged)} {level}" for level in ("bad", "warning", "note", "good")]
    return {
        "name": label,
        "color": color,
        "state": _state(run),
        "problems": run.problems,
        "unproven": run.digests.lost if run.digests is not None else "",
        "verdicts": judged,
        "good": good,
        "counts": ", ".join(count for count in levels if not count.startswith("0 ")) + ".",
        "config": _text(run.path / "config.toml"),
        "environment": list(flat(run.environment).items()),
    }


def _state(run: StoredRun) -> str:
    done, planned = len(run.metrics), run.planned_steps
    algorithm, student, teacher = (run.setting(key) for key in ("algorithm.type", "student.name", "teacher.name"))
    what = f"{algorithm}, {student}" + (f" from {teacher}" if teacher else "")
    if run.finished:
        return f"{what}; finished after {done} steps."
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(_written(run.path)))
    return f"{what}; {done} of {planned or '?'} steps, not finished; it last wrote something at {when}."


def _written(folder: Path) -> float:
    """Time at which the run last wrote something. Files that vanish meanwhile do not count: a run replaces its own."""
    newest = 0.0
    for name in ("config.toml", "metrics.jsonl", "evals.jsonl", "rollouts", "updates", "checkpoints"):
        with contextlib.suppress(OSError):
            newest = max(newest, (folder / name).stat().st_mtime)
    return newest


def _headline(run: StoredRun, label: str) -> Iterator[dict[str, Any]]:
    """Base, student (the newest evaluation) and teacher, on every benchmark."""
    for benchmark in dict.fromkeys(row["benchmark"] for row in run.evaluations):
        rows = [row for row in run.evaluations if row["benchmark"] == benchmark]
        student = sorted((row for row in rows if row["model"] == "student"), key=lambda row: row["step"])
        base = [row for row in student[:1] if row["step"] == 0]
        teacher = [row for row in rows if row["model"] == "teacher"][:1]
        three = (("base", base), ("student", [row for row in student[-1:] if row["step"] > 0]), ("teacher", teacher))
        for who, those in three:
            for row in those:
                yield {"run": label, "benchmark": benchmark, "who": who, **_cells(row)}


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    low, high = row["ci95"]
    return {
        "step": str(row["step"]),
        "accuracy": f"{row['avg_at_k']:.1%}",
        "interval": f"{low:.1%} to {high:.1%}",
        "best": _best(row.get("pass_at")),
        "cut": _shown(row.get("truncation_rate"), ".1%"),
        "length": _shown(row.get("mean_length"), ".1f"),
        "samples": f"{row.get('problems', '?')} x {row.get('k', '?')}" + (f" ({words})" if (words := excluded(row)) else ""),
    }


def _best(pass_at: Any) -> str:
    """pass@k of the largest k."""
    by_k = pass_at if isinstance(pass_at, Mapping) else {}
    k = max((k for k in by_k if k.isdecimal()), key=int, default="")
    of_k = by_k.get(k)
    if not isinstance(of_k, Mapping) or (value := number(of_k.get("value"))) is None:
        return "-"
    found_ends = of_k.get("ci95")
    ends = [number(end) for end in found_ends] if isinstance(found_ends, list) else []
    interval = f", {ends[0]:.1%} to {ends[1]:.1%}" if len(ends) == 2 and None not in ends else ""
    return f"{value:.1%} (k = {k}{interval})"


def _shown(value: Any, form: str) -> str:
    return "-" if number(value) is None else format(value, form)


def _sampling(held: Sequence[Held], runs: Sequence[StoredRun]) -> str:
    """Share of the rollouts that the page holds, in words."""
    words, all_there, longest = [], True, 0
    for each, run in zip(held, runs, strict=True):
        steps = each.data["steps"]
        groups, of_groups = sum(len(step["groups"]) for step in steps), sum(step["num_groups"] for step in steps)
        all_there = all_there and groups == of_groups and len(steps) == len(run.steps)
        rollouts = [rollout for step in steps for group in step["groups"] for rollout in group["rollouts"]]
        longest = max([longest, *(len(rollout["ids"]) for rollout in rollouts if len(rollout["ids"]) < rollout["num_tokens"])])
        name = f"{each.data['name']}: " if len(runs) > 1 else ""
        words.append(f"{name}{groups} of the {of_groups} prompts of {len(steps)} steps, out of {len(run.steps)} steps")
    if not any(run.steps for run in runs):
        return "There are no rollouts yet."
    cut = f" Of long completions it holds the first {longest:,} tokens." if longest else ""
    if all_there:
        return "This page holds all rollouts." + cut
    return (
        f"This page holds a sample of the rollouts ({'; '.join(words)}): evenly spread steps, of each as many prompts as fit, "
        f"those with the worst-rejected and the most-credited tokens first.{cut} The lists of tokens are over whole steps."
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"could not be read: {error}"
