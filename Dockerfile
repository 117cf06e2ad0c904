# A server in a container. The devel image has nvcc: without it the kernels for Hopper GPUs cannot be built, and most of
# the speed is lost. On another processor than the image was built on, C++ kernels are compiled again at start.
#   docker build -t perilune .
#   docker run -p 8000:8000 perilune                                  kimi-nano, on a CPU
#   docker run --gpus all -p 8000:8000 -v /models:/models perilune serve /models/NAME --host 0.0.0.0
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-venv && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/perilune/bin:$PATH
RUN python3 -m venv /opt/perilune

WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY perilune perilune
RUN pip install --no-cache-dir . && perilune ops --build

WORKDIR /
EXPOSE 8000
ENTRYPOINT ["perilune"]
CMD ["serve", "kimi-nano", "--host", "0.0.0.0"]
