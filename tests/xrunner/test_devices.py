"""Ranks and their devices; and that a step on a device other than the CPU mixes no two devices.

No GPU is needed: the steps run on tensors that have a device and a shape, and no memory (torch's
FakeTensor), which refuse what two devices' tensors would refuse. `lazy` is a device type that any
build of torch knows; it stands for a GPU.
"""

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from toy_stages import shape
from toys import Zeros

from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec
from xrunner import devices
from xrunner.comm.handover import EntryReceiver, EntrySender, transfers
from xrunner.comm.messages import Joined, Message, StartMessage, StepMessage
from xrunner.comm.point_to_point import LocalComm, local_comms
from xrunner.devices import Arriving
from xrunner.engine.stage import StageExecutor
from xrunner.models.encoder_decoder import load_stage
from xrunner.models.weights import WHOLE, Shard
from xrunner.query import Sampling
from xrunner.rules.steps import StepKind

DEVICE, LAYERS, LENGTHS, CAPACITY = torch.device("lazy", 0), 3, (4, 2, 5), 12
START = StartMessage(num_groups=1, capacity=CAPACITY, slots=4, encoded_capacity=CAPACITY)


class Gate(LocalComm):
    """Lets messages through once it is open: FakeTensors serve one thread at a time."""

    def __init__(self, comm: LocalComm) -> None:
        self.__dict__.update(comm.__dict__)
        self.is_open = threading.Event()

    def send(self, target: int, message: Message, tensor: Tensor | None = None) -> None:
        self.is_open.wait()
        super().send(target, message, tensor)

    def poll(self, *sources: int, wait_s: float = 0.0) -> tuple[Message, Tensor | None] | None:
        self.is_open.wait()
        return super().poll(*sources, wait_s=wait_s)


@pytest.fixture()
def elsewhere(monkeypatch):
    """Tensors have no values; where a step asks for one (its longest context), it is 9."""
    monkeypatch.setattr(torch.Tensor, "__int__", lambda self: 9)
    with FakeTensorMode():
        yield


SPECS = {"llama": shape(num_layers=LAYERS, num_kv_heads=2),
         "t5": shape("t5", num_layers=LAYERS, num_encoder_layers=LAYERS, num_kv_heads=None,
                     is_gated_mlp=False, max_positions=None)}


def stages(spec: ModelSpec, *roles: str) -> list[StageAssignment]:
    """One stage of one rank for each role."""
    return [StageAssignment(
        index=place, ranks=(place,), first_layer=0, first_encoder_layer=0,
        num_layers=0 if spec.is_encoder_decoder and role == "encode" else LAYERS,
        num_encoder_layers=spec.num_encoder_layers if role != "decode" else 0)
        for place, role in enumerate(roles)]


def step(kind: StepKind, *joined: Joined, removed: tuple[int, ...] = ()) -> StepMessage:
    return StepMessage(kind=kind, group=0, phase=0, iteration=0, removed=removed, joined=joined)


def joining(*, goes_on: bool = False) -> list[Joined]:
    return [Joined(query=i, input_tokens=n, sampling=Sampling(), goes_on=goes_on)
            for i, n in enumerate(LENGTHS)]


def on_host(count: int) -> Tensor:
    """Tokens as a head composes them."""
    return torch.zeros(count, dtype=torch.long)


def through_host(tensor: Tensor) -> Tensor:
    return devices.to_host(tensor).to(tensor.device)


def gather(tensor: Tensor) -> Tensor:
    return torch.stack([devices.to_host(tensor)] * 2)


# engine/test_synchronisations.py has whole models of the other families
@pytest.mark.parametrize(("family", "shard"), [
    ("llama", Shard(0, 2, through_host, gather)), ("t5", Shard(0, 2, through_host, gather))])
def test_a_step_stays_on_its_device(elsewhere, family, shard):
    """And a shard's, whose group works through the host's memory."""
    spec = SPECS[family]
    executor = StageExecutor(load_stage(spec, Zeros(), stages(spec, "both")[0], shard, DEVICE))
    executor.start(START)
    assert executor.groups[0].cache.store.device == DEVICE
    assert executor.execute(step(StepKind.ENCODE, *joining()), on_host(sum(LENGTHS))) is not None
    after = executor.execute(step(StepKind.DECODE, removed=(0,)), on_host(2))
    assert isinstance(after, Arriving) and after.wait().shape == (2,)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_entries_travel_through_the_hosts_memory_between_two_devices(elsewhere, family):
    spec = SPECS[family]
    pools, comms = stages(spec, "encode", "decode"), [Gate(comm) for comm in local_comms(2)]
    own = transfers(pools[:1], pools[1:], spec)
    models = [load_stage(spec, Zeros(), stage, WHOLE, DEVICE, role=role)
              for stage, role in zip(pools, ("encode", "decode"), strict=True)]
    encoder = StageExecutor(models[0], sender=EntrySender(comms[0], own))
    decoder = StageExecutor(models[1], receiver=EntryReceiver(comms[1], own, [1]))
    for executor in (encoder, decoder):
        executor.start(START)
    message = step(StepKind.ENCODE, *joining(goes_on=True))
    encoder.execute(message, on_host(sum(LENGTHS)))
    comms[0].is_open.set()
    encoder.close()
    comms[1].is_open.set()
    decoder.receiver.close()
    assert decoder.receiver.has_arrived(0)
    held = [e.tensor for entries in decoder.receiver._entries.values() for e in entries]
    assert len(held) == 3 and {t.device.type for t in held} == {"cpu"}
    handed = [replace(joined, is_handed=True) for joined in message.joined]
    tokens = decoder.execute(step(StepKind.DECODE, *handed), on_host(3))
    assert isinstance(tokens, Arriving) and tokens.wait().shape == (3,)


def test_ranks_of_a_host_take_its_gpus_in_turn():
    assert [devices.gpu_of(place, ["H200"] * 4) for place in range(4)] == [0, 1, 2, 3]
    assert [devices.gpu_of(place, ["H200"]) for place in range(3)] == [0, 0, 0]
    mixed = ["T1000", "A40", "A40"]
    assert [devices.gpu_of(place, mixed) for place in range(5)] == [1, 2, 1, 2, 1]


def test_a_rank_without_its_gpu_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.select_device("cpu", 3) == torch.device("cpu")
    with pytest.raises(XgptError, match="planned for GPUs.*CUDA_VISIBLE_DEVICES"):
        devices.select_device("gpu", 0)


def test_float32_products_are_never_rounded_to_tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        devices.select_device("cpu", 0)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
