"""Pure mathematics: tensors in, tensors out, unreduced, no I/O and no randomness.

Ragged batches are flat. The tokens of all completions follow each other along one axis `token`; `lengths` (tokens per
completion, axis `rollout`) and `counts` (tokens per segment) mark the borders. Without padding there is no mask: every entry is
a token that the policy sampled.
"""
