"""What a person at a terminal sees: help, one-paragraph errors, exit codes, no tracebacks."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from tests.e2e.tiny import tiny_config
from topd import config_file
from topd.cli import main
from topd.errors import first_line
from topd.models.load import BUILTIN
from topd.run.interrupt import interruptible, stopping_signals, uninterrupted


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(tiny_config(tmp_path / "run")))
    return str(path)


@pytest.mark.parametrize("verb", ["train", "eval", "probe", "config"])
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "--section.key value" in out
    assert "exit codes" in out


def test_without_a_verb_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "train" in capsys.readouterr().out


def test_config_prints_what_train_would_use(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", config, "--algorithm.alpha", "0.1"]) == 0
    assert "alpha = 0.1" in capsys.readouterr().out
    assert main(["config", "--keys"]) == 0
    listed = capsys.readouterr().out
    assert "rollout.group_size" in listed
    assert "algorithm.alpha" in listed


def test_overrides_may_stand_anywhere(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--run.steps", "4", config, "--algorithm.alpha=0.1"]) == 0
    out = capsys.readouterr().out
    assert "steps = 4" in out
    assert "alpha = 0.1" in out


def test_probe_prints_every_verdict(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", config]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    assert all(line.startswith("ok  ") for line in lines[:10])
    assert lines[10].startswith("WARN  grades of the student: ")  # 24 tokens cut most completions off
    assert "Raise rollout.max_completion_tokens" in lines[10]


def test_probe_fails_with_two(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(BUILTIN / "tiny-teacher", tmp_path / "teacher")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": ";"}))
    assert main(["probe", config, "--teacher.name", str(folder)]) == 2
    assert "FAIL  end token" in capsys.readouterr().out


def test_eval_prints_rows(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "builtin:tiny-teacher", "--config", config]) == 0
    assert json.loads(capsys.readouterr().out)["benchmark"] == "held_out"


def truncated(folder: Path) -> str:
    shutil.copytree(BUILTIN / "tiny-student", folder)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    return str(folder)


BAD_INPUT = {
    "missing model folder": (["--student.name", "/no/such/folder"], "student.name"),
    "unknown builtin": (["--student.name", "builtin:tiny"], "builtin:tiny-student"),
    "missing gguf": (["--teacher.name", "nowhere.gguf"], "teacher.name"),
    "prompt longer than the context": (["--rollout.max_completion_tokens", "250"], "rollout.max_completion_tokens"),
    "group of one": (["--rollout.group_size", "1"], "rollout.group_size"),
    "minibatch that does not divide": (["--trainer.minibatch_prompts", "3"], "trainer.minibatch_prompts"),
    "alpha out of range": (["--algorithm.alpha", "1.01"], "algorithm.alpha"),
    "unwritable run folder": (["--run.directory", "/proc/topd"], "run.directory"),
    "unknown device": (["--run.device", "abacus"], "run.device"),
    "unknown key": (["--run.stepz", "3"], "Did you mean"),
    "more threads than processors": (["--run.threads", "100000"], "run.threads"),
    "meta device": (["--run.device", "meta"], "run.device"),
    "markup in a name": (["--eval.benchmarks", '[{name="[/b]",task={type="jsonl",path="none"}}]'], "task.path"),
    "override without value": (["--run.steps"], "--section.key value"),
}


@pytest.mark.parametrize(("words", "named"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_one_paragraph_and_exit_code_two(
    words: list[str], named: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config, *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("topd: ")
    assert named in message
    assert "Traceback" not in message
    assert len(message.strip().splitlines()) == 1


def test_corrupted_weights_are_one_paragraph(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", config, "--student.name", truncated(tmp_path / "student")]) == 2
    message = capsys.readouterr().err
    assert "cannot be loaded" in message
    assert len(message.strip().splitlines()) == 1


def test_nan_weights_stop_at_the_probe(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(BUILTIN / "tiny-teacher", tmp_path / "teacher")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["train", config, "--teacher.name", str(folder)]) == 2
    assert "teacher" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (b'{"prompt": "\xff"}\n', [], "is not UTF-8"),
        (b'{"prompt": "1+1="}\n', ["--algorithm.type", "grpo"], "learns from answers, which 1 of 1"),
        (b'{"prompt": "1+1="}\n', ["--algorithm.type", "sft", "--rollout.group_size", "1"], "learns from demonstrations"),
        (b'{"prompt": "1+1="}\n', ["--student.lora.target_modules", "nothing"], "student.lora.target_modules"),
    ],
    ids=["not text", "no answers", "no demonstrations", "no such modules"],
)
def test_unusable_data_and_adapters_are_named(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str], text: bytes, words: list[str], said: str
) -> None:
    (tmp_path / "data.jsonl").write_bytes(text)
    assert main(["train", config, "--task.path", str(tmp_path / "data.jsonl"), *words]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert "Traceback" not in message


def test_an_empty_task_is_named(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert main(["train", config, "--task.path", str(tmp_path / "empty.jsonl")]) == 2
    assert "empty.jsonl holds no problem" in capsys.readouterr().err


def test_a_run_folder_is_not_overwritten_and_resume_refuses_another_configuration(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config]) == 0
    assert main(["train", config]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["train", config, "--run.resume", "true", "--algorithm.alpha", "0.3"]) == 2
    assert "algorithm.alpha was 0.2, is 0.3" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_is_exit_code_three(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate no network survives: the weights overflow, and the next loss says so."""
    assert main(["train", config, "--trainer.learning_rate", "1e30", "--eval.max_problems", "1"]) == 3
    message = capsys.readouterr().err
    assert "is not finite" in message
    assert "Traceback" not in message


def test_debug_shows_the_traceback(config: str) -> None:
    with pytest.raises(ValueError, match=r"run\.stepz"):
        main(["train", config, "--debug", "--run.stepz", "3"])


def test_the_installed_command_and_the_module_are_the_same() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = Path(sys.executable).with_name("topd")
    outputs = [
        subprocess.run([*words, "--version"], capture_output=True, text=True, env=env).stdout
        for words in ([str(command)], [sys.executable, "-m", "topd"])
    ]
    assert outputs[0] == outputs[1] != ""


def test_starting_is_quick_because_torch_is_not_imported_for_help() -> None:
    code = "import sys; from topd.cli import _parser; _parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_shipped_names_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_file.load("quickstart").student.name == "builtin:tiny-student"


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path, config: str) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        f"{sys.executable} -m topd train {config} | head -n 1", shell=True, capture_output=True, text=True, env=env
    )
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run/summary.json").is_file()


@pytest.mark.parametrize("change", [{"num_hidden_layers": 9}, {"hidden_size": "a"}, {"num_attention_heads": 0}, []])
def test_broken_model_configurations_are_one_paragraph(
    tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str], change: object
) -> None:
    folder = shutil.copytree(BUILTIN / "tiny-student", tmp_path / "student")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **change} if isinstance(change, dict) else change))
    assert main(["train", config, "--student.name", str(folder)]) == 2
    message = capsys.readouterr().err
    assert "student.name" in message
    assert "Traceback" not in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("words", [["config", "quickstart"], ["--help"]])
def test_output_that_cannot_be_written_is_said_in_one_line(words: list[str]) -> None:
    """Also where it is small enough to fail at the end only."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "topd", *words], stdout=full, stderr=subprocess.PIPE, text=True, env=env)
    assert done.returncode == 3
    assert done.stderr.startswith("topd: the output could not be written")
    assert len(done.stderr.splitlines()) == 1


def test_a_reader_of_the_first_lines_is_no_failure() -> None:
    """The end of the output is lost at the exit, or while the command runs."""
    for variable, code in (("PYTHONUNBUFFERED=", 0), ("PYTHONUNBUFFERED=1", 141)):
        words = f"{variable} {sys.executable} -m topd config --keys trainer; echo $? >&2"
        done = subprocess.run(f"({words}) | true", shell=True, capture_output=True, text=True)
        assert done.stderr == f"{code}\n"


def test_keys_of_a_section_are_listed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--keys", "trainer"]) == 0
    keys = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert "trainer.epochs" in keys
    assert all(key.startswith("trainer.") for key in keys)
    assert main(["config", "--keys", "train"]) == 2
    assert "no section or key 'train'" in capsys.readouterr().err


def test_weights_of_another_shape_are_named(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(BUILTIN / "tiny-student", tmp_path / "student")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "intermediate_size": settings["intermediate_size"] + 8}))
    assert main(["train", config, "--student.name", str(folder)]) == 2
    message = capsys.readouterr().err
    assert "mlp.down_proj.weight has shape [" in message
    assert "its config.json requires [" in message
    assert "report" not in message


def test_a_librarys_list_is_not_cut_off_at_its_colon() -> None:
    said = "Couldn't instantiate the backend tokenizer from one of: \n(1) a file, \n(2) a slow tokenizer.\n"
    assert first_line(ValueError(said)).endswith("from one of: (1) a file, (2) a slow tokenizer.")
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"


def test_a_section_given_whole_and_its_keys_keep_their_order(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    section = '{ directory = "a", steps = 7 }'
    for words, steps in (
        (["--run", section, config, "--run.steps", "3"], 3),
        ([config, "--run.steps", "3", "--run", section], 7),
        ([config, "--run.steps", "3", f"--run={section}"], 7),
    ):
        assert main(["config", *words]) == 0
        assert f"steps = {steps}\n" in capsys.readouterr().out


def test_a_table_sets_the_keys_that_it_holds_and_no_others(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trainer.learning_rate", "0.5", "--trainer", "{ epochs = 2 }", "--run", "{ steps = 7 }"]
    assert main(["config", config, *words]) == 0
    out = capsys.readouterr().out
    assert all(line in out for line in ("learning_rate = 0.5\n", "epochs = 2\n", "steps = 7\n", "directory = "))


def test_a_table_of_another_type_replaces_the_section(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", config, "--algorithm", "{ type = 'grpo' }"]) == 0
    out = capsys.readouterr().out
    assert 'type = "grpo"' in out
    assert "alpha" not in out


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["during an import", "between"])
def test_a_signal_before_the_run_begins_ends_with_a_word(tmp_path: Path, signum: signal.Signals, moment: str) -> None:
    """What is imported sends it, and swallows whatever is raised in it; or a function sends it."""
    send = f"os.kill(os.getpid(), {int(signum)})"
    text = f"try: {send}\nexcept BaseException: pass" if moment == "during an import" else f"def send(*_): {send}"
    (tmp_path / "sender.py").write_text(f"import os\n{text}\nsend = globals().get('send', lambda *_: 0)\n")
    (tmp_path / "start.py").write_text(
        "import signal, sys\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\nfrom topd import cli\n"  # under nohup too
        "def command(*_):\n    import sender\n    return sender.send()\n"
        "cli._config = command\nsys.exit(cli.main(['config', '--keys']))\n"
    )
    done = subprocess.run([sys.executable, str(tmp_path / "start.py")], capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    assert done.stderr.startswith("topd: interrupted")
    assert len(done.stderr.splitlines()) == 1


def test_signals_are_handled_as_before_once_the_command_is_done() -> None:
    before = [signal.getsignal(signum) for signum in stopping_signals()]
    assert main([]) == 0
    assert [signal.getsignal(signum) for signum in stopping_signals()] == before


def test_a_signal_once_all_is_done_does_not_change_the_exit_code(tmp_path: Path) -> None:
    """While threads are waited for, and in what runs at the very end."""
    (tmp_path / "end.py").write_text(
        "import atexit, os, signal, threading, time\nfrom topd import cli\n"
        "class Late:\n    def __del__(self):\n        os.kill(os.getpid(), signal.SIGTERM)\n"
        "late = Late()\n"
        "def wait():\n    time.sleep(0.3)\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(5)\n"
        "import sys\nif sys.argv.pop() == 'thread': threading.Thread(target=wait).start()\n"
        "cli._main = lambda words: 0\ncli.command()\n"
    )
    for moment in ("thread", "end"):
        done = subprocess.run([sys.executable, str(tmp_path / "end.py"), moment], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), moment


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stopping_signals()
        with interruptible(), uninterrupted():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in stopping_signals()
        signal.signal(signal.SIGHUP, handler)


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b"], ids=["too long", "a NUL"])
@pytest.mark.parametrize(
    "words",
    [
        ["train", "PATH"],
        ["train", "quickstart", "--student.name", "PATH"],
        ["grade", "quickstart", "PATH"],
        ["report", "PATH"],
        ["explain", "PATH"],
        ["rescore", "PATH", "--algorithm.alpha", "0.1"],
    ],
    ids=" ".join,
)
def test_paths_that_cannot_even_be_looked_for_are_one_paragraph(
    words: list[str], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([path if word == "PATH" else word for word in words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("topd: ")
    assert "Traceback" not in message


def test_a_read_only_run_folder_is_named_by_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """As a read-only disk answers: to the file, and to removing what is not there."""
    (tmp_path / "config.toml").write_text(tomli_w.dumps({"algorithm": {"type": "topd"}, "run": {"steps": 2}}))

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system", str(self))

    for name in ("write_text", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    assert main(["report", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "report.html could not be written: [Errno 30] Read-only file system" in message
    assert "Give another with --output" in message
    assert len(message.splitlines()) == 1


def test_a_file_that_nobody_expected_to_fail_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise PermissionError(13, "Permission denied", "/some/file")

    monkeypatch.setattr("topd.cli._config", fail)
    assert main(["config", "quickstart"]) == 3
    assert capsys.readouterr().err == "topd: /some/file: Permission denied. Fix that and try again; --debug shows where.\n"
    with pytest.raises(PermissionError):
        main(["config", "quickstart", "--debug"])
