"""What the tests of the commands share."""

import pytest


@pytest.fixture(autouse=True)
def _plans_are_checked_briefly(short_replays):
    """See short_replays of tests/conftest.py."""
