#!/bin/sh
# Mining against more of the mixture: two settings (runs/kimi_nano/mining_setting.py), three seeds. One GPU of 140 GB: the
# first took seven and a half minutes, the second has not been run. What is in runs/out/kimi_nano_mining is not made again.
# PYTHON=python3.12 sh runs/kimi-nano-mining.sh   another Python than .venv's
set -eu
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
${PYTHON:-.venv/bin/python} -m runs.kimi_nano.mining --out runs/out/kimi_nano_mining --ways mined --count 160 \
  --processes 5 --ledger bench/results
