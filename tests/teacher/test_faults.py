"""Whole runs through a faulty wire: exactly the result of a healthy run, or the declared error and a folder to resume."""

import contextlib
import logging
import signal
import threading

import pytest
import tomli_w

from tests.endpoint import proxy as faults
from tests.endpoint.proxy import proxying
from tests.endpoint.runs import assert_same_run, everything_in, metrics, served_config, shorten_pauses, stored, train
from tests.run.test_resume import results
from tests.serve.serving import forked_server, serving, wait_until
from topd.cli import main
from topd.errors import ConfigError, RunStopped
from topd.teacher.served import EndpointTeacher

IMPATIENT = {"teacher__timeout_s": 0.6, "teacher__patience_s": 0.6, "teacher__max_attempts": 3}
BAD_KINDS = {
    name: [faults.edited(kind, edit) for kind, edit in dialect.edits.items()] for name, dialect in faults.DIALECTS.items()
}
BAD_KINDS["vllm"].append(faults.same_index_twice)
BAD_KINDS["echo"].append(faults.same_index_twice)

OPTIONS = ("--threads", "1", "--batch-invariant")


@pytest.fixture(scope="module")
def teacher():
    with serving(batch_invariant=True) as base:
        yield base


@pytest.fixture(scope="module")
def twin():
    """Another server of the same model."""
    with serving(batch_invariant=True) as base:
        yield base


@pytest.fixture(scope="module")
def other():
    """Another model that calls itself the same."""
    with serving("builtin:tiny-student", name="builtin:tiny-teacher", batch_invariant=True) as base:
        yield base


@pytest.fixture(scope="module")
def healthy_folder(teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy")
    train(served_config(folder, teacher))
    return folder


@pytest.fixture(scope="module")
def healthy(healthy_folder):
    return results(healthy_folder)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    shorten_pauses(monkeypatch)


def at(step, act):
    """`act` before that step."""
    return lambda now: act() if now == step else None


def name_of(fault):
    return fault.__name__


RETRIED = {
    "connection": (faults.reset_before_headers, faults.reset_after_headers, faults.cut_off),
    "status": (faults.status(500), faults.status(503), faults.status(502), faults.echo_headers),
    "body": (faults.html, faults.empty, faults.truncated),
}


@pytest.mark.parametrize("kind", RETRIED)
def test_faults_that_pass_change_nothing(tmp_path, teacher, healthy, kind):
    """Each meets two requests in a row, and each time another try is made."""
    given = [fault for fault in RETRIED[kind] for _ in range(2)]
    with proxying(teacher) as proxy:
        train(served_config(tmp_path, proxy.url), at(1, lambda: proxy.give(faults.two_of_three(*given))))
        assert proxy.given == list(map(name_of, given))
    assert results(tmp_path) == healthy
    assert sum(row["teacher/retries"] for row in metrics(tmp_path)) == len(given)


SLOW = (
    faults.delay(0.3),
    faults.stall,
    faults.status(429),
    faults.status(429, retry_after="0.2"),
    faults.busy_until(1.0),
    faults.status(503, retry_after="0.2"),
)


def test_servers_that_take_long_or_ask_to_wait_change_nothing(tmp_path, teacher, healthy):
    with proxying(teacher) as proxy:
        train(served_config(tmp_path, proxy.url), at(1, lambda: proxy.give(faults.two_of_three(*SLOW))))
        assert proxy.given == list(map(name_of, SLOW))
    assert results(tmp_path) == healthy
    assert sum(row["teacher/retries"] for row in metrics(tmp_path)) == 1  # of the stalled one; to wait is no failure


@pytest.mark.parametrize("dialect", faults.DIALECTS)
def test_answers_to_something_else_change_nothing(tmp_path, teacher, healthy_folder, dialect):
    """Wrong numbers, lengths, ids, order, rows: all that the dialect can express, each once. All dialects agree to 1e-4."""
    with proxying(teacher, dialect) as proxy:
        train(served_config(tmp_path / "healthy", proxy.url))
        schedule = faults.two_of_three(*BAD_KINDS[dialect])
        train(served_config(tmp_path / "faulty", proxy.url), at(1, lambda: proxy.give(schedule)))
        assert proxy.given == [kind.__name__ for kind in BAD_KINDS[dialect]]
    assert results(tmp_path / "faulty") == results(tmp_path / "healthy")
    assert_same_run(tmp_path / "healthy", healthy_folder)


def test_a_server_that_is_away_for_a_while_changes_nothing(tmp_path, teacher, healthy, caplog):
    """The circuit opens, and a health check closes it again."""
    with proxying(teacher) as proxy:
        train(served_config(tmp_path, proxy.url), at(2, lambda: proxy.give(faults.first(5, faults.reset_before_headers))))
    assert results(tmp_path) == healthy
    said = [record.getMessage() for record in caplog.records if record.name == "topd.endpoint"]
    assert "marked unhealthy, no requests until its health check passes" in said[0]
    assert said[1].endswith("is healthy again")


LAME = (faults.reset_before_headers, faults.stall, faults.status(429), BAD_KINDS["topd"][0], "another model")


@pytest.mark.parametrize("fault", LAME, ids=lambda fault: getattr(fault, "__name__", fault))
def test_one_of_two_servers_that_never_works_again_changes_nothing(tmp_path, teacher, twin, other, healthy, fault):
    with proxying(teacher) as lame, proxying(twin) as well:

        def break_one():
            if fault == "another model":
                lame.upstream = other.removesuffix("/v1")
            else:
                lame.give(faults.always(fault))

        train(served_config(tmp_path, lame.url, well.url, teacher__timeout_s=0.5), at(2, break_one))
        assert lame.seen["score"] >= 1
    assert results(tmp_path) == healthy


ENDLESS = {
    faults.reset_before_headers: "nothing succeeded for 0.6 s",
    faults.stall: "did not answer within 0.6 s",
    faults.status(429, retry_after="0.2"): "nothing succeeded for 0.6 s: .* answered 429",
    faults.status(307, location="http://127.0.0.1:9/"): "answered 307: no",
    faults.edited("nan", faults.NUMBERS["nan"]): "nan cannot be the log-prob of a sampled token",
}


def test_a_fault_that_stays_stops_the_run_and_leaves_it_to_be_resumed(tmp_path, teacher, healthy):
    """One fault after another stops the same run, in its second step; when all is well again it ends as if nothing had been."""
    with proxying(teacher) as proxy:
        for number, (fault, said) in enumerate(ENDLESS.items()):
            tree = served_config(tmp_path, proxy.url, **IMPATIENT, run__resume=number > 0)
            proxy.give(None)
            with pytest.raises(RunStopped, match=f"4 of the step's 4 groups could not be scored .*{said}") as caught:
                train(tree, at(1 if number else 2, lambda fault=fault: proxy.give(faults.always(fault))))
            assert caught.value.exit_code == 3
            assert "topd probe" in str(caught.value)
            assert "--run.resume true" in str(caught.value)
            assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000001.parquet"]
    train(served_config(tmp_path, teacher, run__resume=True))
    assert results(tmp_path) == healthy


def test_a_server_that_restarts_with_another_model_stops_the_run_which_goes_on_with_the_right_one(
    tmp_path, teacher, other, healthy
):
    with proxying(teacher) as proxy:
        restart = faults.first(1, faults.restart(other, drop=True))
        with pytest.raises(RunStopped, match="answers as another model: its weights have changed"):
            train(served_config(tmp_path, proxy.url, **IMPATIENT), at(2, lambda: proxy.give(restart)))
    with pytest.raises(ConfigError, match="answer as another model than the one this run began with"):
        train(served_config(tmp_path, other, run__resume=True))
    train(served_config(tmp_path, teacher, run__resume=True))
    assert results(tmp_path) == healthy


def test_a_resumed_run_knows_its_teacher_whatever_became_of_the_scores(tmp_path, teacher, other, capsys):
    """A server that tells no digest, so that only the numbers of the first meeting can tell."""
    folder = tmp_path / "run"
    with proxying(teacher, "vllm") as right, proxying(other, "vllm") as wrong:
        train(served_config(folder, right.url, run__steps=1))
        for file in folder.glob("teacher_scores.sqlite*"):
            file.unlink()
        again = served_config(folder, wrong.url, run__steps=2, run__resume=True)
        with pytest.raises(
            ConfigError, match="answer as another model than the one this run began with: fixed tokens are off by"
        ):
            train(again)
        met = (folder / "teachers.json").read_text()
        (folder / "teachers.json").write_text(met.replace("-", "-1", 1))
        with pytest.raises(ConfigError, match=r"teachers\.json is damaged: it has changed since it was written .*Restore it"):
            train(again)
        (folder / "teachers.json").unlink()
        capsys.readouterr()
        train(again | {"teacher": again["teacher"] | {"base_url": [right.url]}})
    assert "WARNING  teachers.json is missing: that the served teachers are unchanged is not" in capsys.readouterr().out
    assert (folder / "teachers.json").read_text() == met


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(faults.reset_before_headers, "models"), (faults.html, "models"), (faults.status(500), "score"), (faults.stall, "score")],
)
def test_a_fault_at_the_start_costs_nothing_and_leaves_nothing(tmp_path, teacher, healthy, fault, kind):
    with proxying(teacher) as proxy:
        proxy.give(faults.always(fault), kind)
        with pytest.raises(ConfigError, match=r"teacher\.base_url: none of the servers can be used") as caught:
            train(served_config(tmp_path / "run", proxy.url, **IMPATIENT))
        assert caught.value.exit_code == 2
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back_changes_nothing(tmp_path, healthy, monkeypatch):
    """SIGKILL with the second step's requests in flight; the same command is started again on the same port."""
    prefetch, revived = EndpointTeacher.prefetch, []
    with contextlib.ExitStack() as stack:
        base, process = stack.enter_context(forked_server("builtin:tiny-teacher", *OPTIONS))
        port = base.removesuffix("/v1").rpartition(":")[2]

        def revive():
            revived.append(stack.enter_context(forked_server("builtin:tiny-teacher", *OPTIONS, "--port", port)))

        def prefetch_and_kill(teacher, groups):
            prefetch(teacher, groups)
            if killing and process.poll() is None:
                process.kill()
                process.wait()
                threading.Thread(target=revive).start()

        killing = []
        monkeypatch.setattr(EndpointTeacher, "prefetch", prefetch_and_kill)
        train(served_config(tmp_path, base, teacher__patience_s=60.0), at(2, lambda: killing.append(True)))
        wait_until(lambda: revived)
        assert process.returncode == -signal.SIGKILL
    assert results(tmp_path) == healthy
    assert metrics(tmp_path)[1]["teacher/retries"] > 0


def refusing(prompt_ids):
    """A server that cannot score one prompt, whatever else it can."""
    refuse = faults.status(413, body='{"error": {"message": "too long"}}')

    async def fault(exchange):
        asked = exchange.request.json["groups"][0]["prompt"]
        return await (refuse(exchange) if asked == prompt_ids else exchange.forward())

    return faults.named("refusing one prompt", fault)


def test_a_group_that_alone_cannot_be_scored_is_left_out_and_counted(tmp_path, teacher, healthy_folder):
    refused = stored(healthy_folder, 2, "prompt_ids")[2]
    with proxying(teacher) as proxy:
        proxy.give(faults.always(refusing(refused)))
        train(served_config(tmp_path, proxy.url, teacher__max_dropped_share=0.3))
    assert [row["teacher/dropped_groups"] for row in metrics(tmp_path)] == [0, 1]
    kept = [ids for ids in stored(healthy_folder, 2, "prompt_ids") if ids != refused]
    assert len(kept) == 6
    assert stored(tmp_path, 2, "prompt_ids") == kept
    assert metrics(tmp_path)[0]["train/loss"] == metrics(healthy_folder)[0]["train/loss"]


def test_more_groups_than_may_be_dropped_stop_the_run(tmp_path, teacher, healthy_folder, healthy):
    refused = stored(healthy_folder, 2, "prompt_ids")[2]
    less = {"teacher__max_dropped_share": 0.24}
    with proxying(teacher) as proxy:
        proxy.give(faults.always(refusing(refused)))
        with pytest.raises(
            RunStopped,
            match=r"1 of the step's 4 groups could not be scored \(teacher.max_dropped_share = 0.24\): .*413: too long",
        ):
            train(served_config(tmp_path, proxy.url, **less))
        proxy.give(None)
        train(served_config(tmp_path, proxy.url, **less, run__resume=True), at(1, lambda: proxy.give(None)))
        assert proxy.seen["score"] == 1  # the other three are on disk
    assert results(tmp_path) == healthy


def test_a_step_in_which_nothing_can_be_scored_stops_the_run_whatever_may_be_dropped(tmp_path, teacher):
    with proxying(teacher) as proxy:
        tree = served_config(tmp_path, proxy.url, teacher__max_dropped_share=0.99, **IMPATIENT)
        with pytest.raises(RunStopped, match="4 of the step's 4 groups"):
            train(tree, at(1, lambda: proxy.give(faults.always(faults.status(400)))))


def test_the_command_ends_with_three_and_says_how_to_go_on(tmp_path, teacher, healthy, capsys):
    config = tmp_path / "config.toml"
    with proxying(teacher) as proxy:
        config.write_text(tomli_w.dumps(served_config(tmp_path / "run", proxy.url, **IMPATIENT)))
        proxy.give(lambda number: faults.status(400) if number >= 27 else None)  # from the second step on
        assert main(["train", str(config)]) == 3
        assert "--run.resume true" in capsys.readouterr().err
        proxy.give(None)
        assert main(["train", str(config), "--run.resume", "true"]) == 0
    assert results(tmp_path / "run") == healthy


def test_a_key_leaves_no_trace(tmp_path, monkeypatch, caplog, capfd):
    """In no file of the run, no log record of any library, no line on the terminal, even if an error page repeats it."""
    key = "sk-7d1e5c0ffee"
    monkeypatch.setenv("TOPD_TEACHER_API_KEY", key)
    caplog.set_level(logging.DEBUG)
    with serving(token=key) as base, proxying(base) as proxy:
        tree = served_config(tmp_path / "run", proxy.url, **IMPATIENT)
        with pytest.raises(RunStopped, match="answered 502") as caught:
            train(tree, at(2, lambda: proxy.give(faults.always(faults.echo_headers))))
        before = everything_in(tmp_path / "run")
        proxy.give(None)
        train(served_config(tmp_path / "run", proxy.url, run__resume=True))
        assert {request.headers.get("authorization") for request in proxy.requests} == {f"Bearer {key}"}
    assert "[the key]" in str(caught.value)
    texts = [str(caught.value), repr(caught.value), *(record.getMessage() for record in caplog.records), *capfd.readouterr()]
    assert not any(key in text for text in texts)
    assert key.encode() not in before + everything_in(tmp_path / "run")


@pytest.mark.parametrize(("key", "state"), [(None, "is not set"), ("sk-wrong", "is set, but refused")])
def test_a_missing_or_wrong_key_is_an_error_that_names_the_variable(tmp_path, monkeypatch, capsys, key, state):
    monkeypatch.delenv("MY_KEY", raising=False)
    if key:
        monkeypatch.setenv("MY_KEY", key)
    with serving(token="sk-right") as base:
        tree = served_config(tmp_path / "run", base, teacher__api_key_env="MY_KEY")
        (tmp_path / "config.toml").write_text(tomli_w.dumps(tree))
        assert main(["train", str(tmp_path / "config.toml")]) == 2
    said = capsys.readouterr()
    assert f"The key is read from the environment variable MY_KEY, which {state}." in said.err
    assert "sk-" not in said.err + said.out


def test_a_key_that_is_revoked_stops_the_run(tmp_path, teacher, healthy, monkeypatch):
    monkeypatch.setenv("TOPD_TEACHER_API_KEY", "sk-7d1e5")
    with proxying(teacher) as proxy:
        with pytest.raises(RunStopped, match=r"answered 401: no.*TOPD_TEACHER_API_KEY, which is set, but refused"):
            train(served_config(tmp_path, proxy.url), at(2, lambda: proxy.give(faults.always(faults.status(401)))))
        proxy.give(None)
        train(served_config(tmp_path, proxy.url, run__resume=True))
    assert results(tmp_path) == healthy
