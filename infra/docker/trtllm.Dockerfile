# A worker with the TensorRT-LLM engine, on NVIDIA's release image of exactly the version that the adapter was written for.
#
#   docker build -f infra/docker/trtllm.Dockerfile -t headrace-trtllm .
#
# Nothing that the image brings is changed: its installed versions are the constraints of our own installation, and the build
# fails if any of them is another one afterwards. Linted, never built by our tests (docs/images.md). For a release give both bases
# with their digests.
ARG BASE=nvcr.io/nvidia/tensorrt-llm/release:1.2.1
ARG BUILD_BASE=python:3.12.12-slim-bookworm

FROM ${BUILD_BASE} AS build
COPY pyproject.toml README.md /src/
COPY schemas /src/schemas
COPY services /src/services
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
COPY --from=build /wheels /opt/headrace/wheels
RUN python3 -m pip list --format=freeze | sort > /opt/headrace/pins.txt \
 && PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --only-binary :all: \
      --constraint /opt/headrace/pins.txt "$(echo /opt/headrace/wheels/headrace-*.whl)[tensorrt-llm]" \
 && python3 -m pip list --format=freeze | sort > /opt/headrace/installed.txt \
 && changed="$(comm -23 /opt/headrace/pins.txt /opt/headrace/installed.txt)" \
 && if [ -n "$changed" ]; then echo "these were changed: $changed" >&2; exit 1; fi
COPY --chmod=0755 infra/docker/trtllm-start.sh /usr/local/bin/trtllm-start
RUN useradd --uid 10001 --create-home --home-dir /var/lib/headrace --shell /usr/sbin/nologin headrace
ENV PYTHONUNBUFFERED=1 \
    HEADRACE_HOME=/var/lib/headrace \
    HEADRACE_ALIVE_FILE=/tmp/headrace.alive \
    HEADRACE_WORKER__ENGINE=trtllm
USER 10001
WORKDIR /var/lib/headrace
# Fetching and loading a model may take long; until it is over nothing is held against the worker.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60m --retries=3 \
    CMD ["/bin/sh", "-c", "test -n \"$(find /tmp/headrace.alive -newermt '30 seconds ago')\""]
ENTRYPOINT ["trtllm-start"]
CMD ["worker", "--role", "both"]
