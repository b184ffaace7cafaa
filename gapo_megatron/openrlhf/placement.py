"""Which bundle of a placement group each rank takes."""

from typing import Any


def bundle_index(placement_group: Any, rank: int) -> int:
    """The bundle of `rank` when bundles are grouped by node: neighbouring ranks, and so the ranks of a tensor-parallel
    group, share a node wherever one has room for them.

    Ray numbers bundles before it places them, so that their own order may alternate between nodes.
    """
    import ray

    return by_node(ray.util.placement_group_table(placement_group)["bundles_to_node_id"])[rank]


def by_node(node_of_bundle: dict[int, str]) -> list[int]:
    """Bundle indices, those of one node together; nodes in the order of their first bundle."""
    first: dict[str, int] = {}
    for bundle in sorted(node_of_bundle):
        first.setdefault(node_of_bundle[bundle], bundle)
    return sorted(node_of_bundle, key=lambda bundle: (first[node_of_bundle[bundle]], bundle))
