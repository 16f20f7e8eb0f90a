"""Bytes of many divisions of the devices at once are those of each alone."""

from __future__ import annotations

import numpy as np
import pytest
from problems import problem_of, roofline_of

from xsimulator.policies.waa import divisions
from xsimulator.policies.waa.closed_form import waa_m
from xsimulator.policies.waa.config import WaaConfigs


def some_configs(count, seed):
    rng = np.random.default_rng(seed)
    return WaaConfigs(batch=rng.integers(1, 200, count).astype(float),
                      groups=rng.integers(1, 12, count).astype(float),
                      chunk=rng.choice([0.0, 64.0, 512.0], count))


@pytest.mark.parametrize("model", ["gpt3-39b", "t5-11b"])
@pytest.mark.parametrize("plan", [(1, 0), (2, 4)])
def test_many_divisions_at_once_hold_what_each_holds(model, plan):
    problem = problem_of(model)
    waa = waa_m(problem, roofline_of(problem))
    split, configs = waa.split(*plan), some_configs(40, 1)
    sizes = waa.memory.sizes(configs, configs.batch * 20)
    plans = [split.plan(count) for count in split.encode_devices.tolist()]
    found = waa.memory.fullest_of_many(plans, sizes)
    assert len(plans) > 1
    assert found.tolist() == [waa.memory.fullest_of(one, sizes).tolist() for one in plans]


@pytest.mark.parametrize("model", ["gpt3-39b", "t5-11b"])
def test_devices_are_divided_the_same_many_at_once_and_one_by_one(model, monkeypatch):
    problem = problem_of(model)
    waa, configs = waa_m(problem, roofline_of(problem)), some_configs(60, 2)
    split = waa.split(1, 0)
    found = waa.division.divide(split, configs)
    monkeypatch.setattr(divisions, "AT_ONCE", 0)
    assert found.tolist() == waa.division.divide(split, configs).tolist()
    assert len(set(found.tolist())) > 1 or model == "t5-11b"  # whose first device encodes
