"""A step and the memory of workers over which FSDP2 shards a model's states."""

from dataclasses import replace

import pytest

from allstep.errors import UsageError
from allstep.plan import Link, MeshSpec, memory_of, recommend_mesh
from allstep.plan.bottlenecks import bottlenecks
from tests.plan.test_mesh import BLOCKS, EMBEDDINGS, MICRO, POLICY, TRAINING, cluster, on

BLOCK = 12 * 1024**2 + 13 * 1024


def test_states_are_shared_and_compute_is_not_over_an_instant_link() -> None:
    whole, sharded = (on(MeshSpec(data=8, shard=s), cluster()) for s in (1, 8))
    assert sharded.report.step_s == pytest.approx(0.9 + 0.02 / 8, rel=1e-12)
    assert whole.report.step_s == pytest.approx(0.92, rel=1e-12)
    assert sharded.copy.sharding_s == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("global_batch", [None, 256])
@pytest.mark.parametrize(("shard", "tensor"), [(8, 1), (2, 1), (4, 2), (2, 2)])
def test_step_of_which_the_wire_takes_most(
    shard: int, tensor: int, global_batch: int | None
) -> None:
    """Three gathers or sums a micro-batch, the first and the last of one part of 25 more."""
    link = Link(bandwidth_bps=8e9)
    training = replace(TRAINING, global_batch=global_batch)
    mesh = MeshSpec(data=8 // tensor, tensor=tensor, shard=shard)
    found = on(mesh, cluster(8 // tensor, tensor, link), training)
    num_bytes = 4 * BLOCKS.local_params(MICRO.num_params, tensor)
    gather_s = tensor * num_bytes * (shard - 1) / shard / 1e9  # over a share of the node's link
    copies = mesh.data // shard
    sum_s = tensor * 2 * num_bytes / shard * (copies - 1) / copies / 1e9
    m = training.num_micro_batches(mesh.data)
    passes_s = m * (gather_s * (3 + 2 / 25) + sum_s)
    optimizer_s = 0.02 / shard * BLOCKS.local_params(MICRO.num_params, tensor) / MICRO.num_params
    assert found.report.step_s == pytest.approx(passes_s + optimizer_s, rel=1e-6)
    assert found.report.exposed_s == 0
    product = 1.0
    for bottleneck in bottlenecks(found):
        product *= bottleneck.factor
    assert product == pytest.approx(found.num_workers / found.speed_up, rel=1e-9)
    assert found.waiting_share == pytest.approx(
        (found.copy.sharding_s + found.copy.activations_s) / found.report.step_s, rel=1e-9
    )


def test_compute_is_slower_beside_what_is_gathered() -> None:
    machines = replace(cluster(8, 1, Link(bandwidth_bps=400e9)), compute_slowdown=0.1)
    found = on(MeshSpec(data=8, shard=8), machines)
    gather_s = 4 * MICRO.num_params * 7 / 8 / 50e9
    assert found.copy.sharding_s == pytest.approx(gather_s * (3 * 0.1 + 2 / 25), rel=1e-6)


def test_sharded_memory_by_hand() -> None:
    """A shard of each state; the rest, two blocks, and two of the larger one's gradients."""
    found = memory_of(TRAINING, BLOCKS, MeshSpec(data=8, shard=8))
    whole = memory_of(TRAINING, BLOCKS, MeshSpec())
    rest = MICRO.num_params - 24 * BLOCK
    assert rest == EMBEDDINGS
    assert found.parameters == MICRO.num_params * 4 // 8 + 4 * (rest + 2 * BLOCK)
    assert found.gradients == MICRO.num_params * 4 // 8 + 4 * 2 * rest
    assert found.optimizer == whole.optimizer // 8
    assert found.activations == whole.activations


def test_sharded_mesh_is_chosen_where_whole_copies_do_not_fit() -> None:
    link = Link(bandwidth_bps=400e9, latency_s=5e-6)
    machines, meshes = cluster(1, 8, intra=link), MeshSpec.all_of(8)
    free = recommend_mesh(TRAINING, BLOCKS, machines, POLICY, meshes)
    assert free.choice is not None and str(free.choice.prediction.mesh) == "data=8,tensor=1"
    needs = memory_of(TRAINING, BLOCKS, MeshSpec()).total_gib
    tight = recommend_mesh(TRAINING, BLOCKS, machines, POLICY, meshes, memory_gib=0.99 * needs)
    assert tight.choice is not None
    assert str(tight.choice.prediction.mesh) == "data=8,tensor=1,shard=8"


@pytest.mark.parametrize("bandwidth_bps", [8e9, 1e30])
def test_step_of_sharded_stages(bandwidth_bps: float) -> None:
    """Nothing travels beside compute: three gathers or sums in each turn."""
    link = Link(bandwidth_bps=bandwidth_bps)
    training, mesh = replace(TRAINING, global_batch=80), MeshSpec(data=2, pipeline=2, shard=2)
    found = on(mesh, cluster(4, 1, link), training)
    num_params = 12 * BLOCK + EMBEDDINGS  # of each of the two
    gather_s = 4 * num_params / 2 * 8 / bandwidth_bps
    message_s = link.seconds(BLOCKS.num_activations(8) * BLOCKS.activation_bytes)
    in_blocks = BLOCKS.block_share(MICRO.num_params)
    ends_s = (0.9 * in_blocks / 2, 0.9 * (1 - in_blocks / 2))
    turns_s = [end_s + message_s + 3 * gather_s for end_s in ends_s]
    optimizer_s = 0.02 * num_params / MICRO.num_params / 2
    expected_s = sum(turns_s) + 4 * max(turns_s) + optimizer_s
    assert found.report.step_s == pytest.approx(expected_s, rel=1e-6)
    assert found.copy.sharding_s == pytest.approx(5 * 3 * gather_s, rel=1e-6, abs=1e-12)


def test_memory_of_sharded_stages_by_hand() -> None:
    """As of all blocks, but for one that is gathered at a time."""
    training = replace(TRAINING, global_batch=4 * 5 * 8)
    whole = memory_of(training, BLOCKS, MeshSpec(data=4, pipeline=2))
    found = memory_of(training, BLOCKS, MeshSpec(data=4, pipeline=2, shard=4))
    num_params = 12 * BLOCK + EMBEDDINGS
    assert found.parameters == num_params * 4 // 4 + 4 * (EMBEDDINGS + BLOCK)
    assert found.gradients == num_params * 4 // 4 + 4 * 2 * EMBEDDINGS
    assert found.optimizer == whole.optimizer // 4
    assert found.activations == whole.activations


def test_shards_that_do_not_divide_the_copies() -> None:
    with pytest.raises(UsageError, match=r"`shard` \(=3\) must divide `data` \(=4\)"):
        MeshSpec(data=4, shard=3)
