"""Starts scripts as a command line does, but without the seconds of imports: forked from a process that has imported.

The tests start so many that the imports would be most of the time. With "ask" and its socket it is the `python` of a
shell: python launcher.py ask SOCKET SCRIPT.py ...
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
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


def ask(path: str, request: dict, *fds: int) -> int | None:
    """Send a request to the process that forks, and return its answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(request).encode()], fds)
        return json.loads(connection.recv(100))


class Launcher:
    """The side of the tests; the other side is below, in a process that has imported the modules."""

    def __init__(self, *modules: str):
        self.folder = tempfile.TemporaryDirectory()
        path = f"{self.folder.name}/socket"
        self.ask = functools.partial(ask, path)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            command = [sys.executable, __file__, "serve", str(listener.fileno()), *modules]
            fds = [listener.fileno()]
            self.server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds, start_new_session=True)
        self.python = f'#!/bin/sh\nexec {sys.executable} -S {__file__} ask {path} "$@"\n'  # a shell's command
        self.processes = []

    def start(self, script: str, *argv: str, code: str = "") -> Process:
        """Start `python SCRIPT.py ...` in the current folder, after some code of the test's."""
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        request = dict(argv=[str(ROOT / f"{script}.py"), *argv], code=code, cwd=os.getcwd())
        pid = self.ask(request, their_out, their_err)
        os.close(their_out)
        os.close(their_err)
        self.processes.append(Process(self.ask, pid, out, err))
        return self.processes[-1]

    def run(self, script: str, *argv: str, code: str = "") -> Process:
        """Start a script and wait for its end."""
        process = self.start(script, *argv, code=code)
        process.wait()
        return process

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_group(signal.SIGKILL)
        self.server.communicate()  # it ends with its input
        self.folder.cleanup()


def as_command(path: str, argv: list[str]) -> int:
    """Have a script run, pass signals on to it, and return its exit code."""
    pid = ask(path, dict(argv=argv, code="", cwd=os.getcwd()), 1, 2)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda signum, frame: os.kill(pid, signum))
    while (code := ask(path, {"poll": pid})) is None:
        time.sleep(0.01)
    return code


def serve(listener: socket.socket) -> dict:
    """Answer requests; return in the forked processes only, with what each is to run."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:  # closed: the tests are over
            os._exit(0)
        connection, _ = listener.accept()
        with connection:
            message, fds, _, _ = socket.recv_fds(connection, 65536, 2)
            request, reply = json.loads(message), None
            if "poll" in request:
                pid, status = os.waitpid(request["poll"], os.WNOHANG)
                reply = os.waitstatus_to_exitcode(status) if pid else None
            elif reply := os.fork():
                for fd in fds:
                    os.close(fd)
            else:
                break
            connection.sendall(json.dumps(reply).encode())
    listener.close()
    os.setsid()
    os.chdir(request["cwd"])
    for fd, standard in zip([os.open(os.devnull, os.O_RDONLY), *fds], range(3)):
        os.dup2(fd, standard)
        os.close(fd)
    return request


def leave(status: list[int]) -> None:
    """End a forked process once its exit handlers are done: to take its modules apart takes seconds."""
    for code in status:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        sys.exit(as_command(sys.argv[2], sys.argv[3:]))
    status = []  # the exit code, once it is known
    atexit.register(leave, status)  # what is registered first is called last
    for module in [*sys.argv[3:], "torch._dynamo"]:  # torch imports the latter when it makes an optimizer: 2 seconds
        importlib.import_module(module)
    request = serve(socket.socket(fileno=int(sys.argv[2])))
    for module in sys.argv[3:]:  # the text that is beside the script is to be imported, should it ask
        del sys.modules[module]
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    exec(request["code"], {})
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status.append(0)
    except SystemExit as end:  # the interpreter prints a text, and exits with 1
        status.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    except Exception:
        status.append(1)
        raise
