# SPDX-License-Identifier: Apache-2.0
"""larderd as a program: configuration, --dev, two servers on one store, signals.

Goal: what an operator types works, and what is wrong is refused in one sentence that says where and what to do.
Method: the built program, in folders of the test's own; waits are for files and exits, never for time to pass.
"""
import contextlib
import json
import os
import pathlib
import re
import resource
import signal
import socket
import ssl
import stat
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LARDERD = ROOT / os.environ.get("BUILD", "build") / "larderd"
PATIENCE_S = 60


def run(*args, **kwargs):
    return subprocess.run([LARDERD, *map(str, args)], capture_output=True, text=True, timeout=PATIENCE_S, **kwargs)


def refused(done, *words):
    """The last line on standard error says why, lines of the log may stand before it; nothing on standard output."""
    assert done.returncode == 1, done
    assert done.stdout == ""
    *log, last = done.stderr.splitlines()
    assert last.startswith("larderd: "), done.stderr
    assert all(re.match(r"\d{4}-\d\d-\d\dT", line) for line in log), done.stderr
    for word in words:
        assert word in last, done.stderr


class Dev:
    def __init__(self, folder, *args):
        self.folder = folder
        self.log = open(str(folder) + ".log", "a+")
        self.process = subprocess.Popen([LARDERD, "--dev", folder, *args], stdout=subprocess.PIPE, stderr=self.log, text=True)
        until = time.monotonic() + PATIENCE_S
        while not (folder / "address").exists():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < until, self.text()
            time.sleep(0.01)
        self.address = (folder / "address").read_text().strip()

    def text(self):
        self.log.seek(0)
        return self.log.read()

    def stop(self, sig=signal.SIGTERM):
        self.process.send_signal(sig)
        status = self.process.wait(PATIENCE_S)
        self.out = self.process.stdout.read()
        self.process.stdout.close()
        return status


@contextlib.contextmanager
def dev(folder, *args):
    d = Dev(folder, *args)
    try:
        yield d
    finally:
        if d.process.poll() is None:
            d.process.kill()
            d.process.wait()
        if not d.process.stdout.closed:
            d.process.stdout.close()
        d.log.close()


def connect(folder, role="reader"):
    """A TLS connection with the role's certificate, as far as the handshake."""
    c = json.loads((folder / f"dev-{role}.json").read_text())
    pem = folder / f"test-{role}.pem"
    pem.write_text(c["certificate"] + c["key"])
    context = ssl.create_default_context(cadata=c["ca"])
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(pem)
    context.set_alpn_protocols(["larder/1"])
    host, port = c["server"].rsplit(":", 1)
    return context.wrap_socket(socket.create_connection((host, int(port)), PATIENCE_S), server_hostname=host)


def frame(opcode, request_id, payload=b"", version=1):
    return (b"LRD1" + version.to_bytes(2, "little") + opcode.to_bytes(2, "little") + bytes(4)
            + len(payload).to_bytes(4, "little") + request_id.to_bytes(8, "little") + bytes(8) + payload)


def answer(s):
    def exactly(n):
        got = b""
        while len(got) < n:
            more = s.recv(n - len(got))
            assert more, "the connection was closed"
            got += more
        return got
    head = exactly(32)
    assert head[:4] == b"LRD1"
    flags, size = int.from_bytes(head[8:12], "little"), int.from_bytes(head[12:16], "little")
    return flags, exactly(size)


HELLO = frame(1, 1, (1).to_bytes(8, "little") + b"\4\0test")


def test_version_and_help():
    assert re.fullmatch(r"larderd \d+\.\d+\.\d+\n", run("--version").stdout)
    text = run("--help").stdout
    for option in ("--config", "--check-config", "--dev", "--listen", "SIGTERM"):
        assert option in text


@pytest.mark.parametrize("args", [[], ["--colour"], ["--dev"], ["--dev", "a", "--config", "b"], ["--check-config"], ["--dev", "a", "extra"]])
def test_wrong_usage(args, tmp_path):
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert "--help" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_dev_makes_everything_and_goes_on_with_it(tmp_path):
    folder = tmp_path / "dev"
    with dev(folder) as d:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        first = {}
        for role in ("admin", "writer", "reader", "operator"):
            path = folder / f"dev-{role}.json"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            first[role] = json.loads(path.read_text())
            assert first[role]["server"] == d.address
            assert first[role]["tenant"] == "dev" and first[role]["role"] == role
            assert first[role]["keks"] == first["admin"]["keks"]
        for secret in ("ca.key", "server.key"):
            assert stat.S_IMODE((folder / secret).stat().st_mode) == 0o600
        assert int((folder / "larderd.pid").read_text()) == d.process.pid
        with connect(folder) as s:
            s.sendall(HELLO)
            flags, hello = answer(s)
            assert flags == 1
        assert d.stop() == 0
        assert f"export LARDER_CREDENTIALS={folder}/dev-admin.json" in d.out
    assert not (folder / "address").exists() and not (folder / "larderd.pid").exists()
    with dev(folder) as d:
        again = json.loads((folder / "dev-writer.json").read_text())
        assert again["server"] == d.address
        for same in ("keks", "certificate", "key", "ca"):
            assert again[same] == first["writer"][same]
        with connect(folder) as s:  # the same store answers
            s.sendall(HELLO)
            flags, hello_again = answer(s)
            assert hello_again.split(b"larderd")[1][:28] == hello.split(b"larderd")[1][:28]
        assert d.stop() == 0
    # A lost credential file is made again, with the key that the others have.
    (folder / "dev-admin.json").unlink()
    with dev(folder) as d:
        assert json.loads((folder / "dev-admin.json").read_text())["keks"] == first["admin"]["keks"]
        assert d.stop() == 0


def test_dev_listens_where_it_is_told(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with dev(tmp_path / "dev", "--listen", f"127.0.0.1:{port}") as d:
        assert d.address == f"127.0.0.1:{port}"
        refused(run("--dev", tmp_path / "other", "--listen", f"127.0.0.1:{port}"), f"127.0.0.1:{port}")
        assert d.stop(signal.SIGINT) == 0


def test_a_second_server_on_one_store_is_refused(tmp_path):
    with dev(tmp_path / "dev") as d:
        refused(run("--dev", tmp_path / "dev"), "another larderd")
        with connect(tmp_path / "dev") as s:  # the first goes on
            s.sendall(HELLO)
            assert answer(s)[0] == 1
        assert (tmp_path / "dev/address").read_text().strip() == d.address
        assert d.stop() == 0


def test_a_store_of_an_unknown_version_is_refused(tmp_path):
    folder = tmp_path / "dev"
    with dev(folder) as d:
        assert d.stop() == 0
    record = next(p for p in (folder / "store").rglob("store") if p.is_file())
    record.chmod(0o600)
    bytes_ = bytearray(record.read_bytes())
    record.write_bytes(bytes(len(bytes_)))
    done = run("--dev", folder)
    refused(done, "store")
    record.write_bytes(bytes_)
    with dev(folder) as d:
        assert d.stop() == 0


def test_a_newer_protocol_is_told_so(tmp_path):
    with dev(tmp_path / "dev") as d:
        with connect(tmp_path / "dev") as s:
            s.sendall(frame(1, 1, HELLO[32:], version=7))
            flags, payload = answer(s)
            assert flags == 3
            assert int.from_bytes(payload[:4], "little") == 14  # version
            assert b"7" in payload
        with connect(tmp_path / "dev") as s:
            s.sendall(frame(1, 1, (1 << 33 | 1).to_bytes(8, "little") + b"\4\0test"))
            flags, payload = answer(s)
            assert int.from_bytes(payload[:4], "little") == 14
            assert b"feature 33" in payload
        assert d.stop() == 0


def test_without_a_certificate_nobody_comes_in(tmp_path):
    with dev(tmp_path / "dev") as d:
        context = ssl._create_unverified_context()
        context.set_alpn_protocols(["larder/1"])
        host, port = d.address.rsplit(":", 1)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            with context.wrap_socket(socket.create_connection((host, int(port)), PATIENCE_S)) as s:
                s.sendall(HELLO)
                assert s.recv(1)
        assert d.stop() == 0
        assert "connection refused" in d.text()


def test_sigterm_ends_idle_sessions_and_says_what_it_did(tmp_path):
    with dev(tmp_path / "dev") as d:
        with connect(tmp_path / "dev") as s:
            s.sendall(HELLO)
            answer(s)
            d.process.send_signal(signal.SIGTERM)
            assert s.recv(1) == b""  # a clean end
        assert d.stop() == 0
        lines = d.text().splitlines()
        assert any("stopping signal=SIGTERM" in line for line in lines)
        assert any(re.search(r"stopped finished=\d+ failed=\d+", line) for line in lines)
        for line in lines:
            assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (error|warn|info|debug) ", line), line


def has_open(pid, path):
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if fd.readlink() == path:
                return True
    return False


# Reads of segments never return, as on a dead disk.
DEAD_DISK = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static ssize_t read_at(int fd, void *p, size_t n, long at)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t got = readlink(link, path, sizeof path - 1);
    path[got < 0 ? 0 : got] = 0;
    while (strstr(path, "/s-"))
        pause();
    return syscall(SYS_pread64, fd, p, n, at);
}
ssize_t pread(int fd, void *p, size_t n, off_t at) { return read_at(fd, p, n, at); }
ssize_t pread64(int fd, void *p, size_t n, off64_t at) { return read_at(fd, p, n, at); }
"""


def imported(folder, tmp_path):
    """A dev folder with a data set in it; its segment, and how to run larder there."""
    (tmp_path / "t.bin").write_bytes(b"x" * 100000)
    env = dict(os.environ, LARDER_CREDENTIALS=str(folder / "dev-admin.json"))
    larder = lambda *words: subprocess.Popen([LARDERD.parent / "larder", *words], env=env, stdout=subprocess.DEVNULL,
                                             stderr=subprocess.PIPE, text=True)
    with dev(folder) as d:
        assert larder("dataset", "import", "set", tmp_path / "t.bin").wait(PATIENCE_S) == 0
        assert d.stop() == 0
    segment, = (folder / "store").glob("objects/t/dev/r/*/s-*")
    return segment, larder


@pytest.mark.skipif("san" in str(LARDERD), reason="sanitizers do not go with a library loaded before them")
def test_a_disk_that_never_answers_does_not_keep_it_from_stopping(tmp_path, monkeypatch):
    folder = tmp_path / "dev"
    segment, larder = imported(folder, tmp_path)
    config = folder / "larderd.conf"
    config.write_text(config.read_text().replace("[server]\n", "[server]\nio = pool\nstop_wait = 0\n", 1))
    (tmp_path / "dead.c").write_text(DEAD_DISK)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "dead.so", tmp_path / "dead.c"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "dead.so"))
    with dev(folder) as d:
        reader = larder("dataset", "ls", "set", "--version", "1")
        try:
            until = time.monotonic() + PATIENCE_S
            while not has_open(d.process.pid, segment):
                assert reader.poll() is None and time.monotonic() < until, d.text()
                time.sleep(0.01)
            assert d.stop() == 1
            assert "has not answered" in d.text() and str(folder / "store") in d.text()
        finally:
            reader.kill()
            reader.communicate()


def test_a_pipe_in_the_place_of_a_segment_keeps_nobody_waiting(tmp_path):
    folder = tmp_path / "dev"
    segment, larder = imported(folder, tmp_path)
    segment.unlink()
    os.mkfifo(segment)
    with dev(folder) as d:
        reader = larder("dataset", "ls", "set", "--version", "1")
        _, said = reader.communicate(timeout=PATIENCE_S)
        assert reader.returncode != 0 and said
        assert d.stop() == 0


def test_sighup_publishes_what_the_configuration_says_now(tmp_path):
    folder = tmp_path / "dev"
    env = dict(os.environ, LARDER_CREDENTIALS=str(folder / "dev-reader.json"))

    def listed():
        out = subprocess.run([LARDERD.parent / "larder", "dataset", "ls", "--json"], env=env, capture_output=True,
                             text=True, timeout=PATIENCE_S)
        return sorted(d["name"] for d in json.loads(out.stdout)) if out.returncode == 0 else out.stderr

    def hup(d, text, log):
        config.write_text(text)
        seen = d.text().count(log)
        d.process.send_signal(signal.SIGHUP)
        until = time.monotonic() + PATIENCE_S
        while d.text().count(log) == seen:
            assert time.monotonic() < until, d.text()
            time.sleep(0.01)

    for name in "one", "two":
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text(name)
    section = lambda name: f"\n[publish {name}]\npath = {tmp_path / name}\ntenant = *\nformat = whole\n"
    with dev(folder) as d:
        config = folder / "larderd.conf"
        before = config.read_text()
        assert listed() == []
        hup(d, before + section("one") + section("two"), "read anew published=2")
        assert listed() == ["one", "two"]
        hup(d, before + section("two"), "read anew published=1")
        assert listed() == ["two"]
        hup(d, before + section("three"), "not read anew")  # there is no such folder: all stays
        assert listed() == ["two"]
        hup(d, before + section("one"), "read anew published=1")
        assert listed() == ["one"]
        assert d.stop() == 0


def test_sighup_reads_certificates_and_the_log_anew(tmp_path):
    folder = tmp_path / "dev"
    with dev(folder) as d:
        assert d.stop() == 0
    config = (folder / "larderd.conf").read_text().replace("[server]\n", "[server]\nlog = larderd.log\n", 1)
    (folder / "larderd.conf").write_text(config)
    with dev(folder) as d:
        log = folder / "larderd.log"
        log.rename(folder / "larderd.log.1")
        d.process.send_signal(signal.SIGHUP)
        until = time.monotonic() + PATIENCE_S
        while not (log.exists() and "read anew" in log.read_text()):
            assert time.monotonic() < until
            time.sleep(0.01)
        (folder / "server.pem").write_text("rubbish")
        d.process.send_signal(signal.SIGHUP)
        while "the old one stays" not in log.read_text():
            assert time.monotonic() < until
            time.sleep(0.01)
        with connect(folder) as s:
            s.sendall(HELLO)
            assert answer(s)[0] == 1
        assert d.stop() == 0


def write_config(folder, text):
    path = folder / "larderd.conf"
    path.write_text(text)
    return path


def test_check_config(tmp_path):
    folder = tmp_path / "dev"
    with dev(folder) as d:
        assert d.stop() == 0
    good = (folder / "larderd.conf").read_text()
    done = run("--config", folder / "larderd.conf", "--check-config")
    assert done.returncode == 0 and "is fine" in done.stdout
    cases = [
        (good + "colour = red\n", ["line", "colour", "space_reserve"]),
        (good.replace("[server]", "[sever]"), ["line", "sever", "[publish NAME]"]),
        (good.replace("key = server.key", "key = nowhere.key"), ["nowhere.key"]),
        (good.replace("key = server.key", "key = ca.key"), ["ca.key"]),
        (good + "[publish x]\npath = /nowhere/at/all\ntenant = *\n", ["[publish x]", "/nowhere/at/all"]),
        (good + f"[publish x]\npath = {folder}/ca.pem\ntenant = *\n", ["not a folder"]),
        (good.replace("store = store\n", ""), ["lacks", "store"]),
    ]
    for text, words in cases:
        path = write_config(folder, text)
        refused(run("--config", path, "--check-config"), *words)
        refused(run("--config", path), *words)
    refused(run("--config", tmp_path / "none.conf"), "none.conf")
    write_config(folder, good)


def test_no_core_files_and_many_descriptors(tmp_path):
    with dev(tmp_path / "dev") as d:
        limits = pathlib.Path(f"/proc/{d.process.pid}/limits").read_text()
        assert re.search(r"Max core file size\s+0\s+0", limits)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        assert re.search(rf"Max open files\s+{hard}\s", limits)
        assert d.stop() == 0


def test_the_pool_of_threads_serves_too(tmp_path):
    folder = tmp_path / "dev"
    with dev(folder) as d:
        assert d.stop() == 0
    config = (folder / "larderd.conf").read_text().replace("[server]\n", "[server]\nio = pool\nloops = 2\n", 1)
    write_config(folder, config)
    with dev(folder) as d:
        with connect(folder) as s:
            s.sendall(HELLO)
            assert answer(s)[0] == 1
        assert d.stop() == 0
        assert "pool of threads" in d.text()


def test_many_connections_come_and_go(tmp_path):
    with dev(tmp_path / "dev") as d:
        fds = pathlib.Path(f"/proc/{d.process.pid}/fd")
        if not os.access(fds, os.R_OK):
            pytest.skip("the descriptors of the server cannot be listed here")
        before = None
        for n in range(150):
            with connect(tmp_path / "dev") as s:
                if n % 3:
                    s.sendall(HELLO)
                if n % 3 == 1:
                    answer(s)
            if n == 20:
                before = len(list(fds.iterdir()))
        until = time.monotonic() + PATIENCE_S
        while len(list(fds.iterdir())) > before:
            assert time.monotonic() < until, "descriptors are left open"
            time.sleep(0.05)
        assert d.stop() == 0


def test_the_manual_has_every_key(tmp_path):
    manual = (ROOT / "server/larderd.conf.5").read_text()
    named = {word.strip(",") for line in manual.splitlines() if line.startswith(".It Ic") for word in line.split()[2:]}
    known = set()
    for section in ("server", "publish x", "tenant x"):
        done = run("--config", write_config(tmp_path, f"[{section}]\nno_such_key = 1\n"))
        known |= set(done.stderr.split("it may have ")[1].strip().split(", "))
    assert known - {""} == named - {""}
