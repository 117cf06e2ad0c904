#!/bin/sh
# Mining against more of the mixture: three seeds, from the bundled drafter and from drafts of 150 steps. One GPU of 140 GB;
# about ten minutes by estimate: not yet run whole.
# PYTHON=python3.12 sh runs/kimi-nano-mining.sh   another Python than .venv's
set -eu
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
${PYTHON:-.venv/bin/python} -m runs.kimi_nano.mining --out runs/out/kimi_nano_mining --begin 0 150 --steps 80 \
  --share 0.3 0.6 --seeds 1 2 3 --held-out-seed 1 --count 128 --processes 4 --ledger bench/results
