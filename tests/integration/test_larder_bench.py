# SPDX-License-Identifier: Apache-2.0
"""larder bench: the keys that others read, on little data. What the figures say is for benchmarks, not tests."""
import json
import os

import pytest
from conftest import MISSING, OK, USAGE, run_larder


def bench(*words):
    done = run_larder("bench", *words, "--json")
    assert done.returncode == OK, done.stderr
    return json.loads(done.stdout)


def test_codec():
    rows = bench("codec", "--bytes", "4M", "--stage-ms", 0)
    assert all(set(r) == {"data", "codec", "ratio", "encode_gbps", "decode_gbps"} for r in rows)
    kinds = {"bf16-gaussian", "fp32-gaussian", "random", "zero"}
    assert {r["data"] for r in rows} == kinds
    assert all(any(r["data"] == k and r["codec"] == "zstd1" for r in rows) for k in kinds)
    ratio = {(r["data"], r["codec"]): r["ratio"] for r in rows}
    assert ratio["bf16-gaussian", "fast"] < 0.70 and ratio["random", "fast"] <= 1.001 and ratio["zero", "fast"] == 0


def test_codec_on_other_loops():
    """All loops give the same bytes, hence the same ratios; a name that is not there is refused with those that are."""
    best = bench("codec", "--bytes", "4M", "--stage-ms", 0)
    plain = bench("codec", "--bytes", "4M", "--stage-ms", 0, "--loops", "portable")
    assert [(r["data"], r["codec"], r["ratio"]) for r in plain] == [(r["data"], r["codec"], r["ratio"]) for r in best]
    refused = run_larder("bench", "codec", "--loops", "mmx")
    assert refused.returncode == USAGE and "portable" in refused.stderr


def test_codec_of_a_file(tmp_path):
    (tmp_path / "f").write_bytes(b"\x00\x3f" * 10000)
    rows = bench("codec", "--file", tmp_path / "f", "--dtype", "BF16", "--stage-ms", 0)
    assert {r["codec"] for r in rows} == {"zstd1", "fast", "dense", "off"} and all(r["data"].endswith("/f") for r in rows)
    assert run_larder("bench", "codec", "--file", tmp_path / "f").returncode == USAGE
    assert run_larder("bench", "codec", "--file", tmp_path / "absent", "--dtype", "F32").returncode == MISSING


def test_limits(tmp_path):
    got = bench("limits", "--dir", tmp_path, "--stage-ms", 20, "--disk-bytes", "16M")
    stages = {s["stage"]: s for s in got["stages"]}
    assert {"memcpy", "AES-256-GCM", "TLS 1.3", "loopback TCP", "disk read", "disk write", "planes encode"} <= set(stages)
    assert all(s["gbps"] and s["gbps"] > 0 and s["cpu_s_per_gb"] > 0 for s in stages.values()), stages
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what, more", [("save", ["--rounds", 2]), ("restore", [])])
def test_save_and_restore(tmp_path, what, more):
    got = bench(what, "--bytes", "8M", "--ranks", 2, "--dir", tmp_path, "--stage-ms", 10, *more)
    assert {"bytes", "ranks", "stall_seconds", "first_stall_seconds", "memcpy_seconds", "stall_over_memcpy", "gbps",
            "bound_gbps", "of_limit", "codec_ratio", "server_cpu_s_per_gb", "client_cpu_s_per_gb", "peak_rss_bytes",
            "path"} <= set(got)
    assert got["bytes"] == 8 << 20 and got["ranks"] == 2 and 0.5 < got["codec_ratio"] < 0.75
    assert got["gbps"] > 0 and got["peak_rss_bytes"] > 8 << 20 and got["path"]
    assert "plain TCP" in got["path"]
    assert (what == "restore") == (got["server_cpu_s_per_gb_tls"] is not None) == (got["gbps_tls"] is not None)
    assert list(tmp_path.iterdir()) == [], "the throw-away server's folder stays"
