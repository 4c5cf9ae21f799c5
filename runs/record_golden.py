"""Record tests/e2e/golden_curve.json anew, after a change that is meant to change numbers: python runs/record_golden.py"""

import json
import sys
import tempfile
from pathlib import Path

import topd
from topd import config_file

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.e2e.test_quickstart import GOLDEN, TRACKED, WORDS


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "run"
        topd.train(config_file.load("quickstart", [*WORDS, "--run.directory", str(directory)]))
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    GOLDEN.write_text(json.dumps([{name: row[name] for name in TRACKED} for row in rows[:3]], indent=2) + "\n")


if __name__ == "__main__":
    main()
