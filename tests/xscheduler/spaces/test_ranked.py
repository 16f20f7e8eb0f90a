"""The best of the points that were evaluated, under any latency bound."""

import random

from xscheduler.spaces.ranked import Ranked


def test_the_best_within_a_bound_is_that_of_all_however_they_were_added():
    rng, ranked, known = random.Random(4), Ranked[tuple[int, ...]](), {}
    assert ranked.best(1.0) is None
    for step in range(30):
        new = {(step, place): (float(rng.randrange(5)), rng.random()) for place in range(step)}
        known |= new
        ranked.add((key, qps, latency_s) for key, (qps, latency_s) in new.items())
        for bound_s in (0.0, 0.1, rng.random(), 1.0):
            best = min(((-qps, key) for key, (qps, latency_s) in known.items()
                        if qps > 0 and latency_s <= bound_s), default=None)
            assert ranked.best(bound_s) == (None if best is None else (-best[0], best[1]))
