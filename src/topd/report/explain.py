"""`topd explain`: one group of a run, token by token, in the terminal.

Reads a run folder in any state; needs neither torch nor a model. Everything that is shown can be printed as it is: text reaches
the terminal as segments (report/tokens.py), never as markup.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from topd.errors import ConfigError
from topd.report.credit import (
    STREAMS,
    Extreme,
    Stream,
    algorithm_of,
    differ_within,
    extremes,
    floor_of,
    settings_in_use,
    streams_of,
)
from topd.report.scales import NEAR_ZERO, Scale, ratio, scale_of, signed
from topd.report.stored import StoredRun, read_run
from topd.report.stored_step import Numbers, StoredGroup, StoredRollout, StoredStep
from topd.report.terminal import Column, open_console, plain_text, print_block, print_table, token_text
from topd.report.tokens import Shown, Texts, plain, show_text
from topd.run.files import spans

_LABEL = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Selected group, rollout and colours, all known to exist."""

    run: StoredRun
    step: StoredStep
    group: StoredGroup
    rollout: StoredRollout
    stream: Stream
    """Quantity that colours the tokens."""
    scale: Scale
    texts: Texts
    worst: Sequence[Extreme]
    """The step's tokens with the lowest log-ratio; with the lowest advantage, where there is no teacher."""
    best: Sequence[Extreme]
    """The step's tokens with the highest advantage."""


def explain(
    path: Path | str,
    *,
    step: int | None = None,
    group: str | None = None,
    rollout: int | None = None,
    color: str | None = None,
    tokens: bool = False,
    console: Console | None = None,
) -> None:
    """Show one group of a run. Raises ConfigError for what the run does not hold.

    `step`: the last one with rollouts, if None. `group`: its index in the step, or a prompt id; if None, the one with the step's
    worst-rejected token, or without a teacher with the largest |advantage|. `rollout`: whose tokens are listed; if None, the one
    with the group's worst token. `color`: one of STREAMS. `tokens`: list those of all rollouts.
    """
    console = console or open_console()
    view = _find(read_run(path), step, group, rollout, color)
    _show_head(view, console)
    for each in view.group.rollouts:
        _show_completion(view, each, console)
    for each in view.group.rollouts if tokens else [view.rollout]:
        _show_tokens(view, each, console)
    _show_extremes(view, console)
    for problem in view.run.notes:
        console.print(Text("note: ").append_text(plain_text(problem)), style="yellow")


def _find(run: StoredRun, step: int | None, group: str | None, rollout: int | None, color: str | None) -> View:
    stored = _step(run, step)
    leading = "log_ratio" if _has(stored, "log_ratio") else "advantage"
    color = color or leading
    if color not in STREAMS:
        raise ConfigError(f"--color must be one of {', '.join(STREAMS)}; found '{color}'.")
    if not _has(stored, color):
        there = [name for name in STREAMS if _has(stored, name)]
        raise ConfigError(
            f"--color {color}: the rollouts of step {stored.step} hold no {color}. Choose from {', '.join(there) or 'nothing'}."
        )
    worst = extremes(stored, leading, lowest=True)
    best = extremes(stored, "advantage" if _has(stored, "advantage") else leading, lowest=False)
    outstanding = worst[:1] if leading == "log_ratio" else sorted([*worst[:1], *best[:1]], key=lambda token: -abs(token.value))
    chosen = _group(stored, group, outstanding[0].group if outstanding else 0)
    return View(
        run=run,
        step=stored,
        group=chosen,
        rollout=_rollout(chosen, rollout, leading),
        stream=next(each for each in streams_of(run) if each.key == color),
        scale=scale_of(each.streams[color] for each in chosen.rollouts if color in each.streams),
        texts=Texts(run.vocabulary()),
        worst=worst,
        best=best,
    )


def _step(run: StoredRun, number: int | None) -> StoredStep:
    if not run.steps:
        raise ConfigError(f"the run in '{run.path}' has no rollouts yet. Wait for its first step, or name another run.")
    recorded = [row["step"] for row in run.metrics if row["step"] in run.steps]
    number = (recorded or run.steps)[-1] if number is None else number
    if number not in run.steps:
        raise ConfigError(f"--step: step {number} has no rollouts; there are steps {spans(run.steps)}.")
    stored = run.step(number)
    if stored is None or not any(group.num_tokens for group in stored.groups):
        reason = run.problems[-1] if stored is None and run.problems else f"step {number} holds no tokens"
        others = [step for step in run.steps if step != number]
        raise ConfigError(f"--step: {reason}. " + (f"Choose another: {spans(others)}." if others else "There is no other."))
    return stored


def _group(step: StoredStep, wanted: str | None, default: int) -> StoredGroup:
    if wanted is None:
        return step.groups[default]
    for group in step.groups:
        if wanted in (str(group.index), group.prompt_id):
            return group
    raise ConfigError(
        f"--group: step {step.step} has no group '{wanted}'. Give an index from 0 to {len(step.groups) - 1}, or one of its "
        f"prompt ids, such as '{plain(show_text(step.groups[default].prompt_id))}'."
    )


def _rollout(group: StoredGroup, wanted: int | None, leading: str) -> StoredRollout:
    if wanted is None:
        return min(group.rollouts, key=lambda rollout: _lowest(rollout.streams.get(leading), leading))
    if 0 <= wanted < len(group.rollouts):
        return group.rollouts[wanted]
    raise ConfigError(f"--rollout: group {group.index} has no rollout {wanted}; there are 0 to {len(group.rollouts) - 1}.")


def _lowest(values: Numbers | None, leading: str) -> float:
    if values is None or not np.any(values == values):
        return np.inf
    values = values[values == values]
    return float(values.min() if leading == "log_ratio" else -np.abs(values).max())


def _has(step: StoredStep, stream: str) -> bool:
    return any(stream in rollout.streams for rollout in step.rollouts)


def _show_head(view: View, console: Console) -> None:
    run, step, group = view.run, view.step, view.group
    algorithm = algorithm_of(run)
    settings = ", ".join(f"{key} {value}" for key, value in settings_in_use(run).items())
    planned = f" of {run.planned_steps}" if run.planned_steps else ""
    tokens = step.num_tokens
    facts = [
        ("run", plain_text(run.path)),
        (
            "algorithm",
            plain_text(f"{algorithm.get('type', 'unknown')}: {settings}" if settings else algorithm.get("type", "unknown")),
        ),
        ("step", plain_text(f"{step.step}{planned}: {len(step.groups)} groups, {tokens:,} tokens")),
        (
            "group",
            plain_text(f"{group.index}: {group.prompt_id}, domain {group.domain}, {_counted(len(group.rollouts), 'rollout')}"),
        ),
        ("prompt", plain_text(group.prompt, lines=True)),
        ("answer", plain_text(group.answer if group.answer is not None else "none: not graded")),
    ]
    if (floor := floor_of(run)) is not None:
        facts.insert(2, ("floor", Text(f"no token reward is below {signed(floor[0])} = {floor[1]}")))
    for name, value in (*facts, ("colour", _legend(view, colored=console.color_system is not None and not console.no_color))):
        print_block(console, value, label=name, indent=_LABEL)
    console.print()


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _legend(view: View, *, colored: bool) -> Text:
    """The numbers at which the tones begin, in those tones."""
    in_unit = f" in {view.stream.unit}" if view.stream.unit else ""
    legend = Text(f"{view.stream.label}{in_unit}, {view.stream.meaning}: ")
    steps = [*(-step for step in reversed(view.scale.steps)), 0.0, *view.scale.steps]
    for value in steps:
        legend.append(f" {value:+g} " if value else " 0 ", view.scale.style(value))
    return legend.append(" orange below 0, blue above" if colored else " no colours here: the signs in the tables say the same")


def _show_completion(view: View, rollout: StoredRollout, console: Console) -> None:
    streams = rollout.streams
    parts = [f"grade {rollout.grade:g}", str(rollout.finish_reason), _counted(len(rollout.token_ids), "token")]
    if len(streams.get("token_reward", ())):
        parts.append(f"mean token reward {signed(float(streams['token_reward'].astype(np.float64).mean()))}")
    if len(streams.get("return", ())):
        parts.append(f"sum of returns {signed(float(streams['return'].astype(np.float64).sum()))}")
    values = streams.get(view.stream.key)
    if values is not None and np.any(values == values):
        name = view.stream.label
        low, high = int(np.nanargmin(values)), int(np.nanargmax(values))
        ends = f"{signed(float(values[low]))} at {low} to {signed(float(values[high]))} at {high}"
        parts.append(f"{name} {signed(float(values[low]))} throughout" if values[low] == values[high] else f"{name} {ends}")
    print_block(console, plain_text(", ".join(parts)), label=f"rollout {rollout.index}", indent=_LABEL)
    text = Text()
    for i, shown in enumerate(view.texts.show(rollout.token_ids)):
        text.append_text(token_text(shown, view.scale.style(float(values[i])) if values is not None else "", lines=True))
    print_block(console, text, indent=_LABEL)


_COLUMNS = (
    *(Column(heading="pos", width=3), Column(heading="id")),
    *(Column(heading=heading, width=6) for heading in ("student\nlog-p", "teacher\nlog-p", "log-\nratio", "prob.\nratio")),
    *(Column(heading=heading, width=6) for heading in ("token\nreward", "return", "advan-\ntage", "imp.\nratio")),
    *(Column(heading="clip"), Column(heading="token")),
)


def _show_tokens(view: View, rollout: StoredRollout, console: Console) -> None:
    update = f", importance ratios as update {rollout.update} saw them" if rollout.update is not None else ""
    console.print("", Text(f"tokens of rollout {rollout.index} of group {view.group.index}{update}", style="bold"), sep="\n")
    shown = view.texts.show(rollout.token_ids)
    print_table(console, _COLUMNS, [_token_row(view, rollout, i, shown[i]) for i in range(len(shown))])


def _token_row(view: View, rollout: StoredRollout, i: int, shown: Shown) -> list[Text | str]:
    def of(name: str) -> float | None:
        values = rollout.streams.get(name)
        return None if values is None else float(values[i])

    def cell(name: str) -> Text:
        value = of(name)
        if value is None or abs(value) < NEAR_ZERO:
            return Text(signed(value), style="dim")
        return Text(signed(value), style=view.scale.style(value) if name == view.stream.key else "")

    log_ratio, clipped = of("log_ratio"), of("clipped")
    color = of(view.stream.key)
    return [
        str(i),
        str(rollout.token_ids[i]),
        *(cell(name) for name in ("behaviour_logprob", "teacher_logprob", "log_ratio")),
        ratio(None if log_ratio is None else float(np.exp(np.minimum(log_ratio, 700.0)))),
        *(cell(name) for name in ("token_reward", "return", "advantage")),
        ratio(of("importance_ratio")),
        "-" if clipped is None else "yes" if clipped else "no",
        token_text(shown, view.scale.style(color) if color is not None else ""),
    ]


def _show_extremes(view: View, console: Console) -> None:
    teacher = _has(view.step, "log_ratio")
    context = 24 if not console.is_terminal or console.width >= 100 else 10
    worst = "worst-rejected tokens of the step (lowest log-ratio)" if teacher else "tokens of the step with the lowest advantage"
    best = "most-credited tokens of the step (highest advantage)"
    lists = (("log_ratio" if teacher else "advantage", worst, view.worst), ("advantage", best, view.best))
    shown = [(title, tokens) for stream, title, tokens in lists if differ_within(view.step, stream)]
    if not shown:
        console.print("", Text("all tokens of a completion have the same credit: none stands out"), sep="\n")
    for title, tokens in shown:
        console.print("", Text(f"the {len(tokens)} {title}", style="bold"), sep="\n")
        names = ("student\nlog-p", "teacher\nlog-p", "log-\nratio", "token\nreward", "advan-\ntage")
        columns = [
            *(Column(heading=heading) for heading in ("group", "rollout", "pos")),
            *(Column(heading=heading, width=6) for heading in names),
            Column(heading="before \u25b8 token"),
        ]
        print_table(console, columns, [_extreme_row(view, each, context) for each in tokens])
    console.print("", Text("go on with --group GROUP --rollout ROLLOUT", style="dim"), sep="\n")


def _extreme_row(view: View, extreme: Extreme, context: int) -> list[Text | str]:
    rollout = view.step.groups[extreme.group].rollouts[extreme.rollout]
    numbers = []
    for name in ("behaviour_logprob", "teacher_logprob", "log_ratio", "token_reward", "advantage"):
        values = rollout.streams.get(name)
        numbers.append(signed(None if values is None else float(values[extreme.token])))
    start = max(0, extreme.token - context)
    shown = view.texts.show(rollout.token_ids[start : extreme.token + 1])
    before = Text().join(token_text(each, "dim") for each in shown[:-1])
    where = [str(number) for number in (extreme.group, extreme.rollout, extreme.token)]
    before = before[-context:] if len(before) > context else before
    value = rollout.streams.get(view.stream.key)
    style = view.scale.style(float(value[extreme.token])) if value is not None else ""
    return [*where, *numbers, before + Text(" \u25b8 ", "dim") + token_text(shown[-1], style)]
