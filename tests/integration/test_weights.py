# SPDX-License-Identifier: Apache-2.0
"""Goal: the codecs hold and gain on real weights and on an optimiser's state, not on random numbers only.
Method: tests/bench/weights (which decodes all that it encodes and compares) on a published model and a short training run."""
import json
import os
import subprocess

import pytest

from conftest import ROOT


def test_real_weights_and_optimiser_state():
    done = subprocess.run([ROOT / "tests/bench/weights", "--json", "--steps", "24", "--stage-ms", "0"], cwd=ROOT, env=os.environ,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    ratio = {(r["data"], r["codec"]): r["ratio"] for r in json.loads(done.stdout)}
    assert ratio["minilm-fp32", "fast"] <= 0.85 and ratio["minilm-fp32", "dense"] <= 0.83
    assert ratio["minilm-bf16", "fast"] <= 0.685 and ratio["minilm-bf16", "dense"] <= 0.675
    for kind in ("demo-model", "demo-adam.m", "demo-adam.v"):
        assert ratio[kind, "fast"] <= 0.92 and ratio[kind, "dense"] <= ratio[kind, "fast"]
        assert ratio[kind, "dense"] < ratio[kind, "zstd1"]
