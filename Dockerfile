# syntax=docker/dockerfile:1
#
#   docker build --target cpu -t ortserve:0.1.0-cpu .
#   docker build --target gpu -t ortserve:0.1.0-gpu .         NVIDIA GPUs, amd64 only, driver 580 or newer
#   docker build --target loadtest -t ortserve:0.1.0-loadtest .
#
# All stages are Ubuntu 24.04, because NVIDIA's CUDA images are: a virtual environment that is made in one works in the
# others, whose Python is the same one. What is for GPUs comes last: builders other than BuildKit make every stage that is
# written before the one that is asked for. docs/operations/containers.md describes how to run the images.

# hadolint global ignore=DL3008
# (Packages of Ubuntu have no versions here: its archive keeps only the newest of each, so that a pinned one stops being
# there. The distribution's release is pinned instead.)

# The locale en_US.UTF-8 (3 MB), without which ONNX Runtime loads no model with a StringNormalizer, is made here, too: what
# makes it is larger and not needed later.
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
# The path of requests is compiled, for which mypyc wants to see the types of all that it imports. None of it is taken along.
RUN /opt/pip/bin/pip install --no-cache-dir --only-binary :all: --constraint constraints.txt '.[cpu,otel,compile]' \
    && ORTSERVE_COMPILE=1 /opt/pip/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

# Environments without pip. Of everything else only wheels are taken, so that no compiler is needed any more.
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
# Written to by nothing but what must be: /tmp, where clients' models are kept while they load. Python's caches of
# compiled modules were made at installation. Home is /tmp so that no library finds another place to write to.
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
# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
EXPOSE 8000 8001 8002
STOPSIGNAL SIGTERM
# Healthy is ready. Models may load for the start period, as in deploy/base, before the container counts as unhealthy.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 CMD ["ortserve", "health"]
# The kernel drops signals that a container's first process does not handle, and the server leaves the second SIGTERM to
# its default effect, which is to end at once: so it is tini's child.
ENTRYPOINT ["tini", "--", "ortserve"]
CMD ["serve", "/models"]

# A load to look at, for docker-compose.yml; needs nothing beyond what the server needs.
FROM cpu AS loadtest
COPY loadtests/open_loop.py loadtests/steady_load.py /opt/loadtests/
HEALTHCHECK NONE
ENTRYPOINT ["python", "/opt/loadtests/steady_load.py"]
CMD ["--help"]

FROM wheel AS environment-gpu
RUN python3 -m venv --without-pip /opt/ortserve \
    && /opt/pip/bin/pip --python /opt/ortserve/bin/python install --no-cache-dir --only-binary :all: \
        --constraint constraints.txt "$(echo /wheels/ortserve-*.whl)[gpu,otel,stores]"

# CUDA 13 and cuDNN 9 are those that the wheels of onnxruntime-gpu are built for.
FROM nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04 AS gpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 tini \
    && rm -rf /var/lib/apt/lists/*
COPY --from=environment-gpu /opt/ortserve /opt/ortserve
COPY --from=wheel /opt/locale /usr/lib/locale
# As for CPUs; and kernels that the driver or cupy compile on first use are kept in /tmp.
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
# As for CPUs. NVIDIA's own entry point prints a banner in front of what is started; it is not used.
ENTRYPOINT ["tini", "--", "ortserve"]
CMD ["serve", "/models"]
