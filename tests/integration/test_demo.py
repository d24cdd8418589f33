# SPDX-License-Identifier: Apache-2.0
"""A short run of the demo: a rank killed in the middle of a save, resumed on 3 ranks, the same weights in the end."""
import os
import subprocess

from conftest import BUILD, ROOT, read_safetensors


def test_demo(tmp_path):
    env = dict(os.environ, STEPS="60", EVERY="10", MICRO="1", TMPDIR=str(tmp_path))
    done = subprocess.run([str(ROOT / "tools/demo/run"), str(BUILD)], env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=500)
    assert done.returncode == 0, done.stdout
    assert "ended with the same weights" in done.stdout
    for words in ("killed in the middle of a save", "samples per second", "stall per save", "larder ckpt verify",
                  "0 damaged", "nothing was removed"):
        assert words in done.stdout, done.stdout
    assert list(tmp_path.iterdir()) == [], "the demo's folder stays"


def test_what_the_trainer_saved(server, tmp_path):
    """World, boxes put together, tied weights, labels, the loader's position, the blob of rank 0."""
    env = dict(os.environ, LARDER_CREDENTIALS=str(server.credentials("writer")))
    demo = lambda *words: subprocess.run([str(BUILD / "larder-demo"), *map(str, words)], env=env, text=True,
                                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=200)
    assert demo("pack", tmp_path).returncode == 0
    server.larder("dataset", "import", "texts", *sorted(tmp_path.glob("*.tar")))
    done = demo("train", "--run", "t", "--dataset", "texts", "--ranks", 3, "--steps", 8, "--save-every", 4, "--per-micro", 1,
                "--seed", 7)
    assert done.returncode == 0, done.stdout
    got = server.json("ckpt", "show", "t")
    assert (got["step"], got["world"], got["labels"]["job"]) == (8, 3, "job")
    assert got["loader"] == {"version": 1, "seed": 7, "epoch": 0, "position": 8 * 12, "window_shards": 8}
    tensors = {t["name"]: (t["dtype"], t["shape"]) for t in got["tensors"]}
    assert tensors["model/tokens.weight"] == tensors["model/output.weight"] == ("F32", [256, 64])
    assert len(tensors) == 3 * 21 + 1 and got["plain_bytes"] < 3 * 168384 * 4 + 4096, "tied weights are stored once"
    assert got["blobs"] == [{"rank": 0, "name": "loss", "bytes": 32}]
    server.larder("ckpt", "restore", "t", tmp_path / "o.safetensors")
    restored, _ = read_safetensors(tmp_path / "o.safetensors")
    assert restored["model/tokens.weight"] == restored["model/output.weight"]
    assert set(restored["adam.v/norm.weight"][2]) != {0}
