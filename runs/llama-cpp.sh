#!/usr/bin/env bash
# Builds llama.cpp for this machine and converts the bundled model for it, so that
#     perilune bench peers --cpu --llama-cpp DIR
# can time it beside the engine. Takes about 15 minutes on two cores; needs the project's own environment (make install),
# a C++ compiler and 1 GB in DIR.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?usage: runs/llama-cpp.sh DIR}")
python=${PYTHON:-.venv/bin/python}
version=0.3.36
mkdir -p "$out"

if [ ! -x "$out/venv/bin/python" ] || ! "$out/venv/bin/python" -c 'import llama_cpp' 2>/dev/null; then
  "$python" -m pip download -q --no-deps --no-binary :all: -d "$out" "llama-cpp-python==$version"
  tar -xzf "$out/llama_cpp_python-$version.tar.gz" -C "$out"
  python3 -m venv "$out/venv"
  CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF" \
    "$out/venv/bin/pip" install "$out/llama_cpp_python-$version.tar.gz"
fi
"$python" -m runs.llama_cpp "$out/llama_cpp_python-$version/vendor/llama.cpp" "$out"
"$out/venv/bin/python" perilune/bench/rival_llama.py quantize "$out/f32.gguf" "$out"
