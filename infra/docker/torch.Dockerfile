# A worker with the torch engine, on a CPU or on NVIDIA GPUs.
#
#   docker build -f infra/docker/torch.Dockerfile -t headrace-torch .
#   … --build-arg TORCH_INDEX=<an index with PyTorch's CPU build>      for machines without a GPU, several GB smaller
#
# Linted, never built by our tests (docs/images.md). For a release give BASE with its digest.
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS build
ARG TORCH_INDEX=
COPY pyproject.toml constraints.txt README.md /src/
COPY schemas /src/schemas
COPY services /src/services
RUN python -m venv /opt/headrace \
 && /opt/headrace/bin/pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
      -c /src/constraints.txt '/src[torch,nixl,store,metrics]'

FROM ${BASE}
# The engine's C kernel is compiled on the machine that computes, for its own processor.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/headrace /opt/headrace
RUN useradd --uid 10001 --create-home --home-dir /var/lib/headrace --shell /usr/sbin/nologin headrace
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HEADRACE_HOME=/var/lib/headrace \
    HEADRACE_ALIVE_FILE=/tmp/headrace.alive
USER 10001
WORKDIR /var/lib/headrace
# Fetching and loading a model may take long; until it is over nothing is held against the worker.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60m --retries=3 \
    CMD ["/bin/sh", "-c", "test -n \"$(find /tmp/headrace.alive -newermt '30 seconds ago')\""]
ENTRYPOINT ["headrace"]
CMD ["worker", "--role", "both"]
