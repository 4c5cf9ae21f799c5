"""Streams depend on their names alone."""

import numpy as np

from topd.run.seeding import stream


def test_equal_names_give_equal_streams_and_other_names_other_ones() -> None:
    first = stream(0, "rollout", 3, "train/7").random(4)
    assert np.array_equal(first, stream(0, "rollout", 3, "train/7").random(4))
    for other in [
        (1, "rollout", 3, "train/7"),
        (0, "eval", 3, "train/7"),
        (0, "rollout", 4, "train/7"),
        (0, "rollout", 3, "train/8"),
    ]:
        assert not np.array_equal(first, stream(*other).random(4))


def test_drawing_elsewhere_changes_nothing() -> None:
    np.random.default_rng(0).random(10)
    stream(0, "a").random(3)
    assert stream(0, "b").random() == stream(0, "b").random()


def test_names_that_read_alike_are_other_streams():
    names = [
        (1, "rollout", 11),
        (1, "rollout", 1, 1),
        (11, "rollout", 1),
        ("1", "rollout", 11),
        (1, "rollout", "11"),
        (1, "rollout11"),
    ]
    drawn = {float(stream(*name).random()) for name in names}
    assert len(drawn) == len(names)
