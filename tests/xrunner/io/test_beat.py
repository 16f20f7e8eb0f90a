"""What ranks tell of themselves while they run."""

from xrunner.io.beat import BEATS, Beat, read_beats


def test_a_rank_tells_its_state_about_once_a_second(tmp_path):
    beat = Beat(tmp_path, rank=1, stage=0, pool="all")
    beat(2.0, 1.0, 5)
    first = read_beats(tmp_path)
    assert [(s.rank, s.recent_share, s.queries) for s in first] == [(1, 0.5, 5)]
    beat(2.9, 1.9, 6)
    assert read_beats(tmp_path) == first, "too soon"
    beat(4.0, 2.5, 7)
    (state,) = read_beats(tmp_path)
    assert (state.recent_share, state.busy_s, state.queries) == (0.75, 2.5, 7)


def test_a_clock_that_is_restarted_begins_anew(tmp_path):
    beat = Beat(tmp_path, rank=0, stage=0, pool="all")
    beat(100.0, 3.0, 1)
    beat(0.5, 0.25, 2)
    (state,) = read_beats(tmp_path)
    assert state.queries == 2 and state.recent_share == 0.5


def test_ranks_come_in_their_order_and_half_a_file_is_left_out(tmp_path):
    for rank in (10, 2, 0):
        Beat(tmp_path, rank=rank, stage=rank, pool="all")(1.0, 1.0, 0)
    (tmp_path / BEATS / "3.json").write_text('{"rank": 3')
    assert [state.rank for state in read_beats(tmp_path)] == [0, 2, 10]
    assert read_beats(tmp_path / "elsewhere") == []


def test_a_folder_that_cannot_be_written_to_does_not_end_a_run(tmp_path):
    (tmp_path / BEATS).write_text("a file in its place")
    Beat(tmp_path, rank=0, stage=0, pool="all")(1.0, 1.0, 0)
