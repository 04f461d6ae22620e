#!/usr/bin/env bash
# TensorBoard 2.21.0: EventAccumulator keeps ten of the scalars that TensorBoard's own writer has written.
#
# Input: tensorboard.summary.Writer writes 100 scalars of one tag; the same 100 values as simple_value, the form that
# torch.utils.tensorboard writes. EventAccumulator reads both with its default arguments.
# Guess, written down first: 100 scalars in both cases.
# Behavior: scalars of TensorBoard's own writer are tensors to EventAccumulator: Tags()["scalars"] is empty, and Tensors() has
# 10 of the 100 steps, drawn at random, because the default size for tensors is 10. The curve has no error and no warning.
# size_guidance={"tensors": 0} keeps all.
# Output seen:
#   simple_value: 100 scalars, 0 tensors
#   tensorboard.summary.Writer: 0 scalars, 10 tensors
#   tensorboard.summary.Writer, size_guidance={"tensors": 0}: 0 scalars, 100 tensors
# Exits with 1 if the behavior changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "tensorboard==2.21.0"
"$place/venv/bin/python" - "$place" <<'PYTHON'
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary import Writer
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def kept(directory: Path, sizes: dict[str, int] | None = None) -> tuple[int, int]:
    events = EventAccumulator(str(directory), size_guidance=sizes)
    events.Reload()
    tags = events.Tags()
    scalars = len(events.Scalars("reward")) if "reward" in tags["scalars"] else 0
    return scalars, len(events.Tensors("reward")) if "reward" in tags["tensors"] else 0


new, old = Path(sys.argv[1]) / "new", Path(sys.argv[1]) / "old"
writer = Writer(str(new))
simple = EventFileWriter(str(old))
for step in range(100):
    writer.add_scalar("reward", step / 100, step)
    value = Summary.Value(tag="reward", simple_value=step / 100)
    simple.add_event(Event(wall_time=float(step), step=step, summary=Summary(value=[value])))
writer.close()
simple.close()
seen = {
    "simple_value": kept(old),
    "tensorboard.summary.Writer": kept(new),
    'tensorboard.summary.Writer, size_guidance={"tensors": 0}': kept(new, {"tensors": 0}),
}
for name, (scalars, tensors) in seen.items():
    print(f"{name}: {scalars} scalars, {tensors} tensors")
assert list(seen.values()) == [(100, 0), (0, 10), (0, 100)]
PYTHON
