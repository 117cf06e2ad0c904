"""`perilune bench`: speed beside its ceiling."""

import click

from perilune.cli.shared.verbs import Verbs

VERBS = {
    "decode": "decode speed of the real engine, or per layer on large shapes",
    "prefill": "time per layer of a prompt, on large shapes (needs a GPU)",
    "vision": "a picture through a vision tower of Kimi K2.5's size",
    "exchange": "what tensor-parallel ranks exchange, between GPUs",
    "orders": "what it costs to send a step to other ranks",
    "aa": "TTFT, output speed and more, as Artificial Analysis takes them",
    "serve": "tokens/s per user against all, and goodput, by concurrency",
    "replay": "replay a trace of agents' sessions: cache hits, TTFT, interactivity",
    "drafts": "what speculation gains on a mixed trace",
    "loading": "load a large checkpoint, with the page cache cold and warm",
    "peers": "beside others: experts on a GPU, or with --cpu decoding",
    "schemas": "validity of tool calls and structured answers",
    "convert": "error and time of the search for NVFP4 scales",
}


@click.group(cls=Verbs, verbs=VERBS, package="perilune.cli.bench")
def command() -> None:
    """Measure speed, with the ceiling beside it. The last line of output is JSON."""
