"""Data sets through `datasets`, from a local folder as from the hub."""

from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("datasets")

from topd.errors import ConfigError
from topd.tasks.hub import Config as HubConfig
from topd.tasks.task import Problem, make_task

USER, SYSTEM = {"role": "user", "content": "1+1="}, {"role": "system", "content": "Add."}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture
def folder(data: Path) -> Path:
    table = pa.table({"question": ["1+1", "2+2"], "solution": ["2", "4"], "kind": ["sums", "sums"]})
    pq.write_table(table, data / "train-00000.parquet")
    pq.write_table(table.slice(1), data / "test-00000.parquet")
    return data


def config(folder: Path, **changes: object) -> HubConfig:
    columns = {"prompt_column": "question", "answer_column": "solution", "domain_column": "kind"}
    return HubConfig(**{"type": "hub", "name": str(folder), "eval_split": "test", **columns, **changes})


def read(folder: Path, columns: dict[str, list], **changes: object) -> list[Problem]:
    pq.write_table(pa.table(columns), folder / "train-00000.parquet")
    return list(make_task(HubConfig(type="hub", name=str(folder), **changes), seed=0).train)


def test_columns_are_mapped_and_splits_kept_apart(folder: Path) -> None:
    task = make_task(config(folder), seed=0)
    assert [(p.question, p.answer, p.domain) for p in task.train] == [("1+1", "2", "sums")]
    assert [p.question for p in task.held_out] == ["2+2"]
    assert (task.num_leaks, task.held_out[0].source) == (1, f"{folder}, test row 0")


def test_a_named_column_stands_before_one_with_our_own_name(data: Path) -> None:
    columns = {"prompt": ["q"], "domain": ["a"], "kind": ["b"], "system_prompt": ["c"], "rule": ["d"]}
    [problem] = read(data, columns, domain_column="kind", system_prompt_column="rule")
    assert (problem.domain, problem.system_prompt) == ("b", "d")


def test_missing_columns_and_data_sets_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="has no column 'prompt'; it has question, solution, kind"):
        make_task(config(folder, prompt_column="prompt"), seed=0)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        make_task(config(folder / "nowhere"), seed=0)


VERL = {
    "data_source": ["math_dapo"],
    "prompt": [[SYSTEM, USER]],
    "ability": ["MATH"],
    "reward_model": [{"ground_truth": "34", "style": "rule-lighteval/MATH_v2"}],
    "extra_info": [{"index": "9a9b"}],
}
GSM8K = {"question": ["q"], "answer": ["72 left\n#### 72"]}
MMLU = {"question": ["q"], "choices": [["1", "2"]], "answer": [1]}


@pytest.mark.parametrize(
    ("columns", "changes", "expected"),
    [
        pytest.param(VERL, {}, ("1+1=", "34", None), id="DAPO"),
        pytest.param({"prompt": ["q"], "reward_model": [{"ground_truth": 34}]}, {}, ("q", "34", None), id="verl, a number"),
        pytest.param(GSM8K, {}, ("q", "72", "72 left\n#### 72"), id="GSM8K"),
        pytest.param(GSM8K, {"prompt_column": "question"}, ("q", "72", "72 left\n#### 72"), id="GSM8K, named"),
        pytest.param({"messages": [[USER, {"role": "assistant", "content": "2"}]], "id": [7]}, {}, ("1+1=", None, "2"), id="TRL"),
        pytest.param(
            {"messages": [[USER, {"role": "assistant", "content": "2"}]], "prompt": ["1"], "odd": [7]},
            {"prompt_column": "messages"},
            ("1+1=", None, "2"),
            id="TRL, named",
        ),
        pytest.param(
            MMLU, {"prompt_column": "question"}, ("q", "1", None), id="other columns are left alone if the question is named"
        ),
        pytest.param({"prompt": ["q"], "answer": ["1"], "odd": [7]}, {}, ("q", "1", None), id="or called prompt"),
        pytest.param(
            {"problem": ["q"], "solution": ["s"], "gold": ["1"], "answer": ["2"], "source": ["x"]},
            {"answer_column": "gold"},
            ("q", "1", "s"),
            id="a named answer",
        ),
        pytest.param(
            {"problem": ["q"], "solution": ["s"]},
            {"answer_column": "solution", "demonstration_column": "solution"},
            ("q", "s", "s"),
            id="one column twice",
        ),
    ],
)
def test_forms_of_others_are_recognised(data: Path, columns: dict, changes: dict, expected: tuple) -> None:
    [problem] = read(data, columns, **changes)
    assert (problem.question, problem.answer, problem.demonstration) == expected
    assert problem.system_prompt == ("Add." if columns is VERL else None)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (MMLU, "unknown column 'choices'. Write the choices into the question"),
        ({"prompt": ["q"], "question": ["q"]}, "several columns that may be the question: prompt, question"),
        ({"instruction": ["q"], "output": ["1"]}, "no column that is known to be the question; it has instruction, output. Name"),
        ({"prompt": [[SYSTEM]]}, "train row 0: `prompt` must end with a user's message"),
        ({"prompt": ["a", "a "], "answer": [1, 2]}, "train row 0 and "),
        ({"prompt": ["a"], "answer": [True]}, "train row 0: `answer` must be a string or a number, found bool"),
    ],
)
def test_data_sets_that_are_not_understood_are_refused(data: Path, columns: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.name = |train row") as caught:
        read(data, columns)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("values", "answers"),
    [
        (
            pa.array([8.0, None, float("nan"), 1e-05, 1e16, 0.1, 1.10, 123456789.125]),
            "8 - - 0.00001 10000000000000000 0.1 1.1 123456789.125",
        ),
        (pa.array([0.1, 16777216.0], pa.float32()), "0.1 16777216"),
        (pa.array([Decimal("1.10"), Decimal("100000.00")]), "1.10 100000.00"),
        (pa.array([2**62, -1, None]), f"{2**62} -1 -"),
        (pa.array(["1e3", "", " ", None]), "1e3 - - -"),
    ],
)
def test_numbers_are_the_shortest_decimal_that_the_column_holds(data: Path, values: pa.Array, answers: str) -> None:
    problems = read(data, {"prompt": [f"q{i}" for i in range(len(values))], "answer": values})
    assert [problem.answer or "-" for problem in problems] == answers.split()
