from rlctl.api import evaluate as evaluate
from rlctl.api import generate as generate
from rlctl.api import load_config as load_config
from rlctl.api import plan as plan
from rlctl.api import read_metrics as read_metrics
from rlctl.api import register_algorithm as register_algorithm
from rlctl.api import train as train
from rlctl.backends.batching.batch import TokenBatch as TokenBatch
from rlctl.backends.lookup import register_backend as register_backend
from rlctl.errors import RlctlError as RlctlError
from rlctl.methods.rl.algorithm import Algorithm as Algorithm
from rlctl.rollouts.source import RolloutSource as RolloutSource
from rlctl.telemetry.metrics import Metric as Metric
from rlctl.training.loop import Loop as Loop
from rlctl.training.method import Method as Method

__version__: str
API: dict[str, str]
