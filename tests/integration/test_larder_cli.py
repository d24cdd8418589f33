# SPDX-License-Identifier: Apache-2.0
"""The command line itself: help everywhere, usage errors, credentials, an absent server, the manual."""
import json
import os
import pathlib
import re
import resource
import subprocess

import pytest
from conftest import (BUILD, CONFLICT, CORRUPT, DAMAGE, DENIED, KEY, MISSING, OK, OTHER, ROOT, SERVER, SPACE, USAGE, LARDER, assert_sentence,
                      closed_port, edited_credentials, run_larder, write_safetensors)

HELP = run_larder("--help").stdout
COMMANDS = [m.group(1) for m in re.finditer(r"^  ([a-z]+(?: [a-z]+)?)  +\S", HELP, re.M)]


def test_help_lists_all_commands():
    assert len(COMMANDS) > 20 and "ckpt prune" in COMMANDS and "doctor" in COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    done = run_larder(*command.split(), "--help")
    assert done.returncode == OK and done.stderr == ""
    assert done.stdout.startswith(f"usage: larder {command}")
    assert all(len(line) <= 120 for line in done.stdout.splitlines())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_an_unknown_option(command):
    done = run_larder(*command.split(), "--no-such-option")
    assert done.returncode == USAGE
    assert_sentence(done.stderr)
    assert "--no-such-option" in done.stderr and "--help" in done.stderr


def test_groups_have_help():
    for group in {c.split()[0] for c in COMMANDS if " " in c}:
        done = run_larder(group, "--help")
        assert done.returncode == OK and f"{group} " in done.stdout
        assert run_larder(group).returncode == USAGE
        assert run_larder(group, "nonsense").returncode == USAGE


@pytest.mark.parametrize("words", [
    ["nonsense"], ["ckpt", "ls", "a", "b"], ["ckpt", "show"], ["ckpt", "prune", "r"], ["ckpt", "pin", "r"],
    ["ckpt", "pin", "r", "x"], ["ckpt", "show", "r", "-3"], ["ckpt", "verify", "--level", "hard"],
    ["ckpt", "prune", "r", "--keep-last", "3x"], ["ckpt", "prune", "r", "--keep-within", "7y"],
    ["ckpt", "prune", "r", "--keep-last"], ["ckpt", "prune", "r", "--yes=1", "--keep-last", "1"],
    ["ckpt", "destroy", "r"], ["ckpt", "restore", "r", "out.bin"], ["ckpt", "mark", "r", "1", "odd"],
    ["dataset", "import", "d"], ["dataset", "import", "d", "f", "--format", "zip"],
    ["dataset", "import", "d", "f", "--format", "records"], ["tenant", "add", "acme"],
    ["tenant", "add", "Acme!", "--ca", "x"], ["tenant", "add", "acme", "--ca", "x", "--role", "king"],
    ["bench", "save", "--ranks", "0"], ["bench", "codec", "--bytes", "1"], ["bench", "limits", "--data", "odd"],
    ["feed", "order", "d", "--seed", "abc"], ["ckpt", "pin", "r", "1", "--json"], ["dataset", "destroy", "d", "--yes", "--json"],
    ["dataset", "prune", "d", "--keep-every", "2"]])
def test_usage_errors(words, tmp_path):
    done = run_larder(*words, cwd=tmp_path)
    assert done.returncode == USAGE, done.stderr
    assert_sentence(done.stderr)
    assert done.stdout == ""


def test_version():
    done = run_larder("--version")
    text = (ROOT / "format/version.h").read_text()
    assert done.stdout == f'larder {re.search(r"VERSION_STRING +.(.*).$", text, re.M).group(1)}\n'


def test_without_credentials(tmp_path):
    done = run_larder("ckpt", "ls")
    assert done.returncode == DENIED and "LARDER_CREDENTIALS" in done.stderr
    done = run_larder("ckpt", "ls", credentials=tmp_path / "absent.json")
    assert done.returncode == DENIED and "absent.json" in done.stderr
    (tmp_path / "odd.json").write_text("{]")
    done = run_larder("status", "--credentials", tmp_path / "odd.json")
    assert done.returncode == DENIED
    assert_sentence(done.stderr)


def test_inputs_that_are_no_files(server, tmp_path):
    """A pipe that nobody writes to, a folder, a device: refused at once, never waited for."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    for odd in (tmp_path / "pipe", tmp_path, "/dev/null"):
        done = run_larder("ckpt", "ls", credentials=odd)
        assert done.returncode == DENIED and "not a regular file" in done.stderr
        for words in (("dataset", "import", "odd", odd), ("ckpt", "save", "odd", 1, odd)):
            assert "not a regular file" in server.larder(*words, status=USAGE).stderr


def test_a_limit_on_the_size_of_files(own_server, tmp_path):
    """Beyond it the kernel would end a process by a signal: a restore fails with a sentence and leaves nothing, a server
    fails the save and goes on."""
    write_safetensors(tmp_path / "big.safetensors", {"t": ("U8", [3 << 20], os.urandom(3 << 20))})
    own_server.larder("ckpt", "save", "run", 1, tmp_path / "big.safetensors")
    limit = lambda pid, size: resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    env = dict(os.environ, LARDER_CREDENTIALS=str(own_server.credentials()))
    (tmp_path / "out").mkdir()
    done = subprocess.run([LARDER, "ckpt", "restore", "run", tmp_path / "out" / "o.safetensors"], env=env, text=True,
                          capture_output=True, timeout=60, preexec_fn=lambda: limit(0, 1 << 20))
    assert done.returncode == OTHER and "too large" in done.stderr
    assert_sentence(done.stderr)
    assert list((tmp_path / "out").iterdir()) == []
    limit(own_server.process.pid, 1 << 20)
    assert "too large" in own_server.larder("ckpt", "save", "run", 2, tmp_path / "big.safetensors", status=OTHER).stderr
    limit(own_server.process.pid, resource.RLIM_INFINITY)
    own_server.larder("ckpt", "save", "run", 2, tmp_path / "big.safetensors")


def test_server_down(server, tmp_path):
    down = edited_credentials(server.credentials(), tmp_path / "down.json", server=f"127.0.0.1:{closed_port()}")
    done = run_larder("ckpt", "ls", credentials=down)
    assert done.returncode == SERVER, done.stderr
    assert_sentence(done.stderr)


def test_server_that_is_not_larder(server, tmp_path):
    import socket
    import threading
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)

        def answer():
            try:
                while True:
                    c, _ = listener.accept()
                    c.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    c.close()
            except OSError:
                return
        threading.Thread(target=answer, daemon=True).start()
        odd = edited_credentials(server.credentials(), tmp_path / "odd.json",
                                 server=f"127.0.0.1:{listener.getsockname()[1]}")
        done = run_larder("status", credentials=odd)
        listener.shutdown(socket.SHUT_RDWR)
    assert done.returncode in (SERVER, OTHER, DENIED), done.stderr
    assert_sentence(done.stderr)


def test_status(server):
    got = server.json("status")
    assert got["tenant"] == "dev" and got["role"] == "admin" and isinstance(got["status"], dict)
    text = server.larder("status").stdout
    assert "dev (admin)" in text and re.search(r"^DISK WORK .*QUEUED", text, re.M)
    figures = dict(re.findall(r"^  ( *\S.*?)  +(\S.*)$", text, re.M))
    assert figures["tenants"] == str(got["status"]["store_tenants"]) and figures["free"].endswith("iB")
    assert "_" not in "".join(figures)  # each of the server's keys has words of its own


USES = ["saves", "restores", "feeds over the network", "shards on this machine", "scratch files"]


def doctor_with(folder, cuda, cufile=""):
    """What doctor says with the stand-ins for CUDA's driver and cuFile, set up so; cuda None: without them."""
    env = {"LD_LIBRARY_PATH": str(BUILD / ("tests/standin" if cuda is not None else "tests/nothing"))}
    if cuda:
        env["LARDER_STANDIN"] = cuda
    if cufile:
        env["LARDER_STANDIN_CUFILE"] = cufile
    done = run_larder("doctor", "--dir", folder, "--json", more_env=env)
    assert done.returncode == OK, done.stdout + done.stderr
    got = json.loads(done.stdout)
    assert list(folder.iterdir()) == [], "a test file stays"
    return {c["check"]: c for c in got["checks"]}, {w["use"]: w["way"] for w in got["ways"]}


@pytest.mark.skipif(any(pathlib.Path(f).exists() for f in ("/dev/nvidiactl", "/proc/driver/nvidia")), reason="there is a GPU here")
def test_doctor_without_a_gpu(tmp_path):
    checks, ways = doctor_with(tmp_path, None)
    assert checks["CUDA"]["state"] == checks["cuFile"]["state"] == "absent"
    assert "no NVIDIA driver" in checks["CUDA"]["found"] and "install it" in checks["CUDA"]["advice"]
    assert not any(name.startswith("device") for name in checks)
    assert ways == {"saves": "host memory -> staging memory -> network", "restores": "network -> host memory",
                    "feeds over the network": "network -> ring in host memory",
                    "shards on this machine": "file -> host memory: read and written in place",
                    "scratch files": "host memory <-> file: read and written in place"}


def test_doctor_with_gpus(tmp_path):
    checks, ways = doctor_with(tmp_path, "devices=2 numa=0")
    assert checks["CUDA"]["found"] == "CUDA 13.0, 2 devices" and checks["cuFile"]["found"] == "with nvidia-fs 2.26"
    assert "Stand-in 1" in checks["device 1"]["found"] and "near NUMA node 0" in checks["device 1"]["found"]
    assert checks["  pinned memory"]["state"] == "ok" and checks["cuFile"]["state"] == "ok"
    assert ways["saves"] == "device memory -> pinned staging memory -> network"
    assert ways["restores"] == "network -> pinned host memory -> device memory"
    assert ways["shards on this machine"].startswith("file -> device memory: cuFile, ")
    assert re.match(r"device memory <-> file: cuFile, (direct|compatibility mode: the file system has no direct I/O)", ways["scratch files"])


def test_doctor_with_gpus_that_lack_something(tmp_path):
    checks, ways = doctor_with(tmp_path, "register_max=4096", "nvfs=0")
    assert checks["  pinned memory"]["state"] == "could be better" and "OUT_OF_MEMORY" in checks["  pinned memory"]["found"]
    assert checks["cuFile"]["state"] == "could be better" and "nvidia-fs" in checks["cuFile"]["advice"]
    assert "not pinned" in ways["saves"] and ways["scratch files"].endswith("cuFile, compatibility mode: nvidia-fs is not loaded")
    checks, ways = doctor_with(tmp_path, "version=10020")
    assert checks["CUDA"]["state"] == "absent" and "too old" in checks["CUDA"]["found"] and "update" in checks["CUDA"]["advice"]
    assert ways["scratch files"].startswith("host memory")
    checks, ways = doctor_with(tmp_path, "devices=1", "fail=open:1:5007")
    assert checks["cuFile"]["state"] == "absent" and ways["scratch files"].startswith("device memory <-> file: pinned bounce buffer: cuFile does not start")


def test_doctor(server, tmp_path):
    got = server.json("doctor", "--dir", tmp_path)
    assert got["healthy"] is True
    table = server.larder("doctor", "--dir", tmp_path).stdout  # its exit status is 0 as well
    assert table.startswith("CHECK") and not any(line.endswith(" ") for line in table.splitlines())
    assert "How bytes go on this machine, and why" in table
    assert [w["use"] for w in got["ways"]] == USES and all(w["way"] and w["why"] for w in got["ways"])
    checks = {c["check"]: c for c in got["checks"]}
    assert {"io_uring", "locked memory", "huge pages", "processor", "CUDA", "kernels built in", "cuFile", "disk", "credentials",
            "server"} <= set(checks)
    assert all(c["state"] in ("ok", "could be better", "absent") and c["found"] for c in checks.values())
    assert list(tmp_path.iterdir()) == [], "the disk's test file stays"
    os.chmod(server.credentials("reader"), 0o644)
    got = json.loads(server.larder("doctor", "--dir", tmp_path, "--json", role="reader", status=DAMAGE).stdout)
    os.chmod(server.credentials("reader"), 0o600)
    assert got["healthy"] is False and "chmod 600" in {c["check"]: c for c in got["checks"]}["credentials"]["advice"]


def test_doctor_finds_what_is_broken(server, tmp_path):
    down = edited_credentials(server.credentials(), tmp_path / "down.json", server=f"127.0.0.1:{closed_port()}")
    got = json.loads(server.larder("doctor", "--dir", tmp_path / "absent", "--json", credentials=down, status=DAMAGE).stdout)
    states = {c["check"]: c["state"] for c in got["checks"]}
    assert got["healthy"] is False and states["disk"] == "broken" and states["server"] == "broken"


def test_manual_lists_every_command_and_status():
    page = (ROOT / "tools/larder.1").read_text()
    for command in COMMANDS:
        assert f"Cm {command}" in page, command
    status = re.search(r"\.Sh EXIT STATUS(.*?)\.Sh", page, re.S).group(1)
    listed = [int(n) for n in re.findall(r"^\.It (\d+)", status, re.M)]
    assert listed == [OK, DAMAGE, USAGE, MISSING, DENIED, KEY, SERVER, CORRUPT, SPACE, CONFLICT, OTHER]


def test_output_that_cannot_be_written():
    import subprocess
    from conftest import LARDER
    with open("/dev/full", "w") as full:
        done = subprocess.run([str(LARDER), "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == OTHER and "written" in done.stderr
