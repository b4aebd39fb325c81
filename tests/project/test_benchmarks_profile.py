"""Profiles and products of the benchmarks: times go where they belong, and every form of a layer is that layer."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from torch.nn.functional import conv2d
from torch.profiler import ProfilerActivity

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import arrays, products, profile  # noqa: E402
from benchmarks.workloads import find  # noqa: E402
from fedspeed.models.fast_conv import bilinear  # noqa: E402

SLEEP = 0.02


class Slow(torch.autograd.Function):
    """A product, and time that PyTorch does not see, in both directions."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        time.sleep(SLEEP)
        return x @ w

    @staticmethod
    def backward(ctx, gy):
        x, w = ctx.saved_tensors
        time.sleep(2 * SLEEP)
        return gy @ w.T, x.T @ gy


def test_time_in_a_custom_function_and_outside_of_torch_have_lines_of_their_own():
    x, w = torch.ones(30, 40, requires_grad=True), torch.ones(40, 50, requires_grad=True)
    began = time.perf_counter()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as seen:
        Slow.apply(x, w).sum().backward()
        time.sleep(4 * SLEEP)
    total = 1e3 * (time.perf_counter() - began)
    found = {line.kind: line for line in profile.lines(list(seen.events()), total, 1, 1e6, 1e6)}
    assert found[profile.CUSTOM].measured >= 3e3 * SLEEP
    assert found[profile.OUTSIDE].measured >= 4e3 * SLEEP
    assert found["products"].limit == pytest.approx(1e3 * 3 * 2 * 30 * 40 * 50 / 1e6)  # three products
    assert sum(line.measured for line in found.values()) == pytest.approx(total)
    twice = profile.lines(list(seen.events()), total, 2, 1e6, 1e6)
    assert sum(line.measured for line in twice) == pytest.approx(total / 2)


def test_the_parts_of_a_profile_are_those_of_the_step_without_the_profiler(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    arrays.prepare(find("smoke"))
    found = profile.measure("smoke", "fedspeed", turns=3).to_dict()
    torch.set_num_threads(threads)
    assert sum(line["measured"] for line in found["lines"]) == pytest.approx(found["step"], rel=0.02)
    assert found["limit"] == sum(line["limit"] for line in found["lines"])
    text = profile.table(found)
    assert f"scaled by {found['step'] / found['watched']:.2f}" in text
    assert "without the profiler" in text


@pytest.mark.parametrize("layer", products.LAYERS, ids=str)
def test_unrolled_products_and_convolutions_are_the_layer(layer):
    torch.manual_seed(0)
    for passes, tensors in (products.unrolled(layer, 2), products.plain_convolution(layer, 2)):
        x, w, gy = tensors
        if w.ndim == 2:
            w = w.view(layer.size, layer.size, layer.channels, layer.out).permute(3, 2, 0, 1)
            gy = gy.view(2, layer.outputs, layer.outputs, layer.out).permute(0, 3, 1, 2)
        x64, w64 = x.double().requires_grad_(), w.double().requires_grad_()
        y = conv2d(x64, w64, None, layer.stride, layer.size // 2)
        gx, gw = torch.autograd.grad(y, (x64, w64), gy.double())
        forward, by_input, by_filters = (each() for each in passes)
        if tensors[1].ndim == 2:
            flat = (y.permute(0, 2, 3, 1).reshape(-1, layer.out), gx.permute(0, 2, 3, 1), gw.permute(2, 3, 1, 0))
            expected = (*flat[:2], flat[2].reshape(-1, layer.out))
        else:
            expected, by_input, by_filters = (y, gx, gw), by_input[0], by_filters[1]
        for a, b in zip((forward, by_input, by_filters), expected, strict=True):
            torch.testing.assert_close(a.double(), b.detach(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("layer", [layer for layer in products.LAYERS if layer.bilinear], ids=str)
def test_batched_products_are_those_of_the_fast_layers(layer):
    count, rows, depth = layer.bilinear
    rule = bilinear(layer.side, layer.stride, torch.float32, live=True)
    if rule.A is None:
        assert (count, rows, depth) == (1, rule.tiles, rule.products)
    else:
        assert (count, rows, depth) == (rule.products, rule.tiles, 1)
    passes, (x, w, gy) = products.grouped(layer, 2)
    c = depth * layer.channels
    V, M = (a.view(count, -1, 2 * rows).transpose(1, 2).double() for a in (x, gy))
    U = w.view(count, layer.out, c).transpose(1, 2).double()
    y, gx, gw = passes[0](), passes[1]()[0], passes[2]()[1]
    torch.testing.assert_close(y.view(count, layer.out, -1).transpose(1, 2).double(), V @ U, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(
        gx.view(count, c, -1).transpose(1, 2).double(), M @ U.transpose(1, 2), rtol=1e-4, atol=1e-3
    )
    torch.testing.assert_close(
        gw.view(count, layer.out, c).transpose(1, 2).double(), V.transpose(1, 2) @ M, rtol=1e-4, atol=1e-3
    )


def test_products_are_counted_and_shown(monkeypatch):
    monkeypatch.setattr(products, "SECONDS", 0.0)
    monkeypatch.setattr(products, "COLD", 0)
    layer = products.LAYERS[1]
    found = list(products.figures(layer, 5))
    assert len(found) == 12
    by_form = {figure.form: figure.gflops * figure.ms * 1e6 for figure in found}
    assert by_form["convolution"] == pytest.approx(2 * 5 * 64 * 9 * 64 * 64)  # pictures, outputs, taps, channels
    assert by_form["bilinear, MKL"] == pytest.approx(by_form["convolution"] / 4)
    text = products.tables(found, {"rows": [], "failure": "no compiler"})
    assert text.count("3x3, 8x8, 64 to 64") == 3
    assert "no compiler" in text
    assert {figure.what for figure in products.figures(products.LAYERS[0], 2)} == {"forward", "by filters"}
