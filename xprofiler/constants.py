"""Constants of the analytic roofline, and the source of each. Rates are shares of a peak.

They are fitted to public measurements; `benchmarks/results/roofline.md` compares both, and adds
tables that no constant was fitted to (A40, H200, the other models). Fitted to, of GPUs:

- matrix products: A100 tables of aiconfigurator (vLLM, TensorRT-LLM) and Vidur's Llama-2 on A100
- attention: A100 tables of aiconfigurator (prefill: both engines, decode: vLLM) and Vidur's
  decode attention on A100
- collectives: aiconfigurator's NCCL table of A100 (NVLink); four sizes a degree of Vidur's A40
  table (PCIe)
- synchronisation, step overhead: whole-model latencies of GPT-20B (FasterTransformer's guide).
  They also chose among values that the kernel tables hardly tell apart: the matrix products'
  share and half rows

The other tables were in view while form and rounding were chosen, so they are not blind tests.

CPU figures are torch 2.13 on a two-core AVX-512 machine. A measured profile replaces all.

A row of catalog/engines.yaml overrides constants for one engine on one generation of GPUs: shares
of the peaks, launch costs, all-reduce. benchmarks/fit_engines.py fits the rows. A generation that
has none takes that of the nearest one: shares of a peak carry over better than seconds do."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from xgpt.core import catalog
from xgpt.core.cluster import Device
from xgpt.core.engines import OWN_ENGINE

PerDegree = tuple[tuple[int, float], ...]  # (tensor-parallel degree, value), ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConstants:
    """Costs of collectives and messages over one kind of link. An all-reduce takes the quicker of
    two protocols: one of low latency, one of high bandwidth (NCCL's LL and Simple)."""

    launch_s: float  # small all-reduce: fixed cost
    hop_share: float  # of the link's latency, for each of the ring's 2 (degree - 1) hops
    small_ratio: float  # small protocol's bandwidth as a part of the large one's
    large_launch_s: float  # large all-reduce: fixed cost, hops included
    all_reduce_shares: PerDegree  # of the link's bandwidth, reached by a large all-reduce
    transfer_share: float  # of the link's bandwidth, reached by one message


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineConstants:
    """Shares of the data sheet's peaks that kernels reach, and their fixed costs, for one kind of
    device."""

    gemm_flops_share: float  # reached by a large matrix product
    gemm_half_rows: float  # rows at which a product reaches half of that share
    gemm_half_columns: float = 0.0  # the same for its columns: a part of the tiles is empty
    gemm_half_depth: float = 0.0  # and for the depth that is summed over
    gemm_bytes_share: float  # of memory bandwidth, streaming operands and result
    gemm_overlap: float  # p of (compute^p + memory^p)^(1/p): infinite is the plain maximum
    gemm_launch_s: float  # fixed cost of one matrix product
    fp8_flops_share: float = 0.70  # of the fp8 peak, reached by a large product of fp8 operands
    fp8_half_rows: float = 48.0  # as gemm_half_rows
    fp8_launch_s: float = 4.4e-6  # of one such product
    fp8_half_columns: float | None = None  # as the gemm fields; None: the gemm field's value
    fp8_half_depth: float | None = None
    fp8_bytes_share: float | None = None
    fp8_overlap: float | None = None
    elementwise_bytes_share: float  # norms, activation, residual adds, rotary embedding
    elementwise_launch_s: float
    encode_attention_flops_share: float  # fused prefill attention, long sequence
    encode_attention_half_tokens: float  # sequence length at which it reaches half of that
    encode_attention_tail_s: float  # per token of a sequence: the last tile's pass over its keys
    decode_attention_bytes_share: float  # of memory bandwidth, reading the KV cache
    decode_attention_item_s: float = 0.0  # per query and key-value head of a rank, beside reading
    encode_attention_launch_s: float
    decode_attention_launch_s: float
    sampling_s: float  # choosing one micro-batch's tokens from its logits
    step_overhead_s: float  # host's cost of one micro-batch on one stage
    synchronisation_s: PerDegree  # skew of the ranks, seconds per all-reduce
    nvlink: LinkConstants  # links of FAST_LINK_BYTES_PER_S or more
    pcie: LinkConstants  # slower, but within a node
    pcie_peer: LinkConstants  # the same with peer access between the cards
    network: LinkConstants  # links of NETWORK_LATENCY_S or more


# Bytes of entries per second that a host attends to: 0.0123e12 FLOP/s at two bytes an element, as
# FlexGen's authors fitted it to a node with one T4 and a Xeon of 2.0 GHz (their t4-gcp constants).
HOST_ATTENTION_BYTES_PER_S = 12.3e9
# Limits between the kinds of link: NVLink 1 had 80 GB/s a direction; NCCL's cost model gives
# NVLink 3.4, PCIe 5.7 and networks 14 us.
FAST_LINK_BYTES_PER_S = 80e9
BRIDGE_BYTES_PER_S, BRIDGE_LATENCY_S = 40e9, 4e-6  # or both: NVLink bridges of four lanes (A40)
NETWORK_LATENCY_S = 10e-6

# NVLink: fit to aiconfigurator's NCCL 2.27 table (A100, degrees 2, 4, 8, 512 B to 512 MiB).
# Transfers: an assumption between the 0.76 and 0.95 of Vidur's send_recv at 64 MiB and what
# smaller messages reach.
NVLINK = LinkConstants(launch_s=9.5e-6, hop_share=0.265, small_ratio=0.44, large_launch_s=43e-6,
                       all_reduce_shares=((2, 0.67),), transfer_share=0.70)
# PCIe: fit to Vidur's A40 node (history/a40_all_reduce.csv) at 2 KiB, 64 KiB, 1 MiB and 64 MiB of
# each degree; transfers from a40_pairwise_nvlink/send_recv.csv. At 2 to 6 GB/s neither uses NVLink
# or peer access. Cards with peer access do four times better (A100 pairs, degree 4: 0.75):
# calibrate for such a node.
PCIE = LinkConstants(launch_s=1.3e-6, hop_share=0.25, small_ratio=0.51, large_launch_s=19e-6,
                     all_reduce_shares=((2, 0.157), (4, 0.178), (8, 0.059)),
                     transfer_share=0.13)
# With peer access cards copy to each other over the bus, not through the host's memory. Vidur's
# A100 node of two NVLink pairs has such a bus between the pairs: there an all-reduce of degree 4
# takes a quarter of PCIE's time. Of two and of eight such cards nothing is published: the same is
# assumed, and of transfers.
_PEER_ACCESS = 4.0
PCIE_PEER = replace(
    PCIE, transfer_share=_PEER_ACCESS * PCIE.transfer_share,
    all_reduce_shares=tuple((d, _PEER_ACCESS * share) for d, share in PCIE.all_reduce_shares))
# Network: assumptions. Groups lie within a node, so only transfers are ever asked for.
NETWORK = LinkConstants(launch_s=9.5e-6, hop_share=1.0, small_ratio=0.44, large_launch_s=43e-6,
                        all_reduce_shares=((2, 0.67),), transfer_share=0.70)

# gemm: on average half a tile (64 to 128 rows) is wasted, hence 48 rows. A fit (soft L1 of log
#   ratios, 1 to 4096 rows) gives a share of 0.76 with 64 rows; to Vidur alone 0.75, to
#   aiconfigurator alone 0.84 to 0.86. Waves of tiles are left out: a fit finds 2 to 7 % of one.
# elementwise: Vidur's norms, activation, rotary embedding and add: 17..20 us for the seven
#   kernels of a layer at few rows, 0.50 of the bandwidth at many.
# attention: prefill is a fit to both engines. Decode: a fit to vLLM's table (5,431 rows) together
#   with Vidur's (10,240); a key-value head's fixed cost hides beside what others read. A sequence's
#   causal half counts as its work.
# synchronisation: what GPT-20B on A100 (speed-ups 1.50, 2.19, 2.67 at degrees 2, 4, 8) leaves
#   unexplained by products and collectives, per all-reduce; checked by a test. 16: extrapolated.
# step overhead: launches are hidden behind the device's work; what remains is the message
#   header and bookkeeping of one micro-batch. With it the published latencies come out; Python
#   engines need more (Vidur's host profiles: 0.1..0.9 ms for each of four tasks a step).
GPU = RooflineConstants(
    gemm_flops_share=0.78, gemm_half_rows=48.0, gemm_bytes_share=0.79, gemm_overlap=3.0,
    gemm_launch_s=4.4e-6, elementwise_bytes_share=0.50, elementwise_launch_s=2.8e-6,
    encode_attention_flops_share=0.56, encode_attention_half_tokens=660.0,
    encode_attention_tail_s=18e-9, decode_attention_bytes_share=0.758,
    decode_attention_item_s=35.3e-9, encode_attention_launch_s=12e-6,
    decode_attention_launch_s=17e-6, sampling_s=30e-6, step_overhead_s=200e-6,
    synchronisation_s=((2, 34e-6), (4, 37e-6), (8, 43e-6), (16, 56e-6)),
    nvlink=NVLINK, pcie=PCIE, pcie_peer=PCIE_PEER, network=NETWORK,
)

# Shared memory between ranks, and a network between hosts: assumptions. A rank's own profile
# measures both.
_HOST = LinkConstants(launch_s=0.0, hop_share=1.0, small_ratio=1.0, large_launch_s=0.0,
                      all_reduce_shares=((2, 0.35),), transfer_share=0.70)

# gemm: 0.9 of the float32 peak at 2048 rows, 0.3 at 16, 0.6 at 64; weights stream at 0.8..1.0
#   of the read bandwidth in float32 (bfloat16 less); a torch call costs 5..20 us.
# attention: scaled_dot_product_attention reads KV at 0.82..0.91 of the bandwidth, prefill 0.8
#   of the matrix peak at 512 tokens.
# synchronisation: polite polling of several ranks on few cores adds 50..120 us a message.
# step overhead: Python, header and slot bookkeeping of one micro-batch.
CPU = RooflineConstants(
    gemm_flops_share=0.75, gemm_half_rows=12.0, gemm_bytes_share=0.80, gemm_overlap=8.0,
    gemm_launch_s=10e-6, elementwise_bytes_share=0.50, elementwise_launch_s=10e-6,
    encode_attention_flops_share=0.60, encode_attention_half_tokens=64.0,
    encode_attention_tail_s=0.0, decode_attention_bytes_share=0.80,
    encode_attention_launch_s=30e-6,
    decode_attention_launch_s=30e-6, sampling_s=200e-6, step_overhead_s=500e-6,
    synchronisation_s=((2, 80e-6), (4, 160e-6), (8, 240e-6)),
    nvlink=_HOST, pcie=_HOST, pcie_peer=_HOST, network=_HOST,
)

BY_KIND: dict[Literal["gpu", "cpu"], RooflineConstants] = {"gpu": GPU, "cpu": CPU}


LINK_FIELDS = ("nvlink", "pcie", "pcie_peer", "network")
# Which measured generation stands in for another, the nearest first.
_NEAREST = {
    "volta": ("turing", "ampere", "ada", "hopper", "blackwell"),
    "turing": ("volta", "ampere", "ada", "hopper", "blackwell"),
    "ampere": ("ada", "turing", "volta", "hopper", "blackwell"),
    "ada": ("ampere", "hopper", "turing", "volta", "blackwell"),
    "hopper": ("blackwell", "ada", "ampere", "turing", "volta"),
    "blackwell": ("hopper", "ada", "ampere", "turing", "volta")}


def engine_constants(device: Device, engine: str = OWN_ENGINE) -> RooflineConstants:
    """Constants of `engine` on `device`; the defaults of the device's kind where the engine has no
    row. Raises UnknownNameError for an unknown engine."""
    base = BY_KIND[device.kind]
    if device.kind != "gpu":
        return base
    for name in _engine_and_its_bases(engine):
        constants = catalog.engine(name).constants
        generation = _nearest(device.generation, constants)
        if generation is not None:
            base = changed(base, constants[generation])
    return base


def changed(constants: RooflineConstants, row: Mapping[str, Any]) -> RooflineConstants:
    """`constants` with the fields of a catalog row put in. In the row, values per tensor-parallel
    degree and fields of a link are mappings."""
    values: dict[str, Any] = {}
    for name, value in row.items():
        if name in LINK_FIELDS:
            own = {key: _plain(part) for key, part in value.items()}
            values[name] = replace(getattr(constants, name), **own)
        else:
            values[name] = _plain(value)
    return replace(constants, **values)


def _nearest(generation: str, rows: Mapping[str, Any]) -> str | None:
    """The generation among `rows` that stands in for this one: itself if present, else the
    nearest; None if there is none."""
    return next((g for g in (generation, *_NEAREST.get(generation, ())) if g in rows), None)


def _engine_and_its_bases(engine: str) -> list[str]:
    """Names of the rows whose constants apply, in the order to apply them, `engine` last."""
    found: list[str] = []
    name: str | None = engine
    while name is not None:
        assert name not in found, f"{engine}: rows that are like each other: {found}"
        found.insert(0, name)
        name = catalog.engine(name).like
    return found


def _plain(value: Any) -> Any:
    """A mapping by degree as pairs; a number as it is."""
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else value
