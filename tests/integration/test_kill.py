# SPDX-License-Identifier: Apache-2.0
"""Goal: what was acknowledged survives any kill of the server and failure of its disk, and what was not is never half there.

Method: two writers save steps of their own runs one after the other while a third party prunes one of them; larderd is
killed with SIGKILL at random moments and started again on the same folder and port, on each file system in turn. At the end every acknowledged
step that the rules keep must be listed, verify must find no damage at any level, and the newest must restore to the
bytes that were saved. The seed is printed; LARDER_TEST_SEED repeats it, LARDER_TEST_KILLS makes it longer.
"""
import mmap
import os
import random
import signal
import subprocess
import threading
import time

import pytest

from conftest import DAMAGE, SPACE, Server, closed_port, read_safetensors, run_larder, write_safetensors

KILLS = int(os.environ.get("LARDER_TEST_KILLS", "13"))
KEEP_LAST = 3


def weights(seed, elements):
    return {"w": ("BF16", [elements], random.Random(seed).randbytes(2 * elements))}


class Writer(threading.Thread):
    """Saves step after step; `acknowledged` holds those whose save returned success."""

    ELEMENTS = 6_000_000

    def __init__(self, server, run, scratch):
        super().__init__()
        self.server, self.run_name, self.file = server, run, scratch / f"{run}.safetensors"
        self.stop, self.acknowledged, self.failures = threading.Event(), [], []

    def bytes_of(self, step):
        return weights(f"{self.run_name}/{step}", self.ELEMENTS)

    def run(self):
        step = 0
        while not self.stop.is_set():
            step += 1
            write_safetensors(self.file, self.bytes_of(step))
            done = run_larder("ckpt", "save", self.run_name, step, self.file, credentials=self.server.credentials("writer"))
            if done.returncode == 0:
                self.acknowledged.append(step)
            else:
                self.failures.append(done.stderr)
                time.sleep(0.05)


def prune_until(stop, server, run):
    while not stop.wait(0.2):
        run_larder("ckpt", "prune", run, "--keep-last", KEEP_LAST, "--yes", credentials=server.credentials("operator"))


def good_steps(server, run):
    return {row["step"] for row in server.json("ckpt", "ls", run) if row["state"] == "good"}


@pytest.mark.parametrize("kind", [None, "ext4", "xfs", "btrfs"])
def test_kills_lose_nothing_acknowledged(kind, tmp_path, request, disks):
    place = disks(kind, 1536).mount if kind else tmp_path
    seed = os.environ.get("LARDER_TEST_SEED", str(time.time_ns()))
    print("LARDER_TEST_SEED =", seed)
    rng = random.Random(seed)
    server = Server(place / "dev", "--listen", f"127.0.0.1:{closed_port()}")
    request.addfinalizer(server.stop)
    writers = [Writer(server, name, tmp_path) for name in ("kept", "pruned")]
    stop = threading.Event()
    pruner = threading.Thread(target=prune_until, args=(stop, server, "pruned"))
    try:
        for thread in (*writers, pruner):
            thread.start()
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.05, 0.8))
            server.stop(signal.SIGKILL)
            server.start()
        while not all(writer.acknowledged for writer in writers):  # bounded by the test's own limit
            time.sleep(0.05)
    finally:
        for writer in writers:
            writer.stop.set()
        stop.set()
        for thread in (*writers, pruner):
            thread.join(timeout=180)
    kept, fewer = writers
    print("acknowledged:", kept.acknowledged, fewer.acknowledged, "failed:", len(kept.failures), len(fewer.failures), *kept.failures)
    assert set(kept.acknowledged) <= good_steps(server, "kept")
    assert set(fewer.acknowledged[-KEEP_LAST:]) <= good_steps(server, "pruned")
    for level in ("structure", "scrub", "deep"):
        server.larder("ckpt", "verify", "--level", level)
    for writer in writers:
        newest = max(good_steps(server, writer.run_name))
        out = tmp_path / f"{writer.run_name}-back.safetensors"
        server.larder("ckpt", "restore", writer.run_name, newest, out)
        assert read_safetensors(out)[0] == writer.bytes_of(newest)
    server.stop(signal.SIGTERM)
    assert server.process.returncode == 0


def test_a_flipped_byte_is_found_named_and_not_restored(own_server, tmp_path):
    server, file = own_server, tmp_path / "w.safetensors"
    write_safetensors(file, weights("flip", 3_000_000))
    for step in (1, 2):
        server.larder("ckpt", "save", "run", step, file)
    newest = max(server.folder.rglob("s-*"), key=lambda p: p.stat().st_mtime)
    with open(newest, "r+b") as f:  # in its first chunk
        f.seek(4096 + 100)
        byte = f.read(1)
        f.seek(4096 + 100)
        f.write(bytes([byte[0] ^ 1]))
    found = server.larder("ckpt", "verify", "run", "--level", "scrub", "--json", status=DAMAGE)
    assert newest.name in found.stdout
    out = tmp_path / "out.safetensors"
    damaged = server.larder("ckpt", "restore", "run", 2, out, status=DAMAGE)
    assert " w" in damaged.stderr or "'w'" in damaged.stderr
    assert not out.exists()
    server.larder("ckpt", "restore", "run", 1, out)
    assert read_safetensors(out)[0] == weights("flip", 3_000_000)


def test_what_the_disk_cannot_read_is_named_and_the_rest_comes_back(disks, tmp_path):
    """Btrfs answers a read of bytes that do not match its own checksum with EIO, as a disk does with a bad sector."""
    disk, file, out = disks("btrfs", 1024), tmp_path / "w.safetensors", tmp_path / "out.safetensors"
    server = Server(disk.mount / "dev")
    tensors = {f"t{i}": ("U8", [3 << 20], random.Random(i).randbytes(3 << 20)) for i in range(4)}
    write_safetensors(file, tensors)
    for step in (1, 2):
        server.larder("ckpt", "save", "run", step, file)
    newest = max(server.folder.rglob("s-*"), key=lambda p: p.stat().st_mtime)
    stored = newest.read_bytes()[6 << 20:][:64]
    server.stop()
    assert disk.detach()
    with open(disk.image, "r+b") as f, mmap.mmap(f.fileno(), 0) as image:
        at = image.find(stored)
        assert at > 0 and image.find(stored, at + 1) < 0
        image[at:at + 64] = bytes(64)
    disk.attach()
    with pytest.raises(OSError):
        newest.read_bytes()
    server.start()
    try:
        found = server.larder("ckpt", "verify", "run", "--level", "scrub", status=DAMAGE)
        assert newest.name in found.stdout
        found = server.json("ckpt", "verify", "run", "--level", "deep", status=DAMAGE)
        assert [(x["tensor"], x["step"], x["class"]) for x in found["findings"]] == [("t1", 2, "corrupt")]
        damaged = server.larder("ckpt", "restore", "run", out, status=DAMAGE)
        assert "damaged: tensor t1, " in damaged.stderr and damaged.stderr.count("larder: damaged: ") == 1
        assert "Input/output error" in damaged.stderr and not out.exists()
        server.larder("ckpt", "restore", "run", 1, out)
        assert read_safetensors(out)[0] == tensors
    finally:
        server.stop()


def test_a_full_disk_fails_the_save_and_nothing_else(tmp_path, disks):
    server = Server(disks("ext4", 448).mount / "dev")
    try:
        small, large = tmp_path / "small.safetensors", tmp_path / "large.safetensors"
        write_safetensors(small, weights("small", 1_000_000))
        write_safetensors(large, weights("large", 100_000_000))
        server.larder("ckpt", "save", "run", 1, small)
        server.larder("ckpt", "save", "run", 2, large, status=SPACE)
        assert good_steps(server, "run") == {1}
        server.larder("ckpt", "save", "run", 3, small)  # the space of step 2 was given back
        server.larder("ckpt", "verify", "run", "--level", "deep")
        server.larder("ckpt", "prune", "run", "--keep-last", 1, "--yes")
        assert good_steps(server, "run") == {3}
    finally:
        server.stop()


@pytest.fixture
def crowded(tmp_path):
    """A folder in memory that holds 420 MiB and not a byte more; grow() gives it room."""
    folder = tmp_path / "memory"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=420m", "none", folder], capture_output=True).returncode != 0:
        pytest.skip("needs root and the right to mount a tmpfs")
    yield folder, lambda: subprocess.run(["mount", "-o", "remount,size=2g", folder], check=True)
    subprocess.run(["umount", "-l", folder], check=False)


@pytest.mark.parametrize("kind, options", [("ext4", "data=journal"), ("ext4", "defaults"), ("xfs", "defaults")])
def test_a_disk_that_fails_to_sync_is_not_believed(kind, options, crowded, disks, tmp_path):
    """The image is sparse, and what holds it becomes full. With data=journal there are no direct writes: what the file system had
    accepted fails in fsync; else the writes fail. A save that was acknowledged must be there after the file system was mounted
    anew, and none but those."""
    folder, grow = crowded
    disk = disks(kind, 1024, folder, options)
    server = Server(disk.mount / "dev")
    file, acknowledged, refused = tmp_path / "w.safetensors", [], None
    try:
        for step in range(1, 60):
            write_safetensors(file, weights(f"sync/{step}", 6_000_000))
            done = run_larder("ckpt", "save", "run", step, file, credentials=server.credentials("writer"))
            if done.returncode != 0:
                refused = done
                break
            acknowledged.append(step)
        assert refused is not None and acknowledged, "the disk never failed"
        assert refused.stderr.startswith("larder: "), refused.stderr
        print("acknowledged:", acknowledged, "then:", refused.stderr)
        again = run_larder("ckpt", "save", "run", 99, file, credentials=server.credentials("writer"))
        assert again.returncode != 0
    finally:
        server.stop()
    assert disk.detach()
    grow()
    disk.attach()
    for mark in disk.mount.rglob("failed-sync.*"):  # as larderd(8) says, once the file system has been mounted anew
        mark.unlink()
    server.start()
    try:
        assert good_steps(server, "run") == set(acknowledged)
        server.larder("ckpt", "verify", "--level", "deep")
        out = tmp_path / "back.safetensors"
        server.larder("ckpt", "restore", "run", acknowledged[-1], out)
        assert read_safetensors(out)[0] == weights(f"sync/{acknowledged[-1]}", 6_000_000)
        server.larder("ckpt", "save", "run", 100, file)
    finally:
        server.stop()
