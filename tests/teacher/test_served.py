"""A served teacher is the local one behind a wire: same rewards, same curve, and every question asked once."""

import gc
import json
import threading
import time

import pytest
import torch

from tests.endpoint import proxy as faults
from tests.endpoint.proxy import proxying
from tests.endpoint.runs import assert_same_run, metrics, served_config, shorten_pauses, train
from tests.fakes import EOS, make_model, make_prompt, ragged_groups
from tests.serve.serving import serving, wait_until
from topd import config_file
from topd.assemble import assemble, probe
from topd.endpoint.background import Background
from topd.endpoint.cache import ScoreCache
from topd.errors import ConfigError, RunStopped
from topd.models.logprobs import score_groups
from topd.ragged import Ragged
from topd.teacher import served as module
from topd.teacher.served import Config, EndpointTeacher
from topd.teacher.teacher import Unscored
from topd.types import Rollout, RolloutGroup

GROUPS = ragged_groups((4, (7, 2, 5)), (1, (3, 3)), (9, (1,)))


def rollouts(groups, *, last=None):
    """As the loop has them; `last` replaces the last token of every completion."""
    found = []
    for number, group in enumerate(groups):
        made = tuple(
            Rollout(token_ids=c if last is None else (*c[:-1], last), logprobs=torch.zeros(len(c)), finish_reason="stop", text="")
            for c in group.completions
        )
        prompt = make_prompt(group.prompt_ids, name=f"train/{number}")
        found.append(RolloutGroup(prompt=prompt, rollouts=made, policy_version=0))
    return found


@pytest.fixture(scope="module")
def model():
    return make_model("qwen3-untied", seed=3)


@pytest.fixture(scope="module")
def base(model):
    with serving(model, name="m") as base:
        yield base


@pytest.fixture
def make(tmp_path):
    """(urls, keys of [teacher]) -> EndpointTeacher, closed at the end."""
    background = Background()
    caches = []

    def teacher(*urls, cache=False, student=None, temperature=1.0, **keys):
        if cache:
            caches.append(ScoreCache(tmp_path / f"{len(caches)}.sqlite") if cache is True else cache)
        settings = {"timeout_s": 2.0, "patience_s": 2.0, **keys}
        return EndpointTeacher(
            Config(name="m", base_url=list(urls), **settings),
            background,
            role="teacher",
            student=student or make_model(seed=5),
            temperature=temperature,
            cache=caches[-1] if cache else None,
        )

    yield teacher
    background.close()
    for cache in caches:
        cache.close()


def flat(scores):
    """The log-probs of groups, whether as evidence or as one tensor per completion."""
    return torch.cat([group["teacher_logprobs"] if isinstance(group, Ragged) else torch.cat(group) for group in scores])


# what is scored


@pytest.mark.parametrize("dialect", ["topd", "vllm", "echo"])
def test_scores_are_the_models_in_order_and_told_of_as_they_come(make, model, base, dialect):
    told = []
    with proxying(base, dialect) as proxy:
        found = make(proxy.url).score(rollouts(GROUPS), on_tokens=told.append)
    expected = score_groups(model, GROUPS, max_tokens=4096)
    assert [group.lengths.tolist() for group in found] == [[7, 2, 5], [3, 3], [1]]
    torch.testing.assert_close(flat(found), flat(expected), atol=1e-5, rtol=1e-5)
    assert told == [14, 6, 1]


def test_an_end_token_that_differs_is_looked_up_as_the_teachers(make, model, base, monkeypatch):
    """The served teacher ends with token 1; a student that ends with token 2 has it replaced at the end, and only there."""
    import dataclasses

    student = dataclasses.replace(make_model(seed=5), eos_token_ids=(2,))
    teacher = make(base, student=student, map_eos=True)
    assert teacher.map_eos == {2: EOS}
    found = teacher.score(rollouts(GROUPS, last=2))
    asked = [group.__class__(group.prompt_ids, tuple((*c[:-1], EOS) for c in group.completions)) for group in GROUPS]
    torch.testing.assert_close(flat(found), flat(score_groups(model, asked, max_tokens=4096)), atol=1e-5, rtol=1e-5)
    assert teacher.engine().eos_token_ids == (2, EOS)


def test_end_tokens_that_the_servers_do_not_tell_cannot_be_mapped(make, base):
    with proxying(base, "vllm") as proxy, pytest.raises(ConfigError, match=r"teacher\.map_eos = true needs .*teacher\.tokenizer"):
        make(proxy.url, map_eos=True)


def test_a_group_too_large_for_one_request_is_cut_by_rows(make, model, base, monkeypatch):
    monkeypatch.setattr(module, "MAX_REQUEST_TOKENS", 12)
    with proxying(base) as proxy:
        teacher = make(proxy.url)
        proxy.give(None)
        found = teacher.score(rollouts(GROUPS[:1]))
        sizes = [len(request.json["groups"][0]["completions"]) for request in proxy.requests[-3:]]
    assert sizes == [1, 1, 1]
    torch.testing.assert_close(flat(found), flat(score_groups(model, GROUPS[:1], max_tokens=4096)), atol=1e-5, rtol=1e-5)


def test_two_equal_groups_are_asked_for_once(make, base):
    with proxying(base) as proxy:
        teacher = make(proxy.url)
        proxy.give(None)
        first, second = teacher.score(rollouts([GROUPS[0], GROUPS[0]]))
        assert proxy.seen["score"] == 1
    assert torch.equal(flat([first]), flat([second]))


# when it is asked


def test_what_was_begun_while_sampling_is_not_asked_again(make, base):
    with proxying(base) as proxy:
        teacher = make(proxy.url)
        proxy.give(None)
        groups = rollouts(GROUPS)
        teacher.prefetch(groups[:1])
        teacher.prefetch(groups[1:2])
        wait_until(lambda: proxy.seen["score"] == 2)
        teacher.score(groups)
        assert proxy.seen["score"] == 3


def test_groups_are_scored_while_the_next_are_sampled(make, base):
    """A server that takes 0.3 s is done when sampling is."""
    with proxying(base) as proxy:
        teacher = make(proxy.url)
        proxy.give(faults.always(faults.delay(0.3)))
        teacher.prefetch(rollouts(GROUPS))
        time.sleep(0.5)
        start = time.monotonic()
        teacher.score(rollouts(GROUPS))
        assert time.monotonic() - start < 0.2


def test_a_group_that_fails_fails_alone_with_its_reason(make, base):
    with proxying(base) as proxy:
        teacher = make(proxy.url)
        refused = list(GROUPS[1].prompt_ids)

        async def picky(exchange):
            if exchange.request.json["groups"][0]["prompt"] == refused:
                return faults.Reply(400, b'{"error": {"message": "not this one"}}')
            return await exchange.forward()

        proxy.give(faults.always(picky))
        first, second, third = teacher.score(rollouts(GROUPS))
    assert isinstance(second, Unscored)
    assert second.reason.endswith("answered 400: not this one")
    assert first.lengths.tolist() == [7, 2, 5]
    assert third.lengths.tolist() == [1]


def test_an_interrupted_wait_leaves_nothing_in_flight(make, base):
    class Interrupt(BaseException):
        pass

    def interrupt(num_tokens):
        raise Interrupt

    with proxying(base) as proxy:
        teacher = make(proxy.url, max_concurrent_requests=1, timeout_s=60.0)

        async def slow_but_first(exchange):
            if proxy.seen["score"] > 1:
                await faults.stall(exchange)
            return await exchange.forward()

        proxy.give(faults.always(slow_but_first))
        with pytest.raises(Interrupt):
            teacher.score(rollouts(GROUPS), on_tokens=interrupt)
        wait_until(lambda: proxy.open == 0)
        wait_until(lambda: teacher.served.pool.replicas[0].outstanding == 0)


def test_requests_retries_and_cached_completions_are_counted_since_they_were_last_asked_for(make, base):
    with proxying(base) as proxy:
        teacher = make(proxy.url, cache=True)
        teacher.counts()
        proxy.give(faults.first(1, faults.status(500)))
        teacher.score(rollouts(GROUPS[:2]))
        assert teacher.counts() == {"requests": 3, "retries": 1, "cached": 0}
        teacher.score(rollouts(GROUPS))
        assert teacher.counts() == {"requests": 1, "retries": 0, "cached": 5}
        assert teacher.counts() == {"requests": 0, "retries": 0, "cached": 0}


# what is kept


def test_scores_on_disk_are_not_asked_for_again_and_a_group_may_be_there_in_part(make, model, base):
    with proxying(base) as proxy:
        teacher = make(proxy.url, cache=True)
        teacher.score(rollouts([GROUPS[0].rows(1, 2)]))
        proxy.give(None)
        found = teacher.score(rollouts(GROUPS[:1]))
        assert [len(c) for c in proxy.requests[-1].json["groups"][0]["completions"]] == [7, 5]
        teacher.score(rollouts(GROUPS[:1]))
        assert proxy.seen["score"] == 1
    torch.testing.assert_close(flat(found), flat(score_groups(model, GROUPS[:1], max_tokens=4096)), atol=1e-5, rtol=1e-5)


def test_scores_of_another_temperature_or_of_other_weights_are_not_taken(make, model, base, tmp_path):
    cache = ScoreCache(tmp_path / "shared.sqlite")
    make(base, cache=cache).score(rollouts(GROUPS))
    warm = make(base, cache=cache, temperature=0.7)
    expected = score_groups(model, GROUPS, max_tokens=4096, temperature=0.7)
    torch.testing.assert_close(flat(warm.score(rollouts(GROUPS))), flat(expected), atol=1e-5, rtol=1e-5)
    assert warm.counts()["cached"] == 0
    with serving(make_model("qwen3-untied", seed=4), name="m") as other:
        changed = make(other, cache=cache)
        changed.score(rollouts(GROUPS))
        assert changed.counts()["cached"] == 0


def test_a_run_that_meets_another_form_than_it_began_with_says_so(make, base):
    student, first = make_model(seed=5), make(base)
    again = make(base)
    again.recognise(first.meeting)
    for teacher in (first, again):
        servers = teacher.checks(student, asked=True)[0]
        assert (servers.ok, servers.warning) == (True, False)
        assert "by topd /v1/score" in servers.detail
    with proxying(base, "echo") as proxy:
        other = make(proxy.url)
        other.recognise(first.meeting)
        servers = other.checks(student, asked=True)[0]
    assert (servers.ok, servers.warning) == (True, True)
    assert "by OpenAI /v1/completions with echo. This run began with topd /v1/score" in servers.detail


def test_another_teacher_than_the_run_began_with_is_refused_by_its_numbers_or_its_digest(make, base):
    teacher = make(base)
    met = teacher.meeting
    for changed, said in (
        ({"canary": [number - 1 for number in met.canary]}, "fixed tokens are off by 1 nats"),
        ({"canary": met.canary[:1]}, "fixed tokens are off by inf nats"),
        ({"fingerprint": "0" * 64}, "its weights have another digest"),
    ):
        with pytest.raises(ConfigError, match=f"^teacher: the servers answer as another model .*: {said}"):
            teacher.recognise(met.model_copy(update=changed))
    teacher.recognise(met.model_copy(update={"fingerprint": None}))


def test_a_load_balancer_with_two_models_behind_it_is_refused(make, base):
    student = make_model(seed=5)
    with serving(make_model("qwen3-untied", seed=4), name="m") as wrong, proxying(base, "vllm") as proxy:
        teacher = make(proxy.url)

        async def elsewhere(exchange):
            proxy.upstream = wrong.removesuffix("/v1")
            try:
                return await exchange.forward()
            finally:
                proxy.upstream = base.removesuffix("/v1")

        proxy.give(lambda number: elsewhere if number == 5 else None)
        servers = teacher.checks(student, asked=True)[0]
    assert not servers.ok
    assert "a load balancer with several models behind it" in servers.detail


def test_a_disk_that_is_full_stops_the_run(make, base):
    teacher = make(base, cache=True)
    (pages,) = teacher.cache._database.execute("PRAGMA page_count").fetchone()
    teacher.cache._database.execute(f"PRAGMA max_page_count = {pages}")
    big = ragged_groups(*((3, (200,) * 8) for _ in range(4)))
    with pytest.raises(RunStopped, match=r"sqlite cannot be used: .*full"):
        teacher.score(rollouts(big))


# what is proven before anything is spent


def test_every_check_says_what_it_found(tmp_path):
    with serving(batch_invariant=True) as base, proxying(base) as other:
        parts = assemble(config_file.load(served_config(tmp_path, base, other.url)))
        other.give(faults.always(faults.stall), "models")
        found = {check.name: check for check in probe(parts)}
        parts.close()
    assert list(found) == [
        "teacher servers",
        "vocabulary",
        "end token",
        "context",
        "evidence",
        "temperature",
        "teacher log-probs",
        "teacher prefixes",
        "teacher probabilities",
        "teacher weights",
        "student as own teacher",
        "right answers",
        "grades of the student",
    ]
    assert all(check.ok for check in found.values())
    assert "2 of 2 answer as one model, 'builtin:tiny-teacher', by topd /v1/score, weights " in found["teacher servers"].detail
    assert "decode to the same text on the server" in found["vocabulary"].detail
    assert "Servers do not report their precision" in found["student as own teacher"].detail


def test_a_served_teacher_that_is_said_to_be_bfloat16_is_taken_for_one(tmp_path):
    """Its numbers are float32 here, so nothing but the declared precision can say so: noise is measured, credit expects it."""
    with serving(batch_invariant=True) as base:
        parts = assemble(config_file.load(served_config(tmp_path, base, teacher__dtype="bfloat16")))
        [own] = [check for check in probe(parts) if check.name == "student as own teacher"]
        parts.close()
    assert parts.config.algorithm.rounding == 0.1
    assert "differs from itself by" in own.detail


def test_a_server_with_another_tokenizer_is_refused_though_its_model_has_the_same_size(tmp_path):
    with serving(batch_invariant=True) as base, proxying(base) as proxy:

        async def other_words(exchange):
            reply = await exchange.forward()
            return reply.with_json({"prompt": reply.json["prompt"].replace("7", "8")})

        proxy.give(faults.always(other_words), "text")
        with pytest.raises(ConfigError, match="is '7' for the student and '8' for the teacher's server"):
            train(served_config(tmp_path / "run", proxy.url))
        assert not (tmp_path / "run").exists()


async def number_as_text(exchange):
    return faults.Reply(200, b'{"prompt": 5}')


WORDLESS = [faults.status(404), faults.status(500), faults.html, faults.empty, faults.stall, number_as_text]


@pytest.mark.parametrize("fault", WORDLESS, ids=lambda f: f.__name__)
def test_a_server_that_does_not_show_its_tokenizer_needs_one_named(tmp_path, fault):
    with serving(batch_invariant=True) as base, proxying(base, "vllm") as proxy:
        proxy.give(faults.always(fault), "text")
        tree = served_config(tmp_path / "run", proxy.url, teacher__timeout_s=0.5, teacher__patience_s=0.5, run__steps=1)
        with pytest.raises(ConfigError, match=r"cannot show their tokenizer .*Set teacher\.tokenizer to the folder or hub id"):
            train(tree)
        tree["teacher"]["tokenizer"] = "/no/such/folder"
        with pytest.raises(ConfigError, match=r'teacher\.tokenizer = "/no/such/folder" cannot be loaded'):
            train(tree)


@pytest.mark.parametrize(
    "fault", [faults.status(502), faults.html, faults.status(429, retry_after="0.05")], ids=lambda f: f.__name__
)
def test_a_moment_of_disorder_does_not_ask_for_a_tokenizer(make, base, monkeypatch, fault):
    shorten_pauses(monkeypatch)
    with proxying(base) as proxy:
        teacher = make(proxy.url)
        proxy.give(faults.first(2, fault), "text")
        assert teacher.checks(make_model(seed=5), asked=True)[1].ok
        assert proxy.seen["text"] >= 3


def test_a_named_tokenizer_stands_in_for_the_servers(tmp_path):
    with serving(batch_invariant=True) as base, proxying(base, "vllm") as proxy:
        proxy.give(faults.always(faults.status(404)), "text")
        tree = served_config(tmp_path, proxy.url, teacher__tokenizer="builtin:tiny-teacher")
        parts = assemble(config_file.load(tree))
        found = {check.name: check.detail for check in probe(parts) if check.ok}
        parts.close()
    assert "same ids" in found["vocabulary"]
    assert "both end with" in found["end token"]


def test_a_temperature_that_the_server_ignores_is_refused(tmp_path):
    refused = pytest.raises(ConfigError, match=r"returns log-probs at temperature 1.*Set rollout\.temperature = 1")
    with serving(batch_invariant=True) as base, proxying(base, "vllm") as proxy, refused:
        train(served_config(tmp_path / "run", proxy.url, rollout__temperature=0.7))


# whole runs


@pytest.fixture(scope="module")
def teacher():
    with serving(batch_invariant=True) as base:
        yield base


@pytest.fixture(scope="module")
def whole(teacher, tmp_path_factory):
    """The folder of a run of two steps, many requests at a time."""
    folder = tmp_path_factory.mktemp("whole")
    train(served_config(folder, teacher, teacher__max_concurrent_requests=16))
    return folder


def locally(folder, **changes):
    tree = served_config(folder, **changes)
    tree["teacher"] = {"name": "builtin:tiny-teacher"}
    return tree


def test_a_local_and_a_served_teacher_give_the_same_rewards_and_the_same_curve(tmp_path, whole):
    train(locally(tmp_path))
    assert_same_run(tmp_path, whole)
    assert [row["teacher/dropped_groups"] for row in metrics(whole)] == [0, 0]
    assert [row["teacher/requests"] for row in metrics(whole)] == [4, 4]  # none of the probe's


def test_they_agree_at_another_temperature_too(tmp_path, teacher):
    settings = {"rollout__temperature": 0.7, "run__steps": 1}
    train(locally(tmp_path / "local", **settings))
    train(served_config(tmp_path / "served", teacher, **settings))
    assert_same_run(tmp_path / "local", tmp_path / "served")


def test_the_teacher_is_evaluated_through_the_same_servers(tmp_path, teacher):
    settings = {"eval__teacher": True, "eval__max_problems": 16, "rollout__max_completion_tokens": 60, "run__steps": 1}
    train(served_config(tmp_path, teacher, **settings))
    rows = map(json.loads, (tmp_path / "evals.jsonl").read_text().splitlines())
    [taught] = [row for row in rows if row["model"] == "teacher"]
    assert taught["problems"] == 16
    assert taught["avg_at_k"] > 0.6


def test_nothing_is_left_running_or_open(tmp_path, teacher):
    with proxying(teacher) as proxy:
        gc.disable()
        try:
            train(served_config(tmp_path, proxy.url, run__steps=1))
            assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("topd-e")]
            wait_until(lambda: not proxy.connections)
        finally:
            gc.enable()


def test_a_run_can_go_on_with_other_servers_and_another_patience(tmp_path, teacher, whole):
    train(served_config(tmp_path, teacher, run__steps=1))
    changes = {"teacher__timeout_s": 2.0, "teacher__patience_s": 9.0, "teacher__max_attempts": 4, "teacher__wait_s": 1.0}
    with proxying(teacher) as moved:
        train(served_config(tmp_path, moved.url, run__steps=2, run__resume=True, **changes))
    assert_same_run(tmp_path, whole)
