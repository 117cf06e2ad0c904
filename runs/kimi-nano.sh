#!/bin/sh
# The bundled model from nothing: vocabulary, training, INT4 export, scores and model card.
# sh runs/kimi-nano.sh [THREADS]   seed and data are fixed; needs the packages of `make install` and one CPU
set -eu
cd "$(dirname "$0")/.."
THREADS="${1:-2}"
RUN=runs/out/kimi-nano
MODEL=perilune/bundled/kimi-nano
PYTHON=.venv/bin/python
$PYTHON -m runs.nano.train --out "$RUN" --steps 5000 --threads "$THREADS"
$PYTHON -m runs.nano.export --run "$RUN" --out "$MODEL"
$PYTHON -m runs.nano.evaluate --model "$MODEL" --threads "$THREADS" --card "$RUN/train.json"
