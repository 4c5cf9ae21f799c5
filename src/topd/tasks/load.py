"""`[task]` section -> Task. The module of a task type is imported only when it is used."""

from topd.config import HubConfig, JsonlConfig, ReasoningGymConfig, TaskConfig
from topd.errors import ConfigError
from topd.tasks.task import Task


def load_task(config: TaskConfig, *, seed: int) -> Task:
    """Raises ConfigError if the data cannot be found or read, or if there is nothing to train on."""
    match config:
        case ReasoningGymConfig():
            from topd.tasks import reasoning_gym

            task = reasoning_gym.load(config, seed=seed)
        case JsonlConfig():
            from topd.tasks import jsonl

            task = jsonl.load(config)
        case HubConfig():
            from topd.tasks import hub

            task = hub.load(config)
    if not task.train:
        raise ConfigError(
            f'[task] has no training problems (type = "{config.type}"; problems that are also held out do not count). '
            "Give a data set with at least one, or more of them."
        )
    return task
