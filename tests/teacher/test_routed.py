"""Several teachers: every prompt goes to the one of its domain, and comes back in its place."""

import itertools
import json

import pytest
import torch

from tests.endpoint import proxy as faults
from tests.endpoint.proxy import proxying
from tests.endpoint.runs import everything_in, metrics, served_config, stored, train
from tests.fakes import make_model, ragged_groups
from tests.run.test_resume import results
from tests.serve.serving import serving
from topd.errors import ConfigError, RunStopped
from topd.models.load import BUILTIN
from topd.models.logprobs import score_groups
from topd.rollout.embedded import EmbeddedEngine
from topd.rollout.engine import SamplingParams
from topd.teacher.local import LocalTeacher
from topd.teacher.routed import RoutedTeacher, routes
from topd.teacher.teacher import Unscored
from topd.types import Prompt, Rollout, RolloutGroup

DOMAINS = ("code", "math", "code", "prose", "math")


def prompt(domain, name="train/0", token_ids=(5, 6)):
    return Prompt(id=name, text="", token_ids=token_ids, domain=domain)


def groups_of(domains):
    tokens = ragged_groups(*((3, (4, 2)) for _ in domains))
    made = []
    for number, (domain, group) in enumerate(zip(domains, tokens, strict=True)):
        rollouts = tuple(
            Rollout(token_ids=c, logprobs=torch.zeros(len(c)), finish_reason="length", text="") for c in group.completions
        )
        made.append(RolloutGroup(prompt=prompt(domain, f"train/{number}", group.prompt_ids), rollouts=rollouts, policy_version=0))
    return made


def local(seed):
    return LocalTeacher(make_model(seed=seed), temperature=1.0, max_tokens=4096)


@pytest.fixture
def teacher():
    """Teacher a answers for math, b for code and prose."""
    return RoutedTeacher({"a": local(1), "b": local(2)}, {"math": "a", "code": "b", "prose": "b"})


def test_a_teacher_answers_for_its_domains_or_for_the_one_called_like_it():
    prompts = [prompt("math"), prompt("code")]
    assert routes({"math": None, "other": ["code", "prose"]}, prompts) == {"math": "math", "code": "other", "prose": "other"}


def test_a_domain_without_a_teacher_is_an_error_that_names_both_sides():
    with pytest.raises(
        ConfigError, match=r"no teacher answers for the domain 'law', 'prose' .*found teachers for 'math'.*domains"
    ):
        routes({"math": None}, [prompt("prose"), prompt("law"), prompt("math")])


def test_a_domain_with_two_teachers_is_an_error():
    with pytest.raises(ConfigError, match=r'the domain "math" belongs to teachers\.math and teachers\.b'):
        routes({"math": None, "b": ["math"]}, [])


def test_scores_come_back_in_the_order_of_the_groups(teacher):
    groups, told = groups_of(DOMAINS), []
    found = teacher.score(groups, on_tokens=told.append)
    for group, scores in zip(groups, found, strict=True):
        seed = 1 if group.prompt.domain == "math" else 2
        expected = score_groups(make_model(seed=seed), [group], max_tokens=4096)[0]
        torch.testing.assert_close(scores["teacher_logprobs"], torch.cat(expected), atol=1e-5, rtol=1e-5)
    assert sum(told) == 6 * len(groups)


def test_what_one_teacher_cannot_score_stays_in_its_place(teacher):
    teacher.teachers["b"].score = lambda groups, wanted, on_tokens: [Unscored(group.prompt.domain) for group in groups]
    found = teacher.score(groups_of(DOMAINS))
    assert [scores.reason if isinstance(scores, Unscored) else None for scores in found] == ["code", None, "code", "prose", None]


def test_every_teacher_is_told_of_its_groups_before_the_first_is_waited_for(teacher):
    told = []
    for name, each in teacher.teachers.items():
        each.prefetch = lambda groups, name=name: told.append((name, [group.prompt.domain for group in groups]))
        each.score = lambda groups, wanted, on_tokens, name=name: told.append(name) or [Unscored("")] * len(groups)
    teacher.score(groups_of(DOMAINS))
    assert told == [("b", ["code", "code", "prose"]), ("a", ["math", "math"]), "b", "a"]


def test_the_engine_samples_every_prompt_from_the_teacher_of_its_domain(teacher):
    prompts = [prompt(domain, f"train/{number}", (3 + number, 5)) for number, domain in enumerate(DOMAINS)]
    params = SamplingParams(n=2, max_tokens=6, seed=(1,))
    found = teacher.engine().generate(prompts, params)
    assert [group.prompt for group in found] == prompts
    for group in found:
        model = make_model(seed=1 if group.prompt.domain == "math" else 2)
        [expected] = EmbeddedEngine(model, max_concurrent_rollouts=8).generate([group.prompt], params)
        assert group.completions == expected.completions


def test_what_holds_for_all_is_what_the_weakest_says(teacher):
    a, b = teacher.teachers.values()
    a.context_length, b.context_length = None, 99
    assert teacher.gives == a.gives
    b.gives = frozenset({"teacher_logprobs"})
    assert teacher.gives == b.gives
    assert teacher.context_length == 99
    a.context_length = 100
    assert teacher.context_length == 99
    assert teacher.honours_temperature
    assert teacher.engine_kind == "embedded"
    b.honours_temperature, b.engine_kind = False, "vllm"
    assert not teacher.honours_temperature
    assert teacher.engine_kind == "mixed"
    assert [check.name for check in teacher.checks(make_model(), asked=True)] == [
        "vocabulary (a)",
        "end token (a)",
        "vocabulary (b)",
        "end token (b)",
    ]


# whole runs


@pytest.fixture
def two_domains(tmp_path):
    """The path of problems that are sums and self in turn."""
    lines = (BUILTIN / "sums_train.jsonl").read_text().splitlines()[:40]
    rows = [json.loads(line) | {"domain": domain} for line, domain in zip(lines, itertools.cycle(("sums", "self")), strict=False)]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(folder, problems, **changes):
    tree = served_config(folder, **changes)
    del tree["teacher"]
    tree["task"] |= {"path": str(problems)}
    del tree["task"]["eval_path"]
    return tree


def test_rewards_come_from_the_teacher_of_the_domain_and_are_counted_for_it(tmp_path, two_domains):
    """The student itself answers for one domain: its gap is 0 there, and only there."""
    with serving(batch_invariant=True) as teacher, serving("builtin:tiny-student") as student:
        tree = config_of(tmp_path / "run", two_domains, run__steps=1, rollout__prompts_per_step=8)
        tree["teachers"] = {
            "big": {"name": "builtin:tiny-teacher", "base_url": [teacher], "domains": ["sums", "unused"]},
            "self": {"name": "builtin:tiny-student", "base_url": [student]},
        }
        train(tree)
    [row] = metrics(tmp_path / "run")
    counts = {name: row[f"teacher/{name}/groups"] for name in ("big", "self")}
    domains = stored(tmp_path / "run", 1, "domain")
    assert counts == {"big": domains.count("sums") // 2, "self": domains.count("self") // 2}
    assert min(counts.values()) > 0
    assert row["teacher/self/gap"] == pytest.approx(0, abs=1e-5)
    assert row["teacher/self/token_reward"] == pytest.approx(0, abs=1e-5)
    assert row["teacher/big/gap"] > 0.05
    columns = ("teacher_logprobs", "behaviour_logprobs")
    for domain, taught, own in zip(domains, *(stored(tmp_path / "run", 1, name) for name in columns), strict=True):
        assert (taught == pytest.approx(own, abs=1e-4)) is (domain == "self")


def test_a_served_and_a_local_teacher_work_side_by_side_and_a_failing_one_stops_the_run_by_name(tmp_path, two_domains):
    with serving(batch_invariant=True) as base, proxying(base) as proxy:
        tree = config_of(tmp_path / "run", two_domains)
        limits = {"timeout_s": 0.6, "patience_s": 0.6, "max_attempts": 2, "max_concurrent_requests": 1}
        tree["teachers"] = {
            "sums": {"name": "builtin:tiny-teacher", "base_url": [proxy.url], **limits},
            "self": {"name": "builtin:tiny-student"},
        }
        whole = {**tree, "run": {**tree["run"], "directory": str(tmp_path / "whole")}}
        train(whole)
        with pytest.raises(
            RunStopped,
            match=r"\d of the step's 3 groups could not be scored \(teachers.sums.max_dropped_share = 0.05\): .*answered 500",
        ):
            train(tree, lambda step: proxy.give(faults.always(faults.status(500))) if step == 2 else None)
        proxy.give(None)
        tree["teachers"]["sums"] |= {"base_url": [base], "timeout_s": 1.0}
        train({**tree, "run": {**tree["run"], "resume": True}})

    def without_evals(folder):
        (folder / "evals.jsonl").touch()
        return results(folder)

    assert without_evals(tmp_path / "run") == without_evals(tmp_path / "whole")


def test_an_unknown_domain_is_an_error_at_the_start(tmp_path, two_domains):
    tree = config_of(tmp_path / "run", two_domains)
    tree["teachers"] = {"sums": {"name": "builtin:tiny-teacher"}}
    with pytest.raises(ConfigError, match="no teacher answers for the domain 'self'"):
        train(tree)
    assert not (tmp_path / "run").exists()


def test_every_teacher_has_its_own_key(tmp_path, two_domains, monkeypatch):
    monkeypatch.setenv("FIRST_KEY", "sk-first")
    monkeypatch.setenv("SECOND_KEY", "sk-second")
    with serving(token="sk-first") as first, serving("builtin:tiny-student", token="sk-second") as second:
        tree = config_of(tmp_path / "run", two_domains, run__steps=1)
        tree["teachers"] = {
            "sums": {"name": "builtin:tiny-teacher", "base_url": [first], "api_key_env": "FIRST_KEY"},
            "self": {"name": "builtin:tiny-student", "base_url": [second], "api_key_env": "SECOND_KEY"},
        }
        train(tree)
        assert b"sk-" not in everything_in(tmp_path / "run")
        tree["teachers"]["self"]["api_key_env"] = "FIRST_KEY"
        with pytest.raises(ConfigError, match=r"teachers\.self: .*answered 401.*FIRST_KEY, which is set, but refused"):
            train({**tree, "run": {**tree["run"], "directory": str(tmp_path / "again")}})
