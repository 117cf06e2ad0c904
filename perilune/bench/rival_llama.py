"""llama.cpp's side of the comparison, run by the Python of an environment that has llama_cpp and nothing of ours.

python rival_llama.py quantize F32.gguf OUT         writes OUT/q8_0.gguf and OUT/q4_0.gguf
python rival_llama.py serve FILE.gguf THREADS       reads one JSON line {"prompt": [ids], "output": n} at a time,
                                                  answers each with {"tokens_per_s": x, "tokens": [ids]}
"""

import json
import sys
import time
from types import ModuleType
from typing import Any


def quantize(source: str, out: str) -> None:
    import llama_cpp

    for name in ("q8_0", "q4_0"):
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name.upper()}")
        failed = llama_cpp.llama_model_quantize(source.encode(), f"{out}/{name}.gguf".encode(), settings)
        if failed:
            sys.exit(f"llama.cpp cannot write {out}/{name}.gguf (code {failed})")


def serve(path: str, threads: int) -> None:
    import llama_cpp
    import numpy as np

    model = llama_cpp.Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
    for line in sys.stdin:
        job = json.loads(line)
        model.reset()
        model.eval(job["prompt"])
        tokens = [_likeliest(llama_cpp, np, model)]
        begin = time.perf_counter()
        while len(tokens) < job["output"]:
            model.eval(tokens[-1:])
            tokens.append(_likeliest(llama_cpp, np, model))
        seconds = time.perf_counter() - begin
        print(json.dumps({"tokens_per_s": (len(tokens) - 1) / seconds, "tokens": tokens}), flush=True)


def _likeliest(llama_cpp: ModuleType, np: ModuleType, model: Any) -> int:
    logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return int(np.ctypeslib.as_array(logits, shape=(model.n_vocab(),)).argmax())


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    if verb == "quantize":
        quantize(*rest)
    else:
        serve(rest[0], int(rest[1]))
