"""The bundled model as a float32 GGUF file: `python -m runs.llama_cpp LLAMA_CPP_SOURCE OUT`, from runs/llama-cpp.sh.

Uses llama.cpp's own converter on the exact float32 copy that the comparison with transformers uses. The vocabulary is
left out: only speed and greedy ids are compared.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from perilune.bench.rivals import export
from perilune.formats.hub import resolve_model


def main(source: Path, out: Path) -> None:
    sys.path[:0] = [str(source / "gguf-py"), str(source)]
    import conversion.deepseek
    import convert_hf_to_gguf

    def no_vocabulary(model: Any) -> None:
        model._set_vocab_none()

    conversion.deepseek.DeepseekV2Model.set_vocab = no_vocabulary
    with tempfile.TemporaryDirectory(prefix="perilune-gguf-") as temporary:
        copy = Path(temporary) / "model"
        export(resolve_model("kimi-nano"), copy)
        config = json.loads((copy / "config.json").read_text())
        # The converter requires these two keys; their values are the model's own.
        config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        (copy / "config.json").write_text(json.dumps(config))
        sys.argv = ["convert_hf_to_gguf.py", str(copy), "--outfile", str(out / "f32.gguf"), "--outtype", "f32"]
        convert_hf_to_gguf.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
