"""Prompts from a Hugging Face dataset: a name on the hub, or a directory that `datasets` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.config.schema import DataConfig
from rlctl.data.names import suggest
from rlctl.data.rows import PromptRow, instructions, limited, require_fields, row_from_record
from rlctl.errors import InputError, MachineError

if TYPE_CHECKING:
    from datasets import Dataset

CHECKED_ROWS = 1000
"""Rows whose fields are checked when the dataset is opened; the rest when they are drawn."""


class HubPrompts:
    """Rows of one split, memory-mapped by `datasets`."""

    task = None

    def __init__(self, label: str, dataset: Dataset, data: DataConfig) -> None:
        if len(dataset) == 0:
            raise InputError(f"Dataset {label} (split {data.split}) has no rows.")
        require_fields(dataset.column_names, data, f"Dataset {label}")
        self.label, self.instructions = label, instructions(data)
        self._dataset, self._data = dataset, data
        self._rows = limited(len(dataset), data.size)
        for index in range(min(self._rows, CHECKED_ROWS)):
            self[index]

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> PromptRow:
        if not 0 <= index < len(self):
            raise IndexError(index)
        where = f"dataset {self.label} ({self._data.split}), row {index}"
        return row_from_record(self._dataset[index], index, where, self._data)

    def fingerprint(self) -> dict[str, Any]:
        # `datasets` hashes the files of the dataset and every operation on it into this.
        return {
            "source": self.label,
            "split": self._data.split,
            "rows": len(self),
            "fingerprint": self._dataset._fingerprint,
        }


def open_hub(name: str, data: DataConfig) -> HubPrompts:
    """The split `data.split` of a dataset `name`, or of its configuration c as `name:c`.

    Looks in the local cache and then on the hub. Raises InputError when it is in neither, or the hub cannot be reached.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise MachineError(
            "Hugging Face datasets need the package datasets.", "Install rlctl[cpu] or [cuda]."
        ) from error
    path, _, configuration = name.partition(":")
    if _is_saved_to_disk(Path(path)):
        return HubPrompts(name, _from_disk(path, data), data)
    try:
        loaded = datasets.load_dataset(path, configuration or None, split=data.split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        # `datasets` raises these for an unknown name, split or configuration, and for a hub out of reach
        raise InputError(
            f"Dataset {name!r} (split {data.split!r}) could not be loaded: {_first_line(error)}",
            "--data takes reasoning-gym:<task>, a .jsonl or .parquet file, or a Hugging Face dataset (name or "
            "name:configuration) that is in the local cache or that the hub can be reached for.",
        ) from error
    return HubPrompts(name, loaded, data)


def _is_saved_to_disk(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _from_disk(path: str, data: DataConfig) -> Dataset:
    """A directory written by `save_to_disk`: one split, or several by name."""
    import datasets

    loaded = datasets.load_from_disk(path)
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if data.split not in loaded:
        hint = suggest(data.split, loaded) or f"It has {', '.join(loaded)}; choose with --set data.split=..."
        raise InputError(f"Dataset {path} has no split {data.split!r}.", hint)
    return loaded[data.split]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
