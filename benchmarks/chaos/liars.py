"""A faulty server in front of a real one, in the words of every dialect: nothing that it says wrong is trained on in silence."""

import asyncio
import gzip
import itertools
import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pyarrow.parquet as pq
from benchmarks.chaos.cases import Ended, Journal, Outcome, difference, finish, fresh, run, serving, start, write_config
from safetensors.torch import load
from tests.endpoint import proxy as faults
from tests.endpoint.proxy import Exchange, Fault, Reply, named, proxying
from tests.endpoint.runs import metrics, served_config
from tests.run.test_resume import results

from topd.models.load import BUILTIN

TRUE = 1e-3
"""Nats by which a stored log-prob of the teacher may differ from what it says itself: dialects differ in rounding."""

Rows = list[list[list[Any]]]
Edit = Callable[[Rows], None]
Change = Callable[[list[float]], Sequence[float]]
FORMS = {"/v1/score": "topd", "/generate": "sglang"}


def said_otherwise(name: str, edit: Edit) -> Fault:
    """Answers with log-probs are edited, in whichever form they were asked for; `edit` gets rows of [token id, log-prob]."""

    async def fault(exchange: Exchange) -> Reply:
        reply, request = await exchange.forward(), exchange.request
        if reply.status != 200:
            return reply
        form = FORMS.get(request.path) or ("vllm" if "prompt_logprobs" in request.json else "echo")
        rows = faults.DIALECTS[form]().rows(request, reply)
        try:
            edit(rows)
        except (StopIteration, IndexError):  # one row cannot change places, nor tokens that are all alike
            return reply
        return faults.DIALECTS[form]().with_rows(request, reply, rows)

    return named(name, fault)


def numbers(name: str, change: Change) -> Fault:
    """Right ids with other log-probs; `change` gets those of a row."""

    def edit(rows: Rows) -> None:
        for row in rows:
            entries = [entry for entry in row if entry[1] is not None]
            for entry, value in zip(entries, change([entry[1] for entry in entries]), strict=True):
                entry[1] = value

    return said_otherwise(name, edit)


NUMBERS = [
    numbers("shifted left", lambda row: [*row[1:], row[-1]]),
    numbers("shifted right", lambda row: [row[0], *row[:-1]]),
    numbers("rotated", lambda row: [*row[1:], row[0]]),
    numbers("reversed", lambda row: row[::-1]),
    numbers("zeros", lambda row: [0.0] * len(row)),
    numbers("constant", lambda row: [-1.0] * len(row)),
    numbers("log10", lambda row: [x / math.log(10) for x in row]),
    numbers("0.2 too high", lambda row: [min(0.0, x + 0.2) for x in row]),
    numbers("0.2 too low", lambda row: [x - 0.2 for x in row]),
    numbers("probabilities negated", lambda row: [-math.exp(x) for x in row]),
]


async def bomb(exchange: Exchange) -> Reply:
    """300 MB of zeros in 300 kB."""
    await exchange.forward()
    return Reply(200, BOMB, {"content-encoding": "gzip", "content-type": "application/json"})


BOMB = gzip.compress(bytes(300_000_000), compresslevel=1)


async def drip(exchange: Exchange) -> None:
    """A byte now and then."""
    for byte in (await exchange.forward()).encoded():
        exchange.writer.write(bytes([byte]))
        await exchange.writer.drain()
        await asyncio.sleep(0.2)


async def same_index_twice(exchange: Exchange) -> Reply:
    reply = await exchange.forward()
    return (
        reply
        if reply.status != 200
        else reply.with_json({**reply.json, "choices": [c | {"index": 0} for c in reply.json["choices"]]})
    )


async def two_answers(exchange: Exchange) -> Reply:
    reply = await exchange.forward()
    return replace(reply, body=reply.body * 2)


BODIES = [
    faults.stall,
    faults.reset_before_headers,
    faults.reset_after_headers,
    faults.cut_off,
    faults.html,
    faults.empty,
    faults.truncated,
    two_answers,
    bomb,
    drip,
    faults.status(502),
    faults.status(500, body="x" * 30_000_000),
    faults.status(404),
    faults.status(429, retry_after="999999"),
    faults.status(503, retry_after="999999"),
    faults.busy_until(999_999),
    faults.status(307, location="http://127.0.0.1:9/"),
]
NAME = "a-teacher"
OTHER, HOT = "another model behind a load balancer", "temperature ignored"


async def _ignore_temperature(exchange: Exchange) -> Reply:
    asked = exchange.request.json
    body = json.dumps({**asked, "temperature": 1.0}).encode()
    return await exchange.proxy.speak(replace(exchange.request, body=body))


def kinds(dialect: str) -> dict[str, Fault | None]:
    """All that is wrong at a server of that dialect; None for what the other model says."""
    edits = [said_otherwise(name, edit) for name, edit in faults.DIALECTS[dialect].edits.items()]
    index = [same_index_twice] if dialect in ("vllm", "echo") else []
    named_faults = {fault.__name__: fault for fault in [*NUMBERS, *edits, *index, *BODIES]}
    heat = {HOT: named(HOT, _ignore_temperature)} if dialect == "topd" else {}
    return named_faults | heat | {OTHER: None}


class Liars:
    def __init__(self, folder: Path, teacher: str, other: str) -> None:
        self.folder, self.teacher, self.other = folder, teacher, other
        self.tokenizer = fresh(folder / "tokenizer")
        for file in (BUILTIN / "tiny-teacher").iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, self.tokenizer)
        self.healthy: dict[tuple[str, str], dict[str, Any]] = {}

    def tree(self, directory: Path, url: str, kind: str, weights: bool = False) -> dict[str, Any]:
        """`weights`: whether the teacher's are at hand, to be compared with."""
        tree = served_config(directory, url, teacher__max_dropped_share=0.3, teacher__max_attempts=4)
        tree["teacher"] |= {"name": NAME, "tokenizer": str(BUILTIN / "tiny-teacher" if weights else self.tokenizer)}
        if kind == HOT:
            tree["rollout"]["temperature"] = 0.7
        return tree

    def whole(self, dialect: str, kind: str) -> dict[str, Any]:
        """The results of a run with a healthy server."""
        key = dialect, kind if kind == HOT else ""
        if key not in self.healthy:
            folder = fresh(self.folder / "whole")
            with proxying(self.teacher, dialect) as proxy:
                ended = run("train", write_config(folder, self.tree(folder / "run", proxy.url, kind)))
            assert ended.code == 0, ended.output
            self.healthy[key] = results(folder / "run")
        return self.healthy[key]

    def untrue(self, directory: Path, temperature: float) -> str:
        """Which stored log-prob of the teacher is not what the teacher says; "" if none."""
        for path in sorted((directory / "rollouts").glob("*.parquet")):
            rows = pq.read_table(path, columns=["prompt_ids", "completion_ids", "teacher_logprobs"]).to_pylist()
            groups = [{"prompt": row["prompt_ids"], "completions": [row["completion_ids"]]} for row in rows]
            answer = httpx2.post(f"{self.teacher}/score", json={"groups": groups, "temperature": temperature}, timeout=60)
            right = load(answer.content)["logprobs"].tolist()
            stored = [x for row in rows for x in row["teacher_logprobs"]]
            worst = max(abs(a - b) for a, b in zip(stored, right, strict=True))
            if not worst <= TRUE:
                return f"{path.name} holds log-probs that are wrong by up to {worst:.2g} nats"
        return ""

    def case(self, source: random.Random, dialect: str, kind: str, rate: float, after: bool) -> Outcome:
        """`after`: only once the run has proven its teacher."""
        whole, folder, fault = self.whole(dialect, kind), fresh(self.folder / "case"), kinds(dialect)[kind]
        with proxying(self.teacher, dialect) as proxy:
            other = faults.FaultProxy(self.other, dialect)

            async def balance(exchange: Exchange) -> Reply:
                other._client = proxy._client
                return await other.speak(exchange.request)

            every, turn = round(1 / rate), itertools.count(source.randrange(round(1 / rate)))

            def schedule(number: int) -> Fault | None:
                on = not after or (folder / "run/probe.json").exists()
                return (fault or balance) if on and next(turn) % every == 0 else None

            proxy.give(schedule)
            weights = source.random() < 0.25
            tree = self.tree(folder / "run", proxy.url, kind, weights)
            config = write_config(folder, tree)
            ended = finish(start("train", config))
            given = len(proxy.given)
            proxy.give(None)
            temperature = tree["rollout"].get("temperature", 1.0)
            verdict, words = self.judge(ended, config, folder / "run", whole, temperature)
        row = f"liars, {dialect}, {rate:.0%}"
        when = f"{', after the start' if after else ''}{', weights at hand' if weights else ''} ({given} times)"
        return Outcome(row, verdict, f"{kind}{when}: {words}")

    def judge(self, ended: Ended, config: str, directory: Path, whole: dict[str, Any], temperature: float) -> tuple[str, str]:
        if ended.crashed or ended.code == 130:
            return "crash", ended.last_words
        if ended.code == 2:
            return "refused", ended.last_words
        untrue = self.untrue(directory, temperature)
        if untrue:
            marks = ("WARNING  teacher", "not proven  teacher")
            is_named = any(mark in ended.output for mark in marks)
            return "named" if is_named else "silent", f"{untrue}; {ended.last_words}"
        if ended.code == 3:
            again = run("train", config, "--run.resume", "true")
            if again.code != 0:
                return "crash", f"stopped, and not resumed: {again.last_words}"
            verdict, words = self.judge(again, config, directory, whole, temperature)
            return "stopped" if verdict == "exact" else verdict, f"{ended.last_words} Resumed: {words}"
        changed = difference(directory, whole)
        dropped = sum(row["teacher/dropped_groups"] or 0 for row in metrics(directory))
        if changed and dropped:
            return "named", f"{dropped:g} groups left out and counted"
        return ("silent", f"{changed}: {ended.last_words}") if changed else ("exact", "")


def play(journal: Journal, folder: Path, seed: int, count: int) -> None:
    """Wrong numbers first, then wrong answers, then what never was one, of which half comes last."""
    every = list(itertools.product(faults.DIALECTS, (1.0, 0.2), (False, True)))
    todo = [(dialect, kind, rate, after) for dialect, rate, after in every for kind in kinds(dialect)]
    random.Random(seed).shuffle(todo)
    numbers_first = {fault.__name__: 0 for fault in NUMBERS} | {HOT: 0, OTHER: 0} | {fault.__name__: 2 for fault in BODIES}
    todo.sort(key=lambda case: (tier := numbers_first.get(case[1], 1)) + (tier == 2 and (case[2] == 1.0) != case[3]))
    name = ("--name", NAME)
    with serving("builtin:tiny-teacher", *name) as teacher, serving("builtin:tiny-student", *name) as other:
        liars = Liars(folder, teacher, other)
        for number, case in enumerate(todo[:count]):
            journal.play(f"liars {seed} {number}", lambda source, case=case: liars.case(source, *case))
