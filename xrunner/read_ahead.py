"""What a rank that waits for its run may be told to read meanwhile: the likeliest of what it will
hold, the whole model on one rank that encodes and decodes. Free of torch: the launcher asks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from xgpt.core.deployment import Pool, StageAssignment
from xgpt.core.engines import OWN_ENGINE
from xgpt.core.model import ModelSpec
from xrunner.plan import layout_key, named_by, products_key


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead:
    """`model_files`: see xrunner.plan.RunPlan."""

    model_dir: Path
    model_name: str
    model_files: Mapping[str, str]
    dtype: str
    weight_dtype: str
    threads: int
    is_deterministic: bool

    @property
    def word(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def of(cls, word: str) -> ReadAhead:
        raw = json.loads(word)
        return cls(**{**raw, "model_dir": Path(raw["model_dir"])})

    def key(self, spec: ModelSpec) -> dict[str, str]:
        """That of the weights of a run by such a schedule (xrunner.plan.weights_key)."""
        pool = Pool(name="all", role="both", stages=(whole_model(spec),), num_groups=1, kv_tokens=0)
        return {"model": named_by(self.model_files, self.model_dir), "engine": OWN_ENGINE,
                "dtype": self.dtype, "weight_dtype": self.weight_dtype, "device": "cpu",
                "layout of ranks and stages": json.dumps([layout_key([pool], 1)]),
                "kind of products": products_key(self.is_deterministic),
                "number of threads": str(self.threads)}


def whole_model(spec: ModelSpec) -> StageAssignment:
    """All layers, on rank 0."""
    return StageAssignment(index=0, ranks=(0,), first_layer=0, num_layers=spec.num_layers,
                           num_encoder_layers=spec.num_encoder_layers)
