"""Pure mathematics: tensors in, tensors out, unreduced, no I/O and no randomness.

Ragged batches are flat. The tokens of all completions stand one after the other in one axis `token`; `lengths` (tokens per
completion, axis `rollout`) and `counts` (tokens per segment) say where one ends and the next begins. There is no padding, so
there is no mask: every entry is a token that the policy sampled.
"""
