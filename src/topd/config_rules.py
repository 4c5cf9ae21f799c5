"""Rules that span sections of the configuration: what cannot work together, and what would be ignored."""

import itertools
from collections.abc import Callable, Iterator

from topd.algorithms.base import Method
from topd.config import Config, RolloutConfig

Rule = Callable[[Config, Method], Iterator[str]]


def broken_rules(config: Config, method: Method) -> list[str]:
    """One paragraph for every broken rule. `method`: the configuration's algorithm."""
    return [message for rule in RULES for message in rule(config, method)]


def _teacher(config: Config, method: Method) -> Iterator[str]:
    teachers = config.teachers_by_name()
    if config.teacher is not None and config.teachers:
        yield "[teacher] and [teachers] are both given; a run has one teacher or several by domain. Remove one of the sections."
    if method.asks_teacher and not teachers:
        yield (
            f'[teacher] is missing: algorithm.type = "{config.algorithm.type}" learns from a teacher\'s log-probs. '
            "Add a [teacher] section with a `name`, or choose an algorithm without a teacher (grpo, sft)."
        )
    for name, teacher in teachers.items():
        key = name if config.teacher else f"teachers.{name}"
        if not method.asks_teacher and getattr(teacher, "map_eos", False):
            yield (f'{key}.map_eos would be ignored: algorithm.type = "{config.algorithm.type}" asks no teacher. Remove it.')
        if config.teacher is not None and teacher.domains is not None:
            yield f"{key}.domains would be ignored: one [teacher] answers for all prompts. Remove it, or use [teachers.NAME]."
        if not method.asks_teacher and not config.eval.teacher:
            yield (
                f'[{key}] would be ignored: algorithm.type = "{config.algorithm.type}" asks no teacher, and eval.teacher = false '
                "evaluates none. Remove the section."
            )


def _engine(config: Config, method: Method) -> Iterator[str]:
    rollout = config.rollout
    if not method.samples and rollout.engine != "embedded":
        yield (
            f'rollout.engine = "{rollout.engine}" would be ignored: algorithm.type = "{config.algorithm.type}" samples nothing. '
            "Remove it."
        )
    yield from rollout.options.rules(config)
    if rollout.max_lag < 2 and rollout.max_mismatch_kl != RolloutConfig.model_fields["max_mismatch_kl"].default:
        yield "rollout.max_mismatch_kl would be ignored: rollout.max_lag is below 2. Remove it."


def _minibatches(config: Config, method: Method) -> Iterator[str]:
    prompts, size = config.rollout.prompts_per_step, config.trainer.minibatch_prompts
    if prompts % size:
        near = sorted(range(1, min(prompts, 100_000) + 1), key=lambda d: abs(d - size))
        divisors = ", ".join(str(d) for d in sorted(itertools.islice((d for d in near if prompts % d == 0), 8)))
        yield (
            "trainer.minibatch_prompts must divide rollout.prompts_per_step, so that every update has whole groups; found "
            f"{size} and {prompts}. Divisors near it: {divisors}."
        )


def _group_size(config: Config, method: Method) -> Iterator[str]:
    algorithm, size = config.algorithm, config.rollout.group_size
    if size < algorithm.min_group_size:
        yield (
            f"rollout.group_size must be >= {algorithm.min_group_size} for algorithm.type = "
            f'"{algorithm.type}" (it compares the completions of one prompt), found {size}. '
            'Set rollout.group_size = 8 (the paper\'s), or use algorithm.type = "opd", which needs no group.'
        )
    if not method.samples and size != 1:
        yield (
            f'rollout.group_size must be 1 for algorithm.type = "{algorithm.type}" (a prompt has one demonstration, nothing is '
            f"sampled), found {size}. Set rollout.group_size = 1."
        )


def _sampling(config: Config, method: Method) -> Iterator[str]:
    if not method.samples and (config.rollout.temperature, config.rollout.top_p) != (1, 1):
        yield (
            f'rollout.temperature and rollout.top_p must be 1 for algorithm.type = "{config.algorithm.type}" (nothing is '
            f"sampled), found {config.rollout.temperature} and {config.rollout.top_p}. Remove them."
        )
    if config.eval.temperature == 0 and config.eval.samples_per_problem > 1:
        yield (
            "eval.samples_per_problem must be 1 with eval.temperature = 0 (greedy samples are all the same), found "
            f"{config.eval.samples_per_problem}. Set it to 1, or raise the temperature."
        )


def _benchmarks(config: Config, method: Method) -> Iterator[str]:
    names = [item.name for item in config.eval.benchmarks]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f'eval.benchmarks: the name "{name}" is given twice; numbers are kept by name. Rename one.'


def _prompts(config: Config, method: Method) -> Iterator[str]:
    tasks = {"task": config.task} | {f"eval.benchmarks[{i}].task": item.task for i, item in enumerate(config.eval.benchmarks)}
    for where, task in tasks.items():
        for key in ("system_prompt", "template_arguments"):
            if task.template == "plain" and getattr(task, key) not in (None, {}):
                yield f'{where}.{key} would be ignored with {where}.template = "plain". Remove it, or choose "chat".'


RULES: tuple[Rule, ...] = (_teacher, _engine, _minibatches, _group_size, _sampling, _benchmarks, _prompts)
