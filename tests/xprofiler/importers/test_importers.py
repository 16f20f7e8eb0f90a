"""What importers share: a table read or refused, its points, a profile in the making."""

import pytest
from imported import faults, write

from xgpt.core.errors import InputError
from xprofiler.importers.draft import Column, read_table, samples_at, undisturbed

COLUMNS = (Column("size", "count", least=1), Column("time", "ms"),
           Column("kind", "text", allowed=("a", "b")))


def test_milliseconds_become_seconds(tmp_path):
    path = write(tmp_path / "t.csv", ["size", "time", "kind"], [[8, 2.5, "a"], [16, 0, "b"]])
    table = read_table(path, COLUMNS)
    assert table["time"].tolist() == [0.0025, 0.0]
    assert table["size"].tolist() == [8, 16]


def test_every_fault_of_a_table_is_named_with_its_line(tmp_path):
    path = write(tmp_path / "t.csv", ["size", "time", "colour"],
                 [[8, -1, "x"], [0, "nan", "x"], [1.5, "fast", "x"], [4, 1, "x"]])
    with pytest.raises(InputError) as error:
        read_table(path, COLUMNS)
    assert sorted(faults(error), key=str) == sorted([
        (1, "kind"), (1, "colour"), (2, "time"), (3, "time"), (4, "time"), (3, "size"),
        (4, "size")], key=str)
    assert "missing column" in str(error.value) and "unknown column" in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["", "size,time,kind\n"])
def test_an_empty_table_is_a_mistake(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(InputError, match="empty"):
        read_table(path, COLUMNS)


def test_a_missing_file_and_a_short_row_are_mistakes(tmp_path):
    with pytest.raises(InputError, match="readable"):
        read_table(tmp_path / "none.csv", COLUMNS)
    path = write(tmp_path / "t.csv", ["size", "time", "kind"], [[8, 1, "a"], [8, 1]])
    with pytest.raises(InputError, match=r"t\.csv:3"):
        read_table(path, COLUMNS)


def test_many_faults_of_one_column_are_counted_not_listed(tmp_path):
    path = write(tmp_path / "t.csv", ["size", "time", "kind"], [[1, -1, "a"]] * 50)
    with pytest.raises(InputError, match="30 more such cells"):
        read_table(path, COLUMNS)


def test_rows_that_timed_nothing_are_left_out(tmp_path):
    columns = (Column("size", "count", least=1, is_work=True), *COLUMNS[1:])
    path = write(tmp_path / "t.csv", ["size", "time", "kind"],
                 [[0, "n/a", "a"], [8, 1, "a"], [0, 0, "b"]])
    table = read_table(path, columns)
    assert table["size"].tolist() == [8] and table.lines.tolist() == [3]
    path = write(tmp_path / "u.csv", ["size", "time", "kind"], [[0, 1, "a"]])
    with pytest.raises(InputError, match="at least 1"):  # a file that timed nothing is a mistake
        read_table(path, columns)


# --- drafts -----------------------------------------------------------------------------------


def test_rows_of_one_place_are_samples_of_one_point():
    found = samples_at([4, 1, 4], [0.3, 0.1, 0.5])
    assert [(p.x, p.samples_s) for p in found] == [(4, (0.3, 0.5)), (1, (0.1,))]


def test_a_point_far_slower_than_one_of_more_work_is_left_out():
    found = samples_at([1, 2, 1, 2], [5.0, 2.0, 1.5, 3.0], [1, 1, 2, 2])
    assert [(p.x, p.y) for p in undisturbed(found, grows_with_y=True)] == [(2, 1), (1, 2), (2, 2)]
    assert len(undisturbed(found, grows_with_y=False)) == 3  # (1, 1) is slower than (2, 1) too
