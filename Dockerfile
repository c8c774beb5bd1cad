# A server in a container. It keeps models in the volume /models.
#
#   docker build -t graft .                                     # for CPUs
#   docker build -t graft --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .   # for NVIDIA GPUs
#   docker run -p 8000:8000 -v graft-models:/models -e GRAFT_SERVE_API_KEYS=secret graft     # --gpus all for GPUs

FROM python:3.12-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /venv
ENV PATH=/venv/bin:$PATH
WORKDIR /graft
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt --index-url "$TORCH_INDEX" torch
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt ".[serve]"

FROM python:3.12-slim
# Triton compiles its launchers with a C compiler when a GPU is used.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH GRAFT_HOME=/models GRAFT_SERVE_HOST=0.0.0.0 GRAFT_SERVE_LOG_FORMAT=json
RUN useradd --create-home graft && mkdir /models && chown graft /models
USER graft
VOLUME /models
EXPOSE 8000
# The process is alive from the first second; /health is 200 only when the model is ready.
HEALTHCHECK --interval=10s --start-period=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/live', timeout=5)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["graft", "serve"]
