"""What waits, what runs together, what is turned away: the queue alone."""

import dataclasses
import threading

import pytest

from tests.fakes import make_prompt, ragged_groups
from tests.serve.serving import wait_until
from topd.rollout.engine import SamplingParams
from topd.serve import work
from topd.serve.metrics import ServerMetrics
from topd.serve.protocol import ApiError, CompletionRequest
from topd.serve.queue import TaskQueue
from topd.serve.work import SAMPLING_ROWS, Reload, Sampling, Scoring, check_length, completion_job


@pytest.fixture
def queue():
    return TaskQueue(ServerMetrics(), max_requests=100, max_batch_tokens=20)


def scoring(*shapes, **settings):
    return Scoring(groups=tuple(ragged_groups(*shapes)), **settings)


def sampling(n=1, **settings):
    return Sampling(prompt=make_prompt((2, 3)), params=SamplingParams(n=n, max_tokens=4, **settings))


def test_scoring_runs_together_up_to_a_limit_if_it_is_of_one_kind(queue):
    works = [scoring((2, (6,))), scoring((2, (6,)), temperature=0.5), scoring((2, (4, 2))), scoring((2, (6,)))]
    tasks = [task for work in works for task in queue.submit([work])]
    assert queue.next() == [tasks[0], tasks[2]]  # 16 of 20 tokens
    assert queue.next() == [tasks[1]]
    assert queue.next() == [tasks[3]]


def test_one_request_larger_than_a_batch_runs_alone(queue):
    [large] = queue.submit([scoring((2, (60,)))])
    [small] = queue.submit([scoring((2, (1,)))])
    assert queue.next() == [large]
    assert queue.next() == [small]


def test_ranks_and_plain_scores_do_not_mix(queue):
    tasks = [queue.submit([scoring((1, (1,)), top_k=k)])[0] for k in (None, 0, 5, None)]
    assert queue.next() == [tasks[0], tasks[3]]
    assert queue.next() == [tasks[1], tasks[2]]


def test_sampling_runs_together_up_to_a_number_of_rows(queue):
    works = [sampling(n=SAMPLING_ROWS // 2) for _ in range(3)]
    other = sampling(n=SAMPLING_ROWS // 2, temperature=0.5)
    tasks = queue.submit([works[0], other, *works[1:]])
    assert queue.next() == [tasks[0], tasks[2]]
    assert queue.next() == [tasks[1]]
    assert queue.next() == [tasks[3]]


def test_scoring_and_sampling_take_turns_and_new_weights_come_first(queue, tmp_path):
    queue.submit([sampling(temperature=0.5 + i) for i in range(3)])
    for i in range(2):
        queue.submit([scoring((1, (1,)), temperature=1.0 + i)])
    queue.submit([Reload(folder=tmp_path)])
    order = [type(queue.next()[0].work) for _ in range(6)]
    assert order == [Reload, Sampling, Scoring, Sampling, Scoring, Sampling]


def test_a_paused_queue_gives_out_new_weights_alone(queue, tmp_path):
    queue.pause(abort=False)
    [waiting] = queue.submit([scoring((1, (1,)))])
    [reload] = queue.submit([Reload(folder=tmp_path)])
    assert queue.next() == [reload]
    assert queue.take(Scoring) == []
    queue.resume()
    assert queue.next() == [waiting]


def test_what_is_withdrawn_is_not_given_out(queue):
    tasks = queue.submit([scoring((1, (1,))), sampling()])
    queue.withdraw(tasks)
    [kept] = queue.submit([scoring((1, (2,)))])
    assert queue.next() == [kept]
    assert queue.take(Sampling) == []
    queue.withdraw([kept])
    with pytest.raises(ApiError, match="left"):
        queue.check([kept])


def test_pause_with_abort_spares_new_weights(queue, tmp_path):
    [waiting] = queue.submit([scoring((1, (1,)))])
    [reload] = queue.submit([Reload(folder=tmp_path)])
    queue.pause(abort=True)
    assert waiting.future.exception().status == 503
    assert queue.next() == [reload]


def test_pause_returns_when_nothing_runs(queue):
    queue.submit([scoring((1, (1,)))])
    batch = queue.next()
    paused = threading.Thread(target=queue.pause, kwargs={"abort": True})
    paused.start()

    def is_aborted():
        try:
            queue.check(batch)
        except ApiError as error:
            return error.status == 503
        return False

    wait_until(is_aborted)
    assert paused.is_alive()
    queue.finished()
    paused.join(10)
    assert not paused.is_alive()
    queue.check(batch)


def test_a_closed_queue_refuses_all(queue):
    [waiting] = queue.submit([scoring((1, (1,)))])
    queue.close(0.0)
    assert waiting.future.exception().status == 503
    assert queue.next() == []
    with pytest.raises(ApiError, match="shutting down") as caught:
        queue.submit([scoring((1, (1,)))])
    assert caught.value.status == 503


def test_bounds(monkeypatch):
    queue = TaskQueue(ServerMetrics(), max_requests=2, max_batch_tokens=20)
    queue.submit([sampling(), sampling()])  # one request
    queue.submit([sampling()])
    with pytest.raises(ApiError, match="full") as caught:
        queue.submit([sampling()])
    assert caught.value.status == 429
    monkeypatch.setattr("topd.serve.queue.MAX_TOKENS", 20)
    queue = TaskQueue(ServerMetrics(), max_requests=100, max_batch_tokens=20)
    with pytest.raises(ApiError, match="split") as caught:
        queue.submit([scoring((2, (19,)))])
    assert caught.value.status == 413
    queue.submit([scoring((2, (15,)))])
    with pytest.raises(ApiError, match="full"):
        queue.submit([scoring((2, (3,)))])
    queue.next()
    queue.submit([scoring((2, (3,)))])


def test_the_time_to_wait_follows_the_measured_rate():
    queue = TaskQueue(ServerMetrics(), max_requests=1, max_batch_tokens=20)

    def wait():
        with pytest.raises(ApiError) as caught:
            queue.submit([scoring((1, (1,)))])
        return caught.value.retry_after

    queue.submit([scoring((1, (9,)))])
    assert wait() == 1
    queue.took(queue._waiting[Scoring], seconds=100.0)
    assert wait() == 30
    for _ in range(20):
        queue.took(queue._waiting[Scoring], seconds=12.0)
    assert wait() == 12


def test_a_request_of_many_parts_does_not_hold_up_others(queue):
    """After its first batch it is the turn of whoever has had less."""
    many = queue.submit([sampling(n=SAMPLING_ROWS) for _ in range(40)])
    assert queue.next() == many[:1]
    queue.finished()
    [small] = queue.submit([sampling(n=1, temperature=0.5)])
    assert queue.next() == [small]
    queue.finished()
    assert queue.next() == many[1:2]


def test_scoring_is_cut_in_order_and_in_pieces_of_a_batch(monkeypatch):
    monkeypatch.setattr(work, "SCORING_TOKENS", 20)
    monkeypatch.setattr(work, "SCORING_ROWS", 2)
    whole = scoring((2, (6,)), (2, (6, 4)), (3, (1,)), (8, (2, 2, 2, 2, 2)), (9, (20,)), temperature=0.5, top_k=3)
    pieces = work.scoring_pieces(whole, 1)
    assert [[(len(g.prompt_ids), *map(len, g.completions)) for g in piece.groups] for piece in pieces] == [
        [(2, 6), (2, 6, 4)],
        [(3, 1), (8, 2, 2)],
        [(8, 2, 2)],
        [(8, 2)],
        [(9, 20)],
    ]
    assert {(piece.temperature, piece.top_k) for piece in pieces} == {(0.5, 3)}
    flat = [completion for piece in pieces for group in piece.groups for completion in group.completions]
    assert flat == [completion for group in whole.groups for completion in group.completions]
    assert work.scoring_pieces(whole, 1000) == [whole]


def test_a_large_score_request_does_not_hold_up_others(queue):
    large = queue.submit([scoring((2, (10,))) for _ in range(5)])
    assert queue.next() == large[:1]
    queue.finished()
    [small] = queue.submit([scoring((2, (10,)))])
    assert queue.next() == [small]
    queue.finished()
    assert queue.next() == large[1:2]


def test_alone_means_one_request_at_a_time():
    queue = TaskQueue(ServerMetrics(), max_requests=100, max_batch_tokens=20, alone=True)
    scored = [queue.submit([scoring((1, (1,)))])[0] for _ in range(2)]
    assert [queue.take(Scoring), queue.take(Scoring)] == [[scored[0]], [scored[1]]]
    sampled = [queue.submit([sampling()])[0] for _ in range(2)]
    assert [queue.take(Sampling), queue.take(Sampling)] == [[sampled[0]], [sampled[1]]]


def test_new_weights_are_taken_although_the_queue_is_full(tmp_path):
    queue = TaskQueue(ServerMetrics(), max_requests=1, max_batch_tokens=20)
    queue.submit([scoring((1, (1,)))])
    [reload] = queue.submit([Reload(folder=tmp_path)])
    assert queue.next() == [reload]


def test_what_waits_is_bounded_by_its_ids_not_by_what_may_be_sampled(monkeypatch):
    """Each waits with 2 ids, and may sample 4 tokens."""
    monkeypatch.setattr("topd.serve.queue.MAX_TOKENS", 10)
    queue = TaskQueue(ServerMetrics(), max_requests=100, max_batch_tokens=20)
    for _ in range(5):
        queue.submit([sampling()])
    with pytest.raises(ApiError, match="full"):
        queue.submit([sampling()])


def test_a_batch_goes_on_while_anyone_waits_for_it(queue):
    tasks = [queue.submit([scoring((1, (1,)))])[0] for _ in range(2)]
    batch = queue.next()
    queue.withdraw(tasks[:1])
    queue.check(batch)
    queue.withdraw(tasks[1:])
    with pytest.raises(ApiError, match="left"):
        queue.check(batch)


def test_what_runs_may_go_on_for_the_grace_of_a_close(queue, monkeypatch):
    queue.submit([scoring((1, (1,)))])
    batch, now = queue.next(), [100.0]
    monkeypatch.setattr("topd.serve.queue.time.monotonic", lambda: now[0])
    queue.close(5.0)
    now[0] = 104.9
    queue.check(batch)
    now[0] = 105.0
    with pytest.raises(ApiError, match="aborted"):
        queue.check(batch)


def test_a_waiting_thread_goes_on_when_the_queue_is_resumed(queue):
    queue.pause(abort=False)
    [task] = queue.submit([scoring((1, (1,)))])
    found = []
    waiting = threading.Thread(target=lambda: found.append(queue.next()), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert not found
    queue.resume()
    waiting.join(5)
    assert found == [[task]]


def test_parts_of_two_large_requests_take_turns(queue):
    """Also within one batch: half of a batch's rows each, the second request is not last."""
    one, other = (queue.submit([sampling(n=SAMPLING_ROWS // 2) for _ in range(3)]) for _ in range(2))
    assert queue.next() == [one[0], other[0]]
    assert queue.next() == [one[1], other[1]]


def test_what_a_request_has_had_is_forgotten_with_its_last_part(queue):
    for _ in range(3):
        queue.submit([sampling(n=SAMPLING_ROWS), sampling(n=SAMPLING_ROWS)])
        queue.next()
        queue.next()
    assert not queue._served
    assert not queue._requests


def test_sampling_with_and_without_ranks_does_not_mix(queue):
    works = [dataclasses.replace(sampling(), top_k=k) for k in (0, 2, 5, 0)]
    tasks = [queue.submit([work])[0] for work in works]
    assert queue.next() == [tasks[0], tasks[3]]
    assert queue.next() == [tasks[1], tasks[2]]


@pytest.mark.parametrize(("request_", "top_k"), [({"logprobs": 5}, 1), ({"logprobs": 5, "echo": True}, 5)])
def test_a_prompt_is_ranked_as_deep_as_is_shown(tiny_model, request_, top_k):
    request = CompletionRequest(prompt=[3, 4], prompt_logprobs=1, **request_)
    assert completion_job(request, tiny_model("qwen3")).scoring.top_k == top_k


def test_prompt_and_completion_may_fill_the_context_to_the_last_token(tiny_model):
    model = tiny_model("qwen3")
    check_length(4, model.context_length - 4, model, param="prompt")
    with pytest.raises(ApiError, match="do not fit"):
        check_length(5, model.context_length - 4, model, param="prompt")
