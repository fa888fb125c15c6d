"""Starts scripts as a command line does, but without the seconds of imports: forked from a process that has imported.

The tests that kill and resume runs start so many that the imports would be most of the time.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 300  # seconds, more than any test should ever need


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll a condition until it holds."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.002)


class Process:
    """A started script; the leader of its own process group."""

    def __init__(self, ask: Callable, pid: int, *pipes: int):
        self.ask, self.pid, self.returncode = ask, pid, None
        self.output = ["", ""]
        self.readers = [threading.Thread(target=self.read, args=item, daemon=True) for item in enumerate(pipes)]
        for reader in self.readers:
            reader.start()

    def read(self, index: int, pipe: int) -> None:
        with open(pipe) as file:
            for line in file:
                self.output[index] += line

    @property
    def stdout(self) -> str:
        return self.output[0]

    @property
    def stderr(self) -> str:
        return self.output[1]

    def running(self) -> bool:
        if self.returncode is None:
            self.returncode = self.ask({"poll": self.pid})
        return self.returncode is None

    def send(self, signum: int) -> None:
        if self.running():
            os.kill(self.pid, signum)

    def send_group(self, signum: int) -> None:
        """Signal the process and its children, as a terminal does."""
        if self.running():
            os.killpg(self.pid, signum)

    def wait(self) -> int:
        """Wait for the end, and return the exit code (-9 if killed by signal 9).

        The end is that of the children too: a child that survives keeps the output open.
        """
        wait_until(lambda: not self.running())
        for reader in self.readers:
            reader.join(timeout=TIMEOUT)
            assert not reader.is_alive(), "a child process survives"
        return self.returncode


class Launcher:
    """The side of the tests; the other side is below, in a process that has imported the scripts."""

    def __init__(self, *scripts: str):
        self.socket, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno()), *scripts]
        self.server = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        self.processes = []

    def ask(self, request: dict, *fds: int) -> int | None:
        socket.send_fds(self.socket, [json.dumps(request).encode()], fds)
        return json.loads(self.socket.recv(100))

    def start(self, script: str, *argv: str) -> Process:
        """Start `python SCRIPT.py ...` in the current folder."""
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        request = dict(argv=[str(ROOT / f"{script}.py"), *argv], cwd=os.getcwd())
        pid = self.ask(request, their_out, their_err)
        os.close(their_out)
        os.close(their_err)
        self.processes.append(Process(self.ask, pid, out, err))
        return self.processes[-1]

    def run(self, script: str, *argv: str) -> Process:
        """Start a script and wait for its end."""
        process = self.start(script, *argv)
        process.wait()
        return process

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_group(signal.SIGKILL)
        self.socket.close()
        self.server.wait()


def serve(connection: socket.socket) -> list[str]:
    """Answer requests; return in the forked processes only, with the command line that each is to run."""
    while True:
        message, fds, _, _ = socket.recv_fds(connection, 65536, 2)
        if not message:
            os._exit(0)
        request, reply = json.loads(message), None
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            reply = os.waitstatus_to_exitcode(status) if pid else None
        elif reply := os.fork():
            for fd in fds:
                os.close(fd)
        else:
            connection.close()
            os.setsid()
            os.chdir(request["cwd"])
            for fd, standard in zip([os.open(os.devnull, os.O_RDONLY), *fds], range(3)):
                os.dup2(fd, standard)
                os.close(fd)
            return request["argv"]
        connection.sendall(json.dumps(reply).encode())


if __name__ == "__main__":
    for module in [*sys.argv[2:], "torch._dynamo"]:  # torch imports the latter when it makes an optimizer: 2 seconds
        importlib.import_module(module)
    sys.argv = serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_path(sys.argv[0], run_name="__main__")
