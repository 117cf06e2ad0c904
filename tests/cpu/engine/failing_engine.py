"""An engine process without a model: token 7 as often as asked, and what its prompt says.

Started as engine/client.py starts the real one. A prompt that begins with
1  ends the process before any token of it
2  is answered with one token and then waits for ever
4  is not answered by the first process
With `--never` after the first start it refuses to start again; `--count FILE` counts the starts.
"""

import os
import socket
import sys
from pathlib import Path
from typing import Any

from perilune.core.messages import Cancel, Delta, EngineInfo, EngineStats, Failed, Shutdown, Submit
from perilune.engine import wire

INFO = EngineInfo("failing", 64, 100, (), 64, 16, 4)


def main() -> None:
    *options, descriptor = sys.argv[1:]
    starts = Path(options[options.index("--count") + 1])
    with starts.open("a") as file:
        file.write(f"{os.getpid()}\n")
    stream = socket.socket(fileno=int(descriptor)).makefile("rwb")

    def receive() -> bytes:
        header = stream.read(wire.HEADER.size)
        if not header:
            os._exit(0)
        return stream.read(wire.body_length(header))

    def send(*messages: Any) -> None:
        stream.write(wire.encode(list(messages)))
        stream.flush()

    receive()
    if "--never" in options and len(starts.read_text().splitlines()) > 1:
        send(Failed("no more"))
        return
    send(INFO)
    while True:
        for message in wire.decode(receive()):
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Cancel):
                continue
            assert isinstance(message, Submit)
            kind, rid = message.prompt[0], message.rid
            if kind == 1:
                os._exit(9)
            if kind == 2:
                send(Delta(rid, (7,)))
                continue
            if kind == 4 and len(starts.read_text().splitlines()) == 1:  # waits for a later process
                continue
            count = message.params.max_tokens or 1
            send(Delta(rid, (7,) * count, finish_reason="length"), EngineStats(steps=1))


if __name__ == "__main__":
    main()
