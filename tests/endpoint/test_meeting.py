"""Who served teachers were when a run began: written once, and believed only if it is whole."""

import pytest

from topd.endpoint.meeting import Meeting, read, write
from topd.errors import ConfigError
from topd.run.digests import Digests

MET = {
    "teachers.math": Meeting(form="a", fingerprint=None, canary=[-0.1, -1e-30, -12.5]),
    "teachers.code": Meeting(form="b", fingerprint="0f" * 32, canary=[-0.3]),
}


def test_what_was_met_is_read_to_the_bit(tmp_path):
    path, digests = tmp_path / "teachers.json", Digests(tmp_path)
    assert read(path, digests) == {}
    write(path, MET, digests)
    assert read(path, Digests(tmp_path)) == MET


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1",
        "[]",
        "null",
        '{"teacher": null}',
        '{"teacher": {"form": "a", "fingerprint": null}}',
        *(
            '{"teacher": {"form": "a", "fingerprint": null, "canary": ' + canary + "}}"
            for canary in ("null", '"text"', "5", "[]", "[null]", '["-1"]', "[NaN]", "[1e999]", "[[-1.0]]")
        ),
        '{"teacher": {"form": null, "fingerprint": null, "canary": [-1.0]}}',
        '{"teacher": {"form": "a", "fingerprint": 5, "canary": [-1.0]}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_meeting_is_named_even_where_no_digest_tells(tmp_path, text):
    path = tmp_path / "teachers.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"teachers\.json is damaged: .*Restore it; or delete it"):
        read(path, Digests(tmp_path))


def test_a_changed_number_is_noticed_and_what_cannot_be_read_is_named(tmp_path):
    path, digests = tmp_path / "teachers.json", Digests(tmp_path)
    write(path, MET, digests)
    path.write_text(path.read_text().replace("12.5", "12.4"))
    with pytest.raises(ConfigError, match="it has changed since it was written"):
        read(path, digests)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"is damaged: .*directory"):
        read(path, digests)
