import pytest
import torch

from topd.models.prefix import growing, keep_rows, reading, recording

HEADS, DIM = 2, 3


def draw(rows, tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, HEADS, tokens, DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def recorded(prompts=2, tokens=4, layers=2):
    cache = recording(layers)
    pairs = [draw(prompts, tokens, seed) for seed in range(layers)]
    for layer, pair in enumerate(pairs):
        cache.update(*pair, layer)
    return cache, pairs


def test_recording_keeps_the_first_call_and_passes_on_what_it_is_given():
    cache = recording(1)
    first, second = draw(2, 4, 0), draw(2, 4, 1)
    assert all(a is b for a, b in zip(cache.update(*first, 0), first, strict=True))
    assert all(a is b for a, b in zip(cache.update(*second, 0), second, strict=True))
    assert cache.layers[0].keys is first[0]
    assert cache.layers[0].values is first[1]


def test_reading_puts_each_rows_own_prompt_in_front_and_stores_nothing():
    cache, pairs = recorded()
    rows = torch.tensor([1, 0, 1])
    read = reading(cache, rows)
    new = draw(3, 2, 9)
    for _ in range(2):  # a recomputed layer asks again and gets the same
        for layer, (keys, values) in enumerate(pairs):
            found = read.update(*new, layer)
            assert torch.equal(found[0], torch.cat([keys[rows], new[0]], dim=2))
            assert torch.equal(found[1], torch.cat([values[rows], new[1]], dim=2))
    assert read.get_seq_length() == 4


def test_gradient_flows_through_reading_into_the_recorded_pass():
    cache = recording(1)
    keys, values = draw(2, 4)
    keys.requires_grad_()
    cache.update(keys, values, 0)
    found, _ = reading(cache, torch.tensor([0, 1, 1])).update(*draw(3, 2, 9), 0)
    found.sum().backward()
    # prompt 0 is read by one row, prompt 1 by two
    assert keys.grad[0].eq(1).all()
    assert keys.grad[1].eq(2).all()


@pytest.mark.parametrize("room", [1, 2, 3, 100])
def test_growing_returns_everything_so_far_whatever_the_room(room):
    cache, pairs = recorded(layers=1)
    rows = torch.tensor([0, 0, 1])
    grown = growing(cache, rows, room=room)
    keys, values = pairs[0][0][rows], pairs[0][1][rows]
    for step in range(7):
        new = draw(3, 1, 10 + step)
        keys, values = torch.cat([keys, new[0]], dim=2), torch.cat([values, new[1]], dim=2)
        found = grown.update(*new, 0)
        assert torch.equal(found[0], keys)
        assert torch.equal(found[1], values)
        assert grown.get_seq_length() == 5 + step


def test_growing_buffers_double():
    cache, _ = recorded(tokens=4, layers=1)
    grown = growing(cache, torch.tensor([0]), room=2)
    sizes = []
    for step in range(10):
        grown.update(*draw(1, 1, step), 0)
        sizes.append(grown.layers[0].keys.shape[2])
    # 4 + 2 = 6 holds two tokens; the third needs 7: doubled to at least 12; the ninth needs 13: doubled again
    assert sizes[:2] == [6, 6]
    assert len(set(sizes)) <= 3
    assert all(size >= 5 + step for step, size in enumerate(sizes))


def test_growing_without_a_recorded_prompt():
    grown = growing(recording(1), torch.tensor([0, 0]), room=1)
    first, second = draw(2, 1, 1), draw(2, 1, 2)
    grown.update(*first, 0)
    found, _ = grown.update(*second, 0)
    assert torch.equal(found, torch.cat([first[0], second[0]], dim=2))


def test_kept_rows_go_on_as_before():
    cache, pairs = recorded(layers=1)
    grown = growing(cache, torch.tensor([0, 1, 1]), room=2)
    first = draw(3, 1, 1)
    grown.update(*first, 0)
    kept = torch.tensor([0, 2])
    keep_rows(grown, kept)
    second = draw(2, 1, 2)
    found, _ = grown.update(*second, 0)
    prompts = pairs[0][0][torch.tensor([0, 1])]
    assert torch.equal(found, torch.cat([prompts, first[0][kept], second[0]], dim=2))
