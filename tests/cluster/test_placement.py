"""The order of devices, and what a worker is told of them."""

from __future__ import annotations

from rlctl.cluster.placement import Bundle, place_order
from rlctl.cluster.workers import WorkerSpec


def test_devices_of_a_node_are_neighbors_in_the_order_of_their_numbers() -> None:
    places = [("b", "10"), ("a", "2"), ("b", "9"), ("a", "0")]
    assert sorted(places, key=lambda place: place_order(*place)) == [("a", "0"), ("a", "2"), ("b", "9"), ("b", "10")]


def test_devices_named_by_uuid_are_passed_on_as_they_are() -> None:
    bundles = tuple(Bundle(index, "a", gpu) for index, gpu in enumerate(("GPU-1f", "GPU-2e")))
    environment = WorkerSpec({}, bundles).environment()
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1f,GPU-2e"
    assert sorted(bundles, key=lambda bundle: place_order(bundle.node, bundle.gpu)) == list(bundles)
