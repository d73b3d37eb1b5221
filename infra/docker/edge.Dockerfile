# The edge and the router: slim, no torch.
#
#   docker build -f infra/docker/edge.Dockerfile --target edge   -t headrace-edge   .
#   docker build -f infra/docker/edge.Dockerfile --target router -t headrace-router .
#
# Linted, never built by our tests (docs/images.md). For a release give BASE with its digest.
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS build
COPY pyproject.toml constraints.txt README.md /src/
COPY schemas /src/schemas
COPY services /src/services
RUN python -m venv /opt/headrace \
 && /opt/headrace/bin/pip install --no-cache-dir -c /src/constraints.txt '/src[edge,postgres,store]'

FROM ${BASE} AS service
COPY --from=build /opt/headrace /opt/headrace
RUN useradd --uid 10001 --create-home --home-dir /var/lib/headrace --shell /usr/sbin/nologin headrace
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HEADRACE_HOME=/var/lib/headrace \
    HEADRACE_ALIVE_FILE=/tmp/headrace.alive
USER 10001
WORKDIR /var/lib/headrace
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["/bin/sh", "-c", "test -n \"$(find /tmp/headrace.alive -newermt '30 seconds ago')\""]
ENTRYPOINT ["headrace"]

FROM service AS router
CMD ["router"]

FROM service AS edge
ENV HEADRACE_EDGE__HOST=0.0.0.0 \
    HEADRACE_EDGE__OPEN_ON_LOOPBACK=false
EXPOSE 8000
CMD ["edge"]
