# A server for NVIDIA GPUs in a container; without GPUs: deploy/cpu.Dockerfile. The devel image has nvcc: all CUDA
# kernels are built here, none at start. C++ kernels are compiled again at start if the processor is another one.
#   docker build -t perilune:cuda .
#   docker run --gpus all -p 127.0.0.1:8000:8000 -v /models:/models:ro perilune:cuda serve /models/NAME --host 0.0.0.0
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
  && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home perilune && install -d -o perilune /opt/perilune /opt/source
# By number: Kubernetes (runAsNonRoot) takes no name for a user that is not root.
USER 10001
# For downloaded models. A volume that is mounted here gets its owner from the image.
RUN mkdir -p /home/perilune/.cache/huggingface
ENV PATH=/opt/perilune/bin:$PATH
RUN python3 -m venv /opt/perilune

WORKDIR /opt/source
COPY pyproject.toml README.md LICENSE ./
COPY perilune perilune
RUN pip install --no-cache-dir . && perilune ops --build

WORKDIR /home/perilune
EXPOSE 8000
# Loading a large checkpoint takes minutes, in which a failed check does not count.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --start-interval=2s --retries=3 \
  CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["perilune"]
CMD ["serve", "kimi-nano", "--host", "0.0.0.0"]
