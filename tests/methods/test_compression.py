"""Compressed uploads: real bytes, unbiased rounding, and error feedback where leaving out stalls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federations import Softmax, package

from fedspeed import FedAvg, FedSpeed, Plan, Quantise, Scaffold, TopK, Wrapper
from fedspeed.methods.base import Local
from fedspeed.methods.scaffold import Down, Up
from fedspeed.methods.wrapper import leaves

EQUAL = Softmax(equal=8)
PLAN = Plan(rounds=3, active=4, local_steps=2, batch_size=4, lr=0.1, weight_decay=0.0, seed=5, backend="serial")
LENGTHS = (1, 7, 512, 1300)


def upload(method, v, state=None, **facts):
    """What a client at v sends of SCAFFOLD's two vectors, and what it keeps."""
    zero = torch.zeros_like(v)
    state = method.init_client(zero) if state is None else state
    return method.upload(v.clone(), Down(zero, zero), state, Local(2, 0.1, 8, active=4, **facts))


def vector(d, dtype=torch.float32):
    return torch.from_numpy(np.random.default_rng(d).standard_normal(d)).to(dtype)


@pytest.mark.parametrize("d", LENGTHS)
@pytest.mark.parametrize(
    "method",
    [*(TopK(Scaffold(), f) for f in (0.001, 0.02, 0.1, 1.0)), *(Quantise(Scaffold(), b) for b in range(1, 9))],
    ids=repr,
)
def test_bytes_are_those_of_a_real_encoding(method, d):
    for v in (vector(d), vector(d, torch.float64), torch.zeros(d)):
        up, _ = upload(method, v)
        data = method.encode(up)
        assert len(data) == method.sent(up)
        for a, b in zip(method.decode(data, Up(*map(torch.zeros_like, up))), up, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("method", [TopK(Scaffold(), 0.001), TopK(Scaffold(), 0.2), Quantise(Scaffold(), 3)], ids=repr)
def test_a_part_of_the_bytes_is_refused(method):
    up, _ = upload(method, vector(1300))
    data = method.encode(up)
    for end in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(ValueError):
            method.decode(data[:end], Up(*map(torch.zeros_like, up)))


def test_the_largest_entries_are_sent_and_the_others_kept():
    v = vector(100)
    method = TopK(FedAvg(), 0.05)
    zero = torch.zeros(100)
    down = FedAvg().broadcast(FedAvg().init_server(zero))
    state = method.init_client(zero)
    total = torch.zeros(100, dtype=torch.float64)
    for t in range(1, 4):
        up, new = method.upload(v.clone(), down, state, Local(1, 0.1, 1, t=t, active=1))
        full = v + state.error.D
        order = np.argsort(-full.abs().numpy())
        assert set(np.flatnonzero(up.D.numpy())) == set(order[:5])
        assert torch.equal(up.D[order[:5].copy()], full[order[:5].copy()])
        total += up.D
        torch.testing.assert_close(total + new.error.D, t * v.double(), rtol=1e-6, atol=1e-6)  # nothing is lost
        state = new


@pytest.mark.parametrize("bits", [1, 2, 5])
def test_rounding_is_to_the_two_neighbours_and_right_in_the_mean(bits):
    v, n = vector(64, torch.float64), 1500
    method = Quantise(FedAvg(), bits, bucket=16)
    down = FedAvg().broadcast(FedAvg().init_server(torch.zeros(64, dtype=torch.float64)))
    sent = torch.stack([method.upload(v.clone(), down, (), Local(1, 0.1, 1, t=t, client=3))[0].D for t in range(n)])
    scale = v.view(4, 16).abs().amax(1, keepdim=True).expand(4, 16).flatten()
    step = 2 * scale / (1 if bits == 1 else 2**bits - 2)
    assert ((sent - v).abs() <= step * (1 + 1e-9)).all()
    grid = (sent + scale) / step
    torch.testing.assert_close(grid, grid.round(), rtol=0, atol=1e-9)
    share = ((v + scale) / step) % 1
    error = step * (share * (1 - share) / n).sqrt()
    assert ((sent.mean(0) - v).abs() <= 5 * error + 1e-12).all()


@pytest.mark.parametrize(
    "method",
    [TopK(Scaffold(), 0.2), TopK(FedSpeed(), 0.2), Quantise(Scaffold(), 3)],
    ids=repr,
)
@pytest.mark.slow
def test_loop_block_and_workers_agree(method):
    def ended(**changes):
        with package(EQUAL, method, Plan.from_fields({**PLAN.fields(), **changes})) as run:
            return [record.bytes_up for record in run], run.x

    loop, block, far = ended(engine="loop"), ended(engine="block"), ended(engine="loop", backend="process", workers=2)
    vectors = 2 if isinstance(method.base, Scaffold) else 1
    each = 2 + 3 * 8 if isinstance(method, TopK) else 8 + 5  # 12 entries: 2 bytes of places; or a scale, and 36 bits
    assert loop[0] == block[0] == far[0] == [4 * vectors * each] * 3
    torch.testing.assert_close(loop[1], block[1], rtol=1e-9, atol=1e-9)
    assert torch.equal(loop[1], far[1])


def test_keeping_all_is_the_base():
    def ended(method):
        with package(EQUAL, method, PLAN) as run:
            list(run)
            return run.x

    for base in (FedSpeed(), Scaffold()):
        assert torch.equal(ended(base), ended(TopK(base, 1.0)))
        assert torch.equal(ended(base), ended(Wrapper(TopK(base, 1.0, feedback=False))))


def test_error_feedback_converges_where_leaving_out_stalls():
    """F_i(x) = ||x - a_i||^2 / 2, one step per round at a falling rate, of five entries one is sent: the largest of
    the clients cancel, and without feedback nothing else is ever sent."""
    a = torch.zeros(6, 5, dtype=torch.float64)
    a[:, 0] = torch.tensor([9.0, -9.0, 9.0, -9.0, 9.0, -9.0])
    a[:, 1:] = vector(24, torch.float64).view(6, 4)
    far = {}
    for feedback in (True, False):
        method = TopK(FedAvg(), 0.2, feedback=feedback)
        x = torch.zeros(5, dtype=torch.float64)
        states = [method.init_client(x) for _ in a]
        for t in range(400):
            down, sent = FedAvg().broadcast(FedAvg().init_server(x)), []
            for i in range(6):
                up, states[i] = method.upload(x - 4 / (t + 40) * (x - a[i]), down, states[i], Local(1, 0.1, 1))
                sent.append(up.D)
            x = x + torch.stack(sent).mean(0)
        far[feedback] = float((x - a.mean(0)).norm())
    assert far[True] < 0.05
    assert far[False] > 0.9 * float(a.mean(0).norm())


def test_trees_in_trees_are_followed():
    up, _ = upload(TopK(Quantise(Scaffold(), 8), 0.5), vector(10))
    assert len(list(leaves(up))) == 2
