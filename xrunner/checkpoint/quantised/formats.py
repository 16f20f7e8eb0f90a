"""The ways to store weights of fewer bits that are read: a row each. A row's config is read by
xgpt.core.hf.quantised, whose `Quantised.format` names it."""

from collections.abc import Callable, Iterator, Mapping

from xgpt.core.hf.quantised import Quantised
from xrunner.checkpoint.quantised.awq import Awq
from xrunner.checkpoint.quantised.compressed import PackQuantized
from xrunner.checkpoint.quantised.gguf import Gguf
from xrunner.checkpoint.quantised.gptq import Gptq
from xrunner.checkpoint.quantised.parts import WEIGHT, Format, Part, Shape, Stored
from xrunner.checkpoint.quantised.scaled import Scaled

FORMATS: Mapping[str, Format] = {
    "awq": Awq(), "gptq": Gptq(), "pack-quantized": PackQuantized(), "scaled": Scaled(),
    "gguf": Gguf()}
# Of activations and caches, where a method quantises them, too: ours are not, and nothing takes
# these.
UNUSED = (".input_scale", ".output_scale", ".k_scale", ".v_scale", ".input_zero_point",
          ".activation_scale")


def parts_of(quantised: Quantised, name: str, shape: Shape,
             find: Callable[[str], Stored | None]) -> dict[str, Part] | None:
    """The tensors in which the weight `name` is stored, by their names; None where it is stored
    plainly, or not at all. `find`: what a tensor's file says of it. Raises ValueError where no such
    shape can be stored so."""
    if len(shape) != 2 or not name.endswith(WEIGHT):
        return None
    form, module = FORMATS[quantised.format], name.removesuffix(WEIGHT)
    own = find(name)
    if own is not None and own.is_plain or not any(
            find(f"{module}.{ending}") for ending in form.endings):
        return None
    return {f"{module}.{part.ending}": part for part in form.parts(
        quantised, shape, lambda ending: find(f"{module}.{ending}") is not None)}


def misfits(parts: Mapping[str, Part], quantised: Quantised,
            find: Callable[[str], Stored | None]) -> Iterator[tuple[str, str, object]]:
    """(tensor, what it should be, what it is instead or None) of each that is missing or wrong."""
    for name, part in parts.items():
        found, shapes = find(name), " or ".join(str(list(shape)) for shape in part.shapes)
        if found is None:
            if not part.is_optional:
                yield name, (f"the weights hold no such tensor; {quantised.method} stores one of "
                             f"shape {shapes} beside the weight's others"), None
        elif found.shape not in part.shapes:
            yield name, f"stored as {quantised}, as config.json says, its shape is {shapes}", (
                list(found.shape))
        elif found.type not in part.types:
            yield name, (f"stored as {quantised}, as config.json says, it is of "
                         f"{' or '.join(part.types)}"), found.type
