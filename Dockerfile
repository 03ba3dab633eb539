# attnd as a container image. Two images come from this file:
#
#   docker build -t attnd .                  for NVIDIA GPUs (the last stage); on a node without a GPU the CPU computes
#   docker build -t attnd:cpu --target cpu . without CUDA: builds anywhere, in a minute
#   docker build --target test .             builds attnd without CUDA and runs the tests; a failing test fails the build
#
# Each image can be built for linux/amd64 and for linux/arm64: the base images exist for both platforms. A stage runs on
# the platform that it is built for, so without QEMU a machine builds only for its own platform. This builds for both:
#
#   docker buildx build --platform linux/amd64,linux/arm64 --target cpu -t registry.example.org/attnd:cpu --push .
#
# A build stage has the compilers. The final stage is a bare distribution, which receives one program. CUDA's runtime is
# linked statically, and the node provides the driver (NVIDIA Container Toolkit). Therefore even the GPU image contains
# nothing of CUDA, but only libmicrohttpd, libuv, cJSON, zlib and the program (tests/deploy/image.sh prints their size).
#
# Rules of this file
# 1. Build and final stage are the same distribution, so that the program finds the libraries that it was linked with.
# 2. The program writes no file. It runs with a read-only root, without capabilities, as a user of its own.
# 3. The program is process 1 (ENTRYPOINT in exec form), so that it gets SIGTERM itself, drains, and ends with status 0.
#    It has child processes only with --supervise, and then reaps them.
# 4. Steps that take minutes (the kernels) come before files that change often (the server), so that they stay cached.

# The driver on the nodes limits the CUDA version: CUDA 13 needs driver 580 or newer, CUDA 12.9 (CUDA_VERSION=12.9.1)
# needs 575. The two *_IMAGE arguments may name a registry mirror, a digest or another distribution.
ARG CUDA_VERSION=13.0.1
ARG CUDA_IMAGE=nvidia/cuda:${CUDA_VERSION}-devel-ubuntu24.04
ARG BASE_IMAGE=ubuntu:24.04

# ---- Without CUDA ----------------------------------------------------------------------------------------------------

# Package versions are those of the base image's release. Only the base image is pinned, so that a build gets security
# updates of packages.
# hadolint global ignore=DL3008
FROM ${BASE_IMAGE} AS cpu-build
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        gcc make libc6-dev libmicrohttpd-dev libuv1-dev libcjson-dev zlib1g-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY Makefile ./
COPY kernels kernels
RUN make CUDA=0 build/libattn.a
COPY text text
COPY proto-json proto-json
COPY server server
RUN make CUDA=0 build/attnd \
 && strip -o /attnd build/attnd

FROM cpu-build AS test
# targets of the Makefile that the stage `test` runs
ARG TESTS="unit fuzz-replay http-all"
COPY . .
RUN sh tests/setup.sh test \
 && make CUDA=0 ${TESTS}

# The packages that both images contain. In newer releases libmicrohttpd12 is named libmicrohttpd12t64, and apt finds it
# under either name.
FROM ${BASE_IMAGE} AS runtime
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends libmicrohttpd12 libuv1 libcjson1 zlib1g \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/*-old /var/log/apt /var/log/dpkg.log
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="attnd" \
      org.opencontainers.image.description="Exact attention, forward and backward, over HTTP" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# A container is reached through its published port, so attnd listens on every address. Options are ATTND_... variables,
# or arguments after the image's name.
ENV ATTND_LISTEN=0.0.0.0:8080
EXPOSE 8080
USER 10001:10001
WORKDIR /
STOPSIGNAL SIGTERM
# The health check asks /readyz at the first address of ATTND_LISTEN. Kubernetes has its own probes and ignores this
# check.
HEALTHCHECK --interval=10s --timeout=6s --start-period=30s --retries=3 CMD ["/usr/local/bin/attnd", "healthcheck"]
ENTRYPOINT ["/usr/local/bin/attnd"]

FROM runtime AS cpu
COPY LICENSE /usr/share/doc/attnd/LICENSE
COPY --from=cpu-build /attnd /usr/local/bin/attnd

# ---- With CUDA -------------------------------------------------------------------------------------------------------

FROM ${CUDA_IMAGE} AS gpu-build
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        g++ gcc make libc6-dev libmicrohttpd-dev libuv1-dev libcjson-dev zlib1g-dev \
 && rm -rf /var/lib/apt/lists/*
# nvcc 12.8 and later can compress the kernels to a sixth of their usual size.
ENV PATH=/usr/local/cuda/bin:${PATH} \
    NVCC_APPEND_FLAGS=--compress-mode=size
# Compute capabilities for which the image has machine code. Other GPUs from 8.0 on compile the PTX, which is always
# included, at their first use.
ARG CUDA_ARCHS="80 89 90"
WORKDIR /src
COPY Makefile ./
COPY kernels kernels
RUN make CUDA=1 CUDA_ARCHS="${CUDA_ARCHS}" build/libattn.a
COPY text text
COPY proto-json proto-json
COPY server server
RUN make CUDA=1 CUDA_ARCHS="${CUDA_ARCHS}" build/attnd \
 && strip -o /attnd build/attnd

FROM runtime AS gpu
COPY LICENSE /usr/share/doc/attnd/LICENSE
COPY --from=gpu-build /attnd /usr/local/bin/attnd
# The NVIDIA Container Toolkit reads both variables. Without NVIDIA_VISIBLE_DEVICES the container gets no GPU; without
# "compute" in the other it gets no driver library.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
