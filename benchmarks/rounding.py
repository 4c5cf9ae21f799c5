"""What precision alone makes of a student that is its own teacher: python benchmarks/rounding.py [MODEL] [--prompts 64]

Samples groups in float32 and scores them by the same weights in float32 (plain), as a bfloat16 copy (copied, as a teacher is)
and with a bfloat16 pass (autocast, as with trainer.dtype). Prints the log-ratios of the pairs: the table of docs/results.md.
"""

import argparse
import dataclasses

import torch

from topd import config_file
from topd.assemble import assemble
from topd.models.logprobs import score_groups
from topd.models.policy import frozen_copy
from topd.ops.proximal import proximal_reward
from topd.ops.returns import immediate_plus_mean_future
from topd.rollout.engine import SamplingParams

PAIRS = {
    "float32, float32": ("sampled", "plain"),
    "float32, bfloat16": ("plain", "copied"),
    "bfloat16, float32": ("autocast", "plain"),
    "bfloat16, bfloat16": ("autocast", "copied"),
}
"""trainer.dtype, teacher.dtype -> whose log-probs are subtracted from whose."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", nargs="?", default="builtin:tiny-student")
    arguments.add_argument("--config", default="quickstart", help="whose prompts and lengths are used")
    arguments.add_argument("--prompts", type=int, default=64)
    options = arguments.parse_args()
    names = ["--student.name", options.model, "--teacher.name", options.model]
    plain = ["--student.dtype", "float32", "--teacher.dtype", "float32", "--trainer.dtype", "float32"]
    parts = assemble(config_file.load(options.config, [*names, *plain, "--run.threads", "1"]))
    rollout = parts.config.rollout
    params = SamplingParams(n=rollout.group_size, max_tokens=rollout.max_completion_tokens, seed=(0, "rounding"))
    groups = parts.engine.generate(parts.prompts.take(1)[: options.prompts], params)
    models = {
        "plain": parts.student,
        "autocast": dataclasses.replace(parts.student, autocast_dtype=torch.bfloat16),
        "copied": frozen_copy(parts.student, torch.bfloat16),
    }
    scores = {name: score_groups(model, groups, max_tokens=2048) for name, model in models.items()}
    scores["sampled"] = [tuple(rollout.logprobs for rollout in group.rollouts) for group in groups]
    print(
        "| trainer, teacher | mean | 99 % within | largest | root mean square of a group | std of its returns |\n"
        + "| --- " * 6
        + "|"
    )
    for name, (mine, theirs) in PAIRS.items():
        log_ratios = [torch.cat(t) - torch.cat(s) for s, t in zip(scores[mine], scores[theirs], strict=True)]
        size = torch.cat(log_ratios).abs()
        spread = [float(each.square().mean().sqrt()) for each in log_ratios]
        stds = []
        for group, each in zip(groups, log_ratios, strict=True):
            lengths = torch.tensor([len(completion) for completion in group.completions])
            stds.append(float(immediate_plus_mean_future(proximal_reward(each, alpha=0.2), lengths).std()))
        ranges = [f"{min(part):.2g} to {max(part):.2g}" for part in (spread, stds)]
        print(f"| {name} | {size.mean():.2g} | {size.quantile(0.99):.2g} | {size.max():.2g} | {ranges[0]} | {ranges[1]} |")


if __name__ == "__main__":
    main()
