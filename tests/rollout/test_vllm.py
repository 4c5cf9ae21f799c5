"""Whole runs whose rollouts come from a server (`topd serve --allow-reload`): always from the weights they claim."""

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import torch
from safetensors.torch import load as load_tensors

from tests.endpoint import proxy as faults
from tests.endpoint.proxy import proxying
from tests.endpoint.runs import everything_in, metrics, sampling_config, shorten_pauses, stored, train
from tests.fakes import ragged_groups, save_folder
from tests.run.test_resume import results
from tests.serve.serving import serving, wait_until
from topd.endpoint import served
from topd.errors import ConfigError, RunStopped
from topd.models.export import export_untied
from topd.models.load import load
from topd.models.logprobs import score_groups
from topd.models.policy import Policy
from topd.trainer.step import Trainer

STUDENT = "builtin:tiny-student"
VERSIONS = [0, 2, 4]
"""Two updates a step."""


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    shorten_pauses(monkeypatch)


@contextlib.contextmanager
def student_server(name=STUDENT, **options):
    """A proxy in front of a server whose weights may be replaced."""
    with serving(name, name="student", allow_reload=True, **options) as base, proxying(base) as proxy:
        yield proxy


@pytest.fixture
def student():
    with student_server() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy")
    with student_server() as proxy:
        train(sampling_config(folder, proxy.url, run__steps=2))
    return results(folder)


def at(step, act):
    return lambda now: act() if now == step else None


def hand_overs(proxy):
    return sum(request.path == "/collective_rpc" for request in proxy.requests)


def assert_sampled_by_the_trainers_weights(folder):
    """What the server said of its tokens is what the trainer says of them, under the weights of that version."""
    for step, row in enumerate(metrics(folder), 1):
        assert row["policy/mismatch_kl"] < 1e-8
        pairs = zip(stored(folder, step, "rollout_logprobs"), stored(folder, step, "old_logprobs"), strict=True)
        assert all(sampled == pytest.approx(old, abs=1e-4) for sampled, old in pairs)


# what is handed over


def test_every_version_is_handed_over_and_sampled_from(tmp_path, student):
    train(sampling_config(tmp_path, student.url, run__steps=3))
    assert_sampled_by_the_trainers_weights(tmp_path)
    assert [stored(tmp_path, step, "policy_version")[0] for step in (1, 2, 3)] == VERSIONS
    assert [row["policy/lag"] for row in metrics(tmp_path)] == [0, 0, 0]
    assert hand_overs(student) == 4
    assert {path.name for path in tmp_path.iterdir()} >= {"model", "summary.json"}
    assert not (tmp_path / "handover").exists()


def scores(name_or_url, groups):
    if not name_or_url.startswith("http"):
        model = load(name_or_url, dtype="float32", device=torch.device("cpu"), role="student")
        return torch.cat([part for parts in score_groups(model, groups, max_tokens=4096) for part in parts])
    asked = [{"prompt": group.prompt_ids, "completions": group.completions} for group in groups]
    return load_tensors(httpx2.post(f"{name_or_url}/score", json={"groups": asked}).content)["logprobs"]


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("qwen3", None),
        ("qwen3-untied", None),
        ("qwen3", {"rank": 2}),
        ("qwen3", {"rank": 2, "target_modules": ["lm_head", "q_proj"], "modules_to_save": ["embed_tokens"]}),
    ],
    ids=["tied", "untied", "lora", "lora on tied layers"],
)
def test_in_the_end_the_server_has_the_model_that_was_trained(tmp_path, kind, lora):
    folder, groups = save_folder(tmp_path / "student", kind), ragged_groups((4, (7, 3)), (1, (5,)))
    changes = {"trainer__learning_rate": 0.01, **({"student__lora": lora} if lora else {})}
    with student_server(str(folder)) as proxy:
        tree = sampling_config(tmp_path / "run", proxy.url, student__name=str(folder), **changes)
        tree["teacher"] = {"name": str(save_folder(tmp_path / "teacher", kind, seed=7))}
        train(tree)
        served = scores(proxy.url, groups)
    assert_sampled_by_the_trainers_weights(tmp_path / "run")
    trained = scores(str(tmp_path / "run/model"), groups)
    torch.testing.assert_close(served, trained, atol=1e-4, rtol=1e-4)
    assert float((served - scores(str(folder), groups)).abs().mean()) > 0.01


def test_new_weights_go_through_the_folder_that_is_named_and_leave_it_as_it_was(tmp_path, student):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/thesis.tex").write_text("mine")
    train(sampling_config(tmp_path / "run", student.url, rollout__vllm__weights_directory=str(tmp_path / "shared"), run__steps=1))
    assert [path.name for path in (tmp_path / "shared").iterdir()] == ["thesis.tex"]
    used = {request.json["kwargs"]["weights_path"] for request in student.requests if request.path == "/collective_rpc"}
    [folder] = used  # other runs may use the shared one
    assert re.fullmatch(r"topd-[0-9a-f]{12}", Path(folder).name)
    assert Path(folder).parent == tmp_path / "shared"


# what goes wrong


def test_adapters_on_tied_layers_are_refused_where_a_server_may_keep_them_tied(tmp_path, student, monkeypatch):
    """vLLM takes one tensor for both. A server that tells a digest of its weights is topd's, which unties them."""
    lora = {"rank": 2, "target_modules": ["embed_tokens"]}
    tree = sampling_config(tmp_path, student.url, student__lora=lora)
    read = served.read_cards
    monkeypatch.setattr(served, "read_cards", lambda url, body: [replace(card, fingerprint=None) for card in read(url, body)])
    with pytest.raises(ConfigError, match=r"student\.lora\.target_modules .* must leave the embedding and the output head alone"):
        train(tree)
    assert hand_overs(student) == 0


async def swallow(exchange):
    """A server that says yes and does nothing."""
    return faults.Reply(200, b'{"results": [null]}')


def reloads(fault):
    """Done to the reloads among the control requests."""

    async def only_reloads(exchange):
        return await (fault(exchange) if exchange.request.path == "/collective_rpc" else exchange.forward())

    return faults.always(faults.named("reload", only_reloads))


@pytest.mark.parametrize("learning_rate", [1e-3, 1e-5])
def test_a_reload_that_does_nothing_is_found_out_however_small_the_update(tmp_path, student, learning_rate):
    tree = sampling_config(tmp_path, student.url, trainer__learning_rate=learning_rate)
    with pytest.raises(RunStopped, match=r"not serve the weights of version 2.*those of version 0: the reload did nothing"):
        train(tree, at(1, lambda: student.give(reloads(swallow), "control")))
    assert not (tmp_path / "metrics.jsonl").exists()
    student.give(None, "control")
    train({**tree, "run": {**tree["run"], "resume": True}})
    assert_sampled_by_the_trainers_weights(tmp_path)


def test_a_server_that_loads_something_else_is_found_out_and_the_message_says_where_to_look(tmp_path, student, healthy):
    """Here: the output head left as it was."""
    other = tmp_path / "other"
    policy = load(STUDENT, dtype="float32", device=torch.device("cpu"), role="student")
    with torch.no_grad():
        policy.module.get_input_embeddings().weight.mul_(1.05)
    export_untied(Policy(policy), other)

    async def load_other(exchange):
        body = json.dumps({"method": "reload_weights", "kwargs": {"weights_path": str(other)}}).encode()
        return await exchange.proxy.ask(replace(exchange.request, body=body))

    with pytest.raises(RunStopped, match=r"belong to no version of this run\. Look, in this order: .* is the output head"):
        train(sampling_config(tmp_path / "run", student.url), at(2, lambda: student.give(reloads(load_other), "control")))
    student.give(None, "control")
    train(sampling_config(tmp_path / "run", student.url, run__resume=True))
    assert results(tmp_path / "run") == healthy


def test_a_hand_over_that_fails_stops_the_run_and_says_what_servers_need(tmp_path, student, healthy):
    tree = sampling_config(tmp_path, student.url, rollout__vllm__patience_s=0.5)
    with pytest.raises(RunStopped, match=r"not be handed over: .*VLLM_SERVER_DEV_MODE=1 .*--allow-reload") as caught:
        train(tree, at(1, lambda: student.give(reloads(faults.status(500)), "control")))
    assert caught.value.exit_code == 3
    student.give(None, "control")
    train({**tree, "run": {**tree["run"], "resume": True}})
    assert results(tmp_path) == healthy


def test_a_server_that_cannot_be_given_weights_is_refused_at_the_start(tmp_path):
    with serving(STUDENT) as base, pytest.raises(ConfigError, match=r"rollout servers: .*could not be handed over: .*404"):
        train(sampling_config(tmp_path / "run", base, rollout__vllm__patience_s=0.5))
    assert not (tmp_path / "run").exists()


def test_a_server_of_another_model_is_refused_at_the_start(tmp_path):
    folder = save_folder(tmp_path / "other")
    with student_server(str(folder)) as proxy, pytest.raises(ConfigError, match="rollout"):
        train(sampling_config(tmp_path / "run", proxy.url, rollout__vllm__patience_s=0.5))


def test_a_server_that_was_left_paused_is_woken(tmp_path, student):
    """By a run that was killed in a hand-over."""
    httpx2.post(student.url.replace("/v1", "/pause"), params={"mode": "keep"}, json={}).raise_for_status()
    train(sampling_config(tmp_path, student.url, run__steps=1))
    assert_sampled_by_the_trainers_weights(tmp_path)


def test_a_restart_before_the_hand_over_changes_nothing(tmp_path, student, healthy, monkeypatch):
    """While the trainer updates: the server comes back with its first weights, and is given the new ones."""
    update = Trainer.update

    def with_restart(trainer, batch):
        if trainer.policy.version == 1:
            student.upstream = fresh.upstream
        return update(trainer, batch)

    monkeypatch.setattr(Trainer, "update", with_restart)
    with student_server() as fresh:
        train(sampling_config(tmp_path, student.url))
    assert results(tmp_path) == healthy


def test_a_restart_after_the_hand_over_is_never_sampled_from(tmp_path, student, healthy):
    """The server comes back with its first weights while the trainer believes that it has the new ones."""
    with student_server() as fresh:
        with pytest.raises(RunStopped, match=r"version 2.*those of version 0: .*the server was restarted since"):
            train(sampling_config(tmp_path, student.url), at(2, lambda: setattr(student, "upstream", fresh.upstream)))
        assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000001.parquet"]
        train(sampling_config(tmp_path, student.url, run__resume=True))
    assert results(tmp_path) == healthy


def test_a_restart_in_the_middle_of_sampling_is_given_the_weights_before_it_samples_on(tmp_path, student, healthy):
    """It is away long enough to be missed."""

    async def restarting(exchange):
        student.upstream = fresh.upstream
        return None

    def away():
        student.give(lambda number: restarting if 1 <= number < 4 else None, "sample")

    with student_server() as fresh:
        train(sampling_config(tmp_path, student.url), at(2, away))
        assert student.given == ["restarting"] * 3
    assert results(tmp_path) == healthy


def test_a_group_that_other_weights_sampled_is_never_trained_on(tmp_path, student, healthy):
    """One request strays to a server with old weights, which is gone when the servers are proven: behind a load balancer, say."""
    with student_server() as fresh:

        async def astray(exchange):
            return await fresh.ask(exchange.request)

        with pytest.raises(RunStopped, match=r"1 of the step's 4 groups .*were sampled with other weights"):
            train(sampling_config(tmp_path, student.url), at(2, lambda: student.give(faults.first(1, astray), "sample")))
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000001.parquet"]
    student.give(None, "sample")
    train(sampling_config(tmp_path, student.url, run__resume=True))
    assert results(tmp_path) == healthy


def test_one_of_two_servers_is_enough_and_the_other_comes_back_with_the_weights(tmp_path, student):
    """The second cannot be given weights after the first step; it samples nothing until it has been."""
    with student_server() as second:

        def story(step):
            if step == 1:
                second.give(reloads(faults.status(500)), "control")
            if step == 2:
                second.give(None, "sample")
            if step == 3:
                assert second.seen["sample"] == 0
                second.give(None, "control")
                wait_until(lambda: second.requests[-1].kind == "score")  # the canary, after a hand-over

        train(sampling_config(tmp_path, student.url, second.url, run__steps=3, rollout__prompts_per_step=8), story)
        assert second.seen["sample"] > 0
    assert_sampled_by_the_trainers_weights(tmp_path)


def test_a_key_is_sent_with_all_requests_and_leaves_no_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("TOPD_ROLLOUT_API_KEY", "sk-7d1e5c0ffee")
    with student_server(token="sk-7d1e5c0ffee") as proxy:
        train(sampling_config(tmp_path / "run", proxy.url, run__steps=1))
        assert {request.headers.get("authorization") for request in proxy.requests} == {"Bearer sk-7d1e5c0ffee"}
        assert b"sk-7d1e5" not in everything_in(tmp_path / "run")
        monkeypatch.setenv("TOPD_ROLLOUT_API_KEY", "sk-other")
        with pytest.raises(ConfigError, match=r"rollout.vllm: .*answered 401.*TOPD_ROLLOUT_API_KEY, which is set, but refused"):
            train(sampling_config(tmp_path / "again", proxy.url))


# how far behind


def test_with_lag_the_old_log_probs_are_those_of_the_version_that_sampled(tmp_path, student):
    """Also where the trainer's weights are evaluated, and so handed over, in between: that changes nothing."""
    for every_steps in (0, 1):
        folder = tmp_path / str(every_steps)
        train(sampling_config(folder, student.url, run__steps=3, rollout__max_lag=1, eval__every_steps=every_steps))
        assert_sampled_by_the_trainers_weights(folder)
        assert [row["policy/lag"] for row in metrics(folder)] == [0, 2, 2]
        assert [stored(folder, step, "policy_version")[0] for step in (1, 2, 3)] == [0, 0, 2]
        assert min(row["ratio/p99"] for row in metrics(folder)[1:]) > 1
    without, with_evaluations = results(tmp_path / "0"), results(tmp_path / "1")
    assert {**without, "evals": None} == {**with_evaluations, "evals": None}


def test_with_a_longer_lag_ratios_are_taken_against_the_engines_own_numbers(tmp_path, student):
    """Weights that sampled are gone by then. Every version that samples is handed over, and none is older than the lag."""
    train(sampling_config(tmp_path, student.url, run__steps=5, rollout__max_lag=3, rollout__max_mismatch_kl=1e3))
    versions = [stored(tmp_path, step, "policy_version")[0] for step in range(1, 6)]
    assert versions == sorted(versions)
    assert all(2 * (step - 4) <= version <= 2 * (step - 1) for step, version in enumerate(versions, 1))
    assert [row["policy/lag"] for row in metrics(tmp_path)] == [2 * step - version for step, version in enumerate(versions)]
    for step, version in enumerate(versions, 1):
        pairs = zip(stored(tmp_path, step, "rollout_logprobs"), stored(tmp_path, step, "old_logprobs"), strict=True)
        if version < 2 * (step - 1):
            assert all(sampled == old for sampled, old in pairs)
    assert not list(tmp_path.glob("handover*"))


def test_groups_from_which_the_policy_has_moved_too_far_are_dropped_or_stop_the_run(tmp_path, student):
    tree = sampling_config(tmp_path, student.url, run__steps=4, rollout__max_lag=3, rollout__max_mismatch_kl=1e-9)
    with pytest.raises(RunStopped, match=r"too old: .* rollout.max_mismatch_kl = 1e-09"):
        train(tree)


def test_with_lag_the_next_step_is_sampled_while_this_one_trains(tmp_path, student, monkeypatch):
    update, seen = Trainer.update, []

    def waiting_update(trainer, batch):
        if trainer.policy.version == 0:
            before = student.seen["sample"]
            wait_until(lambda: student.seen["sample"] > before)
            seen.append(student.seen["sample"])
        return update(trainer, batch)

    monkeypatch.setattr(Trainer, "update", waiting_update)
    student.give(None, "sample")
    train(
        sampling_config(tmp_path, student.url, rollout__max_lag=1),
        at(1, lambda: student.give(faults.always(faults.delay(0.05)), "sample")),
    )
    assert seen


def test_what_fails_while_sampling_ahead_stops_the_run_with_its_updates_kept(tmp_path, student):
    def fail_later():
        student.give(lambda number: faults.status(400) if number >= 4 else None, "sample")

    tree = sampling_config(tmp_path, student.url, run__steps=3, rollout__max_lag=1)
    with pytest.raises(RunStopped, match=r"a prompt could not be sampled: .*answered 400"):
        train(tree, at(1, fail_later))
    assert len(metrics(tmp_path)) == 1
    student.give(None, "sample")
    train({**tree, "run": {**tree["run"], "resume": True}})
    assert_sampled_by_the_trainers_weights(tmp_path)
    assert len(metrics(tmp_path)) == 3


def test_a_resumed_run_hands_its_weights_over_and_ends_in_the_same_bytes(tmp_path, student, healthy, monkeypatch):
    from topd.run.interrupt import Interrupted

    update, made = Trainer.update, []

    def stopping_update(trainer, batch):
        if len(made) == 3:
            raise Interrupted("SIGINT")
        made.append(0)
        return update(trainer, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", stopping_update)
        with pytest.raises(Interrupted):
            train(sampling_config(tmp_path, student.url))
    train(sampling_config(tmp_path, student.url, run__resume=True))
    assert results(tmp_path) == healthy


# which log-probs


@pytest.mark.parametrize(("dialect", "engine"), [("vllm", "vllm"), ("topd", "embedded")])
def test_the_reward_compares_engines_of_one_kind(tmp_path, student, dialect, engine):
    """Where teacher and rollouts both come from vLLM, their noise cancels; otherwise the trainer's own numbers are used."""

    async def noisy(exchange):
        reply = await exchange.forward()
        answer = reply.json
        for choice in answer["choices"]:
            choice["logprobs"]["token_logprobs"] = [x - 1e-4 for x in choice["logprobs"]["token_logprobs"]]
        return reply.with_json(answer)

    with serving() as base, proxying(base, dialect) as teacher:
        tree = sampling_config(tmp_path, student.url, run__steps=1, teacher__base_url=[teacher.url])
        train(tree, at(1, lambda: student.give(faults.always(noisy), "sample")))
    sampled, old, behaviour = (stored(tmp_path, 1, f"{name}_logprobs") for name in ("rollout", "old", "behaviour"))
    assert sampled != old
    assert behaviour == (sampled if engine == "vllm" else old)
