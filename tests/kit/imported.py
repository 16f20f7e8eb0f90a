"""What the tests of the importers share: where others' data lies, tables to write, a tiny model."""

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest

from xgpt.core import catalog
from xgpt.core.errors import InputError
from xgpt.core.model import ModelSpec
from xprofiler.profile import Profile
from xprofiler.profile_file import load_profile, save_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import Operator

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no shared/data beside the checkout")
A100 = catalog.device("A100-80")
TINY = ModelSpec(name="tiny", family="llama", num_layers=2, hidden_size=64, num_heads=4,
                 num_kv_heads=2, intermediate_size=128, vocab_size=256, is_gated_mlp=True,
                 has_bias=False, max_positions=512)


def seconds(profile: Profile, operator: Operator, x: float, y: float = 0.0, *,
            tp_degree: int = 1) -> float:
    return float(ProfileTiming(profile).operator_s(operator, x, y, tp_degree=tp_degree))


def again(profile: Profile, folder: Path) -> Profile:
    """`profile` written and read."""
    save_profile(profile, folder / "profile.json")
    return load_profile(folder / "profile.json")


def write(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def faults(error: pytest.ExceptionInfo[InputError]) -> list[tuple[int | None, str]]:
    return [(m.line, m.key) for m in error.value.mistakes]
