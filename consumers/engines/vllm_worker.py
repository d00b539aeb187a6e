"""What vLLM's public calls do not tell: mixed into its worker, run on its engine thread between steps.

Reads private attributes of vLLM, so the engine tests pin every one of them.
"""

from typing import Any


class SlotReport:
    """`worker_extension_cls`. Imported by name in vLLM's own processes."""

    # Any: vLLM's model runner, whose class depends on platform and version.
    model_runner: Any

    def slot_report(self) -> list[int]:
        """Ids in a slot or in the host cache: `list_loras` shows the cache only."""
        adapters = self.model_runner.lora_manager._adapter_manager  # noqa: SLF001  # No public way to see the slots.
        return [*{*adapters.list_adapters(), *(int_id for int_id in adapters.lora_index_to_id if int_id is not None)}]

    def adapter_bytes(self, int_id: int) -> int:
        """What an adapter really occupies in host memory."""
        adapters = self.model_runner.lora_manager._adapter_manager  # noqa: SLF001  # No public way to see the weights.
        layers = adapters.get_adapter(int_id).loras.values()
        return sum(
            tensor.nbytes for layer in layers for side in (layer.lora_a, layer.lora_b) for tensor in _tensors(side)
        )

    def wipe_kv(self) -> None:
        """Zero every KV block. A reset only forgets blocks, and NaN in a freed one reaches whoever gets it next."""
        for cache in self.model_runner.kv_caches:
            cache.zero_()


def _tensors(side: Any) -> list[Any]:
    """Fused layers hold a list, with None for parts the adapter leaves alone."""
    return [tensor for tensor in (side if isinstance(side, list) else [side]) if tensor is not None]
