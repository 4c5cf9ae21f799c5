"""Parquet is read by the calling thread alone, from a native file: an Arrow thread must hold nothing when the process ends."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import topd
from topd.run import parquet

TABLE = pa.table({"a": [[1.0, 2.0], [3.0]], "b": ["x", "y"]})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    pq.write_table(TABLE, tmp_path / "table.parquet")
    return tmp_path / "table.parquet"


def test_no_thread_and_no_buffer_of_python_take_part(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Watched(pq.ParquetFile):
        def __init__(self, source: object, **options: object) -> None:
            asked.append((type(source), options["pre_buffer"]))
            super().__init__(source, **options)

        def read(self, *columns: object, use_threads: bool = True) -> pa.Table:
            asked.append(use_threads)
            return super().read(*columns, use_threads=use_threads)

    monkeypatch.setattr(pq, "ParquetFile", Watched)
    assert parquet.read(path) == TABLE
    assert parquet.read(path, TABLE.schema) == TABLE
    assert asked == [(pa.OSFile, False), False] * 2


def test_nobody_reads_parquet_in_another_way() -> None:
    root = Path(topd.__file__).parent
    ways = re.compile(r"\b(read_table|ParquetFile|ParquetDataset|read_parquet|open_file|memory_map)\(")
    found = [str(file.relative_to(root)) for file in root.rglob("*.py") if ways.search(file.read_text(encoding="utf-8"))]
    assert found == ["run/parquet.py"]


def test_columns_come_as_the_schema_says_and_one_that_is_not_there_is_named(path: Path) -> None:
    schema = pa.schema([("b", pa.large_string()), ("a", pa.list_(pa.float32()))])
    assert parquet.read(path, schema).schema == schema
    with pytest.raises(ValueError, match="there is no column c"):
        parquet.read(path, pa.schema([("c", pa.int32())]))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet at all"])
def test_what_cannot_be_read_raises_what_is_expected(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(parquet.Unreadable):
        parquet.read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(parquet.Unreadable, match="is not a file"):
        parquet.read(path)


def test_names_that_are_not_utf_8_are_opened(tmp_path: Path) -> None:
    path = tmp_path / "\udcff.parquet"
    pq.write_table(TABLE, tmp_path / "table.parquet")
    (tmp_path / "table.parquet").rename(path)
    assert parquet.read(path) == TABLE
