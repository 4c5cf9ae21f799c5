"""Rules that span sections of the configuration: what cannot work together, and what would be ignored."""

import itertools
from collections.abc import Callable, Iterator

from topd.algorithms.base import Method
from topd.config import Config, EndpointConfig, Section, server_root

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
        if not method.asks_teacher and teacher.map_eos:
            yield (f'{key}.map_eos would be ignored: algorithm.type = "{config.algorithm.type}" asks no teacher. Remove it.')
        if config.teacher is not None and teacher.domains is not None:
            yield f"{key}.domains would be ignored: one [teacher] answers for all prompts. Remove it, or use [teachers.NAME]."
        if not method.asks_teacher and not config.eval.teacher:
            yield (
                f'[{key}] would be ignored: algorithm.type = "{config.algorithm.type}" asks no teacher, and eval.teacher = false '
                "evaluates none. Remove the section."
            )
        if shared := _roots(teacher) & _roots(config.rollout):
            yield (
                f"{key}.base_url and rollout.base_url share {', '.join(sorted(shared))}, whose weights are replaced by the "
                "student's after every step. Use another server."
            )
        served_only = (*_ENDPOINT, "tokenizer", "api_key_env", "max_dropped_share")
        yield from _only_with(key, teacher, teacher.base_url is None, "base_url is unset", served_only)


def _roots(section: EndpointConfig) -> set[str]:
    return {server_root(url) for url in section.base_url or ()}


_ENDPOINT = ("max_concurrent_requests", "wait_s", "timeout_s", "patience_s", "max_attempts")


def _only_with(key: str, section: Section, ignored: bool, why: str, names: tuple[str, ...]) -> Iterator[str]:
    """Settings that differ from their default although they would be ignored."""
    for name in names if ignored else ():
        if getattr(section, name) != type(section).model_fields[name].default:
            yield f"{key}.{name} would be ignored: {why}. Remove it."


def _engine(config: Config, method: Method) -> Iterator[str]:
    rollout = config.rollout
    if rollout.engine == "embedded":
        names = (*_ENDPOINT, "base_url", "max_lag", "weights", "weights_directory", "model", "api_key_env")
        yield from _only_with("rollout", rollout, True, 'rollout.engine = "embedded" samples in this process', names)
    elif rollout.base_url is None:
        yield 'rollout.base_url is missing: rollout.engine = "vllm" samples through servers. Give their URLs.'
    elif not method.samples:
        yield f'rollout.engine = "vllm" would be ignored: algorithm.type = "{config.algorithm.type}" samples nothing. Remove it.'
    if rollout.max_lag > 1 and rollout.weights == "nccl":
        yield (
            'rollout.max_lag must be 0 or 1 with rollout.weights = "nccl", which keeps no copy of weights that are not yet '
            f'served; found {rollout.max_lag}. Lower it, or set rollout.weights = "files".'
        )
    only = ("max_mismatch_kl",)
    yield from _only_with("rollout", rollout, rollout.max_lag < 2, "rollout.max_lag is below 2", only)
    yield from _only_with(
        "rollout", rollout, rollout.weights == "nccl", 'rollout.weights = "nccl" writes no files', ("weights_directory",)
    )


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


def _concurrency(config: Config, method: Method) -> Iterator[str]:
    rows = config.rollout.max_concurrent_rollouts
    if config.rollout.engine != "embedded":
        return
    for key, size in (
        ("rollout.group_size", config.rollout.group_size),
        ("eval.samples_per_problem", config.eval.samples_per_problem),
    ):
        if rows < size:
            yield (
                f"rollout.max_concurrent_rollouts must be >= {key}, as the completions of a prompt are decoded together; found "
                f"{rows} and {size}. Raise the first or lower the second."
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


RULES: tuple[Rule, ...] = (_teacher, _engine, _minibatches, _group_size, _sampling, _concurrency, _benchmarks, _prompts)
