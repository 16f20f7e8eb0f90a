"""Weights laid out once in a file, and products that compute by what is read from it."""

import os
import threading
import time

import pytest
import torch

from xgpt.core.placement import WeightTensor, sectors
from xrunner.offload.arena import Arena
from xrunner.offload.weights_file import Writer, unpack, weights_file
from xrunner.ops import four_bits
from xrunner.ops.cpu.products import is_int8_served, is_pairs_served
from xrunner.ops.linear import Product
from xrunner.ops.output_head import OutputHead

ACTIVATIONS = {"qkv": "none", "up": "silu_mul", "fc": "relu", "down": "gelu"}
SHAPES = {"qkv": (140, 33), "up": (100, 128), "fc": (64, 33), "down": (96, 256)}
KEY = {"model": "a", "stage": [0, 2]}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


def unpacked(*, has_weights: bool = True) -> dict[str, Product]:
    """Products of one layer."""
    made, generator = {}, torch.Generator().manual_seed(3)
    for name, shape in SHAPES.items():
        weight = torch.randn(shape, generator=generator)
        bias = torch.randn(shape[0], generator=generator) if name in ("qkv", "fc") else None
        made[name] = Product(weight if has_weights else weight.to("meta"), bias,
                             activation=ACTIVATIONS[name])
    return made


def products(dtype: torch.dtype, *, device: str = "cpu", has_weights: bool = True
             ) -> dict[str, Product]:
    """Products of one layer, packed to be moved."""
    if dtype == torch.int8 and not is_int8_served():
        pytest.skip("this processor has no VNNI")
    made = unpacked(has_weights=has_weights)
    for one in made.values():
        one.pack_movable(dtype, device)
    return made


def results(made: dict[str, Product], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    own = torch.float32 if dtype == torch.int8 else dtype
    generator = torch.Generator().manual_seed(4)
    return {name: one(torch.randn(7, SHAPES[name][1], generator=generator).to(own))
            for name, one in made.items()}


def laid_out(made: dict[str, Product]):
    def write(writer: Writer) -> None:
        for name, product in made.items():
            writer.add(name, product)
        writer.table("table", torch.arange(50 * 100).view(50, 100).to(torch.int16))
    return write


def never(writer: Writer) -> None:
    raise AssertionError("the file is whole")


def memory(num_bytes: int) -> torch.Tensor:
    return Arena("device").tensor((num_bytes,), torch.uint8, "buffer")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_compute_from_a_buffer_as_where_they_were(tmp_path, dtype, device):
    """A later run packs no weight: it takes the layout from tensors without data."""
    first = products(dtype, device=device)
    expected = results(first, dtype)
    with_pairs = device == "cpu" and dtype == torch.bfloat16 and is_pairs_served()
    assert {one.movable.ndim for one in first.values()} == {4 if with_pairs else 2}
    key = {**KEY, "device": device}
    weights_file(tmp_path, key, 16, laid_out(first)).close()
    assert all(one.movable.is_meta for one in first.values())
    file = weights_file(tmp_path, key, 16, never)
    later = products(dtype, device=device, has_weights=False)
    for one in later.values():
        one.place(one.movable.to("meta"))
    buffer = memory(file.num_bytes([*later]))
    file.read([*later], buffer)
    for (name, one), view in zip(later.items(), file.views([*later], buffer), strict=True):
        assert view.data_ptr() % 4096 == 0
        one.place(view, file.vector(name))
    for name, own in results(later, dtype).items():
        assert torch.equal(own, expected[name]), name
    file.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_to_be_moved_compute_what_those_that_stay_do(dtype):
    moved, staying = products(dtype), unpacked()
    for one in staying.values():
        one.pack(dtype)
    found, expected = results(moved, dtype), results(staying, dtype)
    is_equal = dtype == torch.int8 or (dtype == torch.bfloat16 and is_pairs_served())
    for name in SHAPES:
        torch.testing.assert_close(found[name], expected[name], **(
            {"rtol": 0, "atol": 0} if is_equal else {"rtol": 2e-2, "atol": 2e-2}))


def test_some_products_are_read_by_one_request_where_they_are_neighbours(tmp_path):
    made = products(torch.float32)
    weights = {name: one.movable.clone() for name, one in made.items()}
    file = weights_file(tmp_path, KEY, 16, laid_out(made))
    names, sizes = ["qkv", "fc", "down"], [140 * 33 * 4, 64 * 33 * 4, 96 * 256 * 4]
    assert file.num_bytes(names) == sum(map(sectors, sizes))
    buffer = memory(file.num_bytes(names) + 4096)
    file.read(names, buffer)
    for name, view in zip(names, file.views(names, buffer), strict=True):
        assert torch.equal(view, weights[name])
    one, two = file.stored["fc"], file.stored["down"]
    assert one.end == two.offset and one.offset % 4096 == 0
    file.close()


def test_rows_of_a_table_are_read_singly(tmp_path):
    file = weights_file(tmp_path, KEY, 16, laid_out(products(torch.float32)))
    before = file.file.bytes_read
    rows = file.rows("table", torch.tensor([[3, 49], [3, 20]]))
    assert torch.equal(rows, torch.stack([torch.arange(100) + 100 * at for at in (3, 49, 3, 20)]
                                         ).view(2, 2, 100).to(torch.int16))
    # 200 bytes each; row 20 lies in two sectors
    assert file.file.bytes_read - before == 4 * 4096
    file.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_bits_are_unpacked_where_a_product_computes(tmp_path, dtype):
    made = products(dtype)
    whole = {name: one.movable.clone() for name, one in made.items()}
    file = weights_file(tmp_path, KEY, 4, laid_out(made))
    buffer = memory(file.num_bytes([*made]))
    file.read([*made], buffer)
    for (name, one), packed in zip(made.items(), file.views([*made], buffer), strict=True):
        place = torch.empty(one.movable.shape, dtype=dtype)
        unpack(packed, place)
        off, wide = (place.float() - whole[name].float()).abs(), whole[name].float()
        assert 0 < off.max() <= (wide.max() - wide.min()) / 30 * 1.02
        if SHAPES[name] == (96, 256):  # whole groups and panels
            assert len(packed) * 8 == 4.5 * 96 * 256
        one.place(place)
    assert all(result.isfinite().all() for result in results(made, dtype).values())
    file.close()


def test_a_file_of_another_key_or_that_is_not_whole_is_not_used(tmp_path):
    weights_file(tmp_path, KEY, 16, laid_out(products(torch.float32))).close()
    (data,) = [path for path in tmp_path.iterdir() if not path.suffix]
    whole, written = data.read_bytes(), []

    def write(writer: Writer) -> None:
        written.append(1)
        laid_out(products(torch.float32))(writer)

    weights_file(tmp_path, KEY | {"stage": [1, 2]}, 16, write).close()
    assert len(written) == 1
    os.truncate(data, 4096)
    weights_file(tmp_path, KEY, 16, write).close()
    assert len(written) == 2 and data.read_bytes() == whole
    data.with_suffix(".json").unlink()
    data.with_suffix(".part").write_bytes(b"half")  # of a process that was killed
    weights_file(tmp_path, KEY, 16, write).close()
    assert len(written) == 3 and data.read_bytes() == whole
    assert not data.with_suffix(".part").exists()


def test_an_error_while_it_is_written_leaves_no_file(tmp_path):
    def write(writer: Writer) -> None:
        writer.table("table", torch.zeros(10))
        raise ValueError("a tensor is missing")

    with pytest.raises(ValueError, match="a tensor is missing"):
        weights_file(tmp_path, KEY, 16, write)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    weights_file(tmp_path, KEY, 16, laid_out(products(torch.float32))).close()


def test_ranks_that_want_one_file_write_it_once(tmp_path):
    """A lock is of an open file: threads exclude each other by it as processes do."""
    written, read = [], []

    def write(writer: Writer) -> None:
        written.append(1)
        time.sleep(0.1)
        writer.table("table", torch.ones(10, 10))

    def work() -> None:
        file = weights_file(tmp_path, KEY, 16, write)
        read.append(file.rows("table", torch.tensor([9])).sum().item())
        file.close()

    ranks = [threading.Thread(target=work) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert written == [1] and read == [10, 10, 10]


def test_a_head_s_pieces_take_no_more_than_planned():
    vocabulary, hidden = 20000, 64
    head = OutputHead(torch.empty(vocabulary, hidden, dtype=torch.bfloat16, device="meta"))
    assert [len(piece.movable) for piece in head.pieces] == [8192, 8192, 3616]
    for piece in head.pieces:
        piece.pack_movable(torch.bfloat16, "cpu")
    planned = WeightTensor("head", vocabulary, hidden).held_bytes(2)
    assert sum(sectors(piece.movable.nbytes) for piece in head.pieces) <= planned
    assert planned < vocabulary * hidden * 2 * 1.01
    table = WeightTensor("embedding", vocabulary, hidden)
    assert table.held_bytes(2) == table.held_bytes(2, 4) == vocabulary * hidden * 2


def test_bytes_on_the_tiers_are_no_more_than_planned():
    for name, (outputs, inputs) in SHAPES.items():
        planned = WeightTensor(name, outputs, inputs, is_gated=name == "up")
        for dtype in (torch.float32, torch.bfloat16):
            held = products(dtype)[name].movable
            assert sectors(held.nbytes) <= planned.held_bytes(dtype.itemsize), name
            size = four_bits.packed_bytes(held.flatten(2).shape if held.ndim == 4 else held.shape,
                                          1)
            assert sectors(size) <= planned.held_bytes(2, 4), name
