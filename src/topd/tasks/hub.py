"""Problems from the `datasets` library: a hub id or a local folder of parquet, CSV or JSON files."""

from topd.config import HubConfig
from topd.errors import ConfigError, first_line
from topd.tasks.grading import SCORERS
from topd.tasks.jsonl import problem_from
from topd.tasks.task import Problem, Task, split_task


def load(config: HubConfig) -> Task:
    held_out = _read(config, config.eval_split) if config.eval_split else []
    return split_task(_read(config, config.split), held_out, SCORERS[config.grader])


def _read(config: HubConfig, split: str) -> list[Problem]:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"task.type = \"hub\" needs the hub extra: pip install 'topd[hub]' ({error}).") from error
    try:
        rows = datasets.load_dataset(config.name, config.subset, split=split)
    except (OSError, ValueError, ConnectionError, datasets.exceptions.DatasetsError) as error:
        raise ConfigError(
            f'task.name = "{config.name}" (split {split}) cannot be loaded: {first_line(error)}. Check the '
            "name, the split and the network; a local folder of parquet files works without one."
        ) from error
    columns = {
        "prompt": config.prompt_column,
        "answer": config.answer_column,
        "demonstration": config.demonstration_column,
        "domain": config.domain_column,
    }
    used = {name: column for name, column in columns.items() if column is not None}
    if missing := set(used.values()) - set(rows.column_names):
        raise ConfigError(
            f"task.name = \"{config.name}\" has no column '{sorted(missing)[0]}'; it has {', '.join(rows.column_names)}."
        )
    return [
        problem_from({name: row[column] for name, column in used.items()}, f"{config.name}, {split} row {number}")
        for number, row in enumerate(rows)
    ]
