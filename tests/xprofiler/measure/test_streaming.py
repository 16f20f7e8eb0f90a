"""Layers that are timed while their weights are copied, by the classes of a run."""

import time

import pytest

torch = pytest.importorskip("torch", reason="measuring needs the extra `run`")

from xgpt.core import catalog  # noqa: E402
from xgpt.core.model import ModelSpec  # noqa: E402
from xprofiler.measure import streaming  # noqa: E402
from xprofiler.measure.network import Subject  # noqa: E402
from xprofiler.measure.ranks import Ranks  # noqa: E402
from xprofiler.measure.streaming import StreamedBench, times_below  # noqa: E402
from xprofiler.profile import STREAMED_PARTS, Profile, Sample  # noqa: E402

TOY = ModelSpec(name="toy", family="llama", num_layers=2, hidden_size=64, num_heads=2,
                num_kv_heads=1, vocab_size=64, intermediate_size=96, max_positions=200)
READ_S = 0.02


def subject(spec: ModelSpec = TOY, dtype: torch.dtype = torch.float32) -> Subject:
    return Subject(spec=spec, dtype=torch.float32, device=torch.device("cpu"), weight_dtype=dtype)


@pytest.fixture()
def bench(tmp_path):
    made = StreamedBench(subject(), str(tmp_path))
    yield made
    made.mover.close()
    made.file.close()


def test_every_pass_reads_every_layer_once_and_none_where_they_lie_on_the_device(bench, tmp_path):
    """Also where passes with copies and without take turns: what a buffer has by chance would be
    a copy for nothing."""
    assert not list(tmp_path.iterdir()), "the file has no name any more"
    per_layer, read = bench.file.num_bytes([f"0.{place}" for place in range(4)]), []
    for is_streamed in (True, False, True, True, False, False, True):
        before = bench.file.file.bytes_read
        assert bench.layer_s(3, is_streamed=is_streamed) > 0
        read.append((bench.file.file.bytes_read - before) / per_layer)
    # the first layer is read before the clock starts, the last is on its way when it stops
    assert read == [bench.num_layers + 2 if streamed else 0
                    for streamed in (True, False, True, True, False, False, True)]


def test_copies_go_on_beside_the_computing(bench):
    """Both at once take at least as long as the longer one, however busy the machine is."""
    read = bench.file.read

    def slow(names, into):
        time.sleep(READ_S)
        read(names, into)

    bench.file.read = slow
    assert bench.layer_s(0, is_streamed=True) > 0.99 * READ_S
    assert bench.layer_s(2, is_streamed=True) > 0.99 * READ_S
    assert bench.mover.num_bytes["up"] == 0, "of a CPU the disk is the tier below"


def test_the_weights_are_the_models_products_cut_to_a_size_that_is_quickly_written(tmp_path):
    opt = catalog.model("opt-6.7b")
    made = StreamedBench(subject(opt, torch.bfloat16), str(tmp_path))
    most = 2**25
    held = made.file.num_bytes([f"0.{place}" for place in range(4)])
    assert 0.98 * most < held < 1.1 * most and made.num_layers == 4
    made.mover.close()
    made.file.close()


def test_a_machines_share_is_found_in_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "ENOUGH_S", 0.0)
    with torch.inference_mode():
        found = [*times_below(subject(), str(tmp_path), Ranks(None))]
    tables: dict = {}
    for key, x, y, seconds in found:
        tables.setdefault(key, []).append(Sample(x=x, y=y, samples_s=tuple(seconds)))
    copies, *others = ([(p.x, len(p.samples_s)) for key, points in tables.items() for p in points
                        if key.link == part] for part in STREAMED_PARTS)
    assert others == [copies, copies] and 1 <= len(copies) <= 3
    assert [p.x for key, points in tables.items() for p in points if key.name == "unpack"] == [
        2**18, 2**22]
    assert not any(key.name == "host_attention" for key in tables), "a CPU has one attention"
    assert all(s > 0 for _, _, _, seconds in found for s in seconds)
    profile = Profile(metadata=None, tables={  # type: ignore[arg-type]
        key: tuple(points) for key, points in tables.items()})
    share = profile.serial_share
    assert share is None or 0 <= share <= 1
    assert not list(tmp_path.iterdir())
