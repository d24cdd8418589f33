# SPDX-License-Identifier: Apache-2.0
"""What the integration tests share: a larderd --dev of their own, and the command `larder` against it."""
import json
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / os.environ.get("BUILD", "build")
LARDER = BUILD / "larder"
BOUND_S = 120

# The table of larder(1).
OK, DAMAGE, USAGE, MISSING, DENIED, KEY, SERVER, CORRUPT, SPACE, CONFLICT, OTHER = range(11)


def run_larder(*words, credentials=None, cwd=None, binary=False, more_env=None):
    """Runs `larder` with the words; returns the finished process. Without credentials it has none."""
    env = {k: v for k, v in os.environ.items() if k != "LARDER_CREDENTIALS"}
    if credentials:
        env["LARDER_CREDENTIALS"] = str(credentials)
    env.update(more_env or {})
    return subprocess.run([str(LARDER), *map(str, words)], env=env, cwd=cwd, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=BOUND_S, text=not binary)


class Server:
    """A larderd --dev in a folder; `larder(...)` speaks to it with the credential file of a role."""

    def __init__(self, folder, *more):
        self.folder = pathlib.Path(folder)
        self.more = more
        self.log = self.folder.with_name(self.folder.name + ".log")
        self.process = None
        self.start()

    def start(self):
        (self.folder / "address").unlink(missing_ok=True)  # of a life before that was cut off
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([str(BUILD / "larderd"), "--dev", str(self.folder), *self.more],
                                            stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until = time.monotonic() + 30
        while not (self.folder / "address").exists():
            assert self.process.poll() is None and time.monotonic() < until, \
                f"larderd --dev did not start:\n{self.log.read_text(errors='replace')}"
            time.sleep(0.02)

    def stop(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(timeout=60)

    def credentials(self, role="admin"):
        return self.folder / f"dev-{role}.json"

    def larder(self, *words, role="admin", credentials=None, status=OK, **more):
        done = run_larder(*words, credentials=credentials or self.credentials(role), **more)
        assert done.returncode == status, f"larder {' '.join(map(str, words))}: {done.returncode}, expected {status}\n" \
                                          f"{done.stdout}\n{done.stderr}"
        if status not in (OK, DAMAGE):
            assert_sentence(done.stderr)
        return done

    def json(self, *words, **more):
        at = words.index("--") if "--" in words else len(words)
        return json.loads(self.larder(*words[:at], "--json", *words[at:], **more).stdout)


def assert_sentence(text):
    """Errors are lines "larder: ..." for people."""
    text = text.decode() if isinstance(text, bytes) else text
    assert text.startswith("larder: ") and len(text.split()) >= 5, text
    assert "\n" == text[-1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    s = Server(tmp_path_factory.mktemp("larderd") / "dev")
    yield s
    s.stop()


@pytest.fixture
def own_server(tmp_path):
    """One that a test may damage."""
    s = Server(tmp_path / "dev")
    yield s
    s.stop()


class Disk:
    """A file system of its own on a loop device: a sparse image of `mebibytes` in `folder`, mounted at `.mount`. Skips the
    test where that is not allowed or the file system is not known."""

    def __init__(self, kind, folder, mebibytes, options="defaults"):
        self.options = options
        self.image, self.mount = folder / f"{kind}.img", folder / f"{kind}.mnt"
        self.mounted = False
        make = f"mkfs.{kind}"
        if os.geteuid() != 0 or not shutil.which(make):
            pytest.skip(f"needs root and {make} (make deps installs it)")
        self.mount.mkdir()
        with open(self.image, "wb") as f:
            f.truncate(mebibytes << 20)
        subprocess.run([make, "-q", {"ext4": "-F"}.get(kind, "-f"), self.image], check=True, capture_output=True)
        self.attach()

    def attach(self):
        done = subprocess.run(["mount", "-o", f"loop,{self.options}", self.image, self.mount], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"cannot be mounted here: {done.stderr.strip()}")
        self.mounted = True

    def detach(self):
        if self.mounted:
            self.mounted = subprocess.run(["umount", self.mount], capture_output=True).returncode != 0
        return not self.mounted

    def remove(self):
        if not self.detach():
            subprocess.run(["umount", "-l", self.mount], check=False)
        self.image.unlink()


@pytest.fixture
def disks(tmp_path):
    """make(kind, mebibytes, ...): a Disk that goes with the test, after everything on it has been stopped."""
    made = []

    def make(kind, mebibytes, folder=tmp_path, options="defaults"):
        made.append(Disk(kind, folder, mebibytes, options))
        return made[-1]

    yield make
    for disk in made:
        disk.remove()


WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
          "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}


def write_safetensors(path, tensors, metadata=None):
    """tensors: name -> (dtype, shape, bytes)."""
    header, at, data = {}, 0, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(raw)]}
        at += len(raw)
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = pathlib.Path(path).read_bytes()
    n, = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + n])
    metadata = header.pop("__metadata__", None)
    area = raw[8 + n:]
    return {k: (v["dtype"], v["shape"], area[v["data_offsets"][0]:v["data_offsets"][1]])
            for k, v in header.items()}, metadata


def closed_port():
    """A port of loopback that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def edited_credentials(source, to, **changes):
    content = json.loads(pathlib.Path(source).read_text())
    content.update(changes)
    pathlib.Path(to).write_text(json.dumps(content))
    os.chmod(to, 0o600)
    return to
