"""Seconds to load a model from SSD and from DRAM, beside the paper's Table 4.

    python benchmarks/deployment.py

On the A40 cluster, with the catalog's rates (one of a node's SSD, one from a node's DRAM into each
device). The paper does not say how the layers lay; two layouts are shown: tensor parallelism over
each node, which divides the weights evenly, and one stage a GPU, where a GPU holds whole layers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.core.constraint import latency_constraint
from xgpt.core.deployment import Pool
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem
from xprofiler.roofline import Roofline
from xscheduler.live.deployment import Loading, redeployment
from xsimulator.plans import StagePlans

PER_NODE = 8
LAYOUTS = (("tensor-parallel nodes", PER_NODE), ("one stage a GPU", 1))


class Row(NamedTuple):
    """One row of Table 4."""

    model: str
    cluster: str
    dram_s: float
    ssd_s: float


TABLE_4 = (Row("gpt3-39b", "a40-16", 0.9, 2.1), Row("gpt3-101b", "a40-32", 1.3, 7.1),
           Row("gpt3-175b", "a40-32", 2.1, 11.9), Row("gpt3-341b", "a40-48", 3.5, 15.1))
WORDS = """
The SSD's rate is a data sheet's, so its column is a check. The DRAM's is no vendor's figure but a
rough constant, in the range that this table implies: its column shows the spread about one rate.

Where we differ, and why:
- 39B from SSD: the paper's 2.1 s mean {ssd_39:.0f} GB/s a node, 2.5 times the rate of its other
  rows ({others} GB/s) and more than a drive on PCIe 4.0 x4 can read. A page cache that held part
  of the model would do that; we keep the drive's rate.
- from DRAM, tensor-parallel nodes: our fullest GPU holds {embedding:.2f} GB (39B) to
  {embedding_341:.2f} GB (341B) of embedding besides its share of the layers, because the embedding
  lies whole on every rank of the first stage. Without it the paper's seconds mean {dram} GB/s.
- one stage a GPU: 101B and 341B have 2.5 layers for each GPU, so that the fullest holds 3. From
  DRAM that brings 341B near the paper's figure; from SSD it makes the fullest nodes too full. The
  paper does not say which layout it loaded.
"""


def loading(model: str, cluster: Cluster, degree: int) -> Loading:
    """Of the layout that the simulator gives task S."""
    lengths = catalog.task("S")
    problem = Problem(model=catalog.model(model), cluster=cluster, lengths=lengths,
                      constraint=latency_constraint(latency_s=math.inf), fixed=FixedSchedule(),
                      dtype="float16", num_queries=None, default_max_tokens=lengths.outputs.max)
    plans = StagePlans(problem, Roofline(problem.model, cluster.device, problem.dtype))
    stages = plans.both(degree, cluster.num_devices if degree > 1 else 0).stages
    pool = Pool(name="all", role="both", stages=stages, num_groups=1, kv_tokens=0)
    return redeployment((), (pool,), problem.model, problem.dtype, cluster)


def main() -> None:
    for layout, degree in LAYOUTS:
        print(f"\n{layout}\n{'model':<10} {'GPUs':>4} {'GB/GPU':>7} {'GB/node':>8} "
              f"{'DRAM s':>7} {'paper':>6} {'':>6} {'SSD s':>7} {'paper':>6}")
        for row in TABLE_4:
            cluster = catalog.cluster(row.cluster)
            found = loading(row.model, cluster, degree)
            print(f"{row.model:<10} {cluster.num_devices:>4} {max(found.rank_bytes) / 1e9:>7.1f} "
                  f"{max(found.node_bytes) / 1e9:>8.1f} {found.from_dram_s:>7.2f} {row.dram_s:>6} "
                  f"{found.from_dram_s / row.dram_s - 1:>+6.0%} {found.from_ssd_s:>7.2f} "
                  f"{row.ssd_s:>6} {found.from_ssd_s / row.ssd_s - 1:>+6.0%}")
    print(WORDS.format(**_rates()))


def _rates() -> dict[str, object]:
    """What the paper's seconds mean in GB/s, of the weights in equal parts."""
    models = [catalog.model(row.model) for row in TABLE_4]
    clusters = [catalog.cluster(row.cluster) for row in TABLE_4]
    sizes = [model.num_params * 2 / 1e9 for model in models]
    ssd, dram = ([size / (cluster.num_nodes if is_ssd else cluster.num_devices) / seconds
                  for size, cluster, seconds in zip(sizes, clusters, column, strict=True)]
                 for is_ssd, column in ((True, [row.ssd_s for row in TABLE_4]),
                                        (False, [row.dram_s for row in TABLE_4])))
    return {"ssd_39": ssd[0], "others": f"{min(ssd[1:]):.1f} to {max(ssd[1:]):.1f}",
            "dram": f"{min(dram):.1f} to {max(dram):.1f}",
            "embedding": models[0].embedding_params * 2 / 1e9,
            "embedding_341": models[3].embedding_params * 2 / 1e9}


if __name__ == "__main__":
    main()
