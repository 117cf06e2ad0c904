#!/bin/sh
# The bundled text model from nothing, on one GPU: vocabulary, training, INT4 export, training on from the export with the
# learning rate warmed up anew, export, scores, card. About 32 minutes on an H200: 13.5 and 10 of training.
# The weights bundled now are those of the first stage alone, of 21 November, when the generators had plain wordings only.
# sh runs/kimi-nano.sh [DOCS]   DOCS: a directory with the Python documentation's *.rst.txt sources (optional)
# PYTHON=python3.12 sh runs/kimi-nano.sh   another Python than .venv's
set -eu
DOCS="${1:+$(cd "$1" && pwd)}"
cd "$(dirname "$0")/.."
RUN=runs/out/kimi_nano
MODEL=perilune/bundled/kimi-nano
PYTHON="${PYTHON:-.venv/bin/python}"
$PYTHON -m runs.kimi_nano.train --out "$RUN/first" --minutes 13.5 ${DOCS:+--docs "$DOCS"}
$PYTHON -m runs.kimi_nano.export --run "$RUN/first" --out "$RUN/first/model"
$PYTHON -m runs.kimi_nano.train --out "$RUN" --from "$RUN/first/model" --rate 0.0016 --minutes 10 ${DOCS:+--docs "$DOCS"}
$PYTHON -m runs.kimi_nano.export --run "$RUN" --out "$MODEL"
$PYTHON -m runs.kimi_nano.evaluate --model "$MODEL" --run "$RUN" --log "$RUN/evaluation.jsonl"
$PYTHON -m perilune.cli.main evaluate kimi-nano --count 200 --concurrency 64 --ledger bench/results
$PYTHON -m runs.kimi_nano.card --model "$MODEL" --log "$RUN/log.jsonl"
