"""Published runs, predicted from their stated hardware and their throughput on few workers.

[Note: back-casts] Each run's smallest published row gives the compute of a worker; the rows above
it are predicted. Nothing is fitted to them, except where a row says so: there one published row
sets the link's bandwidth and the other rows follow. What isn't stated in the source is a guess
and named. Tags: (A) worked out from stated numbers, (M) from memory and not checked, (P) read off
a plot, about 3 %.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from allstep.plan import (
    Cluster,
    Link,
    MeshSpec,
    PolicySpec,
    TrainingSpec,
    TransformerSpec,
    Workload,
    predict_mesh,
    read_cluster,
    simulate,
)
from allstep.plan.cost import collective_s

__all__ = ["Backcast", "backcasts"]

RESNET50_PARAMS = 25_557_032
# Shares of ResNet-50's gradient and of its backward pass, last stage first, from the parameters
# and multiplications of each stage (A): two thirds of the gradient are ready after a fifth.
RESNET50_READY = ((0.0, 0.0), (0.666, 0.2), (0.944, 0.56), (0.991, 0.81), (1.0, 1.0))

# depth, width and heads of Megatron-LM's models by workers of a copy, and their weak scaling.
MEGATRON = {
    1: (40, 1536, 16, 1.0),
    2: (54, 1920, 20, 0.95),
    4: (64, 2304, 24, 0.82),
    8: (72, 3072, 32, 0.77),
}
MEGATRON_GUESSES = (
    "links at their stated rate, latencies, products of any shape as fast as those of 1.2 billion"
    " weights, forward passes made twice (checkpointing), embeddings left out"
)

_CHAINERMN = "chainer.org, ChainerMN 1.3 (2018), plots (P)"


@dataclass(frozen=True, kw_only=True)
class Backcast:
    """A published number and what the planner makes of its inputs.

    Attributes:
        run: whose.
        what: the number, with its unit.
        published, predicted: its values.
        inputs: "known" if all that matter are stated in the source, "fitted" if one was taken
            from another published row, "guessed" if one that matters isn't stated.
        guesses: what was guessed or fitted.
        source: of the published number, with its trust tag.
    """

    run: str
    what: str
    published: float
    predicted: float
    inputs: Literal["known", "fitted", "guessed"]
    guesses: str
    source: str

    @property
    def error(self) -> float:
        """predicted / published - 1."""
        return self.predicted / self.published - 1


def backcasts() -> list[Backcast]:
    """All of them. See [Note: back-casts]."""
    return [
        *_chainermn(),
        *_aws(),
        *_goyal(),
        *_akiba(),
        *_baidu(),
        *_megatron(),
        *_pipelined(),
        *_scale_up(),
    ]


def _resnet50(compute_s: float, num_samples: int) -> Workload:
    return Workload(
        num_params=RESNET50_PARAMS,
        forward_s=compute_s / 3,
        backward_s=compute_s * 2 / 3,
        num_samples=num_samples,
        ready=RESNET50_READY,
    )


def _at_the_end(name: str, compression: str = "fp32", staleness: int = 0) -> PolicySpec:
    """ChainerMN packs everything and reduces it with NCCL's ring after the backward pass."""
    return PolicySpec(
        name=name, compression=compression, algorithm="ring", bucket_bytes=None, staleness=staleness
    )


def _samples_per_s(
    cluster: Cluster, policy: PolicySpec, num_workers: int, *, base: float, batch: int
) -> float:
    """Samples per second on `num_workers` from those of one full node."""
    node = cluster.of(cluster.workers_per_node)
    compute_s = batch * node.num_workers / base
    if not policy.staleness:
        compute_s -= collective_s(policy.compression, policy.algorithm, node, RESNET50_PARAMS)
    step_s = simulate(_resnet50(compute_s, batch), cluster.of(num_workers), policy).step_s
    return batch * num_workers / step_s


def _chainermn() -> Iterator[Backcast]:
    """32 P100 in 4 nodes, batch 64 a GPU, three networks."""
    infiniband = read_cluster("mn-1")
    line_rate = replace(infiniband, inter=read_cluster("ethernet-10g").inter)
    for num_workers, published in ((16, 2520.0), (32, 5170.0)):
        yield Backcast(
            run="ChainerMN, FDR InfiniBand",
            what=f"samples/s, {num_workers} P100",
            published=published,
            predicted=_samples_per_s(
                infiniband, _at_the_end("fp32"), num_workers, base=1290, batch=64
            ),
            inputs="known",
            guesses="latencies, PCIe at 10 GB/s (small parts of a step)",
            source=_CHAINERMN,
        )
    for num_workers, published in ((16, 900.0), (32, 1745.0)):
        yield Backcast(
            run="ChainerMN, 10 GbE at line rate",
            what=f"samples/s, {num_workers} P100",
            published=published,
            predicted=_samples_per_s(
                line_rate, _at_the_end("fp32"), num_workers, base=1315, batch=64
            ),
            inputs="guessed",
            guesses="what NCCL 2 got out of 10 GbE; the published steps say about 2 Gbit/s",
            source=_CHAINERMN,
        )
    yield Backcast(
        run="ChainerMN, 10 GbE as fast as on 16 GPUs",
        what="samples/s, 32 P100",
        published=1745.0,
        predicted=_samples_per_s(
            _achieved_ethernet(line_rate), _at_the_end("fp32"), 32, base=1315, batch=64
        ),
        inputs="fitted",
        guesses="bandwidth from the published row of 16 GPUs",
        source=_CHAINERMN,
    )
    buffered = _at_the_end("fp16, double buffering", compression="fp16", staleness=1)
    for num_workers, published in ((16, 1870.0), (32, 4230.0)):
        yield Backcast(
            run="ChainerMN, 10 GbE, fp16 + double buffering",
            what=f"samples/s, {num_workers} P100",
            published=published,
            predicted=_samples_per_s(line_rate, buffered, num_workers, base=965, batch=64),
            inputs="known",
            guesses="none that matters: compute takes longer than the exchange, at line rate and"
            " at the 2 Gbit/s of the plain rows",
            source=_CHAINERMN,
        )


def _achieved_ethernet(line_rate: Cluster) -> Cluster:
    """10 GbE with the bandwidth that 900 samples/s on 16 GPUs mean."""
    node = line_rate.of(8)
    compute_s = 64 * 8 / 1315 - collective_s("fp32", "ring", node, RESNET50_PARAMS)
    exchange_s = 64 * 16 / 900 - compute_s
    sent_bytes = 2 * 15 / 16 * 4 * RESNET50_PARAMS
    return replace(line_rate, inter=Link(bandwidth_bps=8 * sent_bytes / exchange_s))


def _aws() -> Iterator[Backcast]:
    cluster = replace(read_cluster("ethernet-25g"), copy_bytes_per_s=600e9)
    buffered = _at_the_end("fp16, double buffering", compression="fp16", staleness=1)
    for num_workers, published in ((16, 3820.0), (32, 7740.0)):
        yield Backcast(
            run="ChainerMN, AWS 25 Gbit/s, fp16 + double buffering",
            what=f"samples/s, {num_workers} V100",
            published=published,
            predicted=_samples_per_s(cluster, buffered, num_workers, base=2030, batch=64),
            inputs="known",
            guesses="latencies, copy bandwidth (hidden beside compute)",
            source=_CHAINERMN,
        )


def _goyal() -> Iterator[Backcast]:
    """Overlapped layer by layer; 120 ms of backward pass."""
    ethernet = Link(bandwidth_bps=0.94 * 50e9, latency_s=20e-6)
    cluster = replace(read_cluster("mn-1"), name="Big Basin", inter=ethernet)
    policy = PolicySpec(name="overlapped", algorithm="two_dimensional", bucket_bytes=4 << 20)
    workload = _resnet50(0.18, 32)
    steps_s = {n: simulate(workload, cluster.of(n), policy).step_s for n in (8, 256)}
    yield Backcast(
        run="Goyal et al., 256 P100",
        what="efficiency, 256 v. 8",
        published=0.90,
        predicted=steps_s[8] / steps_s[256],
        inputs="guessed",
        guesses="50 Gbit/s Ethernet (M), forward half of the 120 ms of backward, no stragglers",
        source="arXiv:1706.02677, reading note, about 90 %",
    )


def _akiba() -> Iterator[Backcast]:
    cluster = read_cluster("mn-1")
    policy = _at_the_end("fp16", compression="fp16")
    step_s, efficiency = 0.255, 0.80
    node = cluster.of(8)
    compute_s = efficiency * step_s - collective_s("fp16", "ring", node, RESNET50_PARAMS)
    yield Backcast(
        run="Akiba et al., 1,024 P100",
        what="ms a step",
        published=1000 * step_s,
        predicted=1000 * simulate(_resnet50(compute_s, 32), cluster, policy).step_s,
        inputs="guessed",
        guesses="8-GPU step from about 80 % efficiency (M), latencies, a full tree, no stragglers",
        source="arXiv:1711.04325, 897.9 s for 90 epochs (M), step (A)",
    )


def _baidu() -> Iterator[Backcast]:
    """A language model of 300 M parameters: 370 ms on one GPU."""
    cluster = read_cluster("baidu-40")
    source = "Gibiansky 2017, 650 to 700 ms, 70 to 120 ms hidden by overlap"
    workload = Workload.from_step(num_params=300_000_000, step_s=0.37, num_samples=32)
    yield Backcast(
        run="Baidu, 5 x 8 GPUs, exchange not hidden",
        what="ms a step",
        published=675.0 + 95.0,
        predicted=1000 * simulate(workload, cluster, _at_the_end("fp32")).step_s,
        inputs="known",
        guesses="latencies; published is the middle of both ranges, added (A)",
        source=source,
    )
    overlapped = PolicySpec(name="fp32", algorithm="ring", bucket_bytes=16 << 20)
    yield Backcast(
        run="Baidu, 5 x 8 GPUs, overlapped",
        what="ms a step",
        published=675.0,
        predicted=1000 * simulate(workload, cluster, overlapped).step_s,
        inputs="guessed",
        guesses="gradients ready evenly; those of a recurrent layer come at the very end",
        source=source,
    )


def _megatron() -> Iterator[Backcast]:
    """Transformers on 1, 2, 4 and 8 V100 a copy; the last also on 64 copies, 512 GPUs."""
    nvidia = "nv-adlr.github.io/MegatronLM; arXiv:1909.08053"
    base_s = megatron_step_s(MeshSpec())
    for mesh, published, source in (
        (MeshSpec(tensor=2), MEGATRON[2][-1], f"{nvidia}, figure 5 (M)"),
        (MeshSpec(tensor=4), MEGATRON[4][-1], f"{nvidia}, figure 5 (M)"),
        (MeshSpec(tensor=8), MEGATRON[8][-1], nvidia),
        (MeshSpec(data=64, tensor=8), 0.74, nvidia),
    ):
        work = megatron_flop(mesh.tensor) / megatron_flop(1) / mesh.tensor
        yield Backcast(
            run=f"Megatron-LM, {mesh.data} x {mesh.tensor} V100",
            what="efficiency, v. 1 GPU",
            published=published,
            predicted=work * base_s / megatron_step_s(mesh),
            inputs="guessed",
            guesses=MEGATRON_GUESSES,
            source=source,
        )


def megatron_flop(tensor: int) -> float:
    """Of a step of 8 sequences of 1,024 tokens."""
    depth, width, *_ = MEGATRON[tensor]
    return transformer_flop(depth, width, 8, 1024)


def transformer_flop(depth: int, width: int, num_sequences: int, sequence_length: int) -> float:
    """Forward twice and backward; 51,200 tokens exist.

    Source: Narayanan et al., 2021, arXiv:2104.04473, equation 3.
    """
    rest = 1 + sequence_length / (6 * width) + 51_200 / (16 * depth * width)
    return 96 * num_sequences * sequence_length * depth * width**2 * rest


def megatron_step_s(mesh: MeshSpec) -> float:
    """Of 8 sequences a copy. DGX-2H: 16 GPUs, 300 GB/s between them both ways, 100 GB/s outside.

    39 TFLOP/s of one GPU, counted as in version 1.0: 62.4 TFLOP/s and 1,288 ms a step (A).
    """
    depth, width, heads, _ = MEGATRON[mesh.tensor]
    blocks = TransformerSpec(
        depth=depth, width=width, heads=heads, sequence_length=1024, activation_bytes=2
    )
    compute_s = 62.4 * 1.288 / 39 * megatron_flop(mesh.tensor) / megatron_flop(1)
    micro = Workload(
        num_params=blocks.divided_params + 6 * depth * width,
        forward_s=compute_s / 4,
        backward_s=compute_s * 3 / 4,
        num_samples=8,
        element_bytes=2,
    )
    cluster = Cluster(
        name="DGX SuperPOD",
        num_nodes=32,
        workers_per_node=16,
        intra=Link(bandwidth_bps=150e9 * 8, latency_s=3e-6),
        inter=Link(bandwidth_bps=100e9 * 8, latency_s=10e-6),
        copy_bytes_per_s=350e9,
    )
    found = predict_mesh(TrainingSpec(micro=micro), blocks, cluster, _at_the_end("fp16"), mesh)
    return found.report.step_s + found.copy.activations_s / 2  # two of its sums are taken once more


@dataclass(frozen=True, kw_only=True)
class PipelinedRun:
    """Transformers on A100: copies of some stages, of 8 GPUs each, share out a fixed batch.

    Attributes:
        name: whose, and its billions of parameters.
        depth, width, heads: of the blocks.
        num_stages: of a copy.
        global_batch: sequences of 2,048 tokens of a step, a micro-batch each.
        steps_s: published seconds of a step by the number of GPUs; the first sets the compute.
        source: of these.
    """

    name: str
    depth: int
    width: int
    heads: int
    num_stages: int
    global_batch: int
    steps_s: dict[int, float]
    source: str

    @property
    def flop(self) -> float:
        """Of a step."""
        return transformer_flop(self.depth, self.width, self.global_batch, 2048)

    def mesh(self, num_gpus: int) -> MeshSpec:
        """Copies, stages, and GPUs of a stage."""
        num_copies = num_gpus // (8 * self.num_stages)
        return MeshSpec(data=num_copies, pipeline=self.num_stages, tensor=8)

    def step_s(self, num_gpus: int) -> float:
        """Predicted from the smallest number of GPUs: the bubble grows, and so do exchanges."""
        base_gpus, base_s = next(iter(self.steps_s.items()))
        compute_s = base_s * base_gpus / self.global_batch
        for _ in range(50):  # what is not compute hardly depends on it
            compute_s *= base_s / self._step_s(compute_s, base_gpus)
        return self._step_s(compute_s, num_gpus)

    def _step_s(self, compute_s: float, num_gpus: int) -> float:
        """DGX A100: 8 GPUs, 600 GB/s between them both ways, 8 x 200 Gbit/s outside."""
        blocks = TransformerSpec(
            depth=self.depth,
            width=self.width,
            heads=self.heads,
            sequence_length=2048,
            activation_bytes=2,
        )
        micro = Workload(
            num_params=blocks.divided_params + (6 * self.depth + 51_200) * self.width,
            forward_s=compute_s / 4,  # forward passes are made twice
            backward_s=compute_s * 3 / 4,
            element_bytes=2,
        )
        cluster = Cluster(
            name="Selene",
            num_nodes=560,
            workers_per_node=8,
            intra=Link(bandwidth_bps=300e9 * 8, latency_s=3e-6),
            inter=Link(bandwidth_bps=8 * 200e9, latency_s=10e-6),
            copy_bytes_per_s=750e9,
        )
        job = TrainingSpec(micro=micro, global_batch=self.global_batch)
        policy, mesh = _at_the_end("fp16"), self.mesh(num_gpus)
        return predict_mesh(job, blocks, cluster, policy, mesh).report.step_s


def _from_rates(
    name: str, shape: tuple[int, int, int], num_stages: int, batch: int, tflops: dict[int, int]
) -> PipelinedRun:
    """A run of which TFLOP/s of a GPU are published."""
    depth, width, heads = shape
    flop = transformer_flop(depth, width, batch, 2048)
    return PipelinedRun(
        name=f"Megatron-LM, {name} billion",
        depth=depth,
        width=width,
        heads=heads,
        num_stages=num_stages,
        global_batch=batch,
        steps_s={gpus: flop / (rate * 1e12 * gpus) for gpus, rate in tflops.items()},
        source="arXiv:2104.04473, table 2",
    )


PIPELINED = (
    PipelinedRun(
        name="Megatron-Turing NLG, 530 billion",
        depth=105,
        width=20_480,
        heads=128,
        num_stages=35,
        global_batch=1920,
        steps_s={2240: 60.1, 2800: 50.2, 3360: 44.4},
        source="arXiv:2201.11990, section 2.4",
    ),
    _from_rates("175", (96, 12_288, 96), 12, 1536, {384: 153, 768: 149, 1536: 141}),
    _from_rates("530", (105, 20_480, 128), 35, 2240, {560: 171, 1120: 167, 2240: 159}),
)


def _pipelined() -> Iterator[Backcast]:
    for run in PIPELINED:
        for num_gpus, step_s in list(run.steps_s.items())[1:]:
            mesh = run.mesh(num_gpus)
            yield Backcast(
                run=f"{run.name}, {mesh.data} x {mesh.pipeline} x {mesh.tensor} A100",
                what="s a step",
                published=step_s,
                predicted=run.step_s(num_gpus),
                inputs="guessed",
                guesses="schedule 1F1B, micro-batches of one sequence on 8 GPUs a stage, links at"
                " their stated rate, latencies",
                source=run.source,
            )


def _scale_up() -> Iterator[Backcast]:
    """DistBelief's 1,000 machines of 16 cores against 3 of four GPUs."""
    gpu_machine, core_peak = 4 * 1e12, 16e9
    yield Backcast(
        run="DistBelief v. COTS HPC",
        what="machines for one of COTS",
        published=1000 / 3,
        predicted=gpu_machine / (16 * core_peak * 0.5),
        inputs="guessed",
        guesses="1 TFLOP/s a GPU (slides), 16 GFLOP/s a core of which half is used; networks of"
        " 1.7 and 1 billion weights taken as equal; compute alone, without what communication cost",
        source="Coates et al. 2013, abstract and press",
    )
    cots_price, gpu_price = 20_000.0, 500.0  # of three machines; of a GTX 680
    yield Backcast(
        run="DistBelief v. COTS HPC",
        what="dollars for one of COTS",
        published=1_000_000 / cots_price,
        predicted=1000 * (cots_price / 3 - 4 * gpu_price) / cots_price,
        inputs="guessed",
        guesses="a machine of DistBelief cost what one of COTS did without its GPUs, $500 each (M);"
        " a million for 1,000, as the press said (M), is $1,000 a machine of 16 cores",
        source="press on both (2012, 2013): $1 million (M), $20,000",
    )
    yield Backcast(
        run="COTS HPC, 16 machines v. 3",
        what="times the dollars",
        published=100_000 / cots_price,
        predicted=16 / 3,
        inputs="guessed",
        guesses="every machine costs the same; both prices are round",
        source="press on Coates et al. 2013: $20,000 and $100,000",
    )
    # Of forward and backward on one worker and on the busiest of 8 x 8 (model_parallel_counts.py).
    single_flop, flop, messages, sent_bytes = 6.1223e12, 1.3396e11, 409, 192_347_136
    link = read_cluster("coates-cots").inter
    assert link is not None
    step_s = flop / 1e12 + link.seconds(sent_bytes, messages)
    yield Backcast(
        run="COTS HPC, 64 GTX 680, 11.2 billion weights",
        what="times one GPU",
        published=47.0,
        predicted=single_flop / 1e12 / step_s,
        inputs="guessed",
        guesses="1 TFLOP/s a GPU (slides), the layers, latencies; GPUs of a machine don't share"
        " its link, and nothing overlaps",
        source="Coates et al. 2013, figure (M)",
    )
