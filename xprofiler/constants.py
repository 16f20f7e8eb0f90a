"""Every constant of the analytic roofline, and where it comes from. Rates are shares of a peak.

GPU figures are read off public measurements of A100 and A40: GEMMs of Llama layers at 1..4096 rows
and degrees 1..8 (Vidur's MLP profiles), attention kernels (aiconfigurator's vLLM tables),
collectives (Vidur's network profiles), and whole-model latencies of GPT-20B (FasterTransformer's
guide). CPU figures are torch 2.13 on a two-core AVX-512 machine. A measured profile replaces all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineConstants:
    """How far one kind of device stays below its data sheet."""

    gemm_flops_share: float  # reached by a large matrix product
    gemm_half_rows: float  # rows at which a product reaches half of that share
    gemm_bytes_share: float  # of memory bandwidth, streaming weights
    gemm_launch_s: float  # fixed cost of one matrix product
    elementwise_bytes_share: float  # norms, activation, residual adds, rotary embedding
    elementwise_launch_s: float
    encode_attention_flops_share: float  # fused prefill attention, long sequence
    encode_attention_half_tokens: float  # sequence length at which it reaches half of that
    decode_attention_bytes_share: float  # of memory bandwidth, reading the KV cache
    decode_attention_half_bytes: float  # KV bytes at which it reaches half of that
    attention_launch_s: float
    sampling_s: float  # choosing one micro-batch's tokens from its logits
    step_overhead_s: float  # host's cost of one micro-batch on one stage
    synchronisation_s: tuple[tuple[int, float], ...]  # (degree, seconds) of skew per all-reduce


# gemm: A100 and A40 reach 0.69..0.79 and 0.66..0.81 at 4096 rows, 0.43..0.54 at 128 rows, and
#   stream weights at 0.75..0.82 of the bandwidth from 1 to 64 rows; about 5 us remain at the
#   smallest shards.
# elementwise: 17..20 us for the seven kernels of a layer at few rows, 0.50 of the bandwidth at
#   many.
# encode attention: 0.52 at 4096 tokens, 0.28 at 1024, 0.17 at 512 (A100, 32 heads).
# decode attention: 0.78..0.92 for hundreds of MB of KV, 8..12 us for next to none.
# synchronisation: what GPT-20B on A100 (speed-ups 1.50, 2.19, 2.67 at degrees 2, 4, 8 where
#   products and collectives alone say 1.53, 2.85, 3.68) leaves unexplained, per all-reduce;
#   checked by a test.
# step overhead: launches are hidden behind the device's work; what remains is the message
#   header and bookkeeping of one micro-batch. With it the published latencies come out; Python
#   engines need more (Vidur's host profiles: 0.1..0.9 ms for each of four tasks a step).
GPU = RooflineConstants(
    gemm_flops_share=0.77, gemm_half_rows=64.0, gemm_bytes_share=0.78, gemm_launch_s=5e-6,
    elementwise_bytes_share=0.50, elementwise_launch_s=2.8e-6,
    encode_attention_flops_share=0.55, encode_attention_half_tokens=800.0,
    decode_attention_bytes_share=0.78, decode_attention_half_bytes=6e6, attention_launch_s=8e-6,
    sampling_s=30e-6, step_overhead_s=200e-6,
    synchronisation_s=((2, 34e-6), (4, 38e-6), (8, 46e-6), (16, 60e-6)),
)

# gemm: 0.9 of the float32 peak at 2048 rows, 0.3 at 16, 0.6 at 64; weights stream at 0.8..1.0
#   of the read bandwidth in float32 (bfloat16 less); a torch call costs 5..20 us.
# attention: scaled_dot_product_attention reads KV at 0.82..0.91 of the bandwidth, prefill 0.8
#   of the matrix peak at 512 tokens.
# synchronisation: polite polling of several ranks on few cores adds 50..120 us a message.
# step overhead: Python, header and slot bookkeeping of one micro-batch.
CPU = RooflineConstants(
    gemm_flops_share=0.75, gemm_half_rows=12.0, gemm_bytes_share=0.80, gemm_launch_s=10e-6,
    elementwise_bytes_share=0.50, elementwise_launch_s=10e-6,
    encode_attention_flops_share=0.60, encode_attention_half_tokens=64.0,
    decode_attention_bytes_share=0.80, decode_attention_half_bytes=1e5, attention_launch_s=30e-6,
    sampling_s=200e-6, step_overhead_s=500e-6,
    synchronisation_s=((2, 80e-6), (4, 160e-6), (8, 240e-6)),
)

BY_KIND: dict[Literal["gpu", "cpu"], RooflineConstants] = {"gpu": GPU, "cpu": CPU}

# Ring all-reduce moves 0.52..0.58 of NVLink's one-direction peak (A100 node, 64 MiB, degrees 2, 8).
# Over PCIe one A40 machine without peer access was measured at 0.05..0.17, falling with the
# degree. 0.35 is an assumption between the two, for links slower than NVLink 1 (80 GB/s): a
# cluster of PCIe cards should be profiled.
ALL_REDUCE_SHARE = 0.55
SLOW_ALL_REDUCE_SHARE = 0.35
SLOW_LINK_BYTES_PER_S = 80e9
# Assumption: a point-to-point stream reaches more of any link than a collective does.
TRANSFER_SHARE = 0.70
