"""Planning for a cluster that is described starts none of the programs that a job file names."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_folder import xgpt

JOB = """
model: opt-125m
cluster: a40-4
workload: {{requests: {{count: 20}}, task: T}}
schedule: {{policy: ft}}
slurm: {{prologue: ["{program}"], container: ["{program}"], modules: ["$({program})"],
        extra: ["--comment=$({program})"]}}
output: out
"""


@pytest.mark.parametrize("command", ["schedule", "simulate"])
def test_what_a_job_file_names_is_not_started(command: str, tmp_path: Path) -> None:
    program, job = tmp_path / "program", tmp_path / "job.yaml"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    program.chmod(0o755)
    job.write_text(JOB.format(program=program))
    done = xgpt(command, job)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "started").exists() and not (tmp_path / "out").exists()
