"""Make the pair of models and the data that ship with the package (src/topd/builtin).

    python runs/make_builtin.py [--work FOLDER]

The task: add two to five numbers, one worked step at a time.

    prompt "17+58+23="    completion "17+58=75;75+23=98;98"

Both models are Qwen3-shaped, start from random weights and learn from worked solutions with `topd train` (algorithm sft). The
student ends with sloppy ones, in which every other step is wrong: it can add, but often does not, and that is what a teacher can
mend in minutes. What was used and what came out is written to src/topd/builtin/RECORD.json.
"""

import argparse
import hashlib
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import topd

BUILTIN = Path(topd.__file__).parent / "builtin"
SEED = 20260704
CHARACTERS = "0123456789+=;"
SIZES = {"tiny-student": {"layers": 3, "hidden": 80, "heads": 4}, "tiny-teacher": {"layers": 4, "hidden": 176, "heads": 4}}
STAGES = {  # (solutions, steps of 640 prompts, peak learning rate)
    "tiny-student": [("demonstration", 110, 2e-3), ("sloppy", 6, 1e-3)],
    "tiny-teacher": [("demonstration", 100, 2e-3)],
}
SLIP_RATE = 0.5
SLIPS = [slip for slip in range(-10, 11) if slip]


def problem(generator: random.Random) -> dict[str, str]:
    """A sum and two solutions: one right, and one in which about half of the steps are wrong."""
    numbers = [generator.randint(1, 99) for _ in range(generator.randint(2, 5))]
    return {
        "prompt": "+".join(map(str, numbers)) + "=",
        "answer": str(sum(numbers)),
        "demonstration": solve(numbers, lambda: 0),
        "sloppy": solve(numbers, lambda: generator.choice(SLIPS) if generator.random() < SLIP_RATE else 0),
    }


def solve(numbers: list[int], slip: Callable[[], int]) -> str:
    """The running total, one addition a step; `slip` is added to each result."""
    steps, total = [], numbers[0]
    for number in numbers[1:]:
        result = max(0, total + number + slip())
        steps.append(f"{total}+{number}={result}")
        total = result
    return ";".join([*steps, str(total)])


def write(path: Path, rows: list[dict[str, str]], fields: tuple[str, ...]) -> None:
    lines = [json.dumps({field: row[field] for field in fields}) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def random_model(folder: Path, *, layers: int, hidden: int, heads: int) -> None:
    words = tokenizer()
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    torch.manual_seed(SEED)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--work", type=Path, default=Path("runs/builtin_work"))
    arguments.add_argument("--only", choices=list(SIZES))
    options = arguments.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    BUILTIN.mkdir(exist_ok=True)
    generator = random.Random(SEED)
    rows = list({row["prompt"]: row for row in (problem(generator) for _ in range(60_000))}.values())
    held_out, shipped = rows[:128], rows[128:2176]
    write(BUILTIN / "sums_eval.jsonl", held_out, ("prompt", "answer"))
    write(BUILTIN / "sums_train.jsonl", shipped, ("prompt", "answer", "demonstration"))

    record_file = BUILTIN / "RECORD.json"
    record = json.loads(record_file.read_text()) if record_file.is_file() else {}
    for name, size in SIZES.items():
        if options.only not in (None, name):
            continue
        began = time.perf_counter()
        folder = options.work / f"{name}-random"
        random_model(folder, **size)
        for number, (solutions, steps, rate) in enumerate(STAGES[name]):
            data = options.work / f"{solutions}.jsonl"
            shown = [{**row, "demonstration": row[solutions]} for row in rows[128:]]
            write(data, shown, ("prompt", "answer", "demonstration"))
            run = options.work / f"{name}-{number}"
            shutil.rmtree(run, ignore_errors=True)
            summary = topd.train(configuration(folder, data, run, steps, rate))
            folder = run / "model"
        target = BUILTIN / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        weights = {key: tensor.bfloat16().contiguous() for key, tensor in load_file(target / "model.safetensors").items()}
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        (target / "model.safetensors").chmod(0o644)
        record[name] = {
            "seed": SEED,
            "parameters": sum(tensor.numel() for tensor in weights.values()),
            "seconds": round(time.perf_counter() - began, 1),
            "stages": STAGES[name],
            "before_rounding": summary["student"],
            "sha256": hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest(),
            **size,
        }
        record_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(record[name]))


def configuration(model: Path, data: Path, run: Path, steps: int, rate: float) -> dict[str, object]:
    return {
        "student": {"name": str(model)},
        "task": {
            "type": "jsonl",
            "path": str(data),
            "eval_path": "builtin:sums_eval.jsonl",
            "grader": "exact",
            "answer_pattern": "([^;]+)$",
        },
        "rollout": {"prompts_per_step": 640, "group_size": 1, "max_completion_tokens": 64, "max_concurrent_rollouts": 512},
        "algorithm": {"type": "sft"},
        "trainer": {"minibatch_prompts": 32, "learning_rate": rate, "schedule": "cosine", "warmup_updates": 20},
        "run": {"directory": str(run), "steps": steps, "seed": 0, "threads": 1, "checkpoint_every": 1000},
    }


if __name__ == "__main__":
    main()
