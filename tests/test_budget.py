"""What the default run may hold: six minutes on two cores are kept by what tests start, which can
be counted, and not by seconds, which depend on the machine's other work."""

import pytest

MOST_WITH_RANKS = 50  # most import torch in two to four processes, and plan before that
WHOLE = 2500  # tests: fewer are a part of the run, chosen by hand


def test_few_default_tests_start_ranks(request):
    items = request.session.items
    if len(items) < WHOLE or any("slow" in item.keywords for item in items):
        pytest.skip("the whole default run is counted")
    with_ranks = sorted(item.nodeid for item in items if "mpi" in item.keywords)
    assert len(with_ranks) <= MOST_WITH_RANKS, (
        "let one run of ranks serve several tests, drive the runner on threads (toys.py), or mark "
        f"what another test holds as slow: {with_ranks}")
