"""Shared prefixes of a job: what is found equals a dictionary of all prefixes."""

import resource
import time
from collections import Counter

import numpy as np
import pytest

from jobs import job
from xgpt.core.errors import XgptError
from xgpt.core.lengths import synthetic_lengths
from xgpt.core.prefixes import in_blocks
from xgpt.job.resolve import dealt_queries, resolve
from xgpt.requests.prefixes import LEAST_TOKENS, encoded_tokens, find_prefixes
from xgpt.requests.spool import Record, Spool, SpoolWriter
from xrunner.files.spooled_requests import make_synthetic

VOCABULARY = 2**31 - 1  # no two tokens are equal by chance


def found_in(prompts, limits=None):
    """The forest of prompts (lists of tokens), of which each may share all but its last token."""
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.fromiter((token for prompt in prompts for token in prompt), np.int32)
    return find_prefixes(tokens, np.cumsum(lengths) - lengths,
                         lengths - 1 if limits is None else np.array(limits))


def chains_of(prompts, forest):
    """The nodes of each prompt, each as its tokens."""
    if forest is None:
        return [[] for _ in prompts]
    return [[tuple(prompt[:end]) for end in forest.ends[forest.chain(node)].tolist()]
            if node >= 0 else [] for prompt, node in zip(prompts, forest.nodes.tolist(),
                                                        strict=True)]


def chains_by_dictionary(prompts, limits):
    """The forest by a dictionary of all prefixes, of which the longest of equal count stay."""
    counts = Counter(tuple(prompt[:end]) for prompt, limit in zip(prompts, limits, strict=True)
                     for end in range(1, limit + 1))
    inner = {prefix[:-1] for prefix, count in counts.items() if counts[prefix[:-1]] == count}
    kept, chains = {(): 0}, []  # node -> its nearest kept node's end
    for prefix in sorted((one for one in counts if counts[one] > 1 and one not in inner), key=len):
        above = max(end for end in range(len(prefix)) if prefix[:end] in kept)
        if (counts[prefix] - 1) * (len(prefix) - above) >= LEAST_TOKENS:
            kept[prefix] = above
    for prompt, limit in zip(prompts, limits, strict=True):
        chains.append([tuple(prompt[:end]) for end in range(1, limit + 1)
                       if tuple(prompt[:end]) in kept])
    return chains


def random_job(rng):
    """(prompts, limits) that begin alike at several levels, also where blocks of reading end."""
    kinds = int(rng.choice([2, 3, 1000]))
    heads = [[]]
    for _ in range(rng.integers(1, 12)):
        own = rng.integers(kinds, size=int(rng.choice([1, 5, 31, 32, 33, 64, 100])))
        heads.append([*heads[rng.integers(len(heads))], *own.tolist()])
    prompts = []
    for _ in range(rng.integers(1, 60)):
        head = heads[rng.integers(len(heads))]
        head = head[:rng.integers(len(head) + 1)] if rng.random() < 0.2 else head
        prompts.append([*head, *rng.integers(kinds, size=rng.integers(0, 20)).tolist()] or [0])
    prompts += [prompts[0]] * int(rng.integers(3))  # several samples of one request
    return prompts, [int(rng.integers(len(prompt))) if rng.random() < 0.1 else len(prompt) - 1
                     for prompt in prompts]


@pytest.mark.parametrize("part", range(5))
def test_forests_of_random_jobs_are_those_of_a_dictionary(part):
    for seed in range(100 * part, 100 * part + 100):
        prompts, limits = random_job(np.random.default_rng(seed))
        forest = found_in(prompts, limits)
        assert chains_of(prompts, forest) == chains_by_dictionary(prompts, limits), seed
        if forest is not None:
            assert (forest.parents < np.arange(len(forest.parents))).all(), seed


def encoded(prompts, forest):
    return encoded_tokens(forest, np.array([len(prompt) for prompt in prompts]))


def prompts_with(heads, each, own, seed=5):
    rng = np.random.default_rng(seed)
    shared = rng.integers(VOCABULARY, size=heads).tolist()
    return [[*head, *rng.integers(VOCABULARY, size=own).tolist()]
            for head in shared for _ in range(each)]


def test_a_system_prompt_and_documents_are_encoded_once():
    few_shot = prompts_with((1, 1200), 2000, 40)
    assert encoded(few_shot, found_in(few_shot)) == 81_200
    documents = prompts_with((50, 3000), 20, 30)
    assert encoded(documents, found_in(documents)) == 180_000


def test_whole_blocks_of_the_first_save_less():
    few_shot = prompts_with((1, 1200), 2000, 40)
    whole = in_blocks(found_in(few_shot), 128, is_whole=True)
    assert round(1 - encoded(few_shot, whole) / 2_480_000, 3) == 0.929


def test_samples_share_all_but_the_last_token():
    prompts = prompts_with((1, 400), 1, 0) * 8
    forest = found_in(prompts)
    assert forest.ends.tolist() == [399] and forest.nodes.tolist() == [0] * 8


def test_nothing_is_found_where_nothing_is_shared():
    assert found_in(prompts_with((1, 0), 100, 50)) is None
    assert found_in(prompts_with((1, 31), 2, 50)) is None  # saves 31 tokens
    assert found_in(prompts_with((1, 32), 2, 50)).ends.tolist() == [32]
    assert found_in(prompts_with((1, 400), 9, 0), [0] * 9) is None
    assert found_in([[1, 2, 3]]) is None


def test_the_children_of_a_small_node_attach_to_its_parent():
    rng = np.random.default_rng(3)
    top, small, left, right = (rng.integers(VOCABULARY, size=size).tolist()
                               for size in (100, 3, 50, 60))
    prompts = [[*top, *small, *half, *rng.integers(VOCABULARY, size=9).tolist()]
               for half in (left, right) for _ in range(4)]
    prompts += [[*top, *rng.integers(VOCABULARY, size=9).tolist()] for _ in range(4)]
    forest = found_in(prompts)
    assert sorted(zip(forest.parents.tolist(), forest.own_tokens.tolist(), strict=True)) == [
        (-1, 100), (0, 53), (0, 63)]


# The spool: what its writer finds is what its reader has.


def spooled(folder, prompts, most=None, **record):
    """The saved spool of prompts, of which the first `most` are queries."""
    writer = SpoolWriter()
    for line, prompt in enumerate(prompts, start=1):
        writer.add(Record(id=str(line), line=line, **record), prompt)
    queries = np.array([(i, 1) for i in range(len(prompts))][:most])
    found = writer.find_prefixes()
    writer.save(folder, queries, 0, prefixes=None if found is None else found[queries[:, 0]])
    return Spool(folder)


def test_a_spool_keeps_the_prefixes_of_its_queries(tmp_path):
    prompts = prompts_with((3, 40), 5, 6)
    expected = found_in(prompts)
    found = spooled(tmp_path, prompts, 11).prefixes
    assert found.ends.tolist() == [40] * 3 == expected.ends.tolist()
    assert found.nodes.tolist() == expected.nodes[:11].tolist()
    assert spooled(tmp_path, prompts_with((1, 0), 9, 40)).prefixes is None
    assert not (tmp_path / "spool" / "prefixes.npy").exists()


@pytest.mark.parametrize(("record", "shared"), [
    ({}, 99), ({"pooled": "last"}, 99), ({"targets": (4, 5, 6)}, 97), ({"pooled": "mean"}, None)])
def test_what_precedes_the_first_row_that_is_asked_for_is_shared(tmp_path, record, shared):
    found = spooled(tmp_path, [list(range(100))] * 4, **record).prefixes
    assert (None if found is None else found.shared.tolist()) == (shared and [shared] * 4)


def test_requests_that_cannot_run_share_nothing():
    writer = SpoolWriter()
    for line in range(1, 4):
        writer.add(Record(id=str(line), line=line), range(50))
    writer.add(Record(id="4", line=4), ())
    assert writer.find_prefixes([1]).nodes.tolist() == [0, -1, 0, -1]
    assert writer.find_prefixes([0, 1]) is None and SpoolWriter().find_prefixes() is None


def test_prefixes_that_do_not_fit_their_spool_are_refused(tmp_path):
    path = tmp_path / "spool" / "prefixes.npy"
    spooled(tmp_path, prompts_with((3, 40), 5, 6))
    table = np.load(path)
    for place, value in (((0, 0), 0), ((1, 0), -2), ((2, 1), 0), ((3, 0), 3), ((3, 1), 39)):
        wrong = table.copy()
        wrong[place] = value
        np.save(path, wrong)
        with pytest.raises(XgptError, match="does not fit the requests of its spool: remove it"):
            _ = Spool(tmp_path).prefixes
    for other in (table[:15], table[:-3], table[:, 0], table.astype(np.int32)):
        np.save(path, other)
        with pytest.raises(XgptError, match="does not fit"):
            _ = Spool(tmp_path).prefixes
    path.write_bytes(b"\x93NUMPY")
    with pytest.raises(XgptError, match="does not fit"):
        _ = Spool(tmp_path).prefixes


# Plans without a file: requests that are made share what the job says.


MADE = ("{requests: {count: 300}, input_tokens: {mean: 90, std: 5, max: 120}, output_tokens: 6, "
        "shared: {groups: 7, tokens: {mean: 40, std: 9, max: 60}}}")


def test_made_requests_begin_with_the_prefixes_of_their_groups(tmp_path):
    own = job(tmp_path, workload=MADE)
    lengths = resolve(own).lengths
    planned = dealt_queries(own, lengths)
    made, writer = make_synthetic(lengths, 300, own.run.seed, VOCABULARY, planned.prefixes)
    assert made.input_tokens.tolist() == planned.inputs.tolist()
    found = writer.find_prefixes()
    assert found.shared.tolist() == planned.prefixes.shared.tolist()
    assert len(found.ends) == 7 and found.nodes.tolist() != sorted(found.nodes), "shuffled"
    same = {(a, b) for a, b in zip(found.nodes.tolist(), made.prefixes.nodes.tolist(), strict=True)}
    assert len(same) == 7, "each group is one"
    alone, _ = synthetic_lengths(lengths, 300, own.run.seed)
    assert planned.inputs.tolist() == alone.tolist(), "a part of the same inputs"


def test_a_job_without_a_number_of_requests_is_planned_by_a_sample(tmp_path):
    own = job(tmp_path, workload=MADE.replace("requests: {count: 300}, ", ""))
    found = dealt_queries(own, resolve(own).lengths)
    assert {*found.prefixes.nodes.tolist()} == {*range(7)} and len(found.inputs) == 4096
    assert dealt_queries(job(tmp_path), resolve(own).lengths) is None


@pytest.mark.slow
def test_a_million_prompts_take_seconds_and_little_memory():
    count, length, shared = 10**6, 254, 200
    rng = np.random.default_rng(1)
    tokens = rng.integers(49_152, size=(count, length), dtype=np.int32)
    tokens[:, :shared] = tokens[rng.integers(1000, size=count), :shared]
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    forest = find_prefixes(tokens.ravel(), np.arange(count) * length, np.full(count, length - 1))
    took_s = time.monotonic() - start
    more = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert (forest.ends[forest.nodes] >= shared).all()
    assert took_s < 30 and more < 1e9, f"{took_s:.1f} s, {more / 1e9:.2f} GB"
