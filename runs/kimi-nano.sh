#!/bin/sh
# The bundled model from nothing, on one GPU: vocabulary, training, INT4 export, training on from the export with the
# learning rate warmed up anew, export, eyes (the text model learns too), scores, card. About 45 minutes on an H200: 13.5,
# 10 and 9 of training.
# The weights bundled now took this recipe's second stage seven times after 13.5 minutes from nothing on 21 November, when the
# generators had plain wordings only: 8.6 minutes and eyes on 24 November, 8.5 (--rate 0.0015) and eyes on 28 November, then on two
# GPUs (--gpus 2 --tokens 65536 --rate 0.0016) on 29 November 8 minutes and eyes of 2.8 and 4.2, which began with the tower of the
# 28th, 11 and eyes of 4.2, and 11.5, with plain texts of people, and eyes of 4.2 (--tower model-vision.safetensors --reading 0.05
# --guide 0.4 --rate 1.5e-3 --words RUN --words-rate 1.5e-4 --words-kept 0). A mean with the stage before followed these two
# (runs.kimi_nano.average). On 30 November: four GPUs (--gpus 4 --tokens 65536 --rate 0.0022), 7.8 minutes and eyes of 3.8, no mean;
# then 60 steps on two CPU cores with half the tokens of sums (--device cpu --tokens 2048 --steps 60 --rate 5e-4 --optimizer adamw)
# and a mean with the weights before these (--share 0.6). Then, the same day, two GPUs, 13.5 minutes and eyes of 4, no mean. The
# last stage of text: two GPUs, 14.1 minutes and eyes of 4 (B, --words-rate 1e-4). Then on 1 December eyes with more text
# (--tower model-vision.safetensors --reading 0.02 --guide 0.4 --rate 1.2e-3 --words RUN --words-kept 0 --word-tokens 65536): 6.2
# minutes from B (--words-rate 3e-4) and a mean with B (--share 0.47), 15.5 minutes from that mean (--words-rate 8e-4 --tokens 8192
# --seed 20261201) and a mean with it (--share 0.4).
# sh runs/kimi-nano.sh [DOCS [FONTS [SETS]]]   DOCS: a directory with the Python documentation's *.rst.txt sources, or ''
#                                              FONTS: a directory with TrueType fonts for pictures, or ''
#                                              SETS: a directory with clones of public data sets, whose sentences are
#                                              learnt too: openai/grade-school-math, arkilpatel/SVAMP, sonos/nlu-benchmark,
#                                              xliuhw/NLU-Evaluation-Data, uci-soe/FairytaleQAData, julianmichael/qamr,
#                                              google-research-datasets/dstc8-schema-guided-dialogue, clinc/oos-eval,
#                                              PolyAI-LDN/task-specific-datasets, tuetschek/e2e-dataset,
#                                              google-deepmind/xquad, google-research-datasets/Taskmaster,
#                                              global-asp/asp-source, yizhongw/self-instruct and
#                                              ShishirPatil/gorilla of GitHub
# On N GPUs of one host (train --gpus N --tokens 65536 --rate 0.0022 for four) a step has N times the tokens.
# PYTHON=python3.12 sh runs/kimi-nano.sh   another Python than .venv's
set -eu
DOCS="${1:+$(cd "$1" && pwd)}"
FONTS="${2:+$(cd "$2" && pwd)}"
SETS="${3:+$(cd "$3" && pwd)}"
cd "$(dirname "$0")/.."
RUN=runs/out/kimi_nano
MODEL=perilune/bundled/kimi-nano
PYTHON="${PYTHON:-.venv/bin/python}"
mkdir -p "$RUN"
WRITTEN="${SETS:+$RUN/sets.jsonl.xz}"
[ -z "$SETS" ] || $PYTHON -m runs.kimi_nano.written "$SETS" "$WRITTEN"
$PYTHON -m runs.kimi_nano.train --out "$RUN/first" --minutes 13.5 ${DOCS:+--docs "$DOCS"} ${WRITTEN:+--written "$WRITTEN"}
$PYTHON -m runs.kimi_nano.export --run "$RUN/first" --out "$RUN/first/model"
$PYTHON -m runs.kimi_nano.train --out "$RUN" --from "$RUN/first/model" --rate 0.0016 --minutes 10 ${DOCS:+--docs "$DOCS"} \
  ${WRITTEN:+--written "$WRITTEN"}
$PYTHON -m runs.kimi_nano.export --run "$RUN" --out "$MODEL"
$PYTHON -m runs.kimi_nano.eyes --model "$MODEL" --out "$RUN/eyes" --words "$RUN" --minutes 9 ${FONTS:+--fonts "$FONTS"}
$PYTHON -m runs.kimi_nano.evaluate --model "$MODEL" --run "$RUN" --log "$RUN/evaluation.jsonl"
$PYTHON -m perilune.cli.main evaluate kimi-nano --count 200 --concurrency 64 --ledger bench/results
PICTURES="--families picture_sums,picture_shapes,picture_charts,picture_buttons --count 200 --concurrency 64 --ledger bench/results"
$PYTHON -m perilune.cli.main evaluate kimi-nano $PICTURES
for SHOWN in blank none; do $PYTHON -m perilune.cli.main evaluate kimi-nano $PICTURES --pictures "$SHOWN" --thinking off; done
$PYTHON -m runs.kimi_nano.card --model "$MODEL" --log "$RUN/log.jsonl" --eyes-log "$RUN/eyes/eyes.jsonl"
