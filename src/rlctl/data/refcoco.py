"""Rows of RefCOCO as published (`jxu124/refcoco`): a picture, several captions of one thing in it, and its box.

A row becomes a question and the box in thousandths of the picture's sides. The pictures are not in the data set, but in
archives of COCO.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.data.image_rows import image_in, is_refcoco
from rlctl.errors import InputError
from rlctl.settings.data import DataConfig

QUESTION = "Please provide the bounding box coordinate of the region described by the following phrase: {}"
ADDED = ("prompt", "image", "answer", "completion")
ARCHIVES = "http://images.cocodataset.org/zips/{}.zip"
"""Where the pictures of `train2014` and `val2014` are."""
_ROOT = "coco/"
"""Prefix of picture paths, which the folder of pictures replaces."""


def refcoco_record(record: Mapping[str, Any], index: int, where: str, data: DataConfig) -> Mapping[str, Any]:
    """Return a record with a prompt, its picture and the box as its answer; other data unchanged. Raises InputError for
    a row without them, and for a missing picture, with the archive's name."""
    if not is_refcoco(record):
        return record
    captions, box = record["captions"], record["bbox"]
    if not captions or not isinstance(box, list | tuple) or len(box) != 4:
        raise InputError(f"{where}: it has no caption, or no box of four numbers.", "Leave the row out.")
    # A row asks for the same thing in all epochs, and in validation by the caption that says most.
    validates = "val" in str(record.get("split"))
    caption = max(captions, key=len) if validates else captions[index % len(captions)]
    path = str(record["image_path"]).removeprefix(_ROOT)
    try:
        height, width = image_in(path, where, data).size()
    except InputError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        archive, folder = ARCHIVES.format(path.partition("/")[0]), data.image_folder or "the folder of the data file"
        hint = f"Download {archive} and unpack it in {folder} (data.image_folder)."
        raise InputError(error.message, hint) from error
    scaled = [round(side / whole * 1000) for side, whole in zip(box, (width, height, width, height), strict=True)]
    answer = f"[{', '.join(map(str, scaled))}]"
    return {**record, **dict(zip(ADDED, (QUESTION.format(caption), path, answer, answer), strict=True))}
