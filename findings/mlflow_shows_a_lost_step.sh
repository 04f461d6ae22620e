#!/usr/bin/env bash
# MLflow 3.17.2 (mlflow-skinny, SQLite store): after a resume, a metric of the run shows the value of a lost step.
#
# Input: steps 1 to 5 of a run, then steps 3 and 4 again under the same run id, as a resume from a checkpoint of step 2 logs them.
# Guess, written down first: run.data.metrics has the value that was logged last.
# Behavior: run.data.metrics, by which search_runs filters, has the value of the largest step, 5, which no longer
# belongs to the run. It stays until the resumed run logs step 5 or later. The history has both values of steps 3 and 4.
# At an equal step and an equal millisecond, the larger value stays, not the one logged last.
# Output seen:
#   history: [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.9), (3, 0.1), (4, 0.2)]
#   value: 0.9, runs with reward above 0.8: 1, value after step 5: 0.3
#   two values of one step and millisecond, 0.5 and then 0.2: 0.5
# Exits with 1 if the behavior changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "mlflow-skinny==3.17.2" "sqlalchemy==2.1.9" "alembic==1.20.1"
"$place/venv/bin/python" - "$place" <<'PYTHON'
import sys

from mlflow import MlflowClient

client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}/runs.db")
experiment = client.create_experiment("resumed")
run = client.create_run(experiment).info.run_id


def value(name: str) -> float:
    return client.get_run(run).data.metrics[name]


for step, reward in [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.9), (3, 0.1), (4, 0.2)]:
    client.log_metric(run, "reward", reward, step=step)
history = [(metric.step, metric.value) for metric in client.get_metric_history(run, "reward")]
resumed = value("reward")
found = len(client.search_runs([experiment], "metrics.reward > 0.8"))
client.log_metric(run, "reward", 0.3, step=5)
later = value("reward")
for loss in (0.5, 0.2):
    client.log_metric(run, "loss", loss, step=1, timestamp=1000)
print(f"history: {history}\nvalue: {resumed}, runs with reward above 0.8: {found}, value after step 5: {later}")
print(f"two values of one step and millisecond, 0.5 and then 0.2: {value('loss')}")
assert sorted(history) == sorted([(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.9), (3, 0.1), (4, 0.2)])
assert (resumed, found, later, value("loss")) == (0.9, 1, 0.3, 0.5)
PYTHON
