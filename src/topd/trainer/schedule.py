"""The learning-rate schedule, as a function of the number of updates made."""

import math

from topd.config import TrainerConfig


def learning_rate(config: TrainerConfig, *, update: int, total_updates: int) -> float:
    """Learning rate of update 0, 1, ...: linear warm-up to the peak, then constant, linear to 0, or half a cosine to 0."""
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / config.warmup_updates
    done = (update - config.warmup_updates) / max(1, total_updates - config.warmup_updates)
    match config.schedule:
        case "constant":
            return config.learning_rate
        case "linear":
            return config.learning_rate * (1 - done)
        case "cosine":
            return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
