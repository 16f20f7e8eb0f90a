"""A KV connector of vLLM that claims to have the KV of some requests' inputs. Decoding at a long
context can then be timed without encoding it. For measurements only: the KV is arbitrary, and
answers are worthless."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from xrunner.backends.vllm.protocol import PREFIX


class FilledCache(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is untyped here
    """A KV connector that loads and saves nothing."""

    def get_num_new_matched_tokens(self, request: Any,
                                   num_computed_tokens: int) -> tuple[int, bool]:
        """Claims all tokens but the last, which a decode step is fed."""
        if not request.request_id.startswith(PREFIX):
            return 0, False
        return max(request.num_tokens - 1 - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any,
                                 num_external_tokens: int) -> None:
        """Does nothing: nothing is loaded into the blocks."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        """Does nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any,
                      **options: Any) -> None:
        """Does nothing."""

    def wait_for_save(self) -> None:
        """Does nothing."""

    def request_finished_all_groups(self, request: Any,
                                    block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None
