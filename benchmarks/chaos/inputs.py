"""Hostile configurations, data files and command lines: a paragraph that says what is wrong, or a run, never a traceback."""

import json
import random
from pathlib import Path
from typing import Any

import tomli_w
from benchmarks.chaos.cases import Journal, Outcome, fresh, run
from tests.e2e.tiny import tiny_config

from topd import config_keys

LONGEST = 2500
"""Characters of a paragraph."""

VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 3, 10**30, -0.5, 1e308, float("nan"), float("inf"), True, False),
    *(
        "",
        " ",
        "\x00",
        "\u202e\U0001f600",
        "x" * 100_000,
        "/dev/null/x",
        "/proc/self/mem",
        "~nobody/x",
        "../../..",
        "builtin:",
        "gguf:",
    ),
    *([], [""], [[]], ["a", 1], {}, {"a": {}}, {"type": "topd"}, [1] * 1000),
)
SMALL = (
    *(
        "-1",
        "0",
        "1",
        "2",
        "3",
        "7",
        "0.0",
        "0.5",
        "1e-300",
        "1e300",
        "nan",
        "inf",
        "true",
        '""',
        '"\\u0000"',
        '"None"',
        '"cpu"',
        '"cuda:99"',
    ),
    *(
        "[]",
        "{}",
        "1979-05-27",
        '"builtin:tiny-student"',
        '"builtin:sums_eval.jsonl"',
        '"(((((("',
        '"(.*)+$"',
        '"([0-9]+)"',
        '"/dev/null"',
    ),
)
LINES = (
    '{"prompt": "1+1=", "answer": "2"}',
    *("", "null", "[]", "{}", "{", '"text"', "nan", '{"prompt": 5}', '{"prompt": ""}', '{"prompt": []}', '{"prompt": [1]}'),
    '{"prompt": [{"role": "user"}]}',
    '{"prompt": [{"role": "robot", "content": "1+1="}], "answer": "2"}',
    '{"prompt": [{"role": "user", "content": null}], "answer": "2"}',
    '{"prompt": "\\ud800", "answer": "2"}',
    '{"prompt": "1+1=", "answer": NaN}',
    '{"prompt": "1+1=", "answer": {"a": []}}',
    '{"prompt": "1+1=", "answer": 1e999}',
    '{"prompt": "1+1=", "answer": "2", "domain": []}',
    '{"prompt": "1+1=", "answer": "2", "demonstration": 7}',
    '{"prompt": "1+1=", "answer": "' + "9" * 20_000 + '"}',
    '{"prompt": "' + "1+" * 20_000 + '1=", "answer": "2"}',
    '{"a": ' * 3000 + "1" + "}" * 3000,
    '{"prompt": "' + "[" * 50_000 + '", "answer": "2"}',
    '{"prompt": "Grüße 1+1=", "answer": "2"}',
    '{"prompt": "<eos>", "answer": "<eos>"}',
)
GRADED = (
    *(
        None,
        5,
        1.5,
        float("nan"),
        1e308,
        True,
        [],
        {},
        "",
        " ",
        "\x00",
        "\ud800",
        "\\boxed{" * 2000,
        "\\frac{1}{" * 500,
        "9" * 20_000,
    ),
    *(
        "10^10^10^10",
        "\\sqrt{" * 300 + "2",
        "x" * 1_000_000,
        "1/0",
        "\\lim_{x\\to 0} x",
        "((((" * 5000,
        "1e999999999",
        "0x" + "f" * 9999,
    ),
)
TOML = (
    *(
        "",
        "=",
        "[",
        "[student",
        "a = ",
        "[student]\nname = 1\nname = 2",
        "\x00",
        "\ufeff",
        "[[student]]\nname = 'x'",
        "student = 5",
    ),
    *("[a.b.c]\nd = 1", "a = " + "[" * 2000 + "]" * 2000, "[run]\nsteps = 1_0__0", "[run]\nsteps = 0x" + "f" * 300),
    *("[run]\nseed = 1979-05-27", "[trainer]\nlr = 1", "[student]\n'' = 1", "[Student]\nname = 'x'", "'a.b' = 1"),
)
BYTES = (b"\xff\xfe\x00", b"\x80" * 100, b"PK\x03\x04", b"PAR1PAR1", bytes(1000), b"\r\n\r\n", "[run]".encode("utf-16"))
WORDS = (
    *(
        [],
        ["train"],
        ["trian"],
        ["train", ""],
        ["train", "."],
        ["train", "/dev/null"],
        ["train", "nowhere.toml"],
        ["--version", "x"],
    ),
    *(
        ["train", "quickstart", "--run.steps"],
        ["train", "quickstart", "--run.steps", "--run.seed"],
        ["config", "quickstart", "--"],
    ),
    *(["train", "quickstart", "--run", "{"], ["train", "quickstart", "--run", "5"], ["config", "quickstart", "--run.", "1"]),
    *(["config", "quickstart", "--.steps", "1"], ["config", "quickstart", "--run..steps", "1"], ["config", "--keys", "x"]),
    *(
        ["config", "quickstart", "--trainer.lr", "1"],
        ["config", "quickstart", "--run.steps=" + "9" * 5000],
        ["eval"],
        ["eval", "x"],
    ),
    *(
        ["eval", "builtin:no", "--config", "quickstart"],
        ["eval", "/dev/null", "--config", "quickstart"],
        ["report"],
        ["report", "x"],
    ),
    *(
        ["report", "."],
        ["report", "/"],
        ["report", "/dev/null"],
        ["report", ""],
        ["report", "\udcff"],
        ["explain", "/"],
        ["explain", "x"],
    ),
    *(
        ["explain", ".", "--step", "-1"],
        ["explain", ".", "--step", "x"],
        ["rescore", "/", "--algorithm.alpha", "2"],
        ["rescore", "."],
    ),
    *(["rescore", "x", "--algorithm.alpha", "nan"], ["serve"], ["serve", "builtin:no"], ["serve", "/dev/null"], ["serve", "."]),
    *(["serve", "builtin:tiny-teacher", "--port", "-1"], ["serve", "builtin:tiny-teacher", "--port", "99999"]),
    *(["serve", "builtin:tiny-teacher", "--host", "no.such.host.invalid"], ["serve", "builtin:tiny-teacher", "--port", "x"]),
    *(["serve", "builtin:tiny-teacher", "--threads", "-5"], ["grade", "quickstart"], ["grade", "quickstart", "/"]),
    *(
        ["grade", "quickstart", "/dev/null"],
        ["grade", "quickstart", "nowhere"],
        ["probe", "nowhere"],
        ["probe", "quickstart", "x"],
    ),
    *(["probe", "quickstart", "--teacher.name", "builtin:"], ["probe", "quickstart", "--teacher.name", "/dev"]),
    *(
        ["probe", "quickstart", "--teacher.base_url", '["http://127.0.0.1:9/v1"]'],
        ["probe", "quickstart", "--student.name", "/tmp"],
    ),
)


def setting(folder: Path, source: random.Random) -> list[str]:
    """One key with a value that is not meant for it; what is allowed is not necessarily wise, so it is only resolved."""
    key = source.choice([key for key, _ in config_keys.all_settings()])
    tree = tiny_config(folder / "run")
    *parents, last = key.split(".")
    table = tree
    for parent in parents:
        table = table.setdefault(parent, {})
    table[last] = source.choice(VALUES)
    return ["config", text(folder, tomli_w.dumps(tree))]


def settings(folder: Path, source: random.Random) -> list[str]:
    """A small run with other values, of the right type and of wrong ones."""
    lines = tomli_w.dumps(tiny_config(folder / "run", run__steps=1, rollout__max_completion_tokens=4)).splitlines()
    places = [i for i, line in enumerate(lines) if "=" in line and not line.startswith(("max_concurrent", "directory"))]
    for place in source.sample(places, source.randrange(1, 3)):
        key = lines[place].split(" = ")[0]
        lines[place] = f"{key} = {source.choice(SMALL)}"
    return ["train", text(folder, "\n".join(lines))]


def toml(folder: Path, source: random.Random) -> list[str]:
    path = folder / "config.toml"
    if source.random() < 0.3:
        path.write_bytes(source.choice(BYTES))
        return ["train", str(path)]
    return ["train", text(folder, source.choice(TOML))]


def data(folder: Path, source: random.Random) -> list[str]:
    """A training file with lines that are none."""
    path = folder / "train.jsonl"
    lines = [LINES[0].replace("1+1", f"1+{i}") for i in range(4)]
    for _ in range(source.randrange(1, 3)):
        lines.insert(source.randrange(len(lines)), source.choice(LINES))
    content = source.choice(["\n", "\r\n", "\n\n"]).join(lines).encode("utf-8", "surrogatepass")
    path.write_bytes(content if source.random() < 0.85 else source.choice(BYTES))
    small = {"run__steps": 1, "rollout__max_completion_tokens": 4, "eval__max_problems": 1, "eval__samples_per_problem": 1}
    tree = tiny_config(folder / "run", task__path=str(path), **small)
    if source.random() < 0.3:
        tree["task"]["eval_path"] = str(path)
    return [source.choice(["probe", "train"]), text(folder, tomli_w.dumps(tree))]


def graded(folder: Path, source: random.Random) -> list[str]:
    path = folder / "graded.jsonl"
    row = dict.fromkeys(source.sample(("answer", "completion", "question", "prompt", "domain"), 3)) | {
        "answer": "5",
        "completion": "5",
    }
    row[source.choice(sorted(row))] = source.choice(GRADED)
    path.write_text(f'{{"answer": "5", "completion": "5"}}\n{json.dumps(row)}\n', encoding="utf-8")
    other = ["--task.grader", "math_verify"] if source.random() < 0.5 else []
    return ["grade", "quickstart", str(path), *other]


def words(folder: Path, source: random.Random) -> list[str]:
    return list(source.choice(WORDS))


def text(folder: Path, content: str) -> str:
    path = folder / "config.toml"
    path.write_text(content, encoding="utf-8", newline="")
    return str(path)


KINDS = {
    "a setting": setting,
    "an edited file": settings,
    "a file that is none": toml,
    "data": data,
    "grade": graded,
    "words": words,
}


def case(folder: Path, source: random.Random, kind: str) -> Outcome:
    command = KINDS[kind](fresh(folder), source)
    ended = run(*command, limit_s=120)
    said = f"topd {' '.join(command)[:200]!r}: exit {ended.code}: {ended.last_words}"
    wordless = ended.code and not ended.output.strip()
    if (
        ended.crashed
        or ended.code == 130
        or wordless
        or (ended.code == 2 and len(ended.output) > LONGEST and "usage:" not in ended.output)
    ):
        return Outcome(f"inputs, {kind}", "crash", said)
    return Outcome(f"inputs, {kind}", {0: "exact", 2: "refused", 3: "stopped"}[ended.code or 0], said)


def play(journal: Journal, folder: Path, seed: int, count: int) -> None:
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        journal.play(f"inputs {seed} {number}", lambda source, kind=kind: case(folder / "case", source, kind))
