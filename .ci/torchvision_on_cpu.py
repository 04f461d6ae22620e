"""Let the CUDA build of torchvision, the only one on PyPI, be imported next to a CPU build of torch.

`.ci/setup` puts this file next to torchvision with a .pth file, so that every process of the environment runs it. The
compiled half of torchvision needs CUDA and declares two operators; where it cannot load, the Python half, which
transformers and vLLM use, needs no more than their declarations.
"""

import sys
from importlib.metadata import version


class BeforeTorchvision:
    """Declares the operators when torchvision is first imported, and costs nothing where it is not."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None and not version("torchvision").endswith("+cpu"):
                self.declare(torch)
        return None

    def declare(self, torch):
        global library
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, BeforeTorchvision())
