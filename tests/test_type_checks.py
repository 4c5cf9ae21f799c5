"""The type checks are on: in every test a wrong type is an error, and so are axes that differ."""

import pytest
import torch
from jaxtyping import TypeCheckError


def test_a_wrong_type_is_an_error():
    from topd.errors import first_line

    with pytest.raises(TypeError, match="violates type hint"):
        first_line("no exception")


def test_axes_that_differ_are_an_error():
    from topd.ops.divergence import kl_divergence

    with pytest.raises(TypeCheckError, match="logprobs_q"):
        kl_divergence(torch.zeros(2, 3), torch.zeros(1, 3))  # torch would broadcast


def test_what_is_checked_once_for_equal_signatures_still_tells_others_apart():
    from jaxtyping import Float, jaxtyped
    from torch import Tensor

    from tests.type_checks import beartype_once

    def made(kind):
        @jaxtyped(typechecker=beartype_once)
        def add(one: Float[Tensor, " token"], other: kind):
            return one + other

        return add

    same, again, scalar = made(Float[Tensor, " token"]), made(Float[Tensor, " token"]), made(Float[Tensor, ""])
    for add in (same, again):
        assert torch.equal(add(torch.ones(2), torch.ones(2)), 2 * torch.ones(2))
        with pytest.raises(TypeCheckError):
            add(torch.ones(2), torch.ones(1))
    assert torch.equal(scalar(torch.ones(2), torch.tensor(1.0)), 2 * torch.ones(2))
