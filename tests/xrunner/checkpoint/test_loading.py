"""Loading: every tensor of a slice once, from any kind of checkpoint directory, and what of it
came from the disk."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import some
from toy_runs import split_stages
from toys import ENCODER_DECODER_FAMILIES, FAMILIES, make_model, spec_of

from xrunner.checkpoint.reader import CheckpointReader
from xrunner.models.encoder_decoder import load_stage
from xrunner.rank import loading
from xrunner.rank.loading import DiskMeter

HALVES = (torch.float16, torch.bfloat16)


class Noting(CheckpointReader):
    """A reader that notes what was asked of it."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        super().__init__(directory, dtype)
        self.asked: list[tuple[object, ...]] = []

    def get(self, name: str, *rest: Any) -> torch.Tensor:
        found = super().get(name, *rest)
        self.asked.append((name, *rest, found.sum().item()))
        return found


def load(directory: Path, dtype: torch.dtype, num_stages: int) -> list[Noting]:
    spec = spec_of(directory)
    readers = []
    for stage in split_stages(spec.num_layers, num_stages, encoder_layers=spec.num_encoder_layers):
        readers.append(Noting(directory, dtype))
        load_stage(spec, readers[-1], stage)
    return readers


@pytest.mark.parametrize("family", some(
    (*FAMILIES, *ENCODER_DECODER_FAMILIES),
    lambda family: family in ("llama-tied", "opt", "gpt2", "t5", "bart")))
def test_half_precision_and_sharded_directories_load_and_each_tensor_once(family, tmp_path):
    model = make_model(family, tmp_path / "float32")
    for dtype in HALVES:
        name = str(dtype).removeprefix("torch.")
        model.to(dtype).save_pretrained(tmp_path / name, max_shard_size="40KB")
        config = (tmp_path / "float32" / "config.json").read_text()
        (tmp_path / name / "config.json").write_text(config)
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 3
        model.float()  # rounded for good; both halves start from what the first left
        model.save_pretrained(tmp_path / f"{name}-whole")
        (tmp_path / f"{name}-whole" / "config.json").write_text(config)
        for num_stages in (1, 2):
            sharded = load(tmp_path / name, dtype, num_stages)
            whole = load(tmp_path / f"{name}-whole", dtype, num_stages)
            for ours, theirs in zip(sharded, whole, strict=True):
                assert ours.asked == theirs.asked
                assert 2 * ours.bytes_read == theirs.bytes_read, "as stored: 2 bytes, and 4"
                once = [asked[:-1] for asked in ours.asked]
                assert len(once) == len(set(once)), "a tensor was read twice"
    bias = getattr(model, "final_logits_bias", None)  # BART's, which is no parameter
    weights = sum(p.numel() for p in model.parameters()) + (0 if bias is None else bias.numel())
    assert sum(reader.bytes_read for reader in load(tmp_path / name, dtype, 1)) == 2 * weights


@pytest.fixture
def cold_file(tmp_path):
    """32 MiB that no cache holds."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(2**20) * 32)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="drops caches by posix_fadvise")
def test_bytes_from_the_disk_are_told_from_those_in_memory(cold_file):
    meter = DiskMeter()
    if meter.num_bytes is None:
        pytest.skip("this system does not count what a process reads of storage")
    cold_file.read_bytes()
    cold = meter.num_bytes
    if cold == 0:
        pytest.skip("the temporary folder lies in memory")
    assert cold >= 32 * 2**20
    warm = DiskMeter()
    cold_file.read_bytes()
    again = warm.num_bytes
    assert again is not None and again < 2**20


def test_without_a_count_nothing_is_claimed(monkeypatch):
    monkeypatch.setattr(loading, "_storage_bytes", lambda: None)
    assert DiskMeter().num_bytes is None
