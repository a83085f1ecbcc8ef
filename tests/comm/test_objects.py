"""Plain data between ranks, and what is refused."""

import contextlib
import math
import pickle
import threading
from collections import Counter, OrderedDict, defaultdict

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.comm import Communicator
from allstep.comm.codec import decode, encode
from allstep.comm.layout import Layout
from allstep.errors import CommunicationError, DisagreementError, UsageError
from tests.helpers.ranks import run_ranks

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
)
keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
objects = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
        | st.lists(st.integers() | st.text()).map(Counter)
    ),
    max_leaves=10,
)


def same_types(x, y):
    if type(x) is not type(y):
        return False
    if isinstance(x, (list, tuple)):
        return all(map(same_types, x, y))
    return all(same_types(x[key], y[key]) for key in x) if isinstance(x, dict) else True


@given(objects)
@settings(deadline=None)
def test_codec_round_trip_of_plain_data(obj):
    back = decode(encode(obj))
    assert back == obj
    assert same_types(back, obj)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.array(1.5),
        np.zeros((0, 3)),
        np.array([True, False]),
        np.array(["ab", "c"]),
        np.array(["", ""]),
        np.array([b"xy"]),
        np.array([1 + 2j], dtype=np.complex64),
        np.array(["2020-02-02"], dtype="datetime64[D]"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10)[::3],
        np.float32(0.1),
        np.int8(-3),
        np.bool_(True),
        np.float64(math.pi),
    ],
)
def test_codec_round_trip_of_numpy(array):
    back = decode(encode({"x": array}))["x"]
    assert type(back) is type(array)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64])
def test_codec_round_trip_of_tensors(dtype):
    for x in (torch.tensor([[0, 1], [1, 0]]).t(), torch.tensor(1), torch.empty(0, 2)):
        back = decode(encode([x.to(dtype)]))[0]
        assert back.dtype == dtype
        assert torch.equal(back, x.to(dtype))
        back.fill_(0)  # its own memory


def test_codec_round_trip_of_a_state_dict():
    state = torch.nn.Linear(2, 3).state_dict()
    assert type(state) is OrderedDict
    received = run_ranks(2, lambda comm: comm.broadcast_object(state if comm.rank == 0 else None))
    for other in received:
        assert type(other) is OrderedDict
        assert list(other) == list(state)
        assert torch.equal(other["weight"], state["weight"])


def test_every_verb_on_objects():
    def work(comm):
        rank, n = comm.rank, comm.size
        obj = {"rank": rank, "text": "x" * 300 * rank}
        everyone = [{"rank": r, "text": "x" * 300 * r} for r in range(n)]
        assert comm.all_gather_object(obj) == everyone
        assert comm.gather_object(obj, root=1) == (everyone if rank == 1 else None)
        assert comm.broadcast_object(obj if rank == 2 else "ignored", root=2) == everyone[2]
        assert comm.scatter_object(everyone if rank == 1 else None, root=1) == obj
        if rank == 0:
            comm.send_object(obj, 2, tag=4)
        if rank == 2:
            assert comm.recv_object(0, tag=4) == everyone[0]

    run_ranks(3, work)


def test_all_reduce_object_adds():
    def work(comm):
        r = comm.rank
        obj = {"n": r, "list": [r], "pair": {"a": r / 2, "b": np.array([r, 1])}, "t": "ab"[r]}
        return comm.all_reduce_object(obj)

    for result in run_ranks(2, work):
        assert result["pair"].pop("b").tolist() == [1, 2]
        assert result == {"n": 1, "list": [0, 1], "pair": {"a": 0.5}, "t": "ab"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (({"a": 1}, {"b": 1}), r"keys \['a'\], rank 1 \['b'\]|keys \['b'\], rank 0 \['a'\]"),
        (({"a": {"x": 1}}, {"a": {"y": 1}}), "cannot be added"),
        (({"a": 1}, 1), "keys|cannot be added"),
        ((None, 1), r"cannot be added .*NoneType"),
        ((1, "x"), r"cannot be added .*\['int', 'str'\]"),
        ((np.ones(2), np.ones(3)), "cannot be added"),
    ],
)
def test_all_reduce_object_of_unlike_values(values, message):
    def work(comm):
        with pytest.raises(DisagreementError, match=message):
            comm.all_reduce_object(values[comm.rank])
        comm.barrier()

    run_ranks(2, work)


def test_object_verbs_of_a_single_process():
    comm = Communicator.single_process()
    obj = {"x": [1, (2, 3)]}
    assert comm.all_gather_object(obj) == comm.gather_object(obj) == [obj]
    assert comm.broadcast_object(obj) == comm.scatter_object([obj]) == obj
    assert comm.all_reduce_object(obj) == obj


class Dangerous:
    def __reduce__(self):
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (Dangerous(), "Dangerous, which cannot be sent; send plain data"),
        ([{"x": lambda: 0}], "builtins.function"),
        (defaultdict(int), "collections.defaultdict"),
        (np.array([Dangerous()]), "dtype object"),
        (np.zeros(2, dtype=[("a", "i4")]), "dtype .*cannot be sent"),
        (torch.ones(2).to_sparse(), "sparse.*to_dense"),
        (torch.ones(2, device="meta"), "on meta"),
        (torch.float32, "torch.dtype"),
    ],
)
def test_codec_refuses_other_types_by_name(obj, message):
    with pytest.raises(UsageError, match=message):
        encode(obj)


def test_codec_refuses_deep_nesting():
    obj: list[object] = []
    for _ in range(3000):
        obj = [obj]
    with pytest.raises(UsageError, match="nesting"):
        encode(obj)


@pytest.mark.parametrize("kind", [tuple, frozenset])
def test_codec_refuses_tuples_and_sets_in_each_other_that_it_could_not_read(kind):
    levels: list[object] = [0]
    for _ in range(300):
        levels.append(kind([levels[-1]]))
    assert decode(encode(levels[32])) == levels[32]
    for obj in (levels[33], [{"a": levels[200]}], levels[300]):
        with pytest.raises(UsageError, match="more than 32 levels; nest lists and dicts"):
            encode(obj)


def nested_tuples(num_levels):
    data = msgpack.packb(0)
    for _ in range(num_levels):
        data = msgpack.packb(msgpack.ExtType(1, b"\x91" + data))
    return data


PICKLE = pickle.dumps(Dangerous())


@pytest.mark.parametrize(
    "data",
    [
        PICKLE,
        msgpack.packb(msgpack.ExtType(77, PICKLE)),
        msgpack.packb(msgpack.ExtType(5, msgpack.packb(["|O", [1], PICKLE]))),
        msgpack.packb(msgpack.ExtType(5, msgpack.packb(["O", [1], b"12345678"]))),
        msgpack.packb(msgpack.ExtType(5, msgpack.packb(["<i4", [3], b"1234"]))),
        msgpack.packb(msgpack.ExtType(5, msgpack.packb([["<i4"], [1], b"1234"]))),
        msgpack.packb(msgpack.ExtType(7, msgpack.packb(["qint8", [1], b"1"]))),
        msgpack.packb(msgpack.ExtType(7, msgpack.packb(["float32", [5], b"1234"]))),
        msgpack.packb(msgpack.ExtType(7, msgpack.packb(["float32", [-1], b"1234"]))),
        msgpack.packb(msgpack.ExtType(7, msgpack.packb(3))),
        msgpack.packb(msgpack.ExtType(3, msgpack.packb([[1]]))),
        msgpack.packb(msgpack.ExtType(7, msgpack.packb(["float32", [-1, -1], b"1234"]))),
        msgpack.packb(msgpack.ExtType(7, msgpack.packb(["float32", [0, -1], b""]))),
        msgpack.packb(msgpack.ExtType(7, msgpack.packb(["float32", [2**62, 2**62, 0], b""]))),
        nested_tuples(200),
        nested_tuples(1000),
        msgpack.packb([1, 2])[:-1],
        b"",
        b"\xc1",
    ],
)
def test_codec_refuses_crafted_bytes_and_never_unpickles(data):
    with pytest.raises(CommunicationError, match="no message of allstep"):
        decode(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        msgpack.packb(3),
        msgpack.packb([True, ["os.system"], [[1]]]),
        msgpack.packb([1, 2, 3]),
        msgpack.packb([True, ["float32"], []]),
        msgpack.packb([False, [], []]),
        msgpack.packb([False, ["float32", "int8"], [[1], [1]]]),
        msgpack.packb([False, ["float32"], [[-1]]]),
    ],
)
def test_layout_refuses_crafted_headers(data):
    with pytest.raises(CommunicationError, match="header that is no layout"):
        Layout.decode(data)


@given(st.one_of(objects, st.just(torch.ones(3)), st.just(np.arange(3))), st.data())
@settings(deadline=None)
def test_codec_takes_or_refuses_bytes_that_were_changed(obj, data):
    changed = bytearray(encode(obj))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    for cut in (len(changed), data.draw(st.integers(0, len(changed)))):
        with contextlib.suppress(CommunicationError):
            decode(bytes(changed[:cut]))


def test_recv_object_waits_for_earlier_receives():
    """Of the same rank and tag; the tensor's header is not taken for the object's."""
    go = threading.Event()

    def work(comm):
        if comm.rank == 0:
            go.wait(20)
            comm.send(torch.ones(3), 1)
            comm.send_object("text", 1)
            return None
        pending = comm.recv(0, async_op=True)
        go.set()
        return comm.recv_object(0), pending.wait().tolist()

    for _ in range(5):
        go.clear()
        assert run_ranks(2, work)[1] == ("text", [1.0, 1.0, 1.0])
