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
    assert {"memcpy", "AES-256-GCM", "lane tag", "TLS 1.3", "loopback TCP", "disk read", "disk write", "planes encode"} <= set(stages)
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


FEED = ("feed", "--seconds", 1, "--stage-ms", 10)
FEED_KEYS = {"workload", "scale", "accelerators", "utilisation", "samples_per_s", "gbps", "bound_gbps", "of_limit",
             "starved_seconds", "server_cpu_s_per_gb", "path"}


def check_feed(got):
    assert set(got) == FEED_KEYS, "these keys, no more and no fewer: others read them"
    assert set(got["starved_seconds"]) == {"network", "disk", "decode", "consumer"}
    assert got["gbps"] > 0 and got["samples_per_s"] > 0 and got["server_cpu_s_per_gb"] >= 0
    assert abs(got["of_limit"] - got["gbps"] / got["bound_gbps"]) < 1e-6


@pytest.mark.parametrize("kind, way", [("--sealed", "plain TCP"), ("--published", "TLS 1.3 over TCP")])
def test_feed(tmp_path, kind, way):
    got = bench(*FEED, kind, "--workload", "unet3d", "--accelerators", 2, "--scale", 0.0005, "--bytes", "2M", "--dir",
                tmp_path)
    check_feed(got)
    assert got["workload"] == "unet3d" and got["accelerators"] == 2 and got["scale"] == 0.0005
    assert 0 < got["utilisation"] <= 1 and way in got["path"]
    assert list(tmp_path.iterdir()) == [], "the data set or the server's folder stays"


def test_feed_finds_its_own_scale_and_number(tmp_path):
    got = bench(*FEED, "--workload", "cosmoflow", "--accelerators", "max", "--bytes", "2M", "--dir", tmp_path)
    check_feed(got)
    one_gbps = 2.83e6 * got["scale"] / 0.0035 / 1e9
    assert one_gbps == pytest.approx(got["bound_gbps"] / 20, rel=0.01)
    assert 0 <= got["accelerators"] <= 64


def test_feed_of_records_and_singly(tmp_path):
    got = bench(*FEED, "--published", "--workload", "llm", "--bytes", "2M", "--dir", tmp_path)
    assert 0 < got["scale"] <= 1 and got["utilisation"] > 0
    got = bench(*FEED, "--workload", "plain", "--single", "--sample-bytes", "10K", "--batch", 8, "--bytes", "2M", "--dir",
                tmp_path)
    assert got["utilisation"] is None and got["starved_seconds"]["network"] > 0 and "plain TCP" in got["path"]


def test_feed_by_a_server_that_runs(tmp_path, server):
    words = ("bench", *FEED, "--workload", "plain", "--bytes", "2M", "--dir", tmp_path, "--json")
    done = run_larder(*words, credentials=server.credentials())
    assert done.returncode == OK, done.stderr
    assert json.loads(done.stdout)["server_cpu_s_per_gb"] is None
    assert not any(d["name"].startswith("bench-feed") for d in server.json("dataset", "ls")), "its dataset stays"
    assert run_larder(*words, "--published", credentials=server.credentials()).returncode == USAGE


def test_only_sealed_feeds_open_lanes(own_server, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.dat").write_bytes(bytes([i]) * 100_000)
    with open(own_server.folder / "larderd.conf", "a") as conf:
        conf.write(f"\n[publish inplace]\npath = {folder}\ntenant = dev\nformat = whole\n")
    own_server.stop()
    own_server.start()
    own_server.larder("dataset", "import", "sealed", *sorted(folder.iterdir()))

    def lanes_of(*words):
        before = own_server.json("status")["status"]["lanes_total"]
        done = run_larder("bench", *FEED, "--workload", "plain", "--batch", 2, "--connections", 3, "--dir", tmp_path, *words, "--json",
                          credentials=own_server.credentials())
        assert done.returncode == OK, done.stderr
        return own_server.json("status")["status"]["lanes_total"] - before, json.loads(done.stdout)["path"]

    lanes, path = lanes_of("--dataset", "inplace", "--published")
    assert lanes == 0 and path == "TLS 1.3 over TCP"
    lanes, path = lanes_of("--dataset", "sealed")
    assert lanes == 3 and "plain TCP" in path


@pytest.mark.parametrize("words", [["--workload", "none"], ["--accelerators", 0], ["--scale", 2], ["--scale", "x"],
                                   ["--workload", "plain", "--accelerators", "max"], ["--batch", 3],
                                   ["--sealed", "--published"]])
def test_feed_refuses(words):
    assert run_larder("bench", "feed", *words).returncode == USAGE
