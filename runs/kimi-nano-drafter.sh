#!/bin/sh
# The bundled model's drafter from nothing, on one GPU: its answers, training, evaluation. About four minutes on an H200.
# PYTHON=python3.12 sh runs/kimi-nano-drafter.sh   another Python than .venv's
set -eu
cd "$(dirname "$0")/.."
RUN=runs/out/kimi_nano_drafter
DRAFTER=perilune/bundled/kimi-nano/drafter
PERILUNE="${PYTHON:-.venv/bin/python} -m perilune.cli.main"
$PERILUNE draft collect kimi-nano --forced --out "$RUN/forced" --rows 200000 --shard-rows 4096 --minutes 0.6
$PERILUNE draft collect kimi-nano --out "$RUN/decoded" --rows 200000 --shard-rows 1024 --minutes 0.5 --max-tokens 400 \
  --max-num-seqs 64 --seed 5
$PERILUNE draft train kimi-nano --corpus "$RUN/forced" --corpus "$RUN/decoded" --run "$RUN/run" --out "$RUN/drafter" \
  --minutes 1.2 --chains 8192 --aux-layers 1,3,4 --intermediate-size 448 --keep-gb 60
$PERILUNE draft evaluate "$RUN/drafter" --count 64 --lengths 1,3,5,8 --max-tokens 512 --json "$RUN/evaluation.json"
rm -rf "$DRAFTER"
cp -r "$RUN/drafter" "$DRAFTER"
cp "$RUN/evaluation.json" "$DRAFTER/evaluation.json"
${PYTHON:-.venv/bin/python} -m runs.kimi_nano.drafter_card --drafter "$DRAFTER" --run "$RUN/run" \
  --corpus "$RUN/forced" --corpus "$RUN/decoded"
