"""A step on data x tensor: closed forms, the memory of a worker, and which mesh is chosen."""

import itertools
from dataclasses import replace

import pytest
import torch

from allstep import Communicator
from allstep.errors import UsageError
from allstep.nn import tensor_parallel
from allstep.plan import (
    Cluster,
    Link,
    MeshSpec,
    PipelineSpec,
    PolicySpec,
    Prediction,
    Target,
    TrainingSpec,
    TransformerSpec,
    Workload,
    memory_of,
    predict,
    predict_mesh,
    recommend_mesh,
)
from allstep.plan.bottlenecks import bottlenecks
from allstep.recipes.text import Text
from allstep.recipes.token_loss import summed_cross_entropy
from allstep.recipes.transformer import Transformer, TransformerConfig, TransformerStage
from allstep.recipes.transformer_parallel import divide_stage, tensor_parallel_plan
from tests.helpers.processes import run_processes

BLOCKS = TransformerSpec(depth=24, width=1024, heads=16, sequence_length=512)
ALL_IN_BLOCKS = BLOCKS.divided_params + BLOCKS.depth * 6 * BLOCKS.width
TOKENS = 32_000
EMBEDDINGS = (TOKENS + 512 + 2) * 1024  # of tokens and positions, and the last norm
MICRO = Workload(
    num_params=ALL_IN_BLOCKS + EMBEDDINGS,
    forward_s=0.3,
    backward_s=0.6,
    optimizer_s=0.02,
    num_samples=8,
)
TRAINING = TrainingSpec(micro=MICRO)
POLICY = PolicySpec(name="fp32")
INSTANT = Link(bandwidth_bps=1e30)


def cluster(
    num_nodes: int = 8, per_node: int = 1, inter: Link = INSTANT, intra: Link = INSTANT
) -> Cluster:
    return Cluster(
        name="c",
        num_nodes=num_nodes,
        workers_per_node=per_node,
        intra=intra,
        inter=inter,
        copy_bytes_per_s=1e30,
    )


def on(mesh: MeshSpec, machines: Cluster, training: TrainingSpec = TRAINING) -> Prediction:
    return predict_mesh(training, BLOCKS, machines, POLICY, mesh)


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
def test_step_over_an_instant_link_is_compute_over_tensor(tensor: int) -> None:
    """All multiplications are divided, and the update of all but norms, biases and positions."""
    inside = replace(MICRO, num_params=ALL_IN_BLOCKS, optimizer_s=0.0)
    found = on(MeshSpec(data=8 // tensor, tensor=tensor), cluster(), TrainingSpec(micro=inside))
    assert found.report.step_s == pytest.approx(0.9 / tensor, rel=1e-12)
    assert found.speed_up == pytest.approx(8.0, rel=1e-12)

    whole = on(MeshSpec(data=8 // tensor, tensor=tensor), cluster())
    local = (24 * (12 * 1024**2 + 7 * 1024) + TOKENS * 1024) / tensor + (24 * 6 + 512 + 2) * 1024
    expected_s = 0.9 / tensor + 0.02 * local / MICRO.num_params
    assert whole.report.step_s == pytest.approx(expected_s, rel=1e-12)


def test_measured_share_goes_before_the_count() -> None:
    """Of the blocks and of the logits, but in a pipeline, where these are whole."""
    half = replace(BLOCKS, measured_share=0.5, measured_logits_share=0.25)
    found = predict_mesh(TRAINING, half, cluster(), POLICY, MeshSpec(data=2, tensor=4))
    local = BLOCKS.local_params(MICRO.num_params, 4) / MICRO.num_params
    assert found.report.step_s == pytest.approx(0.9 * (0.75 / 4 + 0.25) + 0.02 * local, rel=1e-12)
    assert half.block_share(MICRO.num_params) == 0.5
    assert replace(half, measured_share=0.9).divided_share == 1  # measured one after the other
    with pytest.raises(UsageError, match=r"`measured_share` \(=1.5\) must be 0 to 1"):
        replace(BLOCKS, measured_share=1.5)


@pytest.mark.parametrize("global_batch", [None, 64, 8])
@pytest.mark.parametrize("num_workers", [1, 2, 16])
def test_undivided_mesh_is_the_data_parallel_prediction(
    global_batch: int | None, num_workers: int
) -> None:
    ethernet = Link(bandwidth_bps=9.4e9, latency_s=30e-6)
    machines = cluster(4, 8, ethernet, Link(bandwidth_bps=400e9, latency_s=5e-6))
    training = replace(TRAINING, global_batch=global_batch, total_samples=10**6)
    (expected,) = predict(training, machines, [POLICY], [num_workers])
    assert on(MeshSpec(data=num_workers), machines, training) == expected


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_copy_waits_for_four_sums_a_block_and_micro_batch(num_micro_batches: int) -> None:
    """A ring of two sends the activations once, after two latencies."""
    link = Link(bandwidth_bps=80e9, latency_s=1e-3)
    training = replace(TRAINING, global_batch=8 * num_micro_batches)
    found = on(MeshSpec(tensor=2), cluster(2, 1, link, link), training)
    sum_s = 2e-3 + 8 * (8 * 512 * 1024 * 4) / 80e9
    assert found.copy.activations_s == pytest.approx(num_micro_batches * 4 * 24 * sum_s, rel=1e-9)
    instant = on(MeshSpec(tensor=2), cluster(2), training)
    assert found.report.step_s == pytest.approx(
        instant.report.step_s + found.copy.activations_s, rel=1e-9
    )
    assert found.waiting_share == pytest.approx(found.copy.activations_s / found.report.step_s)
    naive = on(MeshSpec(data=2), cluster(2, 1, link, link), training)
    assert abs(naive.report.step_s / found.report.step_s - 1) > 0.05  # all data parallel


def test_gradients_along_data_are_those_of_one_worker() -> None:
    """Exchanged at the end, by a ring of two that shares nothing: n local parameters' bytes."""
    link = Link(bandwidth_bps=8e9)
    at_the_end = PolicySpec(name="end", algorithm="ring", bucket_bytes=None)
    mesh = MeshSpec(data=2, tensor=2)
    machines = cluster(2, 2, inter=link)
    found = predict_mesh(TRAINING, BLOCKS, machines, at_the_end, mesh)
    local = BLOCKS.local_params(MICRO.num_params, 2)
    # Both workers of a node send their own part over its link at once.
    assert found.report.wire_s == pytest.approx(2 * 4 * local / 1e9, rel=1e-9)
    assert found.report.traffic.sent_bytes == pytest.approx(4 * local, rel=1e-6)
    lone = predict_mesh(TRAINING, BLOCKS, cluster(4, 1, inter=link), at_the_end, mesh)
    assert lone.report.wire_s == pytest.approx(4 * local / 1e9, rel=1e-9)


@pytest.mark.parametrize(("num_nodes", "per_node"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_axes_lie_node_by_node(num_nodes: int, per_node: int) -> None:
    """Counted: the nodes of neighbours, and how many rings of the other parts cross a node."""
    machines = cluster(num_nodes, per_node, Link(bandwidth_bps=1e9))
    for mesh in MeshSpec.all_of(8):
        ranks = [list(range(c * mesh.tensor, (c + 1) * mesh.tensor)) for c in range(mesh.data)]
        copy = {rank // per_node for rank in ranks[0]}
        assert mesh.tensor_axis(machines).num_nodes == len(copy)
        assert mesh.tensor_axis(machines).num_workers == mesh.tensor
        sharers = {ranks[c][0] // per_node for c in range(mesh.data)}
        axis = mesh.data_axis(machines)
        assert (axis.num_nodes, axis.num_workers) == (len(sharers), mesh.data)
        parts = {rank % mesh.tensor for rank in range(8) if rank // per_node == 0}
        assert axis.inter is not None
        assert axis.inter.bandwidth_bps == pytest.approx(1e9 / len(parts))


def test_bottlenecks_explain_the_whole_loss() -> None:
    link = Link(bandwidth_bps=50e9, latency_s=1e-5)
    training = replace(TRAINING, global_batch=24)
    for mesh in (MeshSpec(data=8), MeshSpec(data=4, tensor=2), MeshSpec(data=2, tensor=4)):
        found = on(mesh, cluster(8, 1, link, link), training)
        product = 1.0
        for bottleneck in bottlenecks(found):
            product *= bottleneck.factor
        assert product == pytest.approx(8 / found.speed_up, rel=1e-9)
    reasons = " ".join(b.reason for b in bottlenecks(found))
    assert "wait for each other's activations" in reasons


CONFIG = TransformerConfig(
    vocab_size=300, sequence_length=12, width=16, depth=3, heads=4, dropout=0.1, causal=True
)


def small_transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG)


SMALL = TransformerSpec(depth=3, width=16, heads=4, sequence_length=12)
BATCH = 5


def kept_bytes(model: torch.nn.Module) -> int:
    """What a forward pass keeps for the backward pass, each memory once, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(getattr(tensor, "_local_tensor", tensor))
        return tensor

    tokens = torch.randint(300, (BATCH, 12))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        summed_cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for start, size in storages.items() if start not in own)


def count_divided(comm: Communicator) -> tuple[int, int]:
    model = small_transformer()
    mesh = comm.mesh(data=1, tensor=comm.size)
    if comm.size > 1:
        tensor_parallel(model, mesh, tensor_parallel_plan(model))
    return sum(p.numel() for p in model.parameters()), kept_bytes(model)


def count_divided_stages(comm: Communicator) -> list[int]:
    """Parameters of this worker's part of each stage."""
    mesh = comm.mesh(data=1, tensor=comm.size)
    stages = [divide_stage(TransformerStage(CONFIG, number), mesh) for number in range(3)]
    return [sum(p.numel() for p in stage.parameters()) for stage in stages]


def check_memory(tensor: int, num_local: int, num_kept: int) -> None:
    num_params = sum(p.numel() for p in small_transformer().parameters())
    micro = Workload.from_step(num_params=num_params, step_s=1.0, num_samples=BATCH)
    found = memory_of(TrainingSpec(micro=micro), SMALL, MeshSpec(tensor=tensor))
    assert (found.parameters, found.gradients, found.optimizer) == (
        4 * num_local,
        4 * num_local,
        8 * num_local,
    )
    assert found.total == 16 * num_local + found.activations
    # Kept before there are gradients: one of the three v; of the two of sharded logits their
    # gradient. Norms keep two numbers of a token, attention one a head, a token is its own
    # target of 8 bytes, and the loss of whole logits keeps one number.
    tokens, num_unseen = BATCH * 12, 2 if tensor == 1 else 1
    statistics = 4 * (2 * (2 * 3 + 1) + 3 * 4) // tensor + 8
    unseen = 4 * tokens * num_unseen * 300 // tensor
    expected = found.activations - unseen + tokens * statistics
    assert num_kept == expected + (4 if tensor == 1 else 0)


def test_memory_is_what_a_real_transformer_keeps() -> None:
    model = small_transformer()
    check_memory(1, sum(p.numel() for p in model.parameters()), kept_bytes(model))


@pytest.mark.process
def test_memory_is_what_a_divided_transformer_keeps() -> None:
    for num_local, num_kept in run_processes(2, count_divided):
        check_memory(2, num_local, num_kept)


@pytest.mark.process
def test_parameters_are_those_of_divided_stages() -> None:
    """But for the last norm and the positions, which are counted on the first and the last."""
    num_params = sum(p.numel() for p in small_transformer().parameters())
    mesh = MeshSpec(pipeline=3, tensor=2)
    counted = PipelineSpec(transformer=SMALL, mesh=mesh).local_params(num_params)
    uncounted = [2 * 16, 0, 12 * 16]
    for found in run_processes(2, count_divided_stages):
        assert [own + more for own, more in zip(found, uncounted, strict=True)] == counted


def test_memory_by_hand() -> None:
    """A worker of four: 16 bytes a parameter, 4 x (1024 x (24 x 6 + 1.5) + 2 v / 4) a token."""
    four = MeshSpec(tensor=4)
    found = memory_of(TRAINING, BLOCKS, four)
    num_params = 24 * ((12 * 1024**2 + 7 * 1024) // 4 + 6 * 1024)
    num_params += (TOKENS // 4 + 512 + 2) * 1024
    assert found.parameters == found.gradients == 4 * num_params
    assert found.optimizer == 8 * num_params
    assert found.activations == 8 * 512 * 4 * (1024 * (24 * 6 + 1.5) + 2 * 8_000)
    assert memory_of(TRAINING, BLOCKS, four, states_per_param=1).optimizer == 4 * num_params
    halved = memory_of(TRAINING, replace(BLOCKS, activation_bytes=2), four)
    assert 2 * halved.activations == found.activations


def test_divided_layers_hold_the_divided_parameters(tmp_path) -> None:
    model = small_transformer()
    halves, logits = Text(folder=tmp_path, depth=3, width=16, heads=4).divided_layers(model)
    assert len(halves) == 2 * 3
    assert logits == [model.logits]
    whole_biases = 2 * 3 * 16
    num_params = sum(p.numel() for layer in halves for p in layer.parameters())
    assert num_params == SMALL.divided_params + whole_biases


def advise(machines: Cluster, memory_gib: float | None = None, **more: object):
    meshes = [mesh for mesh in MeshSpec.all_of(8) if mesh.shard == 1]
    return recommend_mesh(TRAINING, BLOCKS, machines, POLICY, meshes, memory_gib=memory_gib, **more)


def test_fastest_mesh_that_fits_is_chosen() -> None:
    machines = cluster(1, 8, intra=Link(bandwidth_bps=400e9, latency_s=5e-6))
    free = advise(machines)
    assert str(free.choice.prediction.mesh) == "data=8,tensor=1"
    assert not free.left_out
    rates = [option.prediction.samples_per_s for option in free.options]
    assert rates == sorted(rates, reverse=True)

    needs = {o.prediction.mesh.tensor: o.memory.total_gib for o in free.options}
    assert all(needs[a] > needs[b] for a, b in itertools.pairwise((1, 2, 4, 8)))
    tight = advise(machines, memory_gib=(needs[1] + needs[2]) / 2)
    assert str(tight.choice.prediction.mesh) == "data=4,tensor=2"
    assert list(tight.left_out) == [MeshSpec(data=8)]
    assert tight.left_out[MeshSpec(data=8)].startswith(f"a worker needs {needs[1]:.3g} GiB, and")

    none = advise(machines, memory_gib=0.5 * needs[8])
    assert none.choice is None
    assert none.sentence.startswith("none of these meshes fits: data=1,tensor=8 needs least")


def test_one_worker_is_kept_where_it_is_faster_and_fits() -> None:
    slow = Link(bandwidth_bps=50e6, latency_s=1e-3)
    machines = cluster(8, 1, slow, slow)
    assert advise(machines).sentence.startswith("stay on one worker, on which the model fits: ")
    needs = memory_of(TRAINING, BLOCKS, MeshSpec()).total_gib
    forced = advise(machines, memory_gib=0.99 * needs)
    assert forced.choice is not None
    assert "one worker, " in forced.sentence


def test_target_ranks_by_the_time_to_it() -> None:
    """The least divided mesh has the largest batch, of which a small noise scale makes little."""
    machines = cluster(1, 8, intra=Link(bandwidth_bps=4e12))
    assert str(advise(machines).choice.prediction.mesh) == "data=8,tensor=1"
    found = advise(machines, target=Target(critical_batch=8, known_batch=8))
    assert found.choice.prediction.mesh.tensor > 1


def test_other_dimensions_are_refused() -> None:
    with pytest.raises(UsageError, match=r"`tensor` \(=3\) must divide the 16 heads"):
        on(MeshSpec(data=1, tensor=3), cluster(8))
    with pytest.raises(UsageError, match=r"`tensor` \(=4\) must divide the 6 workers of a node"):
        on(MeshSpec(data=3, tensor=4), cluster(2, 6))
    with pytest.raises(UsageError, match=r"`mesh` \(=16\) exceeds the 8"):
        on(MeshSpec(data=8, tensor=2), cluster(8))
    with pytest.raises(UsageError, match=r"`params` \(=1,000\) are fewer than the 302,"):
        memory_of(TrainingSpec(micro=replace(MICRO, num_params=1000)), BLOCKS, MeshSpec())
    with pytest.raises(UsageError, match=r"`tensor` \(=0\) must be at least 1"):
        MeshSpec(data=2, tensor=0)
    with pytest.raises(UsageError, match=r"`width` \(=10\) must be a multiple of `heads`"):
        TransformerSpec(depth=1, width=10, heads=4, sequence_length=8)
