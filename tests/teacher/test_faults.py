"""Whole runs through a faulty wire: exactly the result of a healthy run, or the declared error and a folder to resume."""

import pytest

from tests.endpoint import proxy as faults
from tests.endpoint.proxy import proxying
from tests.endpoint.runs import served_config, train
from tests.run.test_resume import results
from tests.serve.serving import serving
from topd.errors import RunStopped


@pytest.fixture(scope="module")
def teacher():
    with serving() as base:
        yield base


@pytest.fixture(scope="module")
def healthy(teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy")
    train(served_config(folder, teacher))
    return results(folder)


CONNECTION = [
    faults.delay(0.3),
    faults.stall,
    faults.reset_before_headers,
    faults.reset_after_headers,
    faults.cut_off,
    faults.status(429, retry_after="0.2"),
    faults.status(429),
    faults.busy_until(1.0),
    faults.status(500),
    faults.status(503),
    faults.status(503, retry_after="0.2"),
    faults.echo_headers,
    faults.html,
    faults.empty,
    faults.truncated,
]


@pytest.mark.parametrize("fault", CONNECTION, ids=lambda fault: fault.__name__)
def test_a_fault_that_passes_changes_nothing(tmp_path, teacher, healthy, fault):
    with proxying(teacher) as proxy:
        train(served_config(tmp_path, proxy.url), lambda step: proxy.give(faults.first(2, fault)))
        assert proxy.given == [fault.__name__] * 4
    assert results(tmp_path) == healthy
