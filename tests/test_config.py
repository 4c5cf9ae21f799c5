"""Every wrong configuration is one paragraph that names the key, the rule, the value found and the remedy."""

import tomllib
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from tests.e2e.tiny import tiny_config
from topd import config_file, config_keys, config_words
from topd.algorithms import available, load
from topd.config import AlgorithmConfig, EndpointConfig
from topd.errors import ConfigError


def error_of(tmp_path: Path, *words: str, **changes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        config_file.load(tiny_config(tmp_path, **changes), words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout__group_sise": 4}, ["unknown key 'rollout.group_sise'", "Did you mean 'rollout.group_size'?"]),
        ({"trainer__group_size": 4}, ["unknown key 'trainer.group_size'", "Did you mean 'rollout.group_size'?"]),
        ({"algorithm__alhpa": 0.1}, ["unknown key 'algorithm.alhpa'", "Did you mean 'algorithm.alpha'?"]),
        ({"algorithm": {"type": "opd", "alpha": 0.1}}, ["unknown key 'algorithm.alpha'", "only algorithm.type = topd has it"]),
        ({"trainer__alpha": 0.1}, ["unknown key 'trainer.alpha'", "Did you mean 'algorithm.alpha'?"]),
        ({"algorithm": {"type": "topd", "reward": "log_ratio", "alpha": 0.1}}, ["algorithm.alpha = 0.1 would be ignored"]),
        ({"trainer__betas": [1.5, 0.9]}, ["trainer.betas", "less than 1", "found 1.5"]),
        ({"task__type": "foo"}, ["task.type", "found 'foo'", "'jsonl'"]),
        ({"run__directory": ""}, ["run.directory"]),
        ({"rollout__prompts_per_step": 1_000_000_007}, ["trainer.minibatch_prompts must divide"]),
        (
            {"eval__benchmarks": [{"name": "a", "task": {"type": "jsonl", "path": "x"}}] * 2},
            ["eval.benchmarks", '"a" is given twice'],
        ),
        ({"eval__samples_per_problem": 17}, ["rollout.max_concurrent_rollouts", "16 and 17"]),
        ({"algorithm": {"type": "grpo"}, "teacher__map_eos": True}, ["teacher.map_eos would be ignored"]),
        ({"algorithm": {"type": "topd", "normalize": "none", "std_floor": 0.1}}, ["algorithm.std_floor = 0.1 would be ignored"]),
        ({"eval__temperature": 0.0}, ["eval.samples_per_problem must be 1", "greedy", "found 2"]),
        ({"algorithm__discount": 0.5}, ["algorithm.discount = 0.5 would be ignored", "mean_of_future"]),
        (
            {"algorithm": {"type": "sft"}, "rollout__group_size": 1, "rollout__temperature": 0.5},
            ["rollout.temperature", "must be 1", "found 0.5"],
        ),
        ({"rollout__group_size": "8"}, ["rollout.group_size", "valid integer", "'8'", "Default: 8"]),
        ({"algorithm__alpha": 0.0}, ["algorithm.alpha", "greater than 0", "found 0.0", "Default: 0.2"]),
        ({"algorithm__alpha": 1.5}, ["algorithm.alpha", "less than or equal to 1", "found 1.5", "Default: 0.2"]),
        ({"algorithm__type": "topdd"}, ["algorithm.type", "'topdd'", "Did you mean 'topd'?"]),
        ({"algorithm": {}}, ["algorithm.type", "is required"]),
        ({"rollout__group_size": 1}, ["rollout.group_size must be >= 2", "found 1", "opd"]),
        ({"algorithm": {"type": "grpo"}, "rollout__group_size": 1}, ["rollout.group_size must be >= 2", "grpo"]),
        ({"algorithm": {"type": "sft"}}, ["rollout.group_size must be 1", "found 2"]),
        ({"trainer__minibatch_prompts": 3}, ["trainer.minibatch_prompts must divide", "3 and 4", "1, 2, 4"]),
        ({"teacher": None}, ["[teacher] is missing", "topd"]),
        ({"task__type": "jsnl"}, ["task", "'jsnl'", "jsonl"]),
        ({"task__generator": "chain_sum"}, ["unknown key 'task.generator'"]),
        ({"task__template": "plain", "task__system_prompt": "x"}, ["task.system_prompt would be ignored"]),
        ({"task__template": "plain", "task__template_arguments": {"a": 1}}, ["task.template_arguments would be ignored"]),
        ({"task__answer_pattern": "([0-9"}, ["task.answer_pattern", "regular expression"]),
        ({"task__answer_pattern": "[0-9]+"}, ["task.answer_pattern", "one group"]),
        ({"task__answer_pattern": r"\\boxed\{([^}]*)\}"}, ["task.answer_pattern", "no pattern counts braces"]),
        ({"run": {"steps": 1}}, ["run.directory is required"]),
        ({"trainer__betas": [0.9]}, ["trainer.betas"]),
        ({"trainer__learning_rate": float("nan")}, ["trainer.learning_rate"]),
        ({"trainer__learning_rate": float("inf")}, ["trainer.learning_rate"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_errors_name_key_rule_value_and_remedy(tmp_path: Path, changes: dict[str, object], said: list[str]) -> None:
    message = error_of(tmp_path, **changes)
    assert all(words in message for words in said), message


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    message = error_of(tmp_path, rollout__group_sise=4, algorithm__alpha=2.0)
    assert "group_sise" in message
    assert "algorithm.alpha" in message


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    words = ["--algorithm.alpha", "0.1", "--run.resume=true", "--student.name", "some/folder", "--trainer.betas", "[0.8, 0.9]"]
    config = config_file.load(tiny_config(tmp_path), words)
    assert config.algorithm.alpha == 0.1
    assert config.run.resume is True
    assert config.student.name == "some/folder"
    assert config.trainer.betas == [0.8, 0.9]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["alpha"], "--section.key value"),
        (["--algorithm.alpha"], "has no value"),
        (["--run.resume", "--run.steps", "3"], "--run.resume has no value"),
        (["--task.prompt_suffix", "\udcff"], "--task.prompt_suffix holds bytes that are not UTF-8 text"),
    ],
)
def test_malformed_overrides_are_errors(tmp_path: Path, words: list[str], said: str) -> None:
    assert said in error_of(tmp_path, *words)


def test_a_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = config_file.load(tiny_config(tmp_path, algorithm__alpha=0.3, student__lora={"rank": 2}))
    path = tmp_path / "resolved.toml"
    path.write_text(config_file.dump(config))
    assert config_file.load(path) == config


def test_broken_toml_and_missing_files_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigError, match=r"broken.toml is not valid TOML.*line 1"):
        config_file.load(broken)
    with pytest.raises(ConfigError, match="Did you mean 'quickstart'"):
        config_file.load("quikstart")


@pytest.mark.parametrize("name", available())
def test_every_key_has_a_meaning(name: str) -> None:
    for key, info in [*config_keys.settings(), *config_keys.settings(load(name).Config, "algorithm.")]:
        assert info.description or key.endswith((".type", "engine")), key


def test_every_key_is_listed_once_with_its_types_and_a_default_as_toml_writes_it(tmp_path: Path) -> None:
    listed = {setting.key: setting for setting in config_keys.listing()}
    assert len(listed) == len(config_keys.listing())
    assert list(listed) == [key for key, _ in config_keys.all_settings()]
    assert listed["task.template"].types == listed["trainer.epochs"].types == ()
    assert listed["task.grader"].types == listed["eval.benchmarks.task.grader"].types == ("hub", "jsonl")
    assert listed["algorithm.std_floor"].types == ("grpo", "topd")
    assert str(listed["algorithm.type"]) == "One of grpo, opd, sft, topd, or an import path (docs/extending.md). Required."
    assert str(listed["task.params"]) == "For type reasoning_gym. Arguments of the generator. Default: {}."
    assert (listed["teacher.type"].default, listed["eval.teacher"].default) == ("unset", "true")
    assert (listed["teacher.base_url"].default, listed["teacher.base_url"].types) == ("required", ("served",))
    assert (listed["rollout.vllm.model"].default, listed["rollout.vllm.base_url"].default) == ("unset", "required")
    written = [setting.default for setting in listed.values() if setting.default not in ("required", "unset")]
    assert len(tomllib.loads("".join(f"key{i} = {default}\n" for i, default in enumerate(written)))) == len(written)
    assert "Default: {}." in error_of(tmp_path, "--task.template_arguments", "3")


def test_a_key_with_another_default_in_another_type_is_listed_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tight(load("opd").Config):  # type: ignore[misc, name-defined]
        type: Literal["tight"] = "tight"
        clip: float = Field(0.1, description="The importance ratio is clipped to 1 - clip, 1 + clip.")

    models, plain = [load("grpo").Config, load("opd").Config, Tight], config_keys._choices
    monkeypatch.setattr(config_keys, "_choices", lambda of: models if of is AlgorithmConfig else plain(of))
    clips = [setting for setting in config_keys.listing() if setting.key == "algorithm.clip"]
    assert [(clip.default, clip.types) for clip in clips] == [("0.2", ("grpo", "opd")), ("0.1", ("tight",))]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1e-4),
        ({"student__dtype": "bfloat16"}, 1e-4),  # the trainer recomputes what was sampled
        ({"teacher__dtype": "bfloat16"}, 0.1),
        ({"trainer__dtype": "bfloat16"}, 0.1),
        ({"teacher__dtype": "bfloat16", "algorithm__rounding": 0.02}, 0.02),
        ({"teacher__base_url": ["http://h/v1"], "teacher__dtype": "bfloat16"}, 0.1),
        ({"rollout__engine": "vllm", "rollout__vllm__base_url": ["http://h:1/v1"], "student__dtype": "bfloat16"}, 0.1),
        ({"teacher": None, "teachers": {"a": {"name": "x"}, "b": {"name": "y", "dtype": "bfloat16"}}}, 0.1),
    ],
    ids=str,
)
def test_rounding_follows_the_lowest_precision_of_a_log_ratio(tmp_path: Path, changes: dict, expected: float) -> None:
    config = config_file.load(tiny_config(tmp_path, **changes))
    assert config.algorithm.rounding == expected
    (tmp_path / "resolved.toml").write_text(config_file.dump(config))
    assert config_file.load(tmp_path / "resolved.toml") == config


def test_defaults_are_the_papers(tmp_path: Path) -> None:
    """The paper's setting, as far as it is known: docs/paper_map.md."""
    tree = tiny_config(tmp_path)
    del tree["rollout"], tree["trainer"]
    config = config_file.load(tree)
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.rollout.max_completion_tokens) == (512, 8, 16384)
    assert (config.rollout.temperature, config.rollout.top_p) == (1.0, 1.0)
    assert (config.trainer.minibatch_prompts, config.trainer.epochs, config.trainer.learning_rate) == (32, 1, 1e-6)
    assert (config.algorithm.alpha, config.algorithm.clip) == (0.2, 0.2)
    assert (config.algorithm.reward, config.algorithm.returns) == ("proximal", "mean_of_future")
    assert config.algorithm.normalize == "group_tokens"


def test_defaults_that_are_our_own(tmp_path: Path) -> None:
    """What the paper leaves open, or has otherwise: docs/paper_map.md."""
    tree = tiny_config(tmp_path)
    del tree["rollout"], tree["trainer"], tree["eval"]
    config = config_file.load(tree)
    trainer = config.trainer
    assert trainer.max_grad_norm == 1.0
    assert (trainer.betas, trainer.weight_decay) == ([0.9, 0.999], 0.0)
    assert (trainer.warmup_updates, trainer.schedule) == (0, "constant")
    assert (config.algorithm.std_floor, config.algorithm.rounding) == (1e-6, 1e-4)
    assert (config.eval.temperature, config.eval.top_p, config.eval.samples_per_problem) == (1.0, 1.0, 16)
    assert config.task.max_prompt_tokens is None
    del tree["run"]["steps"]
    with pytest.raises(ConfigError, match=r"run\.steps is required"):
        config_file.load(tree)


# servers

SERVED = {"teacher__base_url": ["http://127.0.0.1:8000/v1"]}
SAMPLED = {"rollout__engine": "vllm", "rollout__vllm__base_url": ["http://127.0.0.1:8001/v1"]}
TWO = {"math": {"name": "a"}, "code": {"name": "b"}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"teacher__base_url": ["127.0.0.1:8000"]}, ["base_url must hold http or https URLs", "127.0.0.1:8000/v1", "found"]),
        ({"teacher__base_url": ["ftp://host/v1"]}, ["base_url must hold http or https URLs", "found 'ftp://host/v1'"]),
        ({"teacher__base_url": ["http:///v1"]}, ["base_url must hold http or https URLs"]),
        ({"teacher__base_url": ["http://host:99999/v1"]}, ["base_url must hold http or https URLs"]),
        ({"teacher__base_url": ["http://ho\x00st/v1"]}, ["base_url must hold http or https URLs"]),
        ({"teacher__base_url": ["http://host/v1 "]}, ["teacher.base_url must hold http or https URLs", "no spaces"]),
        ({"teacher__base_url": []}, ["teacher.base_url", "at least 1 item"]),
        ({"teacher__base_url": "http://host/v1"}, ["teacher.base_url", "valid list", "found 'http://host/v1'"]),
        ({"teacher__base_url": ["http://a/v1", "http://a/v1"]}, ["base_url names a server twice"]),
        ({"teacher__base_url": ["http://a/v1", "http://a"]}, ["base_url names a server twice"]),
        ({"teacher__timeout_s": 5.0}, ["unknown key 'teacher.timeout_s'", "only teacher.type = served has it"]),
        ({"teacher__max_attempts": 2}, ["unknown key 'teacher.max_attempts'", "only teacher.type = served has it"]),
        ({"teacher__api_key_env": "KEY"}, ["unknown key 'teacher.api_key_env'", "only teacher.type = served"]),
        ({"teacher__tokenizer": "x"}, ["unknown key 'teacher.tokenizer'", "only teacher.type = served"]),
        ({"teacher__type": "served"}, ["teacher.base_url is required"]),
        ({**SERVED, "teacher__type": "local"}, ["unknown key 'teacher.base_url'", "only teacher.type = served has it"]),
        ({"teacher__type": "remote"}, ["teacher.type must be one of 'local', 'served'", "found 'remote'"]),
        ({"teacher": None, "teachers": {"a": {"name": "x", "type": "remote"}}}, ["teachers.a.type must be one of 'local'"]),
        ({"algorithm": {"type": "grpo"}, "eval__teacher": False}, ["[teacher] would be ignored", "eval.teacher = false"]),
        (
            {**SAMPLED, "teacher__base_url": ["http://127.0.0.1:8001"]},
            ["teacher.base_url and rollout.vllm.base_url share http://127.0.0.1:8001", "Use another server"],
        ),
        ({"teacher": None, "teachers": {"math/algebra": {"name": "a"}}}, ["math/algebra"]),
        ({**SERVED, "teacher__timeout_s": 0.0}, ["teacher.timeout_s", "greater than 0"]),
        ({**SERVED, "teacher__max_concurrent_requests": 0}, ["teacher.max_concurrent_requests", "greater than or equal to 1"]),
        ({**SERVED, "teacher__max_dropped_share": 1.0}, ["teacher.max_dropped_share", "less than 1"]),
        ({"teacher__domains": ["math"]}, ["teacher.domains would be ignored", "[teachers.NAME]"]),
        ({"teachers": TWO}, ["[teacher] and [teachers] are both given"]),
        ({"rollout__engine": "vllm"}, ["rollout.vllm.base_url is required"]),
        ({"rollout__engine": "vlm"}, ["rollout.engine must be one of 'embedded', 'vllm'", "Did you mean 'vllm'?"]),
        ({"rollout__engine": "vllm", "rollout__options": {}}, ["[rollout.options] would be ignored", "reads [rollout.vllm]"]),
        ({**SAMPLED, "rollout__vllm__modle": "x"}, ["unknown key 'rollout.vllm.modle'. Did you mean 'rollout.vllm.model'?"]),
        ({"rollout__vllm__base_url": ["http://h/v1"]}, ["[rollout.vllm] would be ignored", "embedded"]),
        ({"rollout__vllm__base_url": []}, ["[rollout.vllm] would be ignored"]),
        ({"algorithm": {"type": "sft"}, "rollout__group_size": 1, **SAMPLED}, ['rollout.engine = "vllm" would be ignored']),
        ({"rollout__max_lag": 1}, ["rollout.max_lag would be ignored", "embedded"]),
        ({**SAMPLED, "rollout__max_lag": -1}, ["rollout.max_lag", "greater than or equal to 0"]),
        ({**SAMPLED, "rollout__max_lag": 2, "rollout__vllm__weights": "nccl"}, ["rollout.max_lag must be 0 or 1", '"files"']),
        ({**SAMPLED, "rollout__max_lag": 1, "rollout__max_mismatch_kl": 1.0}, ["rollout.max_mismatch_kl would be ignored"]),
        (
            {**SAMPLED, "rollout__vllm__weights": "nccl", "rollout__vllm__weights_directory": "x"},
            ["rollout.vllm.weights_directory would be ignored"],
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_what_servers_cannot_be_asked_is_an_error(tmp_path: Path, changes: dict[str, object], said: list[str]) -> None:
    message = error_of(tmp_path, **changes)
    assert all(words in message for words in said), message


def test_a_server_whose_weights_are_replaced_is_no_teacher(tmp_path: Path) -> None:
    message = error_of(tmp_path, **SAMPLED, teacher__base_url=["http://127.0.0.1:8001"])
    assert "teacher.base_url and rollout.vllm.base_url share http://127.0.0.1:8001" in message


SECRET = "hunter2"


@pytest.mark.parametrize("section", ["teacher", "rollout.vllm"])
@pytest.mark.parametrize(
    "url",
    [
        f"http://user:{SECRET}@host/v1",
        f"http://{SECRET}@host/v1",
        f"https://host/v1?key={SECRET}",
        f"https://host/v1#{SECRET}",
        f"http://user:{SECRET}@host:99999/v1",
        f"http://user:{SECRET}@[bad/v1",
        f"user:{SECRET}@host",
    ],
)
def test_secrets_in_urls_are_refused_and_never_shown(tmp_path: Path, section: str, url: str) -> None:
    """Neither by our own rule nor by another that fails on the same value: a string for a list, a port out of range."""
    for value in ([url], ["http://fine/v1", url], url):
        message = error_of(tmp_path, "--rollout.engine", "vllm", **{f"{section.replace('.', '__')}__base_url": value})
        assert f"{section}.base_url must hold no user, password, query or fragment" in message
        assert SECRET not in message
    assert SECRET not in error_of(tmp_path, f"--{section}.base_url", f'["{url}"]')
    assert SECRET not in error_of(tmp_path, "--rollout.base_url", f'["{url}"]')


@pytest.mark.parametrize("key", [*EndpointConfig.model_fields, "weights", "weights_directory", "model"])
def test_a_key_that_has_moved_into_the_engines_section_is_named_with_its_place(tmp_path: Path, key: str) -> None:
    expected = f"unknown key 'rollout.{key}'. Did you mean 'rollout.vllm.{key}'?"
    assert expected in error_of(tmp_path, f"--rollout.{key}", "1")
    assert expected in error_of(tmp_path, **SAMPLED, **{f"rollout__{key}": 1})


@pytest.mark.parametrize("value", ["sk-hunter2", "hunter2", "MY KEY hunter2", "", ["hunter2"], 2])
def test_a_key_where_the_name_of_a_variable_belongs_is_never_shown(tmp_path: Path, value: object) -> None:
    message = error_of(tmp_path, **SERVED, teacher__api_key_env=value)
    assert "api_key_env must be the NAME of an environment variable" in message
    assert SECRET not in message


def test_a_key_under_a_name_of_its_own_is_an_unknown_key_and_not_shown(tmp_path: Path) -> None:
    message = error_of(tmp_path, **SERVED, teacher__api_key=SECRET)
    assert "unknown key 'teacher.api_key'. Did you mean 'teacher.api_key_env'?" in message
    assert SECRET not in message


def test_several_teachers_are_read_written_and_named_in_errors(tmp_path: Path) -> None:
    tree = tiny_config(tmp_path)
    del tree["teacher"]
    tree["teachers"] = {"math": {"name": "a", "base_url": ["http://h/v1"], "domains": ["algebra", "sums"]}, "code": {"name": "b"}}
    config = config_file.load(tree, ["--teachers.code.map_eos", "true"])
    assert list(config.teachers_by_name()) == ["math", "code"]
    assert config.teachers["code"].map_eos
    (tmp_path / "resolved.toml").write_text(config_file.dump(config))
    assert config_file.load(tmp_path / "resolved.toml") == config
    with pytest.raises(ConfigError, match=r"unknown key 'teachers\.code\.timeout_s': only teachers\.code\.type = served"):
        config_file.load(tree, ["--teachers.code.timeout_s", "3"])


def test_no_teacher_of_either_form_is_an_error_for_an_algorithm_that_needs_one(tmp_path: Path) -> None:
    assert "[teacher] is missing" in error_of(tmp_path, teacher=None, teachers={})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.lr", "trainer.learning_rate"),
        ("rollout.lr", "trainer.learning_rate"),
        ("lr", "trainer.learning_rate"),
        ("trainer.num_train_epochs", "trainer.epochs"),
        ("algorithm.epochs", "trainer.epochs"),
        ("trainer.epoch", "trainer.epochs"),
        ("trainer.batch_size", "trainer.minibatch_prompts"),
        ("rollout.batch_size", "rollout.prompts_per_step"),
        ("trainer.per_device_train_batch_size", "trainer.minibatch_prompts"),
        ("rollout.num_generations", "rollout.group_size"),
        ("rollout.max_tokens", "rollout.max_completion_tokens"),
        ("eval.max_new_tokens", "eval.max_completion_tokens"),
        ("trainer.max_length", "rollout.max_completion_tokens"),
        ("student.model", "student.name"),
        ("teacher.model", "teacher.name"),
        ("model", "student.name"),
        ("run.output_dir", "run.directory"),
        ("trainer.max_steps", "run.steps"),
    ],
)
def test_words_of_other_trainers_suggest_the_key(tmp_path: Path, key: str, meant: str) -> None:
    assert f"unknown key '{key}'. Did you mean '{meant}'?" in error_of(tmp_path, f"--{key}", "3")


@pytest.mark.parametrize("key", ["trainer.kl_coef", "algorithm.beta"])
def test_what_topd_does_not_have_is_said(tmp_path: Path, key: str) -> None:
    assert f"unknown key '{key}'. There is no penalty against a reference model" in error_of(tmp_path, f"--{key}", "0.1")


def test_unknown_sections_are_named_with_the_right_one(tmp_path: Path) -> None:
    assert "unknown key 'training'. Did you mean the section [trainer]?" in error_of(tmp_path, "--training.lr", "1")
    assert "unknown key 'rolout'. Did you mean the section [rollout]?" in error_of(tmp_path, "--rolout.n", "1")
    assert "unknown key 'zebra'. The sections are student, teacher," in error_of(tmp_path, "--zebra.x", "1")


def test_every_word_of_other_trainers_leads_to_a_key() -> None:
    keys = {key for key, _ in config_keys.all_settings()}
    assert set(config_words.ALSO_CALLED) <= keys
    assert set(config_words.SECTIONS) == {key.partition(".")[0] for key in keys} - {"teachers"}


@pytest.mark.parametrize("text", ["a = " + "[" * 2000 + "]" * 2000, "a = " + "{a = " * 2000 + "1" + "}" * 2000])
def test_a_file_or_value_nested_without_end_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "deep.toml").write_text(text)
    with pytest.raises(ConfigError, match="is nested too deeply to be read"):
        config_file.load(tmp_path / "deep.toml")
    assert "--task is nested too deeply to be read" in error_of(tmp_path, "--task", text.removeprefix("a = "))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text("")

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=r"mine\.toml cannot be read: Permission denied"):
        config_file.load(tmp_path / "mine.toml")
    with pytest.raises(ConfigError, match="no configuration file at"):
        config_file.find("x" * 5000)


def test_of_a_section_and_its_keys_the_later_word_holds(tmp_path: Path) -> None:
    section = ["--run", '{ directory = "a", steps = 7 }']
    assert config_file.load(tiny_config(tmp_path), [*section, "--run.steps", "3"]).run.steps == 3
    assert config_file.load(tiny_config(tmp_path), ["--run.steps", "3", *section]).run.steps == 7


def test_a_long_value_is_shown_by_its_beginning(tmp_path: Path) -> None:
    for value in (f"--run.steps={'9' * 5000}", f"--run.steps={[1] * 2000}", f"--task.grader={'x' * 5000}"):
        assert len(error_of(tmp_path, value)) < 400
    assert error_of(tmp_path, "--" + "x" * 5000, "1").startswith("unknown key 'xxx")
    assert len(error_of(tmp_path, "--" + "x" * 5000, "1")) < 400
