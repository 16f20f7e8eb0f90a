"""The floor's counts: products of a model's parts, entries that decoding reads, steps."""

import json

import numpy as np
import pytest
import torch
from floor import (
    NARROW_WAYS,
    ROWS,
    WAYS,
    Machine,
    Numbers,
    kv_tokens,
    model_of,
    parts_of,
    rates,
    whole_steps,
)

from xgpt.core import catalog

BFLOAT16 = Numbers(torch.bfloat16)


def machine_of(name: str, numbers: Numbers, flops_per_s: float) -> Machine:
    """One that multiplies at the same rate whatever the rows, each way a whole time slower than the
    one before, 8-bit codes twice as quickly as the first; it reads a gigabyte a second."""
    spec, slower = catalog.model(name), np.arange(1.0, len(numbers.ways) + 1)[:, None]
    slower[len(WAYS):] = 0.5
    ways = {name: slower * part.flops_per_row * np.array(ROWS) / flops_per_s
            for name, part in parts_of(spec).items()}
    return Machine(spec=spec, numbers=numbers, ways=ways, bandwidth_bytes_per_s=1e9)


@pytest.mark.parametrize("name", ["smollm2-135m", "opt-13b"])
def test_a_decoder_s_products_are_two_operations_a_weight(name):
    spec, parts = catalog.model(name), parts_of(catalog.model(name))
    vectors = spec.num_layers * (spec.decoder_layer_params - sum(
        rows * columns for rows, columns in parts["layer"].shapes))
    assert parts["layer"].flops_per_row == 2 * (
        spec.num_layers * spec.decoder_layer_params - vectors)
    assert 0 < vectors < 0.01 * spec.num_layers * spec.decoder_layer_params
    assert parts["head"].flops_per_row == 2 * spec.vocab_size * spec.hidden_size


def test_every_decode_step_reads_what_its_queries_have_so_far():
    pairs = [(5, 4), (7, 1)]
    contexts = [5 + 1, 5 + 2, 5 + 3]  # the first token comes from encoding
    assert kv_tokens(catalog.model("smollm2-135m"), pairs) == sum(contexts)
    assert kv_tokens(catalog.model("t5-11b"), pairs) == (1 + 2 + 3 + 4) + 4 * 5 + 1 + 7


def test_a_step_counts_once_however_many_stages_took_it():
    records = [{"kind": kind, "pool": pool, "stage": stage, "replica": 0, "queries": 2,
                "tokens": rows}
               for kind, pool, stage, rows in [
                   ("encode", "encode", 0, 9), ("decode", "decode", 1, 2),
                   ("decode", "decode", 2, 2), ("cross_kv", "decode", 1, 9)]]
    assert whole_steps(records) == [("encode", 2, 9), ("decode", 2, 2)]
    copy = [{**record, "replica": 1, "stage": record["stage"] + 3} for record in records]
    assert whole_steps(records + copy) == 2 * [("encode", 2, 9), ("decode", 2, 2)]


def test_a_run_with_narrow_weights_has_their_products_as_one_of_the_ways(tmp_path):
    held = "int8"
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
              "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
              "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for weight_dtype, narrow in ((held, held), ("float32", ""), ("bfloat16", "")):
        (tmp_path / "run.json").write_text(json.dumps({
            "model_dir": str(tmp_path), "model_name": "toy", "dtype": "bfloat16",
            "weight_dtype": weight_dtype}))
        assert model_of(tmp_path)[1] == Numbers(torch.bfloat16, narrow)
    numbers = Numbers(torch.bfloat16, held)
    machine = machine_of("smollm2-135m", numbers, 1e9)
    rows = [1, 50, 5000]
    assert machine.part_s("layer", rows) == pytest.approx(
        machine_of("smollm2-135m", BFLOAT16, 2e9).part_s("layer", rows))
    table = rates(machine)
    assert sum(NARROW_WAYS[held] in line for line in table) == 2, "layers and head"
    own = rates(machine_of("smollm2-135m", BFLOAT16, 1e9))
    assert not any(NARROW_WAYS[held] in line for line in own)


def test_the_floor_of_a_run_is_its_operations_over_the_rate_and_its_bytes_over_the_bandwidth(
        tmp_path):
    steps = [("encode", 2, 9000), ("mixed", 3, 40), ("decode", 3, 3)]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(
        {"kind": kind, "pool": "all", "stage": 0, "replica": 0, "queries": queries,
         "tokens": rows}) + "\n" for kind, queries, rows in steps))
    (tmp_path / "results.jsonl").write_text(
        json.dumps({"input_tokens": 10, "output_tokens": 3}) + "\n")
    machine = machine_of("smollm2-135m", BFLOAT16, 1e9)
    floor = machine.floor(tmp_path)
    layer, head = machine.parts["layer"].flops_per_row, machine.parts["head"].flops_per_row
    spared = (8998 + 37) * layer / 30 * (1 - 960 * 576 / (960 * 576 + 576 * 576 + 3 * 1536 * 576))
    assert floor.flops == pytest.approx(9043 * layer + 8 * head - spared, rel=1e-12)
    assert floor.products_s == pytest.approx(floor.flops / 1e9)
    assert floor.decode_s == pytest.approx(3 * layer / 1e9)
    assert floor.kv_bytes == (11 + 12) * 30 * 2 * 3 * 64 * 2
    assert floor.total_s == pytest.approx(floor.products_s + floor.kv_bytes / 1e9)
    assert machine.better(machine_of("smollm2-135m", BFLOAT16, 2e9)).floor(
        tmp_path).products_s == pytest.approx(floor.products_s / 2)
