"""Placement of workers: one bundle per device, reserved for the whole run."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.cluster.ray_health import control_answers, dead_process, require_control, require_processes
from rlctl.errors import MachineError

NODE_LABEL = "ray.io/node-id"
"""The label that Ray gives each node."""
LOOK_S = 0.02
"""Seconds between two looks at the reservation."""


@dataclass(frozen=True)
class Bundle:
    """One reserved device (without GPUs, one CPU slot) of one node."""

    index: int
    node: str
    """Node address; workers of one node share memory."""
    gpu: str | None
    """The GPU in the form of its node's CUDA_VISIBLE_DEVICES, index or UUID; None without GPUs."""
    node_id: str = ""
    """Ray's identifier of the node."""


class Placement:
    """`count` bundles on the cluster, numbered so that neighbors share a node if possible."""

    def __init__(self, count: int, *, gpus: bool, timeout_s: float, away_from: Sequence[Bundle] = ()) -> None:
        """Reserve the bundles, on other nodes than `away_from`. Raises MachineError after `timeout_s`."""
        import ray
        from ray.util.placement_group import placement_group

        unit = {"CPU": 1.0, "GPU": 1.0} if gpus else {"CPU": 1.0}
        others = sorted({bundle.node_id for bundle in away_from})
        elsewhere: dict[str, Any] = {}
        if others:
            elsewhere["bundle_label_selector"] = [{NODE_LABEL: f"!in({','.join(others)})"}] * count
        self._gpus = gpus
        self.group = placement_group([dict(unit) for _ in range(count)], strategy="PACK", **elsewhere)
        try:
            self.bundles = self._discover(range(count), gpus, timeout_s)
        except TimeoutError:
            self.release()
            require_control()
            total = ray.cluster_resources()
            excluded = ", ".join(sorted({bundle.node for bundle in away_from}))
            where = f" on other nodes than {excluded}" if others else ""
            raise MachineError(
                f"The plan needs {count} {'GPUs' if gpus else 'CPU slots'}{where}, and Ray could not reserve them in "
                f"{timeout_s:.0f} s (the cluster has {total.get('GPU', 0):.0f} GPUs and {total.get('CPU', 0):.0f} CPU "
                "slots).",
                "Free some, use fewer with --nodes/--gpus-per-node, or raise cluster.start_timeout_s.",
            ) from None
        except BaseException:
            self.release()
            raise

    def _discover(self, indexes: Sequence[int], gpus: bool, timeout_s: float) -> tuple[Bundle, ...]:
        import ray

        if gpus:  # Ray names the device of a bundle only to a task inside of it
            where = ray.remote(num_cpus=1, num_gpus=1)(_where_am_i)
            answers = [where.options(scheduling_strategy=self.strategy(index)).remote() for index in indexes]
            places = ray.get(answers, timeout=timeout_s)
        else:
            places = self._slots(indexes, timeout_s)
        bundles = [Bundle(index, *place) for index, place in zip(indexes, places, strict=True)]
        # The sort is stable and keeps Ray's order of equal (node, GPU) keys.
        return tuple(sorted(bundles, key=lambda bundle: place_order(bundle.node, bundle.gpu)))

    def _slots(self, indexes: Sequence[int], timeout_s: float) -> list[tuple[str, None, str]]:
        """Look up the nodes of bundles without a device, in a loop, since Ray's own wait cannot be interrupted."""
        import ray

        deadline = time.monotonic() + timeout_s
        while True:
            require_processes()
            if control_answers():
                addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
                table = ray.util.placement_group_table(self.group)
                nodes = [table["bundles_to_node_id"].get(index) for index in indexes]
                if table["state"] == "CREATED" and all(node in addresses for node in nodes):
                    return [(addresses[node], None, node) for node in nodes]
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(LOOK_S)

    def strategy(self, index: int) -> Any:
        """Ray scheduling strategy for Ray's bundle number `index`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=index)

    def stands(self, bundles: Sequence[Bundle]) -> bool:
        """Whether bundles that shared a node still share one. Lost bundles have no node until Ray places them again."""
        import ray

        require_control()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        now = self._nodes()
        by_node: dict[str, set[str | None]] = {}
        for bundle in bundles:
            by_node.setdefault(bundle.node_id, set()).add(now.get(bundle.index))
        return all(len(nodes) == 1 and nodes <= alive for nodes in by_node.values())

    def standing(self) -> tuple[Bundle, ...]:
        """Return the bundles whose node is not lost."""
        import ray

        now, alive = self._nodes(), {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return tuple(
            bundle for bundle in self.bundles if bundle.node_id in alive and now.get(bundle.index) == bundle.node_id
        )

    def moved(self, bundles: Sequence[Bundle]) -> bool:
        """Whether `bundles` stand and some changed their node. A host that comes back counts as a new node."""
        now = self._nodes()
        return self.stands(bundles) and any(now.get(bundle.index) != bundle.node_id for bundle in bundles)

    def renewed(self, bundles: Sequence[Bundle], timeout_s: float) -> tuple[Bundle, ...]:
        """Return `bundles` with their current node and device, after Ray placed lost ones again."""
        nodes = self._nodes()
        if all(nodes.get(bundle.index) == bundle.node_id for bundle in bundles):
            return tuple(bundles)
        return self._discover([bundle.index for bundle in bundles], self._gpus, timeout_s)

    def _nodes(self) -> dict[int, str]:
        import ray

        require_control()
        return ray.util.placement_group_table(self.group)["bundles_to_node_id"]

    def release(self) -> None:
        """Return the bundles to Ray. If Ray is broken or out of reach, they end with this process."""
        import ray
        from ray.exceptions import GetTimeoutError

        if dead_process() is None and control_answers():
            with contextlib.suppress(GetTimeoutError):
                ray.util.remove_placement_group(self.group)


def place_order(node: str, gpu: str | None) -> tuple[str, int, str]:
    """Return a sort key that groups devices by node, in numerical order."""
    return node, int(gpu) if gpu and gpu.isdigit() else -1, gpu or ""


def node_address() -> str | None:
    """Return this node's address in the Ray cluster; None outside of Ray."""
    ray = sys.modules.get("ray")
    return ray.util.get_node_ip_address() if ray is not None and ray.is_initialized() else None


def node_id() -> str | None:
    """Ray's identifier of this node; None outside of Ray."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context().get_node_id() if ray is not None and ray.is_initialized() else None


def _where_am_i() -> tuple[str, str | None, str]:
    import ray

    gpu_ids = ray.get_gpu_ids()
    gpu = str(gpu_ids[0]) if gpu_ids else None
    return ray.util.get_node_ip_address(), gpu, ray.get_runtime_context().get_node_id()
