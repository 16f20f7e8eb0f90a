"""Commands of users without a home, in every locale, in real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from xgpt.launch.launcher import RankProgram
from xgpt.launch.local import LocalLauncher

XGPT = [sys.executable, "-m", "xgpt"]
JOB = """
model: {model}
cluster: a40-4
workload: {{requests: {{count: 40}}, task: S}}
schedule: {{policy: rra, encode_batch: 4, decode_iterations: 4, encode_chunk: 0, tp_degree: 1}}
output: résultat
"""
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
          "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 1024,
          "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
_WORDS = ("HOME", "XDG_CACHE_HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "PYTHONUTF8")


def call(*command: str | Path, **words: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in _WORDS}
    return subprocess.run([*map(str, command)], check=False, timeout=100,
                          env={**own, "XGPT_NATIVE": "off", **words}, capture_output=True,
                          text=True, encoding="utf-8")


# reads what root may read, and is nobody that the system knows
_NOBODY = ["setpriv", "--reuid", "54321", "--regid", "54321", "--clear-groups", "--inh-caps",
           "+dac_read_search", "--ambient-caps", "+dac_read_search"]


@pytest.fixture
def open_to_all():
    """Beside those of pytest, in which nobody else may look."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_a_user_without_a_home_has_a_folder_that_is_nobody_elses(open_to_all):
    if shutil.which("setpriv") is None or call(*_NOBODY, "true").returncode:
        pytest.skip("needs rights to be another user")
    open_to_all.chmod(0o777)
    (open_to_all / "job.yaml").write_text(JOB.format(model="opt-125m"))
    words = {"TMPDIR": str(open_to_all)}
    for command, home in ((["models"], {}), (["schedule", open_to_all / "job.yaml"],
                                             {"HOME": "/nonexistent"})):
        done = call(*_NOBODY, *XGPT, *command, **words, **home)
        assert done.returncode == 0, done.stderr
        assert f"{open_to_all}/xgpt-54321 serves instead" in done.stderr
    folder = open_to_all / "xgpt-54321"
    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (54321, 0o700)
    shutil.rmtree(folder)
    folder.mkdir(mode=0o777)  # another's
    done = call(*_NOBODY, *XGPT, "models", **words)
    assert done.returncode == 1 and "is not this user's alone" in done.stderr


@pytest.mark.parametrize("words", [
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}])
def test_names_are_utf8_whatever_the_locale(tmp_path, words):
    folder = tmp_path / "é"
    folder.mkdir()
    (folder / "modèle").mkdir()
    (folder / "modèle" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "jöb.yaml").write_text(JOB.format(model="modèle"), encoding="utf-8")
    done = call(*XGPT, "schedule", folder / "jöb.yaml", XDG_CACHE_HOME=str(tmp_path), **words)
    assert done.returncode == 0, done.stderr
    done = call(*XGPT, "schedule", folder / "jöb.yaml", "--set", "model=modèlé",
                XDG_CACHE_HOME=str(tmp_path), **words)
    assert done.returncode == 2 and "model = 'modèlé': unknown model" in done.stderr


def test_a_name_that_mpi_cannot_hold_is_refused(tmp_path):
    pytest.importorskip("mpi4py", reason="ranks need the extra `run`")
    program = RankProgram(module="surroundings", argument=tmp_path, count=2)
    assert "-launcher fork -rmk user" in " ".join(LocalLauncher().command(program))
    ranks = ("from pathlib import Path\n"
             "from xgpt.core.errors import InputError\n"
             "from xgpt.launch.launcher import RankProgram\n"
             "from xgpt.launch.local import LocalLauncher\n"
             "try: LocalLauncher().run(RankProgram(module='x', argument=Path(), count=2), "
             "watch=lambda: None)\nexcept InputError as error: print(error)")
    done = call("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', "h" * 64,
                sys.executable, "-c", ranks, HOME=str(tmp_path))
    if "unshare failed" in done.stderr:
        pytest.skip("needs rights to give a process another host's name")
    assert "at most 63 characters" in done.stdout, done.stderr
