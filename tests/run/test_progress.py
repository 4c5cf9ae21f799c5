"""What a person sees."""

import io
import json
from pathlib import Path

from rich.console import Console

import topd
from tests.e2e.tiny import tiny_config
from topd import config_file
from topd.loop import run
from topd.run.progress import Display
from topd.run.summary import print_summary


def console(**options: object) -> Console:
    return Console(file=io.StringIO(), width=120, **options)


def test_a_terminal_gets_a_bar_with_tokens_per_second_and_others_get_lines() -> None:
    for terminal in (True, False):
        display = Display(console(force_terminal=terminal))
        display.start_step()
        with display.phase("rollout", "step 1", total=10) as on_tokens:
            on_tokens(10)
        shown = display.console.file.getvalue()
        assert ("rollout" in shown) is terminal
        assert ("tok/s" in shown) is terminal
        assert display.seconds().keys() == {"rollout", "step"}


def test_a_run_shows_one_line_per_step_and_ends_with_the_table(tmp_path: Path) -> None:
    display = Display(console())
    run(config_file.load(tiny_config(tmp_path / "run")), display)
    lines = display.console.file.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/2", "2/2"]
    assert all("gap" in line and "grade" in line for line in steps)
    text = "\n".join(lines)
    for word in ("base", "student", "teacher", "95 % interval", "summary.json", "model"):
        assert word in text


def test_the_table_names_the_pass_at_k_it_shows(tmp_path: Path) -> None:
    summary = topd.train(tiny_config(tmp_path / "run", eval__samples_per_problem=6, run__steps=1))
    seen = console()
    print_summary(summary, tmp_path / "run", seen)
    assert "pass@6" in seen.file.getvalue()
    assert "6" in summary["benchmarks"]["held_out"]["student"]["pass_at"]
    assert json.loads((tmp_path / "run/summary.json").read_text()) == summary
