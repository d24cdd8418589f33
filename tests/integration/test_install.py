# SPDX-License-Identifier: Apache-2.0
"""make install into a folder, then the example outside the tree, by pkg-config; make uninstall takes it back."""
import os
import re
import shutil
import subprocess

from conftest import BUILD, ROOT


def make(*words):
    # The outer make's job server is not ours, and what it was asked for is not asked for here.
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")}
    done = subprocess.run(["make", "-s", f"BUILD={BUILD.relative_to(ROOT)}", *words], cwd=ROOT, env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout


def sanitized():
    return "san-" in str(BUILD)


def test_install(server, tmp_path):
    if sanitized():
        import pytest
        pytest.skip("the example is not built with the sanitizers of this build")
    root, prefix = tmp_path / "root", "/opt/larder"
    make("install", f"DESTDIR={root}", f"PREFIX={prefix}")
    at = root / prefix[1:]
    there = sorted(str(p.relative_to(at)) for p in at.rglob("*") if not p.is_dir())
    assert {"bin/larder", "sbin/larderd", "lib/liblarder.so", "lib/liblarder.so.0", "include/larder.h",
            "lib/pkgconfig/larder.pc", "share/man/man1/larder.1"} <= set(there)
    assert os.readlink(at / "lib/liblarder.so") == "liblarder.so.0"
    pc = (at / "lib/pkgconfig/larder.pc").read_text()
    assert "@" not in pc and f"prefix={prefix}" in pc and re.search(r"^Version: \d+\.\d+\.\d+$", pc, re.M)

    # Moved to where it would stand: pkg-config's sysroot does that for a compiler.
    env = dict(os.environ, PKG_CONFIG_PATH=str(at / "lib/pkgconfig"), PKG_CONFIG_SYSROOT_DIR=str(root))
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "larder"], env=env, check=True, text=True,
                           stdout=subprocess.PIPE).stdout.split()
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.copy(ROOT / "tools/examples/save_restore.c", outside)
    subprocess.run([os.environ.get("CC", "cc"), "-Wall", "-Wextra", "-Werror", "save_restore.c", "-o", "save_restore", *flags],
                   cwd=outside, check=True)
    env = dict(os.environ, LD_LIBRARY_PATH=str(at / "lib"), LARDER_CREDENTIALS=str(server.credentials("writer")))
    done = subprocess.run([str(outside / "save_restore")], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          timeout=60)
    assert done.returncode == 0 and done.stdout == "saved and restored: the same\n", done.stderr
    assert server.json("ckpt", "show", "example")["tensors"][0]["name"] == "weights"
    # The installed command finds the installed library by itself.
    done = subprocess.run([str(at / "bin/larder"), "--version"], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr

    make("uninstall", f"DESTDIR={root}", f"PREFIX={prefix}")
    assert [p for p in at.rglob("*") if not p.is_dir()] == []


def test_the_example_is_short():
    assert len((ROOT / "tools/examples/save_restore.c").read_text().splitlines()) <= 60
