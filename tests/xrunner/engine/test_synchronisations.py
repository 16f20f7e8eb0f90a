"""How often a step waits for its device: never within it, and once for its tokens.

On tensors that have a device and no memory (torch's FakeTensor on the device `lazy`, which stands
for a GPU): what passes between that device and the host is seen as torch carries it out, and what
would ask the device for a value cannot be answered at all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from examples import some
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import Zeros

from xgpt.core.deployment import StageAssignment
from xgpt.core.model import Decoder, ModelSpec
from xrunner.comm.messages import Joined, StartMessage, StepMessage
from xrunner.devices import Arriving
from xrunner.engine.graphs import Captured, CapturedStep, DecodeGraphs, capture_obstacle
from xrunner.engine.group import FED_BACK
from xrunner.engine.kv import BLOCK_TOKENS
from xrunner.engine.stage import StageExecutor
from xrunner.models.encoder_decoder import load_stage
from xrunner.models.stage_model import StageModel
from xrunner.models.weights import WHOLE
from xrunner.ops.contexts import layers_of
from xrunner.ops.cuda import cuda_modules
from xrunner.ops.cuda import kernels as cuda
from xrunner.ops.cuda.cuda_modules import Gpu
from xrunner.ops.cuda.kernels import CudaOps
from xrunner.ops.cuda.launch import Launch
from xrunner.ops.kv_entries import scatter
from xrunner.query import Sampling
from xrunner.rules.slots import Span
from xrunner.rules.steps import KvBudget, StepKind

DEVICE = torch.device("lazy", 0)
GREEDY = (Sampling(), Sampling(), Sampling())
CHOICES = {
    "greedy": GREEDY,
    "drawn": (Sampling(), Sampling(temperature=0.8, top_k=5, seed=1),
              Sampling(temperature=1.0, top_p=0.9)),
    "barred": (Sampling(barred=(1, 2), barred_until=30), Sampling(barred=(3,), barred_until=5),
               Sampling()),
    "given": (Sampling(fixed=((5, 7),)), Sampling(), Sampling()),
    "told": (Sampling(top_logprobs=2), Sampling(), Sampling(top_logprobs=0))}


class Traffic(TorchDispatchMode):
    """What passed between device and host: how often the host waited for the device, and what it
    was sent, or sent, without that."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.downloads = self.uploads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"):
            self.waits.append(name)
        if name in ("_to_copy", "copy_"):
            source, target = (args[0], out) if name == "_to_copy" else (args[1], args[0])
            self._pass(name, source.device, target.device, is_awaited=not (
                (kwargs or {}).get("non_blocking") or (name == "copy_" and args[2:] == (True,))))
        if name in ("index", "index_put_", "index_put"):  # by a mask it counts first
            self.waits += [name for at in tree_leaves(args[1])
                           if isinstance(at, Tensor) and at.dtype == torch.bool]
        return out

    def _pass(self, name: str, source: torch.device, target: torch.device, *,
              is_awaited: bool) -> None:
        if source.type == target.type:
            return
        if is_awaited:
            self.waits.append(f"{name} from {source} to {target}")
        elif target.type == "cpu":
            self.downloads += 1
        else:
            self.uploads += 1


@contextmanager
def elsewhere() -> Iterator[Traffic]:
    with FakeTensorMode(), Traffic() as traffic:
        yield traffic


def executor_of(family: str, layers: int, budget: KvBudget | None,
                decoder: Decoder | None = None) -> StageExecutor:
    is_llama = family == "llama"
    spec = ModelSpec(
        name="toy", family=family, num_layers=layers, hidden_size=24, num_heads=6,
        num_kv_heads=2 if is_llama else 6, vocab_size=50, intermediate_size=32,
        is_gated_mlp=is_llama, has_bias=family in ("opt", "gpt2"), tied_embeddings=True,
        max_positions=64, decoder=decoder or Decoder())
    stage = StageAssignment(index=0, ranks=(0,), first_layer=0, num_layers=layers)
    executor = StageExecutor(load_stage(spec, Zeros(), stage, WHOLE, DEVICE))
    executor.start(StartMessage(num_groups=1, capacity=20, slots=4, budget=budget))
    return executor


def steps_of(choices: tuple[Sampling, ...]) -> list[tuple[StepMessage, list[int]]]:
    """Encode three queries, decode them, decode without the first, encode one beside the others."""
    joined = [Joined(query=i, input_tokens=n, sampling=choice)
              for i, (n, choice) in enumerate(zip((4, 2, 5), choices, strict=True))]
    new = Joined(query=3, input_tokens=3, sampling=choices[0])

    def message(kind: StepKind, **more: Any) -> StepMessage:
        return StepMessage(kind=kind, group=0, phase=0, iteration=1, **more)

    return [(message(StepKind.ENCODE, joined=tuple(joined)), [1] * 11),
            (message(StepKind.DECODE), [FED_BACK] * 3),
            (message(StepKind.DECODE, removed=(0,)), [FED_BACK] * 2),
            (message(StepKind.MIXED, joined=(new,), spans=(Span(2, 0, 3, True),)),
             [FED_BACK] * 2 + [1] * 3)]


# how tokens are chosen is the same for each family, and wherever entries lie
CASES = [(family, choice, in_blocks, Decoder()) for family in ("llama", "opt", "gpt2")
         for choice in CHOICES for in_blocks in (False, True)]
NEWER = [Decoder(embedding_scale=5.0, residual_scale=0.4, logit_scale=0.2), Decoder(qk_norm="head"),
         Decoder(qk_norm="all", norm_place="after"), Decoder(windows=(4, None)),
         Decoder(attention_cap=3.0, logit_cap=4.0)]


@pytest.mark.parametrize(("family", "choice", "in_blocks", "decoder"), [*some(
    CASES, lambda case: case[1] == "greedy" and "llama" in case or case[2] and (
        case[0] == "llama" or case[1] == "greedy")),
    *(("llama", "greedy", True, decoder) for decoder in NEWER)])
def test_a_step_is_waited_for_once_whatever_it_holds(family, choice, in_blocks, decoder,
                                                     monkeypatch):
    monkeypatch.setitem(BLOCK_TOKENS, "cpu", BLOCK_TOKENS["cuda"])
    made = torch.tensor

    def from_the_host(*given: Any, device: Any = None, **more: Any) -> Tensor:
        assert device is None, "a GPU's queue must be empty before it takes numbers of the host so"
        return made(*given, **more)

    sent = []
    for layers in (1, 3) if decoder == Decoder() else (2,):
        with elsewhere() as traffic, monkeypatch.context() as patched:
            executor = executor_of(family, layers, KvBudget(96, 16) if in_blocks else None, decoder)
            traffic.waits.clear()  # of weights, which are loaded once
            of_layers = []
            patched.setattr(torch, "tensor", from_the_host)
            for message, tokens in steps_of(CHOICES[choice]):
                traffic.downloads = traffic.uploads = 0
                given = executor.execute(message, made(tokens))
                assert isinstance(given, Arriving)
                assert not traffic.waits, f"{message.kind}: {traffic.waits}"
                assert traffic.downloads == 1, f"{message.kind}: its tokens, in one piece"
                of_layers.append(traffic.uploads)
            sent.append(of_layers)
    assert sent[0] == sent[-1], "no more with more layers"


@pytest.mark.parametrize(("family", "decoder"), [
    ("llama", Decoder()), ("opt", Decoder()), ("gpt2", Decoder()),
    ("llama", Decoder(embedding_scale=5.0, residual_scale=0.4)),
    ("llama", Decoder(qk_norm="all", norm_place="after")), ("llama", Decoder(windows=(4, None)))])
@pytest.mark.parametrize("width", [1, 3])
def test_nothing_passes_between_device_and_host_in_what_is_captured(
        family, decoder, width, monkeypatch):
    """A graph would keep what the host had at its capture, from memory that is long another's."""
    launched = list[str]()
    monkeypatch.setattr(cuda, "filled", lambda kind, **values: None)  # addresses of no memory
    monkeypatch.setattr(cuda, "is_wide", lambda *tensors, row: True)

    def launch(asked: Launch) -> None:
        launched.append(asked.kernel)

    monkeypatch.setitem(cuda_modules._gpus, DEVICE, Gpu(CudaOps(launch, 100), launch))
    with elsewhere() as traffic, torch.inference_mode():
        model = executor_of(family, 2, None, decoder).model
        assert isinstance(model, StageModel) and capture_obstacle(model) is None
        cache = torch.zeros(2, 2, 4 * width, model.kv_heads, 16, 4, device=DEVICE)
        graphs = DecodeGraphs(model, layers_of(cache), Nothing(), width=width)
        own = CapturedStep(4, graphs)
        graphs.work(own.inputs, own.context)  # as before every capture: some things go up once
        traffic.waits.clear()
        launched.clear()
        traffic.downloads = traffic.uploads = 0
        assert graphs.work(own.inputs, own.context).shape == (4, 24)
        assert not traffic.waits and traffic.downloads == traffic.uploads == 0
        assert sum("decode_attention" in kernel for kernel in launched) == 2


class Nothing:
    """Captures nothing."""

    limit_bytes = taken_bytes = 0

    def __call__(self, work: object) -> Captured:
        raise AssertionError("nothing is to be captured here")


def test_entries_from_another_pool_are_put_in_place_without_a_wait():
    with elsewhere() as traffic:
        store, block = torch.zeros(2, 2, 4, 3, 8, 4, device=DEVICE), torch.ones(2, 2, 3, 9, 4)
        scatter(store, [3], [4], block[:, :, :, :4])  # one query's part of what came together
        scatter(store, [0], [5], block[:, :, :, 4:])
        assert not traffic.waits and traffic.uploads == 2
