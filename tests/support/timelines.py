"""Timelines of configurations in any order, from whole arrays."""

from __future__ import annotations

import numpy as np

from xsimulator.pipeline import StageWork, Timeline, sorted_timeline


def phase_timeline(*, encode_s, encode_rest_s, decode_s, decode_rest_s, iterations,
                   widths=None) -> Timeline:
    """encode_s, encode_rest_s: [configs, stages]; decode_s, decode_rest_s: [configs, max N_D,
    stages]; iterations: [configs]; widths: [configs, max N_D]."""
    order = np.argsort(-iterations, kind="stable")
    work = [StageWork(encode_s=encode_s[order, s], encode_rest_s=encode_rest_s[order, s],
                      decode_s=decode_s[order, :, s].T, decode_rest_s=decode_rest_s[order, :, s].T)
            for s in range(encode_s.shape[1])]
    timeline = sorted_timeline(work, iterations[order], None if widths is None else widths[order].T)
    back = np.argsort(order)
    return Timeline(period_s=timeline.period_s[back], encoded_s=timeline.encoded_s[back],
                    finish_s=timeline.finish_s[back])
