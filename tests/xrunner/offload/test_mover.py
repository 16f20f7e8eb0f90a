"""Copies beside the computing: their order, their errors and their account."""

import threading
import time

import pytest
import torch

from xgpt.core.errors import XgptError
from xrunner.offload.mover import TERMS, Mover, copy


@pytest.fixture(params=[True, False], ids=["overlap", "at once"])
def mover(request):
    made = Mover(overlap=request.param)
    yield made
    made.close()


def fail() -> None:
    raise XgptError("the disk is gone")


def test_copies_of_a_term_are_done_in_their_order(mover):
    done = []
    tickets = [mover.submit("read", 10, lambda i=i: done.append(i)) for i in range(20)]
    mover.wait(tickets[-1])
    assert done == list(range(20))
    assert mover.num_bytes == {"read": 200, "write": 0, "up": 0, "down": 0}
    assert mover.seconds["read"] > 0 == mover.seconds["write"]


def test_all_seconds_of_copies_at_once_are_waited_for():
    mover = Mover(overlap=False)
    mover.wait(mover.submit("read", 1, lambda: time.sleep(0.02)))
    seconds, num_bytes, waited_s = mover.taken()
    assert num_bytes["read"] == 1 and waited_s >= seconds["read"] >= 0.02
    assert mover.waited_s == sum(mover.seconds.values()) == sum(mover.num_bytes.values()) == 0


def test_a_copy_begins_after_those_of_other_terms_that_it_needs():
    mover, done, may_read = Mover(), [], threading.Event()
    read = mover.submit("read", 1, lambda: (may_read.wait(10), done.append("read")))
    up = mover.submit("up", 1, lambda: done.append("up"), after=[read])
    time.sleep(0.05)
    assert not up.done.is_set()
    may_read.set()
    mover.wait(up)
    assert done == ["read", "up"]
    assert mover.seconds["up"] < 0.05 <= mover.seconds["read"], "waiting is no copying"
    mover.close()


def test_terms_run_beside_each_other():
    """Each copy waits for all others: one thread for all of them would never end."""
    mover, together = Mover(), threading.Barrier(len(TERMS))
    tickets = [mover.submit(term, 1, lambda: together.wait(10)) for term in TERMS]
    for ticket in tickets:
        mover.wait(ticket)
    mover.close()


def test_an_error_reaches_the_caller_and_all_later_copies():
    mover, done = Mover(), []
    bad = mover.submit("write", 1, fail)
    later = mover.submit("up", 1, lambda: done.append("up"), after=[bad])
    for _ in range(2):
        with pytest.raises(XgptError, match="the disk is gone"):
            mover.wait(bad)
    with pytest.raises(XgptError, match="the disk is gone"):
        later.wait()
    with pytest.raises(XgptError, match="the disk is gone"):
        mover.submit("read", 1, lambda: done.append("read"))
    with pytest.raises(XgptError, match="the disk is gone"):
        mover.flush()
    mover.close()
    assert not done and mover.num_bytes["up"] == 0


def test_an_error_of_a_copy_at_once_is_raised_where_it_is_submitted():
    with pytest.raises(XgptError, match="the disk is gone"):
        Mover(overlap=False).submit("write", 1, fail)


def test_flushing_waits_for_the_copies_of_all_terms():
    mover, done = Mover(), []
    for term in TERMS:
        mover.submit(term, 1, lambda term=term: (time.sleep(0.02), done.append(term)))
    mover.flush()
    assert sorted(done) == sorted(TERMS)
    mover.close()


def test_closing_ends_the_threads_and_the_copies_that_wait():
    before = threading.active_count()
    mover, may_end, done = Mover(), threading.Event(), []
    under_way = mover.submit("read", 1, lambda: (may_end.wait(10), done.append("first")))
    waiting = [mover.submit("read", 1, lambda: done.append("other")) for _ in range(100)]
    threading.Timer(0.05, may_end.set).start()
    mover.close()
    mover.close()
    assert threading.active_count() <= before + 1  # the timer's may not be gone
    assert under_way.done.is_set() and done in ([], ["first"])
    for ticket in waiting:
        with pytest.raises(RuntimeError, match="have ended"):
            ticket.wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_copy_is_exact_also_of_strided_rows(dtype):
    source = torch.randn(6, 5, 8).mul(100).to(dtype)
    into = torch.zeros(9, 5, 16, dtype=dtype)
    with torch.inference_mode():
        copy(into[1:7, :, ::2], source)
    assert torch.equal(into[1:7, :, ::2], source)
    assert not into[0].any() and not into[:, :, 1::2].any()


@pytest.mark.gpu
def test_on_a_gpu_a_copy_waits_for_the_work_that_made_its_source():
    mover, size = Mover(device="cuda"), 1 << 24
    host = torch.empty(size, pin_memory=True)
    on_device = torch.zeros(size, device="cuda")
    for step in range(5):
        for _ in range(50):
            on_device.add_(1)
        down = mover.submit("down", size * 4, lambda: copy(host, on_device))
        mover.wait(down)
        assert torch.equal(host, torch.full((size,), 50.0 * (step + 1)))
    host.fill_(7)
    mover.wait(mover.submit("up", size * 4, lambda: copy(on_device, host)))
    assert bool((on_device == 7).all())
    mover.close()
