"""Columns of the parquet files of a step: what run/rollouts.py writes, and it and the report read."""

import pyarrow as pa

from topd.evidence import EVIDENCE

_NUMBERS = pa.list_(pa.float32())
ROLLOUTS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("domain", pa.string()),
        ("prompt", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("answer", pa.string()),
        ("policy_version", pa.int64()),
        ("completion", pa.string()),
        ("completion_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("grade", pa.float32()),
        ("num_grader_errors", pa.int32()),
        ("rollout_logprobs", _NUMBERS),
        ("behaviour_logprobs", _NUMBERS),
        ("old_logprobs", _NUMBERS),
        ("teacher_logprobs", _NUMBERS),
        ("token_rewards", _NUMBERS),
        ("returns", _NUMBERS),
        ("advantages", _NUMBERS),
    ]
)
"""rollouts/step_*.parquet: one row a completion."""

_TYPES = {"token": _NUMBERS, "token k": pa.list_(_NUMBERS)}
MORE = pa.schema(
    [
        (name, pa.list_(pa.list_(pa.int32())) if stream.integer else _TYPES[stream.axes])
        for name, stream in EVIDENCE.items()
        if stream.axes != "rollout" and name not in ROLLOUTS.names
    ]
)
"""Streams of the table of evidence that are stored where an algorithm asks for them."""

UPDATES = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("rollout", pa.int32()),
        ("update", pa.int64()),
        ("importance_ratios", _NUMBERS),
        ("clipped", pa.list_(pa.bool_())),
    ]
)
"""updates/step_*.parquet: one row for every time that a completion was trained on."""

FORMER = {"reward": "grade"}
"""Names of columns in earlier versions."""
