"""`topd explain`: the numbers are those of the files, and nothing that a model wrote can do anything to a terminal."""

import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len
from rich.console import Console

import topd
from tests.e2e.tiny import tiny_config
from tests.report.folders import VECTOR, write_run, write_step
from topd.cli import main
from topd.errors import ConfigError
from topd.report.credit import settings_in_use
from topd.report.explain import explain, spans
from topd.report.scales import Scale, ratio, signed
from topd.report.stored import read_run

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
ENV = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
COMMAND = [sys.executable, "-m", "topd", "explain"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain") / "run"
    topd.train(tiny_config(path, eval__max_problems=1))
    return path


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "run")


def shown(path: Path, *, terminal: bool = False, width: int = 80, **options: Any) -> str:
    colors = {"color_system": "truecolor", "force_terminal": True} if terminal else {}
    console = Console(file=io.StringIO(), width=width, soft_wrap=True, highlight=False, **colors)
    explain(path, console=console, **options)
    return console.file.getvalue()


def table(text: str, title: str) -> list[list[str]]:
    """The cells of the lines below a heading that hold numbers."""
    rest = text.split(title, 1)[1].split("\n\n")[0].splitlines()[1:]
    return [line.split() for line in rest if line.split() and line.split()[0].isdigit()]


def stored(path: Path, step: int) -> list[dict[str, Any]]:
    return pq.read_table(path / f"rollouts/step_{step:06d}.parquet").to_pylist()


def tokens_of(path: Path, step: int) -> list[tuple[int, int, int, float, float]]:
    """(group, rollout, position, log-ratio, advantage) of every token, read without the code under test."""
    found, order = [], {}
    for row in stored(path, step):
        order.setdefault(row["prompt_id"], []).append(row)
    for group, rows in enumerate(order.values()):
        for rollout, row in enumerate(rows):
            teacher, student = (np.float32(row[f"{who}_logprobs"]) for who in ("teacher", "behaviour"))
            for i, value in enumerate(teacher - student):
                found.append((group, rollout, i, float(value), row["advantages"][i]))
    return found


def close(cell: str, value: float) -> bool:
    return float(cell) == pytest.approx(value, abs=6e-4 if abs(value) < 10 else 0.06)


def test_the_table_holds_the_numbers_of_the_file(run: Path) -> None:
    text = shown(run, step=1, group="2", rollout=1)
    row = [row for row in stored(run, 1) if row["prompt_id"] == stored(run, 1)[4]["prompt_id"]][1]
    updates = pq.read_table(run / "updates/step_000001.parquet").to_pylist()
    update = next(each for each in updates if (each["prompt_id"], each["rollout"]) == (row["prompt_id"], 1))
    lines = table(text, "tokens of rollout 1 of group 2")
    assert [int(line[0]) for line in lines] == list(range(len(row["completion_ids"])))
    assert [int(line[1]) for line in lines] == row["completion_ids"]
    for i, line in enumerate(lines):
        teacher, student = row["teacher_logprobs"][i], row["behaviour_logprobs"][i]
        expected = [student, teacher, teacher - student, np.exp(teacher - student)]
        expected += [row[name][i] for name in ("token_rewards", "returns", "advantages")] + [update["importance_ratios"][i]]
        assert all(close(cell, value) for cell, value in zip(line[2:10], expected, strict=True)), (line, expected)
        assert line[10] == ("yes" if update["clipped"][i] else "no")
    assert f"grade {row['grade']:g}, {row['finish_reason']}, {len(lines)} tokens" in text
    assert f"mean token reward {np.mean(row['token_rewards']):+.3f}" in text
    assert row["prompt_id"] in text
    assert row["prompt"] in text
    assert "alpha 0.2" in text
    assert "-0.223 = log(1 - alpha)" in text


def test_the_last_step_and_the_worst_rejected_token_come_first(run: Path) -> None:
    text = shown(run)
    group, rollout, position, value, _ = min(tokens_of(run, 2), key=lambda token: token[3])
    assert "2 of 2: 4 groups" in text
    assert f"tokens of rollout {rollout} of group {group}," in text
    first = table(text, "worst-rejected tokens of the step")[0]
    assert [int(cell) for cell in first[:3]] == [group, rollout, position]
    assert close(first[5], value)


def test_the_extremes_are_those_of_the_whole_step(run: Path) -> None:
    text = shown(run, step=1, group="0")
    tokens = tokens_of(run, 1)
    worst = [float(line[5]) for line in table(text, "worst-rejected tokens of the step")]
    best = [float(line[7]) for line in table(text, "most-credited tokens of the step")]
    assert worst == pytest.approx(sorted(token[3] for token in tokens)[:10], abs=6e-3)
    assert best == pytest.approx(sorted((token[4] for token in tokens), reverse=True)[:10], abs=6e-3)


def test_a_group_is_named_by_index_or_prompt_and_all_rollouts_can_be_listed(run: Path) -> None:
    prompt_id = stored(run, 2)[2]["prompt_id"]
    assert shown(run, group=prompt_id) == shown(run, group="1")
    text = shown(run, group="1", tokens=True)
    assert all(table(text, f"tokens of rollout {i} of group 1") for i in (0, 1))


def test_colors_say_what_the_numbers_say(run: Path) -> None:
    """On a terminal the worst token is orange in its completion, and without the colours the text is the same."""
    colored, plain = shown(run, terminal=True, width=200), shown(run, width=200)
    assert ";255;128;0m" in colored
    assert "\x1b" not in plain
    stripped = [line.rstrip() for line in ESCAPE.sub("", colored).splitlines() if "colour" not in line]
    assert stripped == [line.rstrip() for line in plain.splitlines() if "colour" not in line]


@pytest.mark.parametrize("color", ["log_ratio", "token_reward", "return", "advantage"])
def test_tokens_can_be_colored_by(run: Path, color: str) -> None:
    assert re.search(color.replace("_", "."), shown(run, color=color).split("colour")[1].split("\n")[0])


def test_a_scale_diverges_from_zero() -> None:
    scale = Scale(steps=(0.1, 0.5, 2.0, 8.0))
    values = [-np.inf, -8.0, -3.0, -0.5, -0.2, -0.05, 0.0, np.nan, 0.05, 0.2, 0.5, 3.0, 9.0, np.inf]
    assert [scale.level(value) for value in values] == [-4, -4, -3, -2, -1, 0, 0, 0, 0, 1, 2, 3, 4, 4]
    assert scale.style(-3.0).bgcolor != scale.style(3.0).bgcolor


def test_numbers_are_short_and_keep_their_sign() -> None:
    values = [0.0, 1e-9, -0.1234, 9.9996, -12.345, 123.45, -1234.5, 99999.4, -1e7, -np.inf, np.nan, None]
    expected = ["0", "+0.000", "-0.123", "+10.00", "-12.35", "+123.5", "-1234", "+99999", "-1e+07", "-inf", "nan", "-"]
    found = [signed(value) for value in values]
    assert [a for a, b in zip(found, expected, strict=True) if a != b and abs(float(a) - float(b)) > 0.011] == []
    assert all(len(text) <= 6 for text in found)
    assert (ratio(0.0001), ratio(1.5), ratio(None), ratio(0.0)) == ("1e-04", "1.500", "-", "0")


def test_settings_that_are_not_read_are_not_shown(tmp_path: Path) -> None:
    table = {"type": "topd", "alpha": 0.2, "reward": "clipped", "reward_bound": 5.0, "returns": "immediate", "discount": 0.95}
    path = write_run(tmp_path / "topd", {"a": VECTOR}, algorithm=table)
    assert settings_in_use(read_run(path)) == {"reward": "clipped", "reward_bound": 5.0, "returns": "immediate"}
    path = write_run(tmp_path / "opd", {"a": VECTOR}, algorithm={"type": "opd", "clip": 0.2})
    assert settings_in_use(read_run(path)) == {"clip": 0.2}


def test_a_pipe_gets_plain_whole_lines_without_torch(run: Path) -> None:
    code = "import sys; from topd.cli import main; main(sys.argv[1:]); print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, "explain", str(run)], capture_output=True, text=True, env=ENV)
    assert done.stderr.strip() == "False"
    assert "\x1b" not in done.stdout
    assert done.stdout == shown(run)


def test_a_reader_that_leaves_gets_no_traceback(run: Path) -> None:
    done = subprocess.run(f"{' '.join(COMMAND)} {run} | head -n 1", shell=True, capture_output=True, text=True, env=ENV)
    assert (done.stdout.split()[0], done.stderr) == ("run", "")


def in_terminal(path: Path, width: int, **env: str) -> str:
    """What the command writes to a terminal of that width."""
    import fcntl
    import termios

    main_end, other_end = pty.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    terminal = {**ENV, "TERM": "xterm-256color", **env}
    process = subprocess.Popen([*COMMAND, str(path)], stdin=other_end, stdout=other_end, stderr=other_end, env=terminal)
    os.close(other_end)
    output = b""
    while True:
        try:
            part = os.read(main_end, 65536)
        except OSError:
            break
        if not part:
            break
        output += part
    os.close(main_end)
    assert process.wait() == 0, output
    return output.decode().replace("\r\n", "\n")


def test_a_real_terminal_of_80_columns_is_wide_enough(run: Path) -> None:
    text = in_terminal(run, 80)
    assert "\x1b[" in text
    lines = ESCAPE.sub("", text).splitlines()
    assert max(cell_len(line) for line in lines) <= 80
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_without_colors_gets_none(run: Path, env: dict[str, str]) -> None:
    codes = re.findall(r"\x1b\[([0-9;]*)m", in_terminal(run, 100, **env))
    assert all(int(code) < 30 for codes_of in codes for code in codes_of.split(";") if code)


HOSTILE = {
    2: b"\x1b[31mred\x1b]0;title\x07",
    3: b"[bold]markup[/bold] :smile:",
    4: "\u202eevil\u202c".encode(),
    5: "\u05d0\u05d1".encode(),
    6: "\u6f22\u5b57".encode(),
    7: b"\xf0\x9f",
    8: b"A" * 1_000_000,
    9: b"\r\x08\x7f\x9b",
    10: b"two\nlines",
    11: ("e" + "\u0301" * 500).encode(),
    12: "\U000e0041\ufeff\u200b".encode(),
}


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    ids = [*HOSTILE, 999]
    completion = {"ids": ids, "student": [-1.0] * len(ids), "teacher": [-2.0] * len(ids)}
    bad = "\x1b[2J\u202e[red]\r\n\x00"
    columns = {"prompt": bad, "answer": bad, "domain": bad, "completion": bad, "finish_reason": bad}
    return write_run(tmp_path / "run", {f"id{bad}": [completion, completion]}, words=HOSTILE, **columns)


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_hostile_reaches_the_terminal(hostile: Path, terminal: bool) -> None:
    text = shown(hostile, terminal=terminal, width=80, tokens=True)
    text = ESCAPE.sub("", text) if terminal else text
    found = {unicodedata.category(character) for character in text.replace("\n", "")}
    assert not found & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    joined = re.sub(r"\s", "", text)
    for word in (
        "<ESC>[31mred",
        "[bold]markup[/bold]",
        ":smile:",
        "<U+202E>",
        "\u6f22\u5b57",
        "<F09F>",
        "<999>",
        "1,000,000bytes",
    ):
        assert word in joined, word
    assert len(text) < 20_000


def test_wide_characters_keep_the_columns(hostile: Path) -> None:
    text = shown(hostile, width=80).split("tokens of rollout 0 of group 0")[1].split("\n\n")[0]
    rows = [line for line in text.splitlines() if re.match(r"\s*\d+ +\d+ ", line)]
    assert len(rows) == len(HOSTILE) + 1
    assert len({re.match(r"(.*?) - ", line).end() for line in rows}) == 1


def test_what_a_run_lacks_is_a_dash_and_a_note(copy: Path) -> None:
    shutil.rmtree(copy / "updates")
    (copy / "vocabulary.parquet").unlink()
    (copy / "summary.json").unlink()
    text = shown(copy)
    lines = table(text, "tokens of rollout")
    assert len(lines) > 3
    assert all(line[9:] == ["-", "-", f"<{line[1]}>"] for line in lines)
    assert "note: vocabulary.parquet is not there" in text
    assert "<eos>" not in text


def test_a_run_without_a_teacher_shows_its_largest_advantage(tmp_path: Path) -> None:
    plain = {"ids": [1, 2], "student": [-1.0, -1.0], "advantage": [0.5, 0.5]}
    groups = {"a": [plain], "b": [plain, {**plain, "advantage": [-0.1, -3.0]}], "c": [{**plain, "advantage": [2.0, 0.0]}]}
    path = write_run(tmp_path / "run", groups, algorithm={"type": "grpo", "clip": 0.2})
    text = shown(path)
    assert "tokens of rollout 1 of group 1" in text
    assert "lowest advantage" in text
    assert "floor" not in text
    with pytest.raises(
        ConfigError, match=r"--color log_ratio: the rollouts of step 1 hold no log_ratio\. Choose from token_reward"
    ):
        shown(path, color="log_ratio")


def test_a_token_that_the_teacher_rules_out_is_the_worst(tmp_path: Path) -> None:
    ruled_out = {**VECTOR[1], "teacher": [-0.1, -np.inf]}
    path = write_run(tmp_path / "run", {"a": VECTOR, "b": [VECTOR[0], ruled_out]})
    text = shown(path)
    assert "tokens of rollout 1 of group 1" in text
    assert table(text, "worst-rejected")[0][3:6] == ["-0.100", "-inf", "-inf"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"step": 99}, r"--step: step 99 has no rollouts; there are steps 1 to 2\."),
        ({"step": -1}, r"step -1 has no rollouts"),
        ({"group": "4"}, r"step 2 has no group '4'\. Give an index from 0 to 3"),
        ({"group": "x", "step": 1}, r"or one of its prompt ids, such as 'train/"),
        ({"rollout": 2}, r"--rollout: group \d has no rollout 2; there are 0 to 1"),
        ({"color": "red"}, r"--color must be one of log_ratio, "),
    ],
)
def test_what_is_not_there_is_named(run: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        shown(run, **options)


def test_damaged_and_absent_rollouts_are_named(copy: Path, tmp_path: Path) -> None:
    (copy / "rollouts/step_000002.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match=r"--step: rollouts of step 2 could not be read .*Choose another: 1."):
        shown(copy)
    assert "1 of 2" in shown(copy, step=1)
    shutil.rmtree(copy / "rollouts")
    with pytest.raises(ConfigError, match="has no rollouts yet"):
        shown(copy)
    with pytest.raises(ConfigError, match="there is no run folder"):
        shown(tmp_path / "nowhere")


def test_the_verb_refuses_what_it_would_ignore(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(run), "--algorithm.alpha", "0.1"]) == 2
    assert "topd explain does not know '--algorithm.alpha'" in capsys.readouterr().err
    assert main(["explain", str(run), "--step", "1", "--color", "advantage"]) == 0
    assert capsys.readouterr().out == shown(run, step=1, color="advantage")


def test_a_step_without_tokens_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", {"a": VECTOR})
    write_step(path, {}, step=2)
    with pytest.raises(ConfigError, match="step 2 holds no tokens"):
        shown(path)


def test_spans() -> None:
    assert spans([1, 2, 3, 7, 9, 10]) == "1 to 3, 7, 9 to 10"
