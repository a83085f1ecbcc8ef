from collections.abc import Iterator

import pytest
import torch

from allstep.exchange import ExchangePolicy


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Rounding is then far below any mistake."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=[ExchangePolicy()], ids=["plain"])
def policy(request: pytest.FixtureRequest) -> ExchangePolicy:
    """Every exchange keeps the same contract: a new one is a new entry here."""
    return request.param
