"""As hanging_rank.py, but the rank hangs after all exchanges, so that rank 0's step ends."""

from perilune.engine import rank
from perilune.engine.readout import Readout
from tests.multi.hanging_rank import hang

if __name__ == "__main__":
    hang(Readout, "result")
    rank.main()
