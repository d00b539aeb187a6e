"""What vLLM's public calls do not tell or do: mixed into its worker, run on its engine thread between steps.

Uses private attributes of vLLM, so the engine tests pin every one of them.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from consumers.engines.memory import available_bytes, free_in_allocator, give_back, resident_bytes


class SlotReport:
    """`worker_extension_cls`. Imported by name in vLLM's own processes."""

    # Any: vLLM's model runner, whose class depends on platform and version.
    model_runner: Any
    # By the names of `Memory`: what does not change from the start of the engine on.
    _fixed: dict[str, int]

    @property
    def _adapters(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager  # noqa: SLF001  # No public way to see the slots.

    def holdings(self) -> tuple[list[int], dict[int, int]]:
        """Ids in slots, and the bytes of every copy in host memory: `list_loras` shows the ids of the copies only."""
        slots = [int_id for int_id in self._adapters.lora_index_to_id if int_id is not None]
        return slots, {int_id: self._copy_bytes(int_id) for int_id in self._adapters.list_adapters()}

    def stage_adapter(self, digest: str, int_id: int, path: str) -> None:
        """From its files into host memory; `add_lora` would take a slot, another adapter's if it must."""
        from vllm.lora.request import LoRARequest

        if len(self._adapters) >= self._adapters.capacity:
            raise RuntimeError("vLLM's host cache is full")
        manager = self.model_runner.lora_manager
        self._adapters.add_adapter(manager._load_adapter(LoRARequest(digest, int_id, path)))  # noqa: SLF001  # As above.

    def activate_adapter(self, int_id: int) -> None:
        """From host memory into a free slot. vLLM itself would clear the oldest one, whoever runs in it."""
        if None not in self._adapters.lora_index_to_id:
            raise RuntimeError("vLLM's slots are full")
        self._adapters.activate_adapter(int_id)

    def deactivate_adapter(self, int_id: int) -> None:
        """Free the slot and keep the copy."""
        self._adapters.deactivate_adapter(int_id)

    def wipe_kv(self) -> None:
        """Zero every KV block. A reset only forgets blocks, and NaN in a freed one reaches whoever gets it next."""
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def settle_memory(self, limit_bytes: int | None) -> None:
        """Make all that was allocated resident, so that none of it is missing later, and note what the rest takes."""
        self.wipe_kv()
        for tensor in self._stacks():
            tensor.zero_()
        if not self._on_gpu:
            give_back()
        limit = limit_bytes or self._all_bytes()
        claimed = {
            "base_weights": _distinct_bytes(self.model_runner.model.parameters()) + self._packed_bytes(),
            "slots": _distinct_bytes(self._stacks()),
            "kv_cache": _distinct_bytes(self.model_runner.kv_caches),
        }
        workspace = max(0, self._taken_bytes() - sum(claimed.values()) - self._free_bytes())
        self._fixed = {**claimed, "workspace": workspace, "limit": limit}

    def memory(self) -> dict[str, int]:
        """Bytes by the names of `Memory`."""
        used, copies = self.holdings()
        return {
            **self._fixed,
            "slots_used": self._slot_bytes * len(used),
            "host_cache": sum(copies.values()),
            "fragmentation": self._free_bytes(),
            "process": self._taken_bytes(),
        }

    @property
    def _slot_bytes(self) -> int:
        return self._fixed["slots"] // len(self._adapters.lora_index_to_id)

    def adapter_sizes(self) -> tuple[dict[str, int], int]:
        """Bytes per rank of every module that an adapter can have, over all layers, and of a slot: from its tensors."""
        sizes: Counter[str] = Counter()
        for name, module in self._adapters.modules.items():
            parts = self._adapters.packed_modules.get(name, [name])
            sides = (_as_list(module.lora_a_stacked), _as_list(module.lora_b_stacked))
            for part, *tensors in zip(parts, *sides, strict=True):
                rank = self._adapters.lora_config.max_lora_rank
                sizes[part.rpartition(".")[2]] += sum(tensor[0].nbytes for tensor in tensors) // rank
        return dict(sizes), self._slot_bytes

    def _copy_bytes(self, int_id: int) -> int:
        layers = self._adapters.get_adapter(int_id).loras.values()
        return sum(
            tensor.nbytes for layer in layers for side in (layer.lora_a, layer.lora_b) for tensor in _parts(side)
        )

    def _stacks(self) -> Iterator[Any]:
        for module in self._adapters.modules.values():
            yield from (*_as_list(module.lora_a_stacked), *_as_list(module.lora_b_stacked))

    def _packed_bytes(self) -> int:
        """On a CPU vLLM gives a layer's weight to oneDNN, which keeps it in its own order, and leaves an empty one."""
        return sum(
            layer.input_size_per_partition * layer.output_size_per_partition * layer.params_dtype.itemsize
            for layer in self.model_runner.model.modules()
            if hasattr(layer, "output_size_per_partition")
            and not hasattr(layer, "base_layer")
            and layer.weight.numel() == 0
        )

    @property
    def _on_gpu(self) -> bool:
        return bool(self.model_runner.device.type == "cuda")

    def _taken_bytes(self) -> int:
        if not self._on_gpu:
            return resident_bytes()
        import torch

        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def _free_bytes(self) -> int:
        if not self._on_gpu:
            return free_in_allocator()
        import torch

        return int(torch.cuda.memory_reserved() - torch.cuda.memory_allocated())

    def _all_bytes(self) -> int:
        if not self._on_gpu:
            return resident_bytes() + available_bytes()
        import torch

        return int(torch.cuda.mem_get_info()[1])


def _as_list(stacked: Any) -> list[Any]:
    return list(stacked) if isinstance(stacked, tuple | list) else [stacked]


def _parts(side: Any) -> list[Any]:
    """Fused layers hold a list, with None for parts the adapter leaves alone."""
    return [tensor for tensor in _as_list(side) if tensor is not None]


def _distinct_bytes(tensors: Any) -> int:
    """Tied weights are one tensor under several names."""
    stores = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(stores.values())
