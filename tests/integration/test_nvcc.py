# SPDX-License-Identifier: Apache-2.0
"""Goal: larder builds with and without nvcc, and says which. Method: the one object that differs, in a folder of its own;
no other part of the library knows nvcc."""
import shutil
import subprocess

import pytest

from conftest import ROOT

NVCC = shutil.which("nvcc")


def build(folder, nvcc):
    target = folder / "obj/gpudirect/kernels_image.o"
    subprocess.run(["make", "-s", f"BUILD={folder}", f"NVCC={nvcc}", str(target)], cwd=ROOT, check=True, timeout=300)
    return target.read_bytes()


def test_without_nvcc_the_image_is_absent_and_comes_when_nvcc_does(tmp_path):
    without = build(tmp_path, "")
    assert b"built without nvcc" in without and len(without) < 20000
    assert not (tmp_path / "kernels.fatbin").exists()
    if NVCC:
        image = build(tmp_path, NVCC)
        assert b"built without nvcc" not in image and (tmp_path / "kernels.fatbin").read_bytes() in image
        assert b"built without nvcc" in build(tmp_path, "")


@pytest.mark.skipif(not NVCC, reason="nvcc is not on PATH: only the build without it can be tested")
def test_with_nvcc_the_image_holds_every_kernel(tmp_path):
    build(tmp_path, NVCC)
    subprocess.run([NVCC, "-std=c++17", "-I.", "-ptx", "gpudirect/kernels.cu", "-o", str(tmp_path / "kernels.ptx")],
                   cwd=ROOT, check=True, timeout=300)
    ptx = (tmp_path / "kernels.ptx").read_text()
    for kernel in ("pack", "unpack", "hash_begin", "hash_sums", "hash_end", "spin"):
        assert f".entry larder_{kernel}(" in ptx
