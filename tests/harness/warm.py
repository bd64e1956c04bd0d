"""Python processes for tests, forked from one that has imported torch and the packages, so that no test repeats that.

To its caller ``Python("-c", text, argument)`` is ``subprocess.Popen([sys.executable, "-c", text, argument])``; ``-m``
and a script's path work too. Two things differ. Variables that are read while torch or a package is imported
(OMP_NUM_THREADS) have the values of the first call, and modules are not torn down at the end. A test of imports, of
the interpreter's end or of such a variable therefore starts an ordinary process. With ``anew=True`` the process has
torch but no module of the packages: it imports them itself, from another folder or after a change.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

# torch imports its compiler for the first optimizer, which takes as long as all the other imports.
PRELOADED = (
    "torch", "torch._dynamo", "numpy.ctypeslib", "rich.table", "rich.live", "rich.text", "typer", "node.node",
    "node.cli.main", "node.observe.console",
)  # fmt: skip
LATE = ("pydantic.type_adapter", "typer._adapters")  # If installed, typer imports them for each command line.
PACKAGES = ("gossip", "node", "sim")
FORKS = hasattr(os, "pidfd_open")  # On systems other than Linux each process is an ordinary one.
_STARTING = threading.Lock()  # A test may start several processes at once.


class Python(subprocess.Popen):
    """A Python process. It takes the options of Popen that a test needs, and its methods are Popen's."""

    def __init__(self, *words: object, anew: bool = False, **options: Any) -> None:
        self.anew = anew
        super().__init__([sys.executable, *map(str, words)], **options)

    if FORKS:

        def _execute_child(
            self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
            p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
            start_new_session, process_group,
        ):  # fmt: skip
            if preexec_fn or pass_fds or shell or start_new_session or umask != -1:
                raise ValueError("that needs an ordinary process")
            asked = {
                "words": args[1:], "folder": os.fspath(cwd or os.getcwd()), "group": process_group,
                "variables": dict(os.environ if env is None else env), "anew": self.anew,
            }  # fmt: skip
            self.status, other = socket.socketpair()
            given = zip((p2cread, c2pwrite, errwrite), range(3), strict=True)
            streams = [own if own != -1 else inherited for own, inherited in given]
            with other:
                socket.send_fds(_server(), [b"0"], [*streams, other.fileno()])
            self.status.sendall(json.dumps(asked).encode())
            self.status.shutdown(socket.SHUT_WR)
            self.pid = int(self.status.recv(16, socket.MSG_WAITALL))  # The exit status may follow at once.
            self._child_created = True
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

        def _try_wait(self, flags):
            try:
                said = self.status.recv(16, socket.MSG_DONTWAIT if flags & os.WNOHANG else 0)
            except BlockingIOError:
                return 0, 0
            self.status.close()
            assert said, "what starts processes has ended before this one"
            return self.pid, int(said)

        def _internal_poll(self, *_args, **_options):
            if self.returncode is None and self._waitpid_lock.acquire(False):
                try:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid == self.pid:
                        self._handle_exitstatus(status)
                finally:
                    self._waitpid_lock.release()
            return self.returncode


def is_running(pid: int) -> bool:
    """Return False for a zombie, too: an orphan may wait to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run(*words: object, timeout: float = 60.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a Python process to its end and return its exit code and what it printed."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    with Python(*words, **streams) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def _server() -> socket.socket:
    with _STARTING:
        return _started()


@functools.cache
def _started() -> socket.socket:
    """Start the process that forks the others; return the socket for requests to it."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(Path(__file__).resolve()), str(its.fileno())]
    root = Path(__file__).resolve().parents[2]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        command, cwd=root, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[its.fileno()]
    )
    its.close()

    @atexit.register
    def end() -> None:
        ours.close()
        process.wait(30)

    return ours


# -- in the process that is forked -------------------------------------------------------------------------------------
class Forking:
    """A server that forks a process on request, and reports its id and its exit status."""

    def __init__(self, asked: socket.socket) -> None:
        self.asked = asked
        self.selector = selectors.DefaultSelector()
        self.selector.register(asked, selectors.EVENT_READ)
        self.at_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> list[str] | None:
        """Fork until the requesting process has ended. In a forked process, return the words of its command line."""
        while True:
            for key, _ in self.selector.select():
                if key.data is not None:
                    self.reap(key.fd, *key.data)
                    continue
                data, files, _, _ = socket.recv_fds(self.asked, 1, 4)
                if not data:
                    return None
                words = self.fork(files)
                if words is not None:
                    return words

    def fork(self, files: list[int]) -> list[str] | None:
        *streams, place = files
        status = socket.socket(fileno=place)
        with status.makefile("rb") as file:
            asked = json.load(file)
        pid = os.fork()
        if pid:
            for own in streams:
                os.close(own)
            if asked["group"] != -1:  # The child does the same, so that neither waits for the other.
                with contextlib.suppress(OSError):
                    os.setpgid(pid, asked["group"])
            status.sendall(b"%16d" % pid)
            self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
            return None
        for number, own in enumerate(streams):
            os.dup2(own, number)
            os.close(own)
        for held in [status, self.asked, *(key.data[1] for key in self.selector.get_map().values() if key.data)]:
            held.close()
        for held in [key.fd for key in self.selector.get_map().values() if key.data]:
            os.close(held)
        self.selector.close()
        signal.signal(signal.SIGINT, self.at_interrupt)
        if asked["group"] != -1:
            os.setpgid(0, asked["group"])
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["variables"])
        if os.environ.get("PYTHONUNBUFFERED"):
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "wb", closefd=False), write_through=True)
        added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [path for path in added if path and path not in sys.path]
        if asked["anew"]:
            for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
                del sys.modules[name]
        return asked["words"]

    def reap(self, descriptor: int, pid: int, status: socket.socket) -> None:
        self.selector.unregister(descriptor)
        os.close(descriptor)
        with status, contextlib.suppress(BrokenPipeError):  # The requesting process may have ended.
            status.sendall(str(os.waitpid(pid, 0)[1]).encode())


def become(words: list[str]) -> None:
    """Do what ``python WORDS`` does."""
    kind, *arguments = words
    if kind == "-P":
        kind, *arguments = arguments
        assert kind == "-c"
        del sys.path[0]
    elif kind == "-c":
        sys.path[0] = ""
    if kind == "-m":
        name, *arguments = arguments
        sys.argv, sys.path[0] = [name, *arguments], os.getcwd()
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if kind == "-c":
        (text, *arguments), file = arguments, "<string>"
    else:
        text, file, sys.path[0] = Path(kind).read_text(encoding="utf-8"), kind, str(Path(kind).resolve().parent)
    sys.argv = [kind, *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind != "-c":
        main.__file__ = file
    exec(compile(text, file, "exec"), main.__dict__)


def ended(words: list[str]) -> int:
    """Do what ``python WORDS`` does and return its exit code, or the signal that ends it as a negative number."""
    code: Any = 0
    try:
        become(words)
    except SystemExit as error:
        code = error.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return code or 0


if __name__ == "__main__":
    for module in PRELOADED:
        importlib.import_module(module)
    for module in LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()  # A collection in a child would write to these objects, and so copy their pages.
    forking = Forking(socket.socket(fileno=int(sys.argv[1])))
    given = forking.serve()
    if given is not None:
        code = ended(given)
        # End as the interpreter does, but without the teardown of modules, which takes 320 of 330 ms.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code & 0xFF)
