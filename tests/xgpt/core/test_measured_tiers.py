"""This machine's memories below its devices."""

import time

import pytest

from xgpt.core import catalog
from xgpt.core.errors import XgptError
from xgpt.core.system.direct_file import file_system
from xgpt.core.system.tiers import measured_tiers


def test_the_tiers_of_this_machine_are_its_memory_and_the_disk_of_the_folder(tmp_path):
    if file_system(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip("temporary files lie in memory here")
    start_s = time.perf_counter()
    (disk,) = measured_tiers(tmp_path)
    assert time.perf_counter() - start_s < 20, "about one second where nothing else uses the disk"
    assert disk.name == "disk" and not disk.attention and disk.memory_bytes > 2**27
    assert 1e5 < disk.up.bandwidth_bytes_per_s < 1e11
    assert 1e5 < disk.down.bandwidth_bytes_per_s < 1e11
    assert 0 < disk.up.latency_s < 10
    assert "page cache" in disk.up.source
    assert not list(tmp_path.iterdir()), "the sample is gone"
    bus = catalog.link("pcie4-x16")
    host, disk = measured_tiers(tmp_path, bus)
    assert (host.name, disk.name, host.up, host.down) == ("host", "disk", bus, bus)
    assert host.attention and host.memory_bytes > 0


def test_a_folder_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(XgptError, match="a folder that can be written to"):
        measured_tiers(tmp_path / "file")
