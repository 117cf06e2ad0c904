#!/bin/sh
# The bundled model's drafter from nothing, on one GPU: its answers, training, evaluation. About four minutes on an H200.
#   sh runs/kimi-nano-drafter.sh                  replaces the bundled drafter
#   sh runs/kimi-nano-drafter.sh tiny             every command, a few steps each, on a CPU; replaces nothing
#   PYTHON=python3.12 sh runs/kimi-nano-drafter.sh   another Python than .venv's
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
PERILUNE="$PYTHON -m perilune.cli.main"
if [ "${1:-}" = tiny ]; then
  RUN=runs/out/kimi_nano_drafter_tiny DEVICE="CPU"
  FORCED="--rows 6 --shard-rows 3 --workers 0" DECODED="--rows 2 --shard-rows 2 --max-tokens 24 --workers 0"
  TRAIN="--steps 2 --chains 200 --unroll 2"
  EVALUATE="--count 2 --lengths 1,3 --max-tokens 24 --speed 1 --users 1"
else
  RUN=runs/out/kimi_nano_drafter DEVICE="NVIDIA H200"
  # So few answers that training sees their kept hidden states again: with 21,906 it ended within the first epoch, 101 steps of
  # 0.7 s instead of 266 of 0.27 s, and 2.03 tokens a verify step instead of 3.35.
  FORCED="--rows 7600 --shard-rows 1900 --minutes 0.6"
  DECODED="--rows 1000 --shard-rows 500 --minutes 0.5 --max-tokens 400 --max-num-seqs 64 --set kv_blocks=4096"
  TRAIN="--minutes 1.2 --chains 8192 --keep-gb 60"
  EVALUATE="--count 64 --lengths 1,3,5,8 --max-tokens 512 --speed 8 --set kv_blocks=4096"
fi
DRAFTER=$RUN/drafter
rm -rf "$DRAFTER"
# shellcheck disable=SC2086  # lists of options
{
  $PERILUNE draft collect kimi-nano --forced --out "$RUN/forced" $FORCED &
  forced=$!
  $PERILUNE draft collect kimi-nano --out "$RUN/decoded" --seed 5 $DECODED
  wait $forced
  $PERILUNE draft train kimi-nano --corpus "$RUN/forced" --corpus "$RUN/decoded" --run "$RUN/run" --out "$DRAFTER" \
    --aux-layers 1,3,4 --intermediate-size 256 $TRAIN
  $PYTHON -m runs.kimi_nano.drafter_narrow "$DRAFTER"
  $PERILUNE draft evaluate "$DRAFTER" $EVALUATE --json "$RUN/evaluation.json" --plot "$RUN/evaluation.svg"
}
cp "$RUN/evaluation.json" "$RUN/evaluation.svg" "$DRAFTER/"
$PYTHON -m runs.kimi_nano.drafter_card --drafter "$DRAFTER" --run "$RUN/run" --corpus "$RUN/forced" \
  --corpus "$RUN/decoded" --device "$DEVICE"
[ "${1:-}" = tiny ] && exit
rm -rf perilune/bundled/kimi-nano/drafter
cp -r "$DRAFTER" perilune/bundled/kimi-nano/drafter
