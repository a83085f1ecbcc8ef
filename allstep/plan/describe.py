"""Predictions as words, text charts and plain data."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from allstep.plan.predict import Prediction
from allstep.plan.simulate import Span

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_CHART_ROWS = 10
_COLUMN = 7


def seconds_text(seconds: float) -> str:
    """A duration with three digits and a suitable unit.

    Args:
        seconds: the duration.

    Returns:
        The text, such as "12.3 s".

    >>> seconds_text(0.1234), seconds_text(12.34), seconds_text(0.00002), seconds_text(5 * 3600)
    ('123 ms', '12.3 s', '0.02 ms', '5 h')
    """
    for unit_s, name, least in ((3600, "h", 1), (60, "min", 10), (1, "s", 1)):
        number = f"{seconds / unit_s:.3g}"
        if float(number) >= least:  # once rounded: 0.9997 s is 1 s, not 1e+03 ms
            return f"{number} {name}"
    return f"{1000 * seconds:.3g} ms"


def times_text(ratio: float, decimals: int = 2) -> str:
    """A ratio with that many decimals, or with two digits where these would be zeros.

    Args:
        ratio: the ratio.
        decimals: digits after the decimal point.

    Returns:
        The text, such as "1.85x".

    >>> times_text(1234.5), times_text(0.97, 1), times_text(0.00123), times_text(0.0)
    ('1,234.50x', '1.0x', '0.0012x', '0.00x')
    """
    is_small = 0 < ratio < 10**-decimals
    return f"{ratio:.2g}x" if is_small else f"{ratio:,.{decimals}f}x"


def plain_data(prediction: Prediction) -> dict[str, Any]:
    """All figures of a prediction, for JSON.

    Args:
        prediction: the prediction.

    Returns:
        Name -> value; None for a value that is unknown.
    """
    report, policy = prediction.report, prediction.policy
    return {
        "policy": policy.name,
        "compression": policy.compression,
        "algorithm": policy.algorithm,
        "bucket_bytes": policy.bucket_bytes,
        "staleness": policy.staleness,
        "sync_every": policy.sync_every,
        "workers": prediction.num_workers,
        "global_batch": prediction.global_batch,
        "step_s": report.step_s,
        "compute_s": report.compute_s,
        "exposed_s": report.exposed_s,
        "straggler_s": report.straggler_s,
        "wire_s": report.wire_s,
        "samples_per_s": prediction.samples_per_s,
        "single_worker_samples_per_s": prediction.single_worker_samples_per_s,
        "speed_up": prediction.speed_up,
        "efficiency": prediction.efficiency,
        "training_s": prediction.training_s,
        **asdict(report.traffic),
    }


def chart(predictions: Sequence[Prediction]) -> list[str]:
    """A text chart of efficiency over the number of workers, with a letter for each policy.

    Each number of workers has a column; policies of the same efficiency stand side by side.

    Args:
        predictions: predictions for at most six policies.

    Returns:
        The lines.
    """
    names = list(dict.fromkeys(p.policy.name for p in predictions))
    counts = sorted({p.num_workers for p in predictions})
    assert len(names) < _COLUMN
    letters = dict(zip(names, _LETTERS, strict=False))
    rows = [[" "] * (_COLUMN * len(counts)) for _ in range(_CHART_ROWS + 1)]
    for p in predictions:
        row = rows[_CHART_ROWS - round(_CHART_ROWS * min(1.0, p.efficiency))]
        start = _COLUMN * counts.index(p.num_workers) + 1
        taken = "".join(row[start : start + _COLUMN - 1]).strip()
        cell = taken + letters[p.policy.name]
        row[start : start + _COLUMN - 1] = list(cell.ljust(_COLUMN - 1))
    axis = "".join(f" {count:<{_COLUMN - 1}}" for count in counts)
    lines = ["efficiency"]
    lines += [
        f"{100 - 100 * index // _CHART_ROWS:4d} % |{''.join(row)}".rstrip()
        for index, row in enumerate(rows)
    ]
    lines += ["       +" + "-" * len(axis), f"workers {axis}".rstrip()]
    lines += [f"  {letters[name]}  {name}" for name in names]
    return lines


def timeline(spans: Sequence[Span], width: int) -> list[str]:
    r"""A text chart of a step: a line for compute, one for the network, and a key.

    Args:
        spans: the spans of one round of a simulation.
        width: width of the chart in characters.

    Returns:
        The lines; the last one is the key.

    >>> step = [Span("compute", "forward", 0, 1), Span("compute", "backward 0", 1, 3),
    ...     Span("wire", "bucket 0", 3, 4), Span("wait", "wait", 3, 4)]
    >>> print(*timeline(step, 17), sep="\n")
    compute  ffbbbb..
    wire           00
    f forward, b backward, u update, l local step, . waiting, 0 1 2 ... buckets; 8 columns are 4 s
    """
    marks = {"forward": "f", "optimizer": "u", "landing": "u", "local step": "l", "wait": "."}
    columns = max(1, width - 9)
    end_s = max(span.end_s for span in spans)
    lanes = {"compute": [" "] * columns, "wire": [" "] * columns}
    for span in spans:
        lane = lanes["wire" if span.lane == "wire" else "compute"]
        kind, _, number = span.name.partition(" ")
        mark = marks.get(span.name) or {"backward": "b"}.get(kind) or number[-1]
        first, last = (round(columns * t / end_s) for t in (span.start_s, span.end_s))
        lane[first:last] = [mark] * (last - first)
    return [
        *(f"{name:9}{''.join(lane)}".rstrip() for name, lane in lanes.items()),
        "f forward, b backward, u update, l local step, . waiting, 0 1 2 ... buckets;"
        f" {columns} columns are {seconds_text(end_s)}",
    ]
