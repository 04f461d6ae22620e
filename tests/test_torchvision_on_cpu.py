"""The hook that lets torchvision for CUDA be imported next to torch for CPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata

import pytest

PROGRAM = """
import _imp, json, logging
from importlib.util import find_spec

plain, held = logging.getLogger, set()

def get_logger(name=None):
    held.add(_imp.lock_held())
    return plain(name)

logging.getLogger = get_logger
spec = find_spec("torchvision")  # as transformers asks
import torchvision.transforms.v2
import torch
print(json.dumps({"held": list(held), "origin": spec.origin, "file": torchvision.__file__,
                  "operator": str(torch.ops.torchvision.nms)}))
"""


def test_torchvision_is_imported_without_the_lock_of_all_imports() -> None:
    """Python (`importlib._bootstrap._find_spec`) holds that lock while a finder runs; torch's import takes logging's
    lock, and a fork takes both in the other order."""
    try:
        metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        pytest.skip("torchvision is not installed")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["held"] == [False]
    assert told["origin"] == told["file"]
    assert told["operator"] == "torchvision.nms"
