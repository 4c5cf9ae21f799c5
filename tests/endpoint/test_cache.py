"""Scores on disk: found again by teacher and tokens, forgotten with their step, never wrong."""

import functools
import shutil
import sqlite3
import threading

import pytest
import torch

from tests.fakes import ragged_groups
from topd.endpoint.cache import KEEP_STEPS, ScoreCache
from topd.errors import RunStopped
from topd.models.logprobs import Tokens

GROUP = Tokens((5, 6), ((7, 8, 9), (7,)))
SCORES = [torch.tensor([-0.1, -2.0, -1e-30]), torch.tensor([-3.25])]


@pytest.fixture
def cache(tmp_path):
    cache = ScoreCache(tmp_path / "run" / "scores.sqlite")
    yield cache
    cache.close()


def found(cache, identity="t", group=GROUP):
    return cache.get(identity, group)


def test_what_was_put_is_found_to_the_bit(cache):
    assert found(cache) == [None, None]
    cache.put("t", GROUP, SCORES)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(found(cache), SCORES, strict=True))


def test_completions_are_found_one_by_one(cache):
    cache.put("t", GROUP.rows(1, 2), SCORES[1:])
    first, second = found(cache)
    assert first is None
    assert torch.equal(second, SCORES[1])


def test_a_found_tensor_is_ours_to_change(cache):
    cache.put("t", GROUP, SCORES)
    found(cache)[0].zero_()
    assert torch.equal(found(cache)[0], SCORES[0])


@pytest.mark.parametrize(
    ("identity", "group"),
    [
        ("u", GROUP),
        ("t", Tokens((6, 5), GROUP.completions)),
        ("t", Tokens((5,), ((6, 7, 8, 9), (6, 7)))),
        ("t", Tokens((5, 6, 7), ((8, 9),))),
        ("t", Tokens((5, 6), ((7, 8), (7, 8, 9, 9)))),
    ],
)
def test_another_teacher_prompt_or_completion_is_not_found(cache, identity, group):
    """Also where prompt and completion together are the same tokens, cut elsewhere."""
    cache.put("t", GROUP, SCORES)
    assert found(cache, identity, group) == [None] * len(group.completions)


def test_what_a_killed_process_leaves_on_disk_is_found_by_the_next(tmp_path):
    """Without close: the file and its journal, as they are at that moment."""
    killed = ScoreCache(tmp_path / "a" / "scores.sqlite")
    killed.put("t", GROUP, SCORES)
    (tmp_path / "b").mkdir()
    for file in (tmp_path / "a").glob("scores.sqlite*"):
        shutil.copy(file, tmp_path / "b")
    after = ScoreCache(tmp_path / "b" / "scores.sqlite")
    assert torch.equal(found(after)[0], SCORES[0])
    killed.close()
    after.close()


def test_scores_are_forgotten_once_their_step_and_the_next_are_stored(cache):
    early, late = ragged_groups((2, (3,)), (2, (4,)))
    cache.put("t", early, [torch.full((3,), -1.0)])
    for _ in range(KEEP_STEPS - 1):
        cache.step_done()
        assert found(cache, group=early) != [None]
        cache.put("t", late, [torch.full((4,), -2.0)])
    cache.step_done()
    assert found(cache, group=early) == [None]
    assert found(cache, group=late) != [None]


def test_a_reopened_cache_goes_on_counting_steps(tmp_path):
    path = tmp_path / "scores.sqlite"
    cache = ScoreCache(path)
    cache.step_done()
    cache.step_done()
    cache.put("t", GROUP, SCORES)
    cache.close()
    cache = ScoreCache(path)
    cache.step_done()
    assert found(cache) != [None, None]
    cache.step_done()
    assert found(cache) == [None, None]
    cache.close()


def test_threads_share_it(cache):
    groups = ragged_groups(*((3, (4, 2)) for _ in range(40)))
    scores = [[torch.full((4,), -float(i)), torch.full((2,), -float(i))] for i in range(len(groups))]
    errors = []

    def work(part):
        try:
            for i in range(part, len(groups), 8):
                cache.put("t", groups[i], scores[i])
                assert torch.equal(cache.get("t", groups[i])[0], scores[i][0])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(torch.equal(cache.get("t", g)[1], s[1]) for g, s in zip(groups, scores, strict=True))


@pytest.mark.parametrize("content", [b"not a database, but as long as one" * 100, b"SQLite format 3\x00" + b"\x01" * 4096])
def test_a_damaged_file_stops_the_run_and_is_named_with_the_remedy(tmp_path, content):
    path = tmp_path / "scores.sqlite"
    path.write_bytes(content)
    with pytest.raises(RunStopped, match=r"scores\.sqlite cannot be used: .*delete that file .*--run\.resume true"):
        ScoreCache(path)


def test_a_full_disk_stops_the_run_and_what_was_there_is_still_found(cache):
    cache.put("t", GROUP, SCORES)
    (pages,) = cache._database.execute("PRAGMA page_count").fetchone()
    cache._database.execute(f"PRAGMA max_page_count = {pages}")
    big = ragged_groups((3, (100_000,)))[0]
    with pytest.raises(RunStopped, match="full"):
        cache.put("t", big, [torch.zeros(100_000)])
    assert torch.equal(found(cache)[0], SCORES[0])


def test_an_entry_of_another_length_is_not_believed(cache):
    cache.put("t", GROUP, SCORES)
    cache._database.execute("UPDATE scores SET logprobs = zeroblob(2)")
    assert found(cache) == [None, None]


@pytest.mark.parametrize("value", ["NULL", "'twentytwentytwenty!!'", "5", "1.5", "CAST(x'ff' AS TEXT)"])
def test_an_entry_that_is_no_blob_is_not_believed(cache, value):
    cache.put("t", GROUP, SCORES)
    cache._database.execute(f"UPDATE scores SET logprobs = {value}")
    assert found(cache) == [None, None]


@pytest.mark.parametrize("value", ["'zz'", "NULL", "x'00'", str(2**63 - 1)])
def test_a_damaged_count_of_steps_is_begun_anew(tmp_path, value):
    cache = ScoreCache(tmp_path / "scores.sqlite")
    cache.put("t", GROUP, SCORES)
    cache._database.execute(f"UPDATE scores SET generation = {value}")
    cache.close()
    cache = ScoreCache(tmp_path / "scores.sqlite")
    assert torch.equal(found(cache)[0], SCORES[0])
    for _ in range(KEEP_STEPS):
        cache.step_done()
    assert found(cache) == [None, None]
    cache.close()


@pytest.mark.parametrize("byte", [0, 3, -1])
def test_a_flipped_bit_in_an_entry_is_not_believed(cache, byte):
    cache.put("t", GROUP, SCORES)
    (stored,) = cache._database.execute("SELECT logprobs FROM scores WHERE length(logprobs) = 20").fetchone()
    damaged = bytearray(stored)
    damaged[byte] ^= 1
    cache._database.execute("UPDATE scores SET logprobs = ? WHERE logprobs = ?", (bytes(damaged), stored))
    assert [part is None for part in found(cache)] == [len(scores) == 3 for scores in SCORES]


def test_entries_that_changed_places_are_not_believed(cache):
    alike = Tokens((5, 6), ((7, 8), (8, 7)))
    cache.put("t", alike, [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0, -4.0])])
    (one, first), (other, second) = cache._database.execute("SELECT key, logprobs FROM scores").fetchall()
    for key, blob in ((one, second), (other, first)):
        cache._database.execute("UPDATE scores SET logprobs = ? WHERE key = ?", (blob, key))
    assert found(cache, group=alike) == [None, None]


def test_a_file_that_another_process_has_open_is_named(tmp_path, monkeypatch):
    first = ScoreCache(tmp_path / "scores.sqlite")
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, timeout=0.01))
    with pytest.raises(RunStopped, match="locked"):
        ScoreCache(tmp_path / "scores.sqlite")
    first.close()


def test_the_same_tokens_cut_elsewhere_are_another_entry(cache):
    """Neither takes the other's place."""
    one, other = Tokens((5, 6), ((7, 8, 9),)), Tokens((5, 6, 7), ((8, 9),))
    cache.put("t", one, SCORES[:1])
    cache.put("t", other, [torch.tensor([-4.0, -5.0])])
    assert torch.equal(found(cache, group=one)[0], SCORES[0])
    assert found(cache, group=other)[0].tolist() == [-4.0, -5.0]
