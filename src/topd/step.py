"""START HERE: one training step as a table of contents.

Prompt -> RolloutGroup -> ScoredGroup -> TrainBatch -> StepReport
"""

from typing import Any

from topd.algorithms.base import Method
from topd.collect.feed import Feed
from topd.record import Record
from topd.trainer.batch import flatten, make_batches
from topd.trainer.step import Trainer


def train_step(step: int, feed: Feed, method: Method, trainer: Trainer, record: Record) -> dict[str, Any]:
    """One rollout batch, from prompts to new weights. Returns the step's metrics."""
    groups = feed.take(step)  # 1, 2, 3: prompts, completions, evidence
    evidence = flatten(groups)
    credit = method.credit(evidence)  # 4
    record.rollouts(step, groups, evidence, credit)
    feed.run_ahead(step)
    batches = make_batches(  # 5
        groups,
        evidence,
        credit,
        weighting=method.weighting,
        minibatch_prompts=trainer.config.minibatch_prompts,
        epochs=trainer.config.epochs,
        seed=(feed.config.run.seed, "minibatches", step),
    )
    with record.updating(batches) as on_tokens:
        trainer.update_all(batches, on_tokens)  # 6, 7
    feed.publish()
    record.updates(step, batches, trainer.reports)
    return record.metrics(step, groups, evidence, credit, trainer.reports)
