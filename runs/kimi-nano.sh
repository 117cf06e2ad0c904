#!/bin/sh
# The bundled model from nothing, on one GPU: vocabulary, training, INT4 export, scores, card. About 20 minutes on an H200.
# sh runs/kimi-nano.sh [DOCS]   DOCS: a directory with the Python documentation's *.rst.txt sources (optional)
# PYTHON=python3.12 sh runs/kimi-nano.sh   another Python than .venv's
set -eu
DOCS="${1:+$(cd "$1" && pwd)}"
cd "$(dirname "$0")/.."
RUN=runs/out/kimi_nano
MODEL=perilune/bundled/kimi-nano
PYTHON="${PYTHON:-.venv/bin/python}"
$PYTHON -m runs.kimi_nano.train --out "$RUN" --minutes 13.5 ${DOCS:+--docs "$DOCS"}
$PYTHON -m runs.kimi_nano.export --run "$RUN" --out "$MODEL"
$PYTHON -m runs.kimi_nano.evaluate --model "$MODEL" --run "$RUN" --log "$RUN/evaluation.jsonl"
$PYTHON -m perilune.cli.main evaluate kimi-nano --count 200 --concurrency 64 --ledger bench/results
$PYTHON -m runs.kimi_nano.card --model "$MODEL" --log "$RUN/log.jsonl"
