"""Times a decode graph, for measurements."""

import statistics

import torch

from perilune.engine.graphs.decode import Graph

REPLAYS = 2  # launched back to back and timed together in a round


def replays(rounds: int) -> int:
    """How often `replay_seconds` replays its graph."""
    return (1 + rounds) * (1 + REPLAYS)


@torch.inference_mode()
def replay_seconds(graph: Graph, vocab_size: int, rounds: int) -> float:
    """Seconds per replay of back-to-back replays: the median of `rounds`. Each round has other random tokens, the
    same on all ranks. Last tokens and the KV of the graph's positions are overwritten."""
    tokens, device = graph.step.tokens, graph.step.tokens.device
    generator, times = torch.Generator().manual_seed(7), []
    for _ in range(1 + rounds):
        tokens.copy_(torch.randint(vocab_size, tokens.shape, generator=generator))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        times.append(float(begin.elapsed_time(end)) / REPLAYS / 1e3)
    return statistics.median(times[1:])
