from collections.abc import Iterator

import pytest
import torch

from allstep.exchange import ExchangePolicy, Synchronous


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Rounding is then far below any mistake."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


POLICIES = {
    "plain": Synchronous(plain=True),
    "overlapped": Synchronous(algorithm="native"),
    "small-buckets": Synchronous(algorithm="native", bucket_bytes=64),
    "at-the-end": Synchronous(algorithm="native", overlap=False),
    "exact": Synchronous(algorithm="native", compression="exact", bucket_bytes=64),
}


@pytest.fixture(params=POLICIES.values(), ids=POLICIES.keys())
def policy(request: pytest.FixtureRequest) -> ExchangePolicy:
    """Every exchange keeps the same contract: a new one is a new entry here."""
    return request.param
