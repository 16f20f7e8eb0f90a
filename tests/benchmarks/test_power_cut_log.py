"""What processes did to a folder is written down whole, whoever else writes at the same time."""

import os
import shutil
import subprocess
import sys

import power_cut
import pytest

NAMES = ["plain", "with spaces", " a line\nbreak 1 2", "- "]
COUNT = 150
WRITERS = """
import os, signal, sys, threading
signal.signal(signal.SIGALRM, lambda *_: None)  # whoever waits for a lock is interrupted
folder, count, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
def work(name):
    with open(os.path.join(folder, name), "wb", buffering=0) as file:
        for number in range(count):
            file.write(b"open 1 2 3 - -\\n%d\\n" % number)
    os.rename(file.name, f"{file.name} done")
def all_together(names):
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
child = os.fork()
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
all_together([f"{name}{bool(child)}" for name in names])
signal.setitimer(signal.ITIMER_REAL, 0)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_threads_and_forks_write_records_one_after_the_other(tmp_path):
    folder, log = tmp_path / "a folder", tmp_path / "log"
    folder.mkdir()
    subprocess.run([sys.executable, "-c", WRITERS, str(folder), str(COUNT), *NAMES], check=True,
                   timeout=200, env={**os.environ, **power_cut.environment(
                       power_cut.compiled(tmp_path), folder, log)})
    disk = power_cut.Disk()
    operations = list(power_cut.read_log(log))
    for operation in operations:
        disk.apply(operation)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {*files} == {f"{name}{own} done" for name in NAMES for own in (True, False)}
    assert {name: disk.content[file] for name, file in disk.names[power_cut.ROOT].items()} == files
    assert len(operations) == len(files) * (COUNT + 2)
