"""A query ends where a stop string appears, at a cost that does not grow with the output, or with
an error where its logits are no numbers, and the others as if it were not there. A run that is
asked to stop says whether it is done: one that is done and called stopped would be started
again."""

import errno
import os
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from holding import rule_of
from plans import plan_of
from replays import answers_of, generated
from toy_runs import Collector, run_in_process, run_waa_in_process, toy_waa_rules, waa_pools
from toys import make_model, random_queries

from xrunner.backends import deepspeed_worker
from xrunner.comm.point_to_point import local_comms
from xrunner.engine.pool_requests import ActiveQuery, Ending, Vocabulary
from xrunner.files.lock import STOP_FILE
from xrunner.files.results import Answered
from xrunner.files.sink import RunSink
from xrunner.plan import RunPlan
from xrunner.query import PreparedQuery
from xrunner.rank import worker
from xrunner.rank.world import World

COUNT = 7
RULES = {"rra": {"encode": 2, "iterations": 3, "groups": 2}, "ft": {"groups": 2},
         "vllm": {"batch": 3, "kv_tokens": 1600}}


# family, degrees of the stages or of each pool's
@pytest.mark.parametrize(("stop_after", "is_complete"), [(1, False), (COUNT, True)])
@pytest.mark.parametrize(("policy", "family", "degrees", "own"), [
    ("rra", "llama", (1,), RULES["rra"]), ("rra", "llama", (2, 2), RULES["rra"]),
    ("rra", "t5", (1, 1, 1), RULES["rra"]), ("ft", "llama", (1,), RULES["ft"]),
    ("dsi", "llama", (1, 1, 1), RULES["ft"]), ("orca", "llama", (1, 1), {"batch": 2}),
    ("vllm", "llama", (1,), RULES["vllm"]), ("sarathi", "llama", (1, 1), {"batch": 2}),
    ("waa", "llama", ((1,), (1,)), {"max_in_system": 3}),
    ("waa", "t5", ((1, 1), (2, 1)), {"max_in_system": 3, "num_groups": 2})])
def test_a_stop_ends_every_rank_and_with_the_last_token_finds_the_run_complete(
        made, policy, family, degrees, own, stop_after, is_complete):
    (directory, model), queries, sink = made(family), random_queries(COUNT), Collector(stop_after)
    if policy == "waa":
        run_waa_in_process(directory, queries, waa_pools(directory, *degrees),
                           toy_waa_rules(len(degrees[0]), **own), sink=sink)
    else:
        run_in_process(directory, queries, degrees=degrees, rule=rule_of(policy, **own), sink=sink)
    assert sink.is_complete is is_complete
    assert stop_after <= len(sink.results) and (len(sink.results) == COUNT) is is_complete
    assert answers_of(sink).items() <= generated(model, queries).items()


@pytest.mark.parametrize("rule", ["rra", "vllm"])
def test_a_last_token_under_way_at_a_stop_still_ends_its_query(llama, rule):
    queries = [replace(query, max_new_tokens=1) for query in random_queries(COUNT)]
    sink, executors = run_in_process(llama[0], queries, num_stages=2,
                                     rule=rule_of(rule, **RULES[rule]), sink=Collector(1))
    encoded = sum(step.queries for step in executors[-1].log if step.kind == "encode")
    assert len(sink.results) == encoded < COUNT and sink.is_complete is False


def test_a_wish_to_stop_is_seen_and_not_forgotten(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("xrunner.files.sink.time.monotonic", lambda: now)
    sink = RunSink(plan_of(tmp_path, tmp_path), num_queries=1, before=Answered(0, frozenset()))
    assert not sink.should_stop()
    (tmp_path / STOP_FILE).touch()
    now += 1.0
    assert sink.should_stop()
    (tmp_path / STOP_FILE).unlink()
    now += 1.0
    assert sink.should_stop()
    sink.close(1.0, "stopped")


@pytest.mark.parametrize(("module", "work"), [(worker, "work"), (deepspeed_worker, "run")])
@pytest.mark.parametrize(("number", "is_users"), [(errno.ENOSPC, True), (errno.EDQUOT, True),
                                                  (errno.EBADF, False)])
def test_a_full_disk_ends_a_rank_in_words(tmp_path, monkeypatch, capsys, number, is_users, module,
                                          work):
    ended: list[int] = []
    alone = World(local_comms(1)[0], barrier=lambda: None, gather=lambda report: [report],
                  abort=ended.append, split=lambda group, place: pytest.fail("in no group"),
                  duplicate=lambda: local_comms(1)[0])

    def fail(plan: RunPlan, world: World, **kept_weights: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, "connect", lambda kind="cpu": alone)
    monkeypatch.setattr(module, work, fail)
    path = str(plan_of(tmp_path, tmp_path).save())
    if not is_users:
        with pytest.raises(OSError, match=os.strerror(number)):
            module.main([path])
        return
    assert module.main([path]) == 1 and ended == [1]
    said = capsys.readouterr().err
    assert os.strerror(number) in said and str(tmp_path) in said and "goes on" in said


# as tokenizers have them: pieces of bytes, of which some are half a character, and silent specials
PIECES = ["a", "b", "ab", " a", " b", "\n", "\u00e9", "\u6f22", "".ljust(40), "ba b", ""]
BYTES = [piece.encode() for piece in PIECES] + [bytes([b]) for b in "\u00e9\u6f22".encode()]


def decode(ids: Sequence[int]) -> str:
    """Byte pieces, put together; the first loses its leading space, as SentencePiece's does."""
    return b"".join(BYTES[i] for i in ids).decode(errors="replace").removeprefix(" ")


def naive(ids: Sequence[int], stops: Sequence[str]) -> str | None:
    text = decode(ids)
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[:min(ends)] if ends else None


def active_query(stops: Sequence[str]) -> ActiveQuery:
    return ActiveQuery(PreparedQuery(index=0, id="q", input_ids=(1,), max_new_tokens=10**6,
                                     stop=tuple(stops)), encode_start_s=0.0, input_tokens=1)


def test_it_is_found_with_the_token_that_ends_it():
    source, found = random.Random(3), 0
    for _ in range(120):
        # texts of few kinds of piece, so that a long stop string does come, and late
        kinds = source.sample(range(len(BYTES)), source.randint(2, len(BYTES)))
        ids = source.choices(kinds, k=300)
        text = decode(ids)
        at = source.randrange(max(len(text), 1))
        stops = [text[at:at + source.randint(1, 30)] or "x", "never"]
        active = active_query(stops)
        for count, token in enumerate(ids, start=1):
            is_last = active.take(token, 0.0, Vocabulary(eos_ids=frozenset(), decode_text=decode))
            expected = naive(ids[:count], stops)
            assert active.ending == (None if expected is None else Ending("stop", expected)), (
                f"{stops = } {count = }")
            if is_last:
                found += count > 64
                break
    assert found > 10


def test_a_long_output_is_not_decoded_again_with_every_token():
    active, decoded = active_query(["never"]), 0

    def counted(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(ids)

    vocabulary = Vocabulary(eos_ids=frozenset(), decode_text=counted)
    assert not any(active.take(token, 0.0, vocabulary)
                   for token in random.Random(4).choices(range(5), k=2000))
    assert decoded < 40 * 2000


def test_an_exception_of_the_tokenizer_is_the_end_of_its_query_alone():
    def fails(ids: Sequence[int]) -> str:
        raise OverflowError("no such piece")

    vocabulary = Vocabulary(eos_ids=frozenset([0]), decode_text=fails)
    looking, ended = active_query(["x"]), active_query([])
    assert looking.take(3, 0.0, vocabulary) and ended.take(0, 0.0, vocabulary)
    for active in (looking, ended):
        result = active.finished(1.0, fails)
        assert (result.finish_reason, result.text) == ("error", "")
        assert "OverflowError" in (result.error or "") and "no such piece" in (result.error or "")


POISON = 5  # a token whose embedding overflows in the first norm


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("poisoned")
    model = make_model("gpt2-untied", folder)
    with torch.no_grad():
        model.transformer.wte.weight[POISON] = 3e38
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("policy", ["one stage", "two stages", "tensor parallel", "waa"])
def test_one_query_fails_and_the_others_keep_their_tokens(policy, poisoned):
    queries = [replace(query, input_ids=tuple(token if token != POISON else 6
                                              for token in query.input_ids))
               for query in random_queries(8)]
    bad = replace(queries[3], input_ids=(*queries[3].input_ids[:-1], POISON))
    answers = []
    for given in (queries, [*queries[:3], bad, *queries[4:]]):
        if policy == "waa":
            sink, _ = run_waa_in_process(poisoned, given, waa_pools(poisoned, [1], [1]),
                                         toy_waa_rules(1))
        else:
            sink, _ = run_in_process(
                poisoned, given, num_groups=2 if policy == "two stages" else 1,
                degrees={"one stage": [1], "two stages": [1, 1], "tensor parallel": [2]}[policy])
        answers.append({result.query.index: result for result in sink.results})
    clean, mixed = answers
    assert mixed.keys() == clean.keys() == set(range(8))
    failed = {index for index, result in mixed.items() if result.error is not None}
    # who draws the poisoned token itself fails where it is fed back
    assert failed == {3} | {index for index, result in clean.items() if result.error is not None}
    assert mixed[3].finish_reason == "error" and mixed[3].output_ids == ()
    assert "logits not finite" in str(mixed[3].error)
    for index in set(range(8)) - {3}:
        assert mixed[index].output_ids == clean[index].output_ids
