# rlctl with its CPU set, in the versions that its tests run. From the root of a checkout:
#   docker build -f docker/cpu.Dockerfile -t rlctl:cpu .
#   docker run --rm --shm-size 2g rlctl:cpu rlctl train grpo --preset laptop
FROM python:3.11-slim-bookworm
# A compiler for pycosat, of which there is no wheel, and for Triton.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv
WORKDIR /opt/rlctl
# What is installed changes seldom, and rlctl itself often.
COPY pyproject.toml README.md LICENSE constraints-cpu.txt overrides-cpu.txt ./
COPY src/rlctl/__init__.py src/rlctl/__init__.py
COPY presets presets
RUN uv pip install --system --no-cache --compile-bytecode --torch-backend cpu -c constraints-cpu.txt --overrides overrides-cpu.txt '.[cpu,demo]'
RUN uv pip install --system --no-cache --compile-bytecode --torch-backend cpu --no-deps "$(grep ^torchvision== constraints-cpu.txt)"
COPY . .
RUN uv pip install --system --no-cache --compile-bytecode --no-deps --reinstall-package rlctl .
WORKDIR /work
CMD ["rlctl", "doctor"]
