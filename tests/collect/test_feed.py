"""Which weights sample which step, what runs ahead of what, and what is read instead of sampled."""

import dataclasses
import threading
import time

import pytest

from tests.e2e.tiny import tiny_config
from topd import config_file
from topd.assemble import assemble
from topd.collect.feed import Feed
from topd.errors import RunStopped
from topd.models.policy import Policy
from topd.ragged import Ragged
from topd.rollout.embedded import EmbeddedEngine
from topd.run.directory import RunDirectory
from topd.run.progress import Display
from topd.types import RolloutGroup, ScoredGroup

STEPS = 6


class Engine(EmbeddedEngine):
    """Samples nothing, and notes with which weights it would have. `go` holds a step back until it is set."""

    context_length, exact = None, True

    def __init__(self) -> None:
        self.policy_version = self.newest = 0
        self.sampled: dict[int, int] = {}
        self.threads: dict[int, str] = {}
        self.go: dict[int, threading.Event] = {}
        self.fault: RunStopped | None = None

    def publish(self, policy_version: int) -> None:
        self.newest = policy_version

    def load_weights(self, policy_version: int) -> None:
        assert self.threads.keys() == self.sampled.keys() or self.fault, "weights change while something is sampled"
        self.policy_version = self.newest = policy_version

    def generate(self, prompts, params, *, on_tokens, on_groups):
        step = params.seed[-1]
        self.policy_version = self.newest
        self.threads[step] = threading.current_thread().name
        if step in self.go:
            assert self.go[step].wait(10)
        if self.fault:
            raise self.fault
        self.sampled[step] = self.policy_version
        return [RolloutGroup(prompt=prompt, rollouts=(), policy_version=self.policy_version) for prompt in prompts[:1]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    made = assemble(config_file.load(tiny_config(tmp_path_factory.mktemp("feed"), run__steps=STEPS)))
    yield made
    made.close()


@pytest.fixture
def feed(parts, tmp_path, monkeypatch, request):
    """A feed with `request.param` steps of lag whose groups are not scored."""
    rollout = parts.config.rollout.model_copy(update={"max_lag": request.param})
    policy = Policy(parts.student)
    config = parts.config.model_copy(update={"rollout": rollout})
    made = Feed(dataclasses.replace(parts, config=config, policy=policy, engine=Engine()), RunDirectory(tmp_path), Display())
    nothing = Ragged.of([[(1,)]])
    monkeypatch.setattr(made, "_score", lambda groups: [ScoredGroup(group=group, evidence=nothing) for group in groups])
    return made


def train(feed: Feed, step: int) -> int:
    """A step of two updates. Returns the version that its groups were sampled with."""
    [scored] = feed.take(step)
    assert scored.group.prompt == feed.parts.prompts.take(step)[0]
    feed.run_ahead(step)
    feed.parts.policy.version += 2
    feed.publish()
    return scored.group.policy_version


@pytest.mark.parametrize("feed", [0, 1], indirect=True)
def test_the_weights_are_as_many_steps_old_as_the_lag_says(feed):
    versions = [train(feed, step) for step in range(1, STEPS + 1)]
    assert versions == ([0, 2, 4, 6, 8, 10] if feed.lag == 0 else [0, 0, 2, 4, 6, 8])


@pytest.mark.parametrize("feed", [3], indirect=True)
def test_a_longer_lag_is_a_bound_and_the_newest_weights_are_taken(feed):
    """Step 3 is slow: the trainer cannot overtake it, and what follows takes the weights that were published meanwhile."""
    engine = feed.parts.engine
    engine.go[3] = threading.Event()
    versions = [train(feed, 1)]
    deadline = time.monotonic() + 10
    while 3 not in engine.threads and time.monotonic() < deadline:
        time.sleep(0.001)
    versions.append(train(feed, 2))
    assert versions == [0, 0]
    feed.run_ahead(2)  # publishes the weights of step 2 while step 3 is being sampled
    engine.go[3].set()
    versions += [train(feed, step) for step in range(3, STEPS + 1)]
    assert versions[2] == 0
    assert versions[3] == 4
    assert all(2 * (step - 1 - feed.lag) <= version <= 2 * (step - 1) for step, version in enumerate(versions, 1))
    assert sorted(engine.sampled) == list(range(1, STEPS + 1))  # each once, none beyond the last


@pytest.mark.parametrize("feed", [1], indirect=True)
def test_it_samples_beside_the_caller_and_settle_waits_for_it(feed):
    engine = feed.parts.engine
    feed.take(1)
    engine.go[2] = threading.Event()
    feed.run_ahead(1)
    assert 2 not in engine.sampled
    threading.Timer(0.05, engine.go[2].set).start()
    feed.parts.policy.version = 2
    feed.settle()
    assert engine.sampled[2] == 0
    assert engine.policy_version == 2
    assert engine.threads[1] == "MainThread"
    assert engine.threads[2].startswith("topd-feed")


@pytest.mark.parametrize("feed", [1], indirect=True)
def test_a_fault_ahead_is_raised_by_take_not_by_settle(feed):
    feed.take(1)
    feed.parts.engine.fault = RunStopped("the servers are gone")
    feed.run_ahead(1)
    feed.settle()
    with pytest.raises(RunStopped, match="the servers are gone"):
        feed.take(2)


@pytest.mark.parametrize("feed", [2], indirect=True)
def test_a_stored_step_is_not_sampled_ahead(feed):
    feed.directory.rollouts(2).parent.mkdir()
    feed.directory.rollouts(2).touch()
    feed.take(1)
    feed.run_ahead(1)
    feed.settle()
    assert sorted(feed.parts.engine.sampled) == [1, 3]


@pytest.mark.parametrize("feed", [1], indirect=True)
def test_the_copy_stands_for_the_weights_of_the_step_before_and_no_other(feed):
    train(feed, 1)  # the copy is of version 0, the policy at 2
    policy = feed.parts.policy
    assert feed._weights_of(2) is policy.model
    assert feed._weights_of(0) is feed._snapshot
    assert feed._weights_of(1) is None
