# The server for CPUs. llama.cpp is compiled for the CPU that builds the image, unless a folder with a portable wheel is
# given (docker build --build-context wheels=dist): docs/deployment.md.
ARG BASE=debian:bookworm-slim

FROM scratch AS wheels

FROM ${BASE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential ca-certificates python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/cppbatch
ARG CMAKE_ARGS=""
ENV CPPBATCH_BACKEND=cpu XDG_CACHE_HOME=/tmp/cache PIP_NO_CACHE_DIR=1
# Only what the installation reads, so that changes of the source do not compile llama.cpp again.
COPY pyproject.toml README.md LICENSE ./
COPY scripts/install.py scripts/
RUN --mount=from=wheels,target=/wheels \
    if ls /wheels/*.whl > /dev/null 2>&1; then export CPPBATCH_WHEELS=/wheels; fi \
    && mkdir cppbatch && touch cppbatch/__init__.py && python3 scripts/install.py && rm -rf /tmp/cache
COPY cppbatch cppbatch
RUN .venv/bin/python -m compileall -q cppbatch

FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates libgomp1 libstdc++6 python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --home-dir /data --no-create-home cppbatch \
    && install -d -o cppbatch -g cppbatch -m 700 /data \
    && install -d -o cppbatch -g cppbatch /models
COPY --from=build /opt/cppbatch /opt/cppbatch
ENV PATH=/opt/cppbatch/.venv/bin:$PATH \
    CPPBATCH_HOST=0.0.0.0 \
    CPPBATCH_MODELS=/models \
    CPPBATCH_DATA_DIR=/data \
    CPPBATCH_CONFIG=/data/config \
    XDG_CACHE_HOME=/data/cache
USER cppbatch
WORKDIR /data
VOLUME ["/models", "/data"]
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["cppbatch"]
CMD ["serve"]
