"""A pipelined step: closed forms, the schedules counted event by event, memory, and advice."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from allstep.errors import UsageError
from allstep.plan import (
    Link,
    MeshSpec,
    PipelineSpec,
    PolicySpec,
    TrainingSpec,
    TransformerSpec,
    Workload,
    memory_of,
    predict_mesh,
    recommend_mesh,
)
from allstep.plan.bottlenecks import bottlenecks
from allstep.plan.memory import memory_of_workers
from allstep.recipes.transformer import TransformerConfig, TransformerStage
from tests.plan.test_mesh import (
    ALL_IN_BLOCKS,
    BLOCKS,
    EMBEDDINGS,
    MICRO,
    POLICY,
    TOKENS,
    cluster,
    on,
)

# All of it in blocks: stages are equal.
INSIDE = replace(MICRO, num_params=ALL_IN_BLOCKS, optimizer_s=0.0)


def spec(num_workers: int, stages_per_worker: int = 1, depth: int = 24) -> PipelineSpec:
    return PipelineSpec(
        transformer=replace(BLOCKS, depth=depth),
        mesh=MeshSpec(pipeline=num_workers, stages_per_worker=stages_per_worker),
    )


def training_of(micro: Workload, num_micro_batches: int, num_copies: int = 1) -> TrainingSpec:
    return TrainingSpec(micro=micro, global_batch=8 * num_micro_batches * num_copies)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 2), (4, 1, 4), (4, 1, 30), (4, 2, 8), (8, 3, 64)])
def test_bubble_share_is_the_published_one(p: int, v: int, m: int) -> None:
    step = spec(p, v).step(INSIDE, m)
    assert step.bubble_s / step.workload.compute_s == pytest.approx((p - 1) / (v * m + p - 1))
    assert step.workload.compute_s - step.bubble_s == pytest.approx(0.9 * m / p)
    assert step.activations_s == 0
    naive_s = 0.9 * m / p  # without a bubble
    assert step.workload.compute_s / naive_s - 1 == pytest.approx((p - 1) / (v * m))


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 7), (4, 4), (4, 9), (8, 32)])
def test_messages_are_two_a_micro_batch_and_border(p: int, m: int) -> None:
    """A micro-batch's way there and back through p stages, at the pace of 1F1B."""
    message_s = 0.003
    step = spec(p).step(INSIDE, m, message_s=message_s)
    lap_s = 0.9 + 2 * (p - 1) * message_s
    assert step.workload.compute_s == pytest.approx((m + p - 1) / p * lap_s, rel=1e-12)
    assert step.activations_s == pytest.approx(m * 2 * message_s * (p - 1) / p, rel=1e-12)


def simulated_1f1b_s(
    forward_s: list[float], backward_s: list[float], m: int, message_s: float
) -> float:
    """The end of torch's Schedule1F1B, whose messages arrive `message_s` after they are sent.

    Worker i runs p - i forward passes first, then one backward and one forward pass by turns.
    """
    p = len(forward_s)
    orders = []
    for i in range(p):
        first = min(m, p - i)
        order = [("F", k) for k in range(first)]
        for k in range(m):
            order.append(("B", k))
            if first + k < m:
                order.append(("F", first + k))
        orders.append(order)
    ends: dict[tuple[str, int, int], float] = {}
    clocks, done = [0.0] * p, [0] * p
    while any(done[i] < len(orders[i]) for i in range(p)):
        for i in range(p):
            while done[i] < len(orders[i]):
                kind, k = orders[i][done[i]]
                before = (kind, k, i - 1) if kind == "F" else (kind, k, i + 1)
                if not 0 <= before[2] < p:
                    start_s = clocks[i]
                elif before in ends:
                    start_s = max(clocks[i], ends[before] + message_s)
                else:
                    break
                clocks[i] = start_s + (forward_s[i] if kind == "F" else backward_s[i])
                ends[kind, k, i] = clocks[i]
                done[i] += 1
    return max(clocks)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (2, 9), (4, 4), (4, 12), (8, 8), (8, 40)])
def test_equal_stages_take_as_long_as_the_schedule_event_by_event(p: int, m: int) -> None:
    step = spec(p).step(INSIDE, m)
    simulated_s = simulated_1f1b_s([0.3 / p] * p, [0.6 / p] * p, m, 0.0)
    assert step.workload.compute_s == pytest.approx(simulated_s, rel=1e-12)
    message_s = 0.02 * 0.9 / p
    step = spec(p).step(INSIDE, m, message_s=message_s)
    simulated_s = simulated_1f1b_s([0.3 / p] * p, [0.6 / p] * p, m, message_s)
    assert step.workload.compute_s == pytest.approx(simulated_s, rel=0.01)


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (4, 40), (5, 25)])
def test_unequal_stages_go_at_the_pace_of_the_slowest(p: int, m: int) -> None:
    """The logits of a large vocabulary on the last worker, and blocks that don't divide evenly."""
    step = spec(p, depth=23).step(MICRO, m)
    share = replace(BLOCKS, depth=23).block_share(MICRO.num_params)
    depths = spec(p, depth=23).depths
    assert sum(depths) == 23
    shares = [depth / 23 * share for depth in depths]
    shares[-1] += 1 - share
    simulated_s = simulated_1f1b_s([0.3 * s for s in shares], [0.6 * s for s in shares], m, 0.0)
    found_s = step.workload.compute_s - step.workload.optimizer_s
    assert found_s == pytest.approx(simulated_s, rel=0.01)
    assert found_s == pytest.approx(0.9 * (1 + (m - 1) * max(shares)), rel=1e-12)
    assert found_s > 1.02 * (m + p - 1) * 0.9 / p  # as if they were equal


def test_pipeline_of_one_is_the_undivided_step() -> None:
    step = spec(1).step(MICRO, 3, message_s=1.0)
    whole = training_of(MICRO, 3).workload(1)
    assert step.bubble_s == step.activations_s == 0
    assert step.workload.compute_s == pytest.approx(whole.compute_s, rel=1e-12)
    assert step.workload.num_params == MICRO.num_params


def test_mesh_of_all_three_axes_by_hand() -> None:
    """Two copies of two stages of two workers, on one link each, exchange at the end."""
    link = Link(bandwidth_bps=80e9, latency_s=1e-3)
    mesh, m = MeshSpec(data=2, pipeline=2, tensor=2), 4
    at_the_end = PolicySpec(name="end", algorithm="ring", bucket_bytes=None)
    found = predict_mesh(
        training_of(INSIDE, m, 2), BLOCKS, cluster(8, 1, link, link), at_the_end, mesh
    )
    activations = 8 * 512 * 1024 * 4
    sum_s, message_s = 2e-3 + 8 * activations / 80e9, 1e-3 + 8 * activations / 80e9
    stage_s = 0.9 / 4 + 4 * 12 * sum_s
    slot_s = stage_s + 2 * message_s / 2
    assert found.report.compute_s == pytest.approx((m + 1) * slot_s, rel=1e-9)
    assert found.copy.bubble_s == pytest.approx(slot_s, rel=1e-9)
    assert found.copy.activations_s == pytest.approx(m * (4 * 12 * sum_s + message_s), rel=1e-9)
    local = 12 * ((12 * 1024**2 + 7 * 1024) // 2 + 6 * 1024)
    assert found.report.exposed_s == pytest.approx(2e-3 + 8 * 4 * local / 80e9, rel=1e-6)
    assert found.report.step_s == pytest.approx(found.report.compute_s + found.report.exposed_s)
    assert found.mesh == mesh
    assert found.num_workers == 8
    assert found.global_batch == 64


@pytest.mark.parametrize(
    ("num_nodes", "per_node", "mesh", "sharing"),
    [
        (2, 8, MeshSpec(data=4, pipeline=2, tensor=2), None),
        (2, 8, MeshSpec(data=1, pipeline=8, tensor=2), 2),
        (2, 8, MeshSpec(data=1, pipeline=2, tensor=8), 8),
        (4, 4, MeshSpec(data=1, pipeline=2, tensor=8), 4),
        (16, 1, MeshSpec(data=2, pipeline=8, tensor=1), 1),
    ],
)
def test_stages_send_over_the_link_that_they_share(
    num_nodes: int, per_node: int, mesh: MeshSpec, sharing: int | None
) -> None:
    """Counted: the workers of a node whose next stage is on another one."""
    machines = cluster(num_nodes, per_node, Link(bandwidth_bps=1e9), Link(bandwidth_bps=9e9))
    crossing = [0] * num_nodes
    for rank in range(mesh.num_workers):
        place = rank % mesh.copy_size
        if place + mesh.tensor < mesh.copy_size and (rank + mesh.tensor) // per_node != (
            rank // per_node
        ):
            crossing[rank // per_node] += 1
    assert max(crossing) == (sharing or 0)
    expected = 9e9 if sharing is None else 1e9 / sharing
    assert mesh.stage_link(machines).bandwidth_bps == pytest.approx(expected)


def test_gradients_are_exchanged_after_the_last_backward_pass() -> None:
    """Whatever the buckets: nothing of the exchange is hidden, and so one bucket is best."""
    link = Link(bandwidth_bps=8e9)
    job, mesh = training_of(INSIDE, 4, 2), MeshSpec(data=2, pipeline=2)
    found = predict_mesh(job, BLOCKS, cluster(4, 1, link, link), POLICY, mesh)
    assert found.report.exposed_s == pytest.approx(4 * ALL_IN_BLOCKS / 2 / 1e9, rel=1e-6)


def test_bottlenecks_explain_the_whole_loss_of_a_pipeline() -> None:
    link = Link(bandwidth_bps=50e9, latency_s=1e-5)
    for mesh in (MeshSpec(data=2, pipeline=4), MeshSpec(data=2, pipeline=2, tensor=2)):
        found = on(mesh, cluster(8, 1, link, link), TrainingSpec(micro=MICRO, global_batch=8 * 13))
        product = 1.0
        for bottleneck in bottlenecks(found):
            product *= bottleneck.factor
        assert product == pytest.approx(8 / found.speed_up, rel=1e-9)
        assert any("fills and empties" in b.reason for b in bottlenecks(found))


def test_memory_by_hand() -> None:
    """The first of two keeps two micro-batches of 12 blocks, and room for messages of four."""
    found = memory_of(training_of(INSIDE, 4), BLOCKS, MeshSpec(pipeline=2))
    assert found.parameters == found.gradients == 4 * ALL_IN_BLOCKS // 2
    assert found.optimizer == 2 * found.parameters
    tokens = 8 * 512
    assert found.activations == tokens * 4 * 1024 * (2 * (12 * 18 + 1) + 4)


def test_memory_is_what_real_stages_keep() -> None:
    """Of one micro-batch, up to the few numbers that norms, attention and the loss keep."""
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "sequence_length": 12, "width": 16, "depth": 3, "heads": 4}
    config = TransformerConfig(**shape, dropout=0.1, causal=True)
    stages = [TransformerStage(config, i) for i in range(3)]
    blocks = TransformerSpec(depth=3, width=16, heads=4, sequence_length=12)
    num_params = 3 * (12 * 16**2 + 13 * 16) + (300 + 12 + 2) * 16  # tied
    micro = Workload.from_step(num_params=num_params, step_s=1.0, num_samples=5)
    found = memory_of_workers(TrainingSpec(micro=micro), blocks, MeshSpec(pipeline=3))

    tokens = torch.randint(300, (5, 12))
    values, num_tokens = tokens, tokens.numel()
    # Two norms, four heads and the tokens' numbers; of the last one norm more, and logits of 300
    # of which only the logarithms are saved, where the formula has 4 x 300.
    beside = [40, 32, 48 - 4 * 3 * 300]
    for i, stage in enumerate(stages):
        own = {p.untyped_storage().data_ptr() for p in stage.parameters()}
        kept: list[Tensor] = []
        values = values.detach().requires_grad_(i > 0)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=kept: kept.append(tensor) or tensor, lambda tensor: tensor
        ):
            values = stage(values)
            if i == 2:
                loss = F.cross_entropy(values.flatten(0, 1), tokens.flatten())
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        num_kept = sum(size for start, size in storages.items() if start not in own)
        num_received = 4 * num_tokens * 16 * (2 if i == 1 else 1)
        expected = found[i].activations - num_received + beside[i] * num_tokens
        assert num_kept == expected + 4 * (i == 2)
        missing = (2 * 16, 0, 12 * 16)[i]  # the last norm and the positions, where they aren't
        assert sum(p.numel() for p in stage.parameters()) == found[i].parameters // 4 - missing
    assert loss.isfinite()


def test_large_vocabulary_makes_the_last_worker_the_largest() -> None:
    embeddings = EMBEDDINGS + 9 * TOKENS * 1024
    large = replace(MICRO, num_params=ALL_IN_BLOCKS + embeddings)
    found = memory_of(training_of(large, 2), BLOCKS, MeshSpec(pipeline=2))
    assert found.parameters == 4 * (ALL_IN_BLOCKS // 2 + embeddings)
    assert found.activations == 8 * 512 * 4 * (1024 * (12 * 18 + 2 + 2) + 40 * TOKENS)


def test_more_stages_need_less_memory_and_more_micro_batches_a_little_more() -> None:
    one, two, four = (MeshSpec(pipeline=p) for p in (1, 2, 4))
    eight = training_of(MICRO, 8)
    totals = [memory_of(eight, BLOCKS, mesh).parameters for mesh in (one, two, four)]
    assert totals == sorted(totals, reverse=True)
    few, many = (memory_of(training_of(MICRO, m), BLOCKS, two).activations for m in (2, 32))
    assert many - few == 30 * 8 * 512 * 1024 * 4
    interleaved = memory_of(eight, BLOCKS, replace(two, stages_per_worker=2)).activations
    assert interleaved > memory_of(eight, BLOCKS, two).activations


def test_pipeline_is_chosen_where_sums_would_cross_slow_links() -> None:
    """A model that fits on no worker: stages send a hundredth of what tensor parallelism does."""
    slow = Link(bandwidth_bps=5e9, latency_s=30e-6)
    single = replace(MICRO, num_samples=1, forward_s=0.3 / 8, backward_s=0.6 / 8)
    half = 0.6 * memory_of(TrainingSpec(micro=single), BLOCKS, MeshSpec()).total_gib
    found = recommend_mesh(
        TrainingSpec(micro=single, global_batch=256),
        BLOCKS,
        cluster(8, 1, slow, slow),
        POLICY,
        MeshSpec.all_of(8, longest_pipeline=24),
        memory_gib=half,
    )
    assert found.choice is not None
    assert found.choice.prediction.mesh.pipeline > 1
    assert found.choice.prediction.mesh.tensor == 1
    assert "data=8,tensor=1" in {str(mesh) for mesh in found.left_out}


def test_what_is_no_pipeline_is_refused() -> None:
    with pytest.raises(UsageError, match=r"`pipeline` \(=25\) must be at most the 24 blocks"):
        spec(25)
    with pytest.raises(UsageError, match=r"x `stages_per_worker` \(=7\) must be at most the 24"):
        spec(4, 7)
    with pytest.raises(UsageError, match=r"`pipeline` \(=4\) needs 4 micro-batches of each copy"):
        spec(4).step(MICRO, 3)
    with pytest.raises(UsageError, match=r"`pipeline` \(=0\) must be at least 1"):
        MeshSpec(pipeline=0)
    with pytest.raises(UsageError, match=r"`pipeline x tensor` \(=6\) must divide the 4 workers"):
        on(MeshSpec(data=2, pipeline=3, tensor=2), cluster(3, 4), training_of(MICRO, 4, 2))
    few = recommend_mesh(
        training_of(MICRO, 2), BLOCKS, cluster(8), POLICY, MeshSpec.all_of(8, longest_pipeline=8)
    )
    assert few.left_out[MeshSpec(pipeline=4, tensor=2)].startswith("`pipeline` (=4) needs 4 micro")
    assert MeshSpec(pipeline=2, tensor=4) in {o.prediction.mesh for o in few.options}
