"""Values of control variables that cover a space, for a policy's `grid`."""

GRID_RATIO = 1.1


def geometric(largest: int) -> list[int]:
    """Whole numbers from 1 to `largest`, GRID_RATIO apart."""
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(max(sizes[-1] + 1, int(sizes[-1] * GRID_RATIO)), largest))
    return sizes


def group_counts(stages: int) -> list[int]:
    """One group to twice the stages, about a factor of 1.5 apart."""
    counts = {1, stages, 2 * stages}
    count = 1.0
    while count < stages:
        counts.add(round(count))
        count = max(count * 1.5, count + 1)
    return sorted(counts)
