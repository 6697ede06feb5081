# syntax=docker/dockerfile:1
#
#   docker build --target cpu -t ortserve:0.1.0-cpu .
#   docker build --target gpu -t ortserve:0.1.0-gpu .         NVIDIA GPUs, amd64 only, driver 580 or newer
#   docker build --target loadtest -t ortserve:0.1.0-loadtest .
#
# All stages use Ubuntu 24.04, as NVIDIA's CUDA images do. They have the same Python, so a virtual environment of one stage
# works in the others. The stages for GPUs come last, because builders other than BuildKit build every stage before the
# requested one. docs/operations/containers.md describes how to run the images.

# hadolint global ignore=DL3008
# (Ubuntu's packages are not pinned, because its archive keeps only the newest version of each. The release of the
# distribution is pinned instead.)

# ONNX Runtime loads models with a StringNormalizer only if the locale en_US.UTF-8 (3 MB) exists. This stage creates it, so
# that the later ones do not contain the larger package for it.
FROM ubuntu:24.04 AS wheel
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev locales python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir /opt/locale \
    && localedef --no-archive -i en_US -f UTF-8 /opt/locale/en_US.utf8 \
    && python3 -m venv /opt/pip
WORKDIR /source
COPY LICENSE README.md constraints.txt pyproject.toml setup.py ./
COPY server ./server
# mypyc compiles the request path. It needs the types of all imported packages; later stages do not contain these packages.
RUN /opt/pip/bin/pip install --no-cache-dir --only-binary :all: --constraint constraints.txt '.[cpu,otel,compile]' \
    && ORTSERVE_COMPILE=1 /opt/pip/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# Environments without pip. All other packages are installed from wheels, so these stages need no compiler.
FROM wheel AS environment-cpu
RUN python3 -m venv --without-pip /opt/ortserve \
    && /opt/pip/bin/pip --python /opt/ortserve/bin/python install --no-cache-dir --only-binary :all: \
        --constraint constraints.txt "$(echo /wheels/ortserve-*.whl)[cpu,otel,stores]"

FROM ubuntu:24.04 AS cpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 tini \
    && rm -rf /var/lib/apt/lists/*
COPY --from=environment-cpu /opt/ortserve /opt/ortserve
COPY --from=wheel /opt/locale /usr/lib/locale
# Only /tmp is written to: it holds models from clients while they load. The installation has already written Python's
# bytecode. HOME is /tmp, so that libraries write nowhere else.
ENV PATH=/opt/ortserve/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    ORTSERVE_HOST=0.0.0.0
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ortserve" \
      org.opencontainers.image.description="A model server for ONNX Runtime, on CPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /tmp
# A number, so that Kubernetes can verify that the user is not root.
USER 10001:10001
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
# A container is healthy when the server is ready. As in deploy/base, the start period allows models to load.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 CMD ["ortserve", "health"]
# The server leaves the second SIGTERM to its default action, which ends the process at once. The kernel does not apply
# default actions to the first process of a container, so the server is a child of tini.
ENTRYPOINT ["tini", "--", "ortserve"]
CMD ["serve", "/models"]

# The load test of docker-compose.yml, which needs no packages besides those of the server.
FROM cpu AS loadtest
# The context keeps the permissions of the clone, which only its owner may read after a umask of 077.
COPY --chown=10001:10001 loadtests/open_loop.py loadtests/steady_load.py /opt/loadtests/
HEALTHCHECK NONE
ENTRYPOINT ["python", "/opt/loadtests/steady_load.py"]
CMD ["--help"]

FROM wheel AS environment-gpu
RUN python3 -m venv --without-pip /opt/ortserve \
    && /opt/pip/bin/pip --python /opt/ortserve/bin/python install --no-cache-dir --only-binary :all: \
        --constraint constraints.txt "$(echo /wheels/ortserve-*.whl)[gpu,otel,stores]"

# The wheels of onnxruntime-gpu are built for CUDA 13 and cuDNN 9.
FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04 AS gpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 tini \
    && rm -rf /var/lib/apt/lists/*
COPY --from=environment-gpu /opt/ortserve /opt/ortserve
COPY --from=wheel /opt/locale /usr/lib/locale
# As for CPUs. Kernels that the driver or cupy compile on first use are cached in /tmp.
ENV PATH=/opt/ortserve/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp \
    CUDA_CACHE_PATH=/tmp/cuda-cache \
    CUPY_CACHE_DIR=/tmp/cupy-cache \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    ORTSERVE_HOST=0.0.0.0 \
    ORTSERVE_EXECUTION_PROVIDERS=cuda,cpu
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ortserve" \
      org.opencontainers.image.description="A model server for ONNX Runtime, on NVIDIA GPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 CMD ["ortserve", "health"]
# As for CPUs. NVIDIA's own entry point is not used, because it prints a banner.
ENTRYPOINT ["tini", "--", "ortserve"]
CMD ["serve", "/models"]
