"""Replicas behind one function: who is asked, how often, how long, and who no more. Time is simulated (clock.py)."""

import asyncio
import contextlib
import logging

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.endpoint.clock import Clock
from tests.endpoint.runs import section
from topd.endpoint import pool as module
from topd.endpoint.faults import BadAnswer, Busy, Fault, Forbidden, OtherModel, Refused, Unavailable
from topd.endpoint.pool import FAILURES_TO_OPEN, Pool
from topd.endpoint.replica import Replica, Request

ASKED = Request(path="/v1/score")


class Scripted(Replica):
    """Takes `seconds` for everything; `outcomes` are what its first requests come to (None: an answer), then all is well."""

    def __init__(self, name="a", outcomes=(), seconds=0.01):
        self.url = f"http://{name}"
        self.outcomes = list(outcomes)
        self.seconds = seconds
        self.outstanding = self.failures = self.now = self.most = self.calls = self.checks = 0
        self.fault, self.is_another_model, self.not_before, self.busy, self.timeout_s = None, False, 0.0, None, 30.0
        self.ill = None
        self.asked_at = []

    async def send(self, request, *, timeout_s=None):
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        self.asked_at.append(asyncio.get_running_loop().time())
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.now -= 1
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome
        return httpx2.Response(200, text=self.url.removeprefix("http://"))

    async def close(self):
        pass


async def verify(replica):
    replica.checks += 1
    if replica.ill is not None:
        raise replica.ill


def down(count=1):
    return [Unavailable("reset")] * count


def busy(seconds):
    return Busy("come again", float(seconds))


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def pool_of(*replicas, max_concurrent=4, max_attempts=6, patience_s=60.0, **options):
    limits = section(max_concurrent_requests=max_concurrent, max_attempts=max_attempts, patience_s=patience_s)
    return Pool(limits, replicas, verify=verify, **options)


def asking(clock, pool, count=1, read=lambda response: response.text):
    """What `count` requests at once come to: answers and faults; and the seconds that all took."""

    async def ask():
        began = clock.monotonic()
        try:
            found = await asyncio.gather(*(pool.send(lambda: ASKED, read) for _ in range(count)), return_exceptions=True)
            return found, clock.monotonic() - began
        finally:
            await pool.close()

    return clock.run(ask())


def test_the_replica_with_the_least_to_do_is_asked(clock):
    a, b, c = Scripted("a"), Scripted("b"), Scripted("c")
    a.outstanding, b.outstanding, c.outstanding = 2, 1, 3
    found, _ = asking(clock, pool_of(a, b, c), 3)
    assert sorted(found) == ["a", "b", "b"]
    assert (a.outstanding, b.outstanding, c.outstanding) == (2, 1, 3)


def test_work_is_shared_by_speed(clock):
    slow, fast = Scripted("slow", seconds=3.0), Scripted("fast", seconds=1.0)
    _, seconds = asking(clock, pool_of(slow, fast, max_concurrent=1), 40)
    assert (slow.calls, fast.calls) == (10, 30)
    assert seconds == pytest.approx(30)


def test_a_place_that_is_free_is_taken_at_once(clock):
    """Nobody sleeps through the end of another request: with one place, the time is that of the requests alone."""
    replica = Scripted(seconds=0.01)
    found, seconds = asking(clock, pool_of(replica, max_concurrent=1), 500)
    assert found == ["a"] * 500
    assert replica.most == 1
    assert seconds == pytest.approx(5.0)


def test_a_failed_request_is_tried_elsewhere(clock):
    bad, good = Scripted("bad", down(99)), Scripted("good")
    found, _ = asking(clock, pool_of(bad, good, max_attempts=2))
    assert found == ["good"]
    assert (bad.calls, good.calls) == (1, 1)


def test_a_bad_answer_is_tried_elsewhere(clock):
    def read(response):
        if response.text == "bad":
            raise BadAnswer("NaN")
        return response.text

    found, _ = asking(clock, pool_of(Scripted("bad"), Scripted("good"), max_attempts=2), 3, read=read)
    assert found == ["good"] * 3


def test_a_request_is_given_up_after_so_many_failures_with_the_last_fault(clock):
    replica = Scripted(outcomes=[*down(1), BadAnswer("too short"), Unavailable("stalled")])
    [fault], seconds = asking(clock, pool_of(replica, max_attempts=3))
    assert str(fault) == "stalled"
    assert replica.calls == 3
    assert seconds < 2


def test_pauses_between_tries_grow_and_differ(clock, monkeypatch):
    """A server that is back must not be met by all at once."""
    monkeypatch.setattr(module, "FAILURES_TO_OPEN", 1e9)
    replica = Scripted(outcomes=down(1200))
    asking(clock, pool_of(replica, max_concurrent=1000), 200)
    began, *later = sorted(set(replica.asked_at))
    assert replica.calls == 1200
    assert len(later) == 1000
    assert 3 < later[-1] - began < 0.2 * (1 + 2 + 4 + 8 + 16) + 1


@pytest.mark.parametrize(("fault", "calls"), [(Refused("too long"), 2), (Forbidden("no key"), 1)])
def test_what_no_server_will_ever_accept_is_asked_of_each_once(clock, fault, calls):
    a, b = Scripted("a", [fault]), Scripted("b", [fault])
    [found], _ = asking(clock, pool_of(a, b))
    assert found is fault
    assert a.calls + b.calls == calls
    assert a.trusted
    assert b.trusted


def test_a_replica_that_refuses_what_others_accept_does_not_swallow_the_work(clock):
    """An ingress that answers 404 at once has the least to do, always."""
    quick, slow = Scripted("quick", [Refused("404")] * 999, seconds=0.001), Scripted("slow", seconds=0.1)
    quick.ill = Refused("404")
    found, _ = asking(clock, pool_of(quick, slow), 64)
    assert found == ["slow"] * 64
    assert not quick.trusted
    assert quick.calls < 64


def test_a_health_check_that_breaks_does_not_lose_the_replica(clock):
    replica = Scripted("a", down(FAILURES_TO_OPEN))
    replica.ill = KeyError("data")
    pool = pool_of(replica)

    async def story():
        answer = asyncio.create_task(pool.send(lambda: ASKED, lambda response: response.text))
        await asyncio.sleep(20)
        checks, replica.ill = replica.checks, None
        assert await answer == "a"
        await pool.close()
        return checks

    assert clock.run(story()) > 1


def test_a_request_is_made_when_there_is_a_place_for_it(clock):
    """All requests of a step at once would need their bodies at once."""
    replica, made = Scripted(seconds=1.0), []
    pool = pool_of(replica, max_concurrent=2)

    async def story():
        tasks = [asyncio.create_task(pool.send(lambda: made.append(1) or ASKED, lambda response: 0)) for _ in range(10)]
        await asyncio.sleep(0.5)
        count = len(made)
        await asyncio.gather(*tasks)
        await pool.close()
        return count

    assert clock.run(story()) == 2


def test_thousands_that_wait_do_not_wake_each_other(clock, monkeypatch):
    """Every release wakes one of them."""
    replica, looks = Scripted(seconds=0.01), []
    pool = pool_of(replica, max_concurrent=8)
    choose = module.Pool._wait

    async def counted(self, seconds):
        looks.append(1)
        await choose(self, seconds)

    monkeypatch.setattr(module.Pool, "_wait", counted)
    found, _ = asking(clock, pool, 400)
    assert len(found) == 400
    assert len(looks) < 3 * 400


def test_three_failures_in_a_row_open_the_circuit_until_a_health_check_succeeds(clock):
    ill, well = Scripted("ill", down(FAILURES_TO_OPEN)), Scripted("well", seconds=10.0)
    ill.ill = Unavailable("still down")
    pool = pool_of(ill, well, max_concurrent=1)

    async def story():
        answers = asyncio.gather(*(pool.send(lambda: ASKED, lambda response: response.text) for _ in range(6)))
        await asyncio.sleep(5)
        assert (ill.trusted, ill.calls, str(ill.fault)) == (False, FAILURES_TO_OPEN, "still down")
        assert ill.checks >= 3
        ill.ill = None
        found = await answers
        assert ill.trusted
        assert (ill.failures, ill.fault) == (0, None)
        await pool.close()
        return found

    found = clock.run(story())
    assert set(found) == {"ill", "well"}


def test_health_is_asked_for_more_and_more_rarely(clock):
    replica = Scripted(outcomes=down(3))
    replica.ill = Unavailable("down")
    asking(clock, pool_of(replica, patience_s=120.0, longest_wait_s=15.0))
    assert 8 <= replica.checks <= 16


def test_an_answer_between_two_failures_keeps_the_circuit_closed(clock):
    replica = Scripted(outcomes=[*down(2), None] * 5)
    found, _ = asking(clock, pool_of(replica, max_concurrent=1, max_attempts=20), 5)
    assert found == ["a"] * 5
    assert replica.checks == 0


def test_being_asked_to_wait_is_no_failure_and_no_attempt(clock):
    replica = Scripted(outcomes=[busy(2)] * 10)
    [found], seconds = asking(clock, pool_of(replica, max_attempts=1))
    assert found == "a"
    assert seconds == pytest.approx(20, abs=1)
    assert (replica.trusted, replica.failures, replica.checks) == (True, 0, 0)


def test_a_replica_that_asks_to_wait_gets_nothing_before_while_others_work(clock):
    waiting, other = Scripted("waiting", [busy(30)]), Scripted("other", seconds=1.0)
    found, _ = asking(clock, pool_of(waiting, other, max_concurrent=1), 40)
    first, *later = waiting.asked_at
    assert min(later) - first >= 30
    assert set(found) == {"waiting", "other"}


def test_a_server_that_is_always_busy_ends_patience(clock):
    replica = Scripted(outcomes=[busy(1)] * 1000)
    [fault], seconds = asking(clock, pool_of(replica, patience_s=30.0))
    assert isinstance(fault, Refused)
    assert str(fault) == "nothing succeeded for 30 s: come again"
    assert 30 < seconds < 33


def test_patience_ends_when_every_replica_stays_away(clock):
    a, b = Scripted("a", down(99)), Scripted("b", down(99))
    a.ill, b.ill = Unavailable("a is down"), Unavailable("b is down")
    found, seconds = asking(clock, pool_of(a, b, max_attempts=99, patience_s=30.0), 8)
    assert {str(fault) for fault in found} == {"nothing succeeded for 30 s: a is down; b is down"}
    assert 30 < seconds < 60


def test_patience_is_counted_from_the_last_success_of_anyone(clock):
    """A request may wait far longer than that while others are answered."""
    replica = Scripted(seconds=20.0)
    found, seconds = asking(clock, pool_of(replica, max_concurrent=1, patience_s=30.0), 10)
    assert found == ["a"] * 10
    assert seconds == pytest.approx(200)


def test_another_model_is_left_alone_at_once_until_it_is_the_right_one_again(clock):
    wrong, right = Scripted("wrong"), Scripted("right", seconds=1.0)
    wrong.ill = OtherModel("wrong answers as another model")
    pool = pool_of(wrong, right, max_concurrent=1)

    def read(response):
        if response.text == "wrong" and wrong.ill is not None:
            raise wrong.ill
        return response.text

    async def story():
        answers = asyncio.gather(*(pool.send(lambda: ASKED, read) for _ in range(50)))
        await asyncio.sleep(20)
        assert (wrong.calls, wrong.trusted) == (1, False)
        wrong.ill = None
        found = await answers
        assert wrong.trusted
        assert wrong.calls > 1
        await pool.close()
        return found

    assert set(clock.run(story())) == {"wrong", "right"}


def test_where_all_are_another_model_nobody_waits(clock):
    replica = Scripted()
    replica.ill = OtherModel("a answers as another model")

    def read(response):
        raise replica.ill

    found, seconds = asking(clock, pool_of(replica, patience_s=600.0), 4, read=read)
    assert all(isinstance(fault, Fault) and "another model" in str(fault) for fault in found)
    assert seconds < 60


def test_a_cancelled_request_gives_its_place_back(clock):
    replica = Scripted(seconds=100.0)
    pool = pool_of(replica, max_concurrent=1)

    async def story():
        running, waiting, third = (
            asyncio.create_task(pool.send(lambda: ASKED, lambda response: response.text)) for _ in range(3)
        )
        await asyncio.sleep(1)
        assert (replica.outstanding, replica.now) == (1, 1)
        waiting.cancel()
        running.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        assert (replica.outstanding, replica.now) == (1, 1)
        assert await third == "a"
        assert replica.outstanding == 0
        await pool.close()

    clock.run(story())


def test_a_replica_that_is_back_says_so_with_its_reason_before(clock, caplog):
    caplog.set_level(logging.WARNING)
    asking(clock, pool_of(Scripted(outcomes=down(3))))
    assert [record.getMessage() for record in caplog.records] == [
        "http://a marked unhealthy, no requests until its health check passes: reset",
        "http://a is healthy again",
    ]


def test_requests_and_retries_are_counted(clock):
    pool = pool_of(Scripted(outcomes=[*down(2), busy(1)]))
    asking(clock, pool, 3)
    assert (pool.num_requests, pool.num_retries) == (6, 2)


OUTCOMES = st.sampled_from([None, Unavailable("reset"), BadAnswer("NaN"), busy(0.5), busy(3), OtherModel("another model")])


@given(
    scripts=st.lists(st.tuples(st.lists(OUTCOMES, max_size=8), st.sampled_from([0.0, 0.01, 1.0])), min_size=1, max_size=4),
    max_concurrent=st.integers(1, 3),
    left=st.lists(st.none() | st.sampled_from([0.0, 0.005, 0.3, 2.0]), min_size=1, max_size=30),
)
def test_whatever_happens_the_bound_holds_all_are_answered_and_no_place_is_lost(scripts, max_concurrent, left):
    """`left`: seconds after which a request's client leaves, if it does."""
    clock = Clock()
    replicas = [Scripted(str(i), outcomes, seconds) for i, (outcomes, seconds) in enumerate(scripts)]

    async def one(pool, seconds):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await pool.send(lambda: ASKED, lambda response: response.text)

    async def story():
        pool = pool_of(*replicas, max_concurrent=max_concurrent, max_attempts=100, patience_s=3600.0)
        found = await asyncio.gather(*(one(pool, seconds) for seconds in left))
        await asyncio.sleep(60)
        await pool.close()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", clock)
        found = clock.run(story())
    assert all(answer is not None for answer, seconds in zip(found, left, strict=True) if seconds is None)
    assert all(replica.most <= max_concurrent for replica in replicas)
    assert all(replica.outstanding == 0 and replica.trusted for replica in replicas)


def test_one_that_is_trusted_is_waited_for_with_patience(clock):
    back, gone = Scripted("back"), Scripted("gone")
    for replica in (back, gone):
        replica.ill = Unavailable(f"{replica.url} is down")
    pool = pool_of(back, gone, patience_s=20.0)

    async def story():
        began = clock.monotonic()
        await pool.wait_for_one()
        assert clock.monotonic() == began
        for replica in (back, gone):
            pool.distrust(replica, replica.ill)
        with pytest.raises(Unavailable, match="no server was healthy for 20 s: http://back is down; http://gone is down"):
            await pool.wait_for_one()
        waiting = asyncio.create_task(pool.wait_for_one())
        await asyncio.sleep(0.1)
        back.ill = None
        await waiting
        assert back.trusted
        await pool.close()

    clock.run(story())


def test_a_request_that_failed_goes_elsewhere_although_there_is_more_to_do(clock):
    bad, good = Scripted("bad", down(99)), Scripted("good")
    good.outstanding = 2
    found, _ = asking(clock, pool_of(bad, good, max_attempts=2))
    assert found == ["good"]


def test_who_is_asked_to_wait_is_patient_while_others_are_answered(clock):
    """Two requests, 45 s of patience: after 20 s one is answered, the other is put off at 20 and at 40 s and answered at 60."""
    replica = Scripted(outcomes=[busy(20), None, busy(20), busy(20), None])
    found, seconds = asking(clock, pool_of(replica, max_concurrent=1, patience_s=45.0), 2)
    assert found == ["a", "a"]
    assert seconds == pytest.approx(60, abs=1)


def test_a_wait_longer_than_patience_is_not_waited_for(clock):
    found, seconds = asking(clock, pool_of(Scripted(outcomes=[busy(999_999)]), patience_s=5.0))
    assert [str(fault) for fault in found] == ["nothing succeeded for 5 s: come again"]
    assert seconds == pytest.approx(5, abs=module.LOOK_AGAIN_S + 0.1)


def test_what_all_that_are_well_refuse_is_refused_at_once(clock):
    ill, well = Scripted("ill"), Scripted("well", [Refused("too long")] * 9)
    ill.fault = Unavailable("away")
    found, seconds = asking(clock, pool_of(ill, well))
    assert [str(fault) for fault in found] == ["too long"]
    assert seconds < 1
    assert (ill.calls, well.calls) == (0, 1)


def test_all_that_wait_go_on_when_a_replica_is_back(clock):
    replica = Scripted(outcomes=down(FAILURES_TO_OPEN), seconds=5.0)
    replica.ill = Unavailable("down")
    pool = pool_of(replica, max_concurrent=8, max_attempts=20, patience_s=600.0)

    async def story():
        answers = asyncio.gather(*(pool.send(lambda: ASKED, lambda response: response.text) for _ in range(6)))
        await asyncio.sleep(100)
        replica.ill = None
        await answers
        await pool.close()

    clock.run(story())
    back = [moment for moment in replica.asked_at if moment > 1100]
    assert len(back) >= FAILURES_TO_OPEN
    assert max(back) - min(back) < 0.01
