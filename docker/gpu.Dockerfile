# rlctl with its CUDA set (CUDA 13: the host's driver must be 580 or newer). From the root of a checkout:
#   docker build -f docker/gpu.Dockerfile -t rlctl .
#   docker run --rm --gpus all --ipc host --ulimit memlock=-1 rlctl rlctl doctor --preset 1node
FROM python:3.12-slim-bookworm
# A compiler for Triton's launchers and TransformerEngine's extension, and the user's side of InfiniBand for NCCL.
RUN apt-get update && apt-get install -y --no-install-recommends g++ ibverbs-providers libibverbs1 librdmacm1 && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv
WORKDIR /opt/rlctl
# What is installed changes seldom, and rlctl itself often.
COPY pyproject.toml README.md LICENSE ./
COPY src/rlctl/__init__.py src/rlctl/__init__.py
COPY presets presets
RUN uv pip install --system --no-cache --compile-bytecode '.[cuda]'
RUN NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_WITH_NCCL_EP=0 uv pip install --system --no-cache --compile-bytecode '.[transformer-engine]'
RUN vllm download-kernels
COPY . .
RUN uv pip install --system --no-cache --compile-bytecode --no-deps --reinstall-package rlctl .
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
CMD ["rlctl", "doctor"]
