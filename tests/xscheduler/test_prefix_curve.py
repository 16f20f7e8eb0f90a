"""How much shared prefixes save, by the tokens of them that are kept."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from problems import toy_problem

from jobs import job_file
from xgpt.cli import schedule as command
from xgpt.core.prefixes import Prefixes
from xgpt.core.problem import QueryLengths
from xscheduler.prefix_curve import saved_shares

WORKLOAD = ("{requests: {count: 200}, input_tokens: {mean: 1030, std: 2, max: 1040}, shared: "
            "{groups: 40, tokens: {mean: 980, std: 5, max: 1000}}, "
            "output_tokens: {mean: 9, std: 3, max: 20}}")


def test_a_small_cache_saves_little_of_shuffled_documents_and_all_of_sorted_ones():
    """30 documents of 4,000 tokens, below a common beginning of 100, asked in turns."""
    documents = 1 + np.tile(np.arange(30), 10)
    prefixes = Prefixes(parents=np.array([-1, *[0] * 30]), ends=np.array([100, *[4100] * 30]),
                        nodes=documents)
    inputs = np.full(300, 4200)
    known = QueryLengths(inputs=inputs, most_outputs=inputs, prefixes=prefixes)
    shares = saved_shares(replace(toy_problem(), queries=known))
    most = (300 * 4100 - 100 - 30 * 4000) / inputs.sum()
    assert [row.kept_tokens for row in shares] == [16_384, 65_536, 262_144, None]
    assert [row.in_prefix_order for row in shares] == [pytest.approx(most)] * 4
    by_size = [row.in_input_order for row in shares]
    # one of 4 documents that fit is exchanged at each request, the 3 others are kept
    assert by_size == sorted(by_size) and by_size[0] < 0.2 and 0.4 < by_size[1] < 0.6
    assert by_size[2:] == [pytest.approx(most)] * 2
    assert saved_shares(toy_problem()) == ()


def test_the_command_shows_it(tmp_path):
    job = job_file(tmp_path, model="opt-1.3b", cluster="1xH100", workload=WORKLOAD,
                   schedule="{policy: rra}")
    shown, told = (CliRunner().invoke(command.schedule, [str(job), "--prefixes", *more],
                                      catch_exceptions=False).stdout for more in ((), ("--json",)))
    table = shown[shown.index("prefix tokens kept"):].splitlines()
    assert table[2].split()[0] == "16,384" and table[5].split()[0] == "all"
    rows = json.loads(told)["prefixes"]
    assert 0 < rows[0]["in_input_order"] < rows[0]["in_prefix_order"] == rows[3]["in_input_order"]
