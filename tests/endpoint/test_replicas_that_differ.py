"""Servers of the rollout engine may hold different weights when they are met: they are about to get the trainer's."""

import asyncio

import pytest

from tests.endpoint.runs import section
from tests.fakes import make_model
from tests.serve.serving import serving
from topd.endpoint.served import ServedModel
from topd.errors import ConfigError
from topd.models.logprobs import Tokens

CANARY = Tokens((5,), ((6, 20, 9, 31),))


@pytest.mark.parametrize("one_model", [True, False])
def test_only_teachers_must_be_one_model(one_model):
    async def meet(*urls):
        served = ServedModel(section(*urls, timeout_s=5.0), role="r", name="m", canary=CANARY, one_model=one_model)
        try:
            await served.connect()
            return [replica.trusted for replica in served.pool.replicas]
        finally:
            await served.close()

    with serving(make_model(seed=0), name="m") as one, serving(make_model(seed=1), name="m") as other:
        if one_model:
            with pytest.raises(ConfigError, match="do not serve one model"):
                asyncio.run(meet(one, other))
        else:
            assert asyncio.run(meet(one, other)) == [True, True]
