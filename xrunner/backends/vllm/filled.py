"""A KV connector of vLLM that says of every request named so that the entries of its input are
there already: decoding at a long context can then be timed without encoding it first.

For measuring alone: what the entries hold is left as it is, and the answers are worth nothing."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from xrunner.backends.vllm.core import PREFIX


class FilledCache(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is untyped here
    """Nothing is loaded, and nothing saved."""

    def get_num_new_matched_tokens(self, request: Any,
                                   num_computed_tokens: int) -> tuple[int, bool]:
        """All tokens but the last, which a decode step is fed."""
        if not request.request_id.startswith(PREFIX):
            return 0, False
        return max(request.num_tokens - 1 - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any,
                                 num_external_tokens: int) -> None:
        """Nothing is to be loaded into them."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any,
                      **options: Any) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def request_finished_all_groups(self, request: Any,
                                    block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None
