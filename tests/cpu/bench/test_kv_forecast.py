"""A replay that is forecast: 64 sessions at once on a cache for eight, a tenth of their length."""

from perilune.bench import traces
from perilune.bench.trace_formats import sessions_of
from runs import kv_forecast


def test_many_sessions_at_once_find_what_they_said() -> None:
    """Restored blocks are there when their request starts: 67.5 % were hits where others evicted them before."""
    made = sessions_of(traces.generate(traces.Agents(sessions=64, turns=15)), scale=0.1)
    begun = [traces.begun(session, 13) for session in made]
    row = kv_forecast.forecast(begun, layers=9, kv_blocks=540, host_gb=2.8, seqs=16)
    assert (row["requests"], row["failed"], row["blocks_dropped"]) == (128, 0, 0)
    assert row["ideal_share"] > 0.95 and row["hit_share"] > 0.99 * row["ideal_share"]
    few = kv_forecast.forecast(begun[:12], layers=9, kv_blocks=540, host_gb=0.0, seqs=16)
    assert few["hit_share"] < 0.9 * few["ideal_share"] and few["restored_gb"] == 0.0


def test_steps_take_what_the_tables_say() -> None:
    assert kv_forecast.layer_seconds(64) == 1863e-6 and 768e-6 < kv_forecast.layer_seconds(30) < 1863e-6
    prompt, behind = (kv_forecast.step_seconds([(10_000, start)], 1) for start in (0, 90_000))
    assert 0.0205 < prompt - kv_forecast.OUTSIDE_SECONDS < 0.021  # 20.67 ms measured
    assert 0.079 < behind - kv_forecast.OUTSIDE_SECONDS < 0.083  # 80.8
