"""AdamW and its learning-rate schedule, as a function of the number of updates made."""

import math

import torch

from topd.config import TrainerConfig
from topd.models.language_model import LanguageModel


def make_optimizer(policy: LanguageModel, config: TrainerConfig) -> torch.optim.AdamW:
    """AdamW over the trainable weights in float32; weight decay on matrices only, as is usual."""
    trainable = [parameter for parameter in policy.module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.betas[0], config.betas[1]))


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
