"""A map between vocabularies on the device. Suffixes: E entries of the sparse matrix, K tokens of a teacher."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlctl.data.cross_tokens import Projection


@dataclass(frozen=True)
class VocabProjection:
    """`Projection` on the device."""

    students_E: torch.Tensor
    teachers_E: torch.Tensor
    weights_E: torch.Tensor
    teacher_vocab: int

    @classmethod
    def of(cls, projection: Projection, device: torch.device) -> VocabProjection:
        entries = (projection.students_E, projection.teachers_E, projection.weights_E)
        students_E, teachers_E, weights_E = (torch.from_numpy(entry_array).to(device) for entry_array in entries)
        return cls(students_E, teachers_E, weights_E, projection.teacher_vocab)

    def part(self, wanted_K: torch.Tensor, start: int, width: int) -> torch.Tensor:
        """Return the sparse matrix [K, width] from a rank's part of the student's tokens to some of the teacher's."""
        place = torch.full((self.teacher_vocab,), -1, device=wanted_K.device)
        place[wanted_K] = torch.arange(len(wanted_K), device=wanted_K.device)
        rows_E, columns_E = place[self.teachers_E], self.students_E - start
        kept_E = (rows_E >= 0) & (columns_E >= 0) & (columns_E < width)
        indices = torch.stack([rows_E[kept_E], columns_E[kept_E]])
        size = (len(wanted_K), width)
        return torch.sparse_coo_tensor(indices, self.weights_E[kept_E], size, check_invariants=False).coalesce()
