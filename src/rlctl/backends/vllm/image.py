"""Rounds put together from messages: each sender's boxes, one behind the other, into the image of the round."""

from __future__ import annotations

import torch

from rlctl.backends.vllm.channel import Part, Rounds, message_bytes
from rlctl.backends.vllm.receiver import chunk_view
from rlctl.checkpoints.tensors import strided


class Images:
    """Two images, and for each sender two buffers that its messages arrive in. `parts[sender][round]` are the boxes."""

    def __init__(
        self, rounds: Rounds, parts: list[list[tuple[Part, ...]]], device: torch.device, capacity: int
    ) -> None:
        """`capacity`: bytes of an image; 0: there are only buffers of messages, and `unpack` is told where to."""
        self.rounds, self.parts = rounds, parts
        self.images = [torch.empty(capacity, dtype=torch.uint8, device=device) for _ in range(2)]
        sizes = [max(map(message_bytes, own), default=0) for own in parts]
        self._messages = [[torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)] for size in sizes]
        self._views: dict[tuple[int, int, int], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def message(self, sender: int, index: int) -> torch.Tensor:
        """Where the message of a round arrives; empty where the sender has nothing for it."""
        return self._messages[sender][index % 2][: message_bytes(self.parts[sender][index])]

    def image(self, index: int) -> torch.Tensor:
        return self.images[index % 2]

    def unpack(self, sender: int, index: int, image: torch.Tensor | None = None) -> None:
        """Put a message that has arrived in place, in the round's own image or in `image`."""
        image = self.image(index) if image is None else image
        key = (sender, index, image.data_ptr())
        if key not in self._views:
            self._views[key] = self._bind(sender, index, image)
        targets, sources = self._views[key]
        if targets:
            torch._foreach_copy_(targets, sources)

    def _bind(self, sender: int, index: int, image: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        chunks, message = self.rounds[index], self.message(sender, index)
        targets, sources = [], []
        for part in self.parts[sender][index]:
            target = strided(chunk_view(image, chunks[part.chunk]), part.view)
            targets.append(target)
            sources.append(message[part.offset : part.offset + part.bytes].view(target.dtype).view(target.shape))
        return targets, sources
