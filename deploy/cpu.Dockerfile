# A server without a GPU in a container. On another processor than the image was built on, C++ kernels are compiled
# again at start.
#   docker build -f deploy/cpu.Dockerfile -t perilune:cpu .
#   docker run -p 127.0.0.1:8000:8000 perilune:cpu
FROM python:3.12-slim-bookworm

RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --create-home perilune && install -d -o perilune /opt/perilune /opt/source
# By number: Kubernetes (runAsNonRoot) takes no name for a user that is not root.
USER 10001
# For downloaded models. A volume that is mounted here gets its owner from the image.
RUN mkdir -p /home/perilune/.cache/huggingface
ENV PATH=/opt/perilune/bin:$PATH
RUN python3 -m venv /opt/perilune
# PyPI's torch brings the CUDA libraries; this one is 4 GB smaller.
RUN pip install --no-cache-dir 'torch>=2.11,<2.14' --index-url https://download.pytorch.org/whl/cpu

WORKDIR /opt/source
COPY pyproject.toml README.md LICENSE ./
COPY perilune perilune
RUN pip install --no-cache-dir . && perilune ops --build

WORKDIR /home/perilune
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --start-interval=2s --retries=3 \
  CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["perilune"]
CMD ["serve", "kimi-nano", "--host", "0.0.0.0"]
