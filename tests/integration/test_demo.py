# SPDX-License-Identifier: Apache-2.0
"""A short run of the demo: a rank killed in the middle of a save, resumed on 3 ranks, the same weights in the end."""
import os
import subprocess

from conftest import BUILD, ROOT


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
