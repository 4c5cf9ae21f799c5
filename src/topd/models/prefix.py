"""Key/value caches that let many completions share one pass over their prompt, with gradients.

Two passes: the prompts alone, recorded layer by layer; then all completions, each reading the record of its prompt.
transformers' caches cannot do this: they grow in place, so the recomputation of a checkpointed layer appends a second time, and
their sliding-window layers keep only the window. The layers here store once and never grow.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin


class _Layer(CacheLayerMixin):
    """Base of the layers here: without a window and without a limit."""

    is_sliding = False

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class _RecordedLayer(_Layer):
    """First pass: stores the keys and values of the first call. A recomputed layer changes nothing."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if self.keys is None:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values, self.is_initialized = key_states, value_states, True

    def get_seq_length(self) -> int:
        return 0


class _ReadLayer(_Layer):
    """Second pass: the recorded prompt, expanded to the rows of the batch, before the new keys and values."""

    def __init__(self, recorded: CacheLayerMixin, rows: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.rows, self.is_initialized = recorded.keys, recorded.values, rows, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        keys = torch.cat([self.keys.index_select(0, self.rows), key_states], dim=-2)
        values = torch.cat([self.values.index_select(0, self.rows), value_states], dim=-2)
        return keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a read layer is initialised at construction")

    def get_seq_length(self) -> int:
        return self.keys.shape[-2]


class _GrowingLayer(_Layer):
    """Decoding: the prompt, then one token at a time, written in place into a buffer that doubles when full."""

    def __init__(self, recorded: CacheLayerMixin, rows: Tensor, room: int) -> None:
        super().__init__()
        self.length = 0 if recorded.keys is None else recorded.keys.shape[-2]
        self.rows, self.recorded, self.room = rows, recorded, room

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._allocate(key_states, self.recorded.keys)
        self.values = self._allocate(value_states, self.recorded.values)
        self.is_initialized = True

    def _allocate(self, new: Tensor, prompt: Tensor | None) -> Tensor:
        buffer = new.new_empty(*new.shape[:2], self.length + self.room, new.shape[-1])
        if prompt is not None:
            buffer[:, :, : self.length] = prompt.index_select(0, self.rows)
        return buffer

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            grow = (0, 0, 0, max(end, self.keys.shape[-2]))
            self.keys, self.values = pad(self.keys, grow), pad(self.values, grow)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep_rows(self, kept: Tensor) -> None:
        self.keys, self.values = self.keys.index_select(0, kept), self.values.index_select(0, kept)

    def get_seq_length(self) -> int:
        return self.length


def recording(num_layers: int) -> Cache:
    """Cache for the pass over the prompts."""
    return Cache(layers=[_RecordedLayer() for _ in range(num_layers)])


def reading(recorded: Cache, rows: Tensor) -> Cache:
    """Cache for the pass over completions: row i continues prompt `rows[i]`. Gradient flows into the recorded pass."""
    return Cache(layers=[_ReadLayer(layer, rows) for layer in recorded.layers])


def growing(recorded: Cache, rows: Tensor, *, room: int) -> Cache:
    """Cache for decoding: row i continues prompt `rows[i]`, with room for that many tokens before the buffer doubles."""
    return Cache(layers=[_GrowingLayer(layer, rows, room) for layer in recorded.layers])


def keep_rows(cache: Cache, kept: Tensor) -> None:
    """Drop all rows but `kept` from a growing cache."""
    for layer in cache.layers:
        layer.keep_rows(kept)
