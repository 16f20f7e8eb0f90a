"""What other engines' executors have in common: they execute decoder-only models alone."""

from torch import Tensor

from xrunner.comm.messages import StepMessage


class DecoderOnly:
    """A stage alone that ends each step with tokens, and for which nothing is encoded apart."""

    def gives_tokens(self, message: StepMessage) -> bool:
        return True

    def awaits_encoded(self, group: int | None = None) -> bool:
        return False

    def take_encoded(self, group: int, encoded: Tensor) -> None:
        raise AssertionError(f"{group = }: a decoder-only model has no encoder")
