"""`make gpu-check`: its exit codes, that it finds what is wrong, and that it works on a pretended GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from pretended import pretended_cuda

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import gpu_check


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so_in_a_line(capsys):
    assert gpu_check.main([]) == gpu_check.NO_GPU == 3
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert gpu_check.main(["--device", "tpu"]) == gpu_check.main(["--device", "cuda"]) == 2
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 2
    assert told.out == ""


def test_what_is_off_is_wrong(monkeypatch, capsys):
    ends = iter(torch.tensor([0.0, float(i)]).double() for i in range(100))
    monkeypatch.setattr(gpu_check, "_end", lambda *_, **__: (torch.zeros(2).double(), next(ends)))
    report = gpu_check.Report()
    gpu_check._twice(report, torch.device("cpu"), True)
    assert len(report.wrong) == 3
    ends = iter([1.0, 1.0 + 1e-7, 1.001, 1.0, 1.0 + 1e-7, 1.0 + 9e-7])  # the truth, the CPU's float32, the device's
    monkeypatch.setattr(
        gpu_check, "_end", lambda *_, **__: (torch.zeros(1).double(), torch.tensor([next(ends)]).double())
    )
    report = gpu_check.Report()
    gpu_check._numbers(report, torch.device("cpu"), ("fedavg",))
    assert report.wrong == ["fedavg, loop"]
    with report.part("broken"):
        raise RuntimeError("no kernel")
    assert report.wrong[-1] == "broken"
    assert "WRONG broken: RuntimeError: no kernel" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_whole_report(monkeypatch, capsys, device):
    if device == "cpu":
        assert gpu_check.main(["--device", "cpu", "--quick"]) == 0
    else:
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda _=None: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 2**20)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"total_memory": 2**30})
        )
        with pretended_cuda(monkeypatch):
            assert gpu_check.main(["--device", "cuda", "--quick"]) == 0
    told = capsys.readouterr().out
    assert "all is as it should be" in told
    assert "WRONG" not in told
    assert "ms per gradient" in told
    assert ("cuDNN deterministic True, benchmark False, TF32 False; matrix products: TF32 False" in told) == (
        device == "cuda"
    )
