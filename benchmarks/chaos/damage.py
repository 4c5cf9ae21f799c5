"""Files of a run folder that change on disk: a bit, the end, a line, the whole file. Then the run goes on, or is looked at."""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.chaos.cases import Ended, Journal, Outcome, difference, finish, run, serving, start, warnings, write_config
from tests.endpoint import proxy as faults
from tests.endpoint.proxy import Exchange, Fault, proxying
from tests.endpoint.runs import served_config
from tests.run.test_resume import results

SETTINGS = {"run__steps": 5, "run__checkpoint_every": 2, "run__keep_checkpoints": 2, "eval__every_steps": 2}
TEXT = (".json", ".jsonl", ".toml")


def flip(content: bytes, source: random.Random) -> bytes:
    place = source.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << source.randrange(8)]) + content[place + 1 :]


def cut(content: bytes, source: random.Random) -> bytes:
    return content[: source.randrange(len(content))]


def zero(content: bytes, source: random.Random) -> bytes:
    """A block that never reached the disk."""
    place, size = source.randrange(len(content)), source.choice((16, 512, 4096))
    return content[:place] + bytes(len(content[place : place + size])) + content[place + size :]


def garbage(content: bytes, source: random.Random) -> bytes:
    return source.randbytes(source.randrange(1, 4096))


def other_digit(content: bytes, source: random.Random) -> bytes:
    places = [match.start() for match in re.finditer(rb"[0-9]", content)]
    place = source.choice(places)
    return content[:place] + str((int(content[place : place + 1]) + source.randrange(1, 10)) % 10).encode() + content[place + 1 :]


def lose_line(content: bytes, source: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    del lines[source.randrange(len(lines))]
    return b"".join(lines)


def repeat_line(content: bytes, source: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join([*lines, source.choice(lines)])


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a bit flipped": flip,
    "cut off": cut,
    "a block of zeros": zero,
    "emptied": lambda content, source: b"",
    "garbage": garbage,
}
IN_TEXT = {"another digit": other_digit, "a line less": lose_line, "a line twice": repeat_line}


SHOWN = ("rollouts", "updates", "vocabulary", "metrics", "evals", "summary", "config.toml", "environment", "digests", "probe")
READ = {"resume": ("",), "report": SHOWN, "explain": SHOWN, "rescore": SHOWN, "eval": ("model", "config.toml", "digests")}
"""How the names of files begin that a command may read."""


def damage(folder: Path, source: random.Random, command: str) -> tuple[str, str]:
    """Damage one file that the command may read, each kind of file as likely; its name, and what happened to it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    files = [path for path in files if str(path.relative_to(folder)).startswith(READ[command])]
    kinds: dict[str, list[Path]] = {}
    for path in files:
        parts = path.relative_to(folder).parts
        kinds.setdefault(parts[0] if parts[0] != "checkpoints" else f"{parts[0]} {path.name}", []).append(path)
    path = source.choice(kinds[source.choice(sorted(kinds))])
    name, content = str(path.relative_to(folder)), path.read_bytes()
    siblings = [other for other in files if other != path and other.suffix == path.suffix and other.read_bytes() != content]
    every = {**CHANGES, **(IN_TEXT if path.suffix in TEXT else {})}
    what = source.choice([*every, "deleted", *(["that of another"] if siblings else [])])
    if what == "deleted":
        path.unlink()
    elif what == "that of another":
        shutil.copy(source.choice(siblings), path)
    else:
        path.write_bytes(every[what](content, source))
    return name, what if (path.exists() and path.read_bytes() != content) or what == "deleted" else "nothing, as it came out"


def is_of(line: str, name: str) -> bool:
    """Whether a line speaks of a file, by its name, its folder's or the number of its step."""
    path = Path(name)
    step = re.search(r"step_0*(\d+)", name)
    words = [path.name, *([path.parent.name, f"step {step[1]}", f"steps {step[1]}"] if step else [])]
    return any(re.search(rf"\b{re.escape(word)}\b", line) for word in words)


class Damage:
    """`stopped` and `done` are one run, killed while its fourth step was scored, and at its end."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.now = folder / "now" / "run"
        self.config = write_config(folder / "now", served_config(self.now, url, **SETTINGS))
        shutil.rmtree(self.now, ignore_errors=True)
        self.resume = ("train", self.config, "--run.resume", "true")
        with proxying(url) as proxy:
            asked: list[int] = []

            def schedule(number: int) -> Fault | None:
                asked.append((self.now / "rollouts/step_000003.parquet").exists())
                return kill if sum(asked) == 3 else None

            async def kill(exchange: Exchange) -> None:
                process.kill()
                await faults.stall(exchange)

            proxy.give(schedule)
            process = start("train", write_config(folder / "first", served_config(self.now, proxy.url, **SETTINGS)))
            ended = finish(process)
            assert ended.code == -9, ended.output
        self.keep("stopped")
        ended = run(*self.resume)
        assert (ended.code, warnings(ended)) == (0, []), ended.output
        self.whole = results(self.now)
        self.keep("done")
        self.views = {"explain": ("explain", str(self.now), "--step", "2", "--group", "1")}
        self.views["report"] = ("report", str(self.now))
        self.views["rescore"] = ("rescore", str(self.now), "--algorithm.alpha", "0.1")
        self.views["eval"] = ("eval", str(self.now / "model"), "--config", self.config)
        self.seen = {}
        for name, words in self.views.items():
            self.take("done")
            self.seen[name] = self.view(run(*words))

    def keep(self, name: str) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        shutil.copytree(self.now, self.folder / name)

    def take(self, name: str) -> None:
        shutil.rmtree(self.now, ignore_errors=True)
        shutil.copytree(self.folder / name, self.now)

    def view(self, ended: Ended) -> str:
        """What was shown and written, without the times."""
        written = [self.now / "report.html", *sorted((self.now / "rescores").glob("*.json"))]
        texts = [ended.output, *(path.read_text(errors="replace") for path in written if path.is_file())]
        return re.sub(r"\d+(\.\d+)? ?(s|ms|MB|GiB)\b|\d{4}-\d\d-\d\d[T ][\d:.]+", "", "\n".join(texts))

    def resumed(self, source: random.Random) -> Outcome:
        self.take("stopped")
        name, what = damage(self.now, source, "resume")
        changed = (self.now / name).read_bytes() if (self.now / name).is_file() else None
        ended = run(*self.resume)
        words, row = f"{name}: {what}", "damage, then resume"
        if ended.crashed:
            return Outcome(row, "crash", f"{words}: {ended.last_words}")
        if ended.code:
            return Outcome(row, *self.put_back(name, f"{words}: {ended.last_words}", source))
        left = changed is not None and (self.now / name).is_file() and (self.now / name).read_bytes() == changed
        if left:  # it was not read: it did no harm, and whoever reads it will be told
            shutil.copy(self.folder / "done" / name, self.now / name)
        differs = difference(self.now, self.whole)
        said = [line for line in warnings(ended) if is_of(line, name)]
        verdict = "exact" if not differs else "named" if said else "silent"
        return Outcome(row, verdict, f"{words}{', not read' if left else ''}: {differs} {' '.join(warnings(ended))}")

    def put_back(self, name: str, words: str, source: random.Random) -> tuple[str, str]:
        """A refusal must leave the run as it was: with the file put back it goes on, exactly. Tried for some."""
        if source.random() > 0.2:
            return "refused", words
        shutil.copy(self.folder / "stopped" / name, self.now / name)
        ended = run(*self.resume)
        differs = ended.last_words if ended.code else difference(self.now, self.whole)
        return ("silent", f"{words}; with the file put back: {differs}") if differs else ("refused", f"{words}; then exact")

    def looked_at(self, source: random.Random, view: str) -> Outcome:
        self.take("done")
        name, what = damage(self.now, source, view)
        ended = run(*self.views[view])
        words, row = f"{name}: {what}", f"damage, then {view}"
        if ended.crashed:
            return Outcome(row, "crash", f"{words}: {ended.last_words}")
        if ended.code:
            return Outcome(row, "refused", f"{words}: {ended.last_words}")
        seen = self.view(ended)
        if seen == self.seen[view]:
            return Outcome(row, "exact", words)
        more = [line for line in seen.splitlines() if line not in self.seen[view]]
        said = [
            line
            for line in more
            if re.search(
                r"note: |class=.problem|\bdamaged|not there|not proven|could not be read|missing|left out|lost|lacks", line
            )
        ]
        shown = " ".join(" ".join(said or more).split())[:400]
        return Outcome(row, "named" if any(is_of(line, name) for line in said) else "silent", f"{words}: {shown}")


def play(journal: Journal, folder: Path, seed: int, count: int) -> None:
    with serving("builtin:tiny-teacher") as url:
        cases = Damage(folder, url)
        for number in range(count):
            view = ("resume", "resume", *cases.views)[number % 6]
            act = cases.resumed if view == "resume" else lambda source, view=view: cases.looked_at(source, view)
            journal.play(f"damage {seed} {number}", act)
