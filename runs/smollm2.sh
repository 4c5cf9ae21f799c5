#!/usr/bin/env bash
# The run on real weights, from nothing to docs/results.md's numbers: about two hours on one CPU core.
#   runs/smollm2.sh            run it again, or go on with it after a stop
# Needs the gguf and tasks extras: pip install -c constraints.txt '.[gguf,tasks]'
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1

[ -f runs/smollm2/demonstrations.jsonl ] || python runs/smollm2_demonstrations.py runs/smollm2/demonstrations.jsonl
[ -d runs/smollm2/teacher/model ] || topd train configs/smollm2_teacher.toml --run.resume true
topd probe configs/smollm2.toml
topd train configs/smollm2.toml --run.resume true
python runs/show_curve.py runs/smollm2/teacher runs/smollm2/student
