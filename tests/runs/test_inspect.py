"""Sharpness and divergence against what is known in closed form, and `fedspeed inspect` on a finished run."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from federations_theory import simulation
from torch import nn

from fedspeed.cli import main
from fedspeed.client.flat_model import FlatModel
from fedspeed.client.sharpness import batches, mean_gradient, sam_gap, top_eigenvalue
from fedspeed.data import federate
from fedspeed.data.problems import dissimilarity, random_quadratic, samples
from fedspeed.methods import FedAvg
from fedspeed.runs.inspect import inspect_run
from fedspeed.theory import Setting

PROBLEM = random_quadratic(m=4, d=5, n=3, L=3.0, mu=0.2, shared=False, seed=2)
MSE = nn.functional.mse_loss


def prepared():
    loop = simulation(PROBLEM, FedAvg(), Setting(eta=0.1, lam=1.0, K=2, T=1), np.ones(5))
    work = loop.work
    return work.flat, loop.x, batches(work.data, np.unique(work.data.indices))


def test_largest_eigenvalue_of_a_quadratic():
    flat, x, data = prepared()
    exact = np.linalg.eigvalsh(PROBLEM.H.mean(0))[-1]
    found = top_eigenvalue(flat, x, data, MSE, iterations=500, tolerance=1e-8)
    assert found.value == pytest.approx(exact, rel=1e-10)
    assert found.residual <= 1e-8 * exact


def test_largest_eigenvalue_where_the_largest_in_size_is_negative():
    """A saddle: the Hessian of output^2/2 - 3 b^2 ... as a loss of a two-parameter model with eigenvalues 1 and -4."""

    class Saddle(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, inputs):
            return (0.5 * self.p[0] ** 2 - 2 * self.p[1] ** 2).expand(len(inputs))

    flat = FlatModel(Saddle())
    data = [(torch.zeros(3, 1), torch.zeros(3))]
    found = top_eigenvalue(flat, flat.x, data, lambda output, _: output.mean(), iterations=300, tolerance=1e-8)
    assert found.value == pytest.approx(1.0, abs=1e-6)


def test_largest_eigenvalue_of_a_network_is_that_of_its_full_hessian():
    torch.manual_seed(0)
    flat = FlatModel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    inputs, targets = torch.randn(20, 3, dtype=torch.float64), torch.randint(0, 2, (20,))
    loss = nn.functional.cross_entropy
    data = [(inputs[:12], targets[:12]), (inputs[12:], targets[12:])]  # unequal pieces are weighted
    H = torch.stack([flat.hvp(flat.x, e, inputs, targets, loss) for e in torch.eye(flat.d, dtype=torch.float64)])
    exact = float(torch.linalg.eigvalsh((H + H.T) / 2)[-1])
    found = top_eigenvalue(flat, flat.x, data, loss, iterations=2000, tolerance=1e-6)
    assert found.value == pytest.approx(exact, rel=1e-6)


def test_mean_gradient_and_sam_gap_of_a_quadratic():
    """F(x + rho u) - F(x) = rho ||g|| + rho^2/2 u'Hu, u = g/||g||."""
    flat, x, data = prepared()
    value, g = mean_gradient(flat, x, data, MSE)
    exact = PROBLEM.gradient(np.broadcast_to(x.numpy(), (4, 5))).mean(0)
    np.testing.assert_allclose(g.numpy(), exact, atol=1e-12)
    assert value == pytest.approx(float(PROBLEM.value(x.numpy())), rel=1e-12)
    u, rho = exact / np.linalg.norm(exact), 0.3
    gap = rho * np.linalg.norm(exact) + rho**2 / 2 * u @ PROBLEM.H.mean(0) @ u
    assert sam_gap(flat, x, data, MSE, rho) == pytest.approx(gap, rel=1e-9)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on a quadratic with a shared Hessian, full batches, all clients, by the command line."""
    out = tmp_path_factory.mktemp("runs") / "quadratic"
    call = (
        "run --method fedspeed --data quadratic --model vector --split natural --clients 5 --active 5 --rounds 4 "
        "--local-steps 6 --batch-size 20 --lr 0.1 --lr-decay 1 --weight-decay 0 --seed 3 --quiet "
        "--set method.lam=1 --set method.rho=0 --set data.d=4 --set data.sigma_g=2"
    )
    assert main([*call.split(), "--out", str(out)]) == 0
    return out


def test_inspection_of_a_run_knows_the_problem(finished):
    problem = random_quadratic(5, 4, 20, mu=0.1, sigma_g=2.0, seed=3)
    found = inspect_run(finished, iterations=300)
    assert found.eigenvalue == pytest.approx(problem.L, rel=1e-2)
    assert found.samples == 100
    assert found.clients == 5
    assert found.dissimilarity == pytest.approx(problem.sigma_g**2, rel=1e-4)
    assert json.loads((finished / "inspect.json").read_text())["eigenvalue"] == found.eigenvalue


def test_divergence_is_that_of_a_round_of_plain_sgd(finished):
    """x_iK - mean = -M (grad F_i - grad F) with M = [I - (I - eta H)^K] H^-1, for one Hessian H."""
    problem = random_quadratic(5, 4, 20, mu=0.1, sigma_g=2.0, seed=3)
    H, eye = problem.H[0], np.eye(4)
    M = np.linalg.solve(H, eye - np.linalg.matrix_power(eye - 0.1 * H, 6))
    apart = (problem.v - problem.v.mean(0)) @ M
    assert inspect_run(finished).divergence == pytest.approx(np.square(apart).sum(-1).mean(), rel=1e-4)
    assert dissimilarity(problem, np.zeros(4)) == pytest.approx(4.0)


def test_the_rate_is_that_of_the_last_round_there_is(tmp_path):
    call = "run --method fedavg --model linear --clients 6 --active 3 --local-steps 2 --lr-decay 0.5 --quiet"
    for name, more in (("one", "--rounds 1"), ("stopped", "--rounds 4 --stop-at train_loss=99")):
        assert main([*call.split(), *more.split(), "--out", str(tmp_path / name)]) == 0
    one, stopped = (inspect_run(tmp_path / name, samples=20, iterations=1) for name in ("one", "stopped"))
    assert stopped == one


def test_fewer_samples_and_clients_and_another_place(finished, tmp_path):
    found = inspect_run(finished, samples=7, clients=2, out=tmp_path / "new")
    assert (found.samples, found.clients) == (7, 2)
    assert (tmp_path / "new" / "inspect.json").is_file()


def test_the_command_prints_a_row_a_run(finished, capsys):
    assert main(["inspect", str(finished), str(finished)]) == 0
    assert capsys.readouterr().out.count("quadratic") == 2
    assert main(["inspect", str(finished), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[str(finished)]["method"] == "fedspeed"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--rho", "0"], "rho must be > 0"),
        (["--samples", "0"], "samples must be at least 1"),
        (["--clients", "-1"], "clients must be at least 1"),
    ],
)
def test_bad_options(finished, extra, said, capsys):
    assert main(["inspect", str(finished), *extra]) == 2
    assert said in capsys.readouterr().err


def test_what_is_no_run_is_refused(finished, tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "not a finished run" in capsys.readouterr().err
    assert main(["inspect", str(finished), str(finished), "--out", str(tmp_path)]) == 2
    assert "--out takes one run" in capsys.readouterr().err
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.toml").write_text((finished / "config.toml").read_text())
    (broken / "model.safetensors").write_bytes(b"no tensors")
    assert main(["inspect", str(broken)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    (broken / "config.toml").write_text((finished / "config.toml").read_text().replace("d = 4", "d = 3"))
    (broken / "model.safetensors").write_bytes((finished / "model.safetensors").read_bytes())
    assert main(["inspect", str(broken)]) == 2
    assert "does not fit its config.toml" in capsys.readouterr().err


def test_pieces_of_the_training_data_are_not_augmented():
    data = federate(samples(PROBLEM), split="natural", clients=4)
    parts = batches(data, np.arange(12))
    assert sum(len(targets) for _, targets in parts) == 12
    assert torch.equal(parts[0][0], data.x)
