"""Child: a process that serves one object's methods, every call under a deadline."""

import contextlib
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import IO, Any, NoReturn, TypeVar

from autoflash.errors import AutoflashError

START = "import sys; from autoflash.child import serve; serve(*map(int, sys.argv[1:]))"
START_DEADLINE_S = 180.0  # importing torch and starting CUDA on a loaded machine
# Nothing here sends these without saying so; earlyoom and its like begin with SIGTERM.
OUTSIDE = (signal.SIGKILL, signal.SIGTERM)
KILLED = "killed from outside"  # begins such a reason
OUT_OF_GPU_MEMORY = "out of GPU memory"  # begins such a reason

Result = TypeVar("Result")
Call = tuple[str, tuple[Any, ...]]  # a method and its arguments


class Failure(Exception):
    """A candidate that failed, as a Trial will say it: a status and the reason.

    `fatal` says that the process it happened in is of no more use: CUDA keeps an illegal access
    for good, every later call of the process fails with it. `chance` says that another try may
    well end otherwise: something outside killed the process, or the host had no memory left.
    """

    def __init__(self, status: str, reason: str, fatal: bool = False, chance: bool = False) -> None:
        super().__init__(status, reason, fatal, chance)
        self.status, self.reason, self.fatal, self.chance = status, reason, fatal, chance

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}"


class ChildError(Exception):
    """An exception of the serving process that no candidate explains: our own mistake."""


def twice(work: Callable[[], Result]) -> Result:
    """What `work` gives; tried once more where chance made it fail."""
    try:
        return work()
    except Failure as failure:
        if not failure.chance:
            raise
    return work()


class Child:
    """A process in a session of its own that makes a service and answers calls to its methods.

    It is started by `start` or the first call, and again by the call after its death. A call that
    is not answered in time kills the process with its whole group (compilers it started included),
    and so does the death of this process. `service` is pickled: a class, a function or a partial.
    """

    def __init__(
        self, service: Callable[[], Any], environment: Mapping[str, str] | None = None
    ) -> None:
        self._service = service
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._errors: IO[bytes] | None = None
        self._under_way: Call | None = None  # sent along with the last one, not yet answered
        self.starts = 0

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def call(
        self, method: str, *arguments: Any, deadline_s: float, then: Call | None = None
    ) -> Any:
        """What `method` of the service returns.

        The process goes on with `then` at once, which is the call that will be made next, it seems.
        If another is made, what came of `then` is forgotten.

        Raises Failure as the service raised it, with `timeout` after the deadline, and with
        `runtime` when the process died; AutoflashError as raised; ChildError for the rest.
        """
        if self._under_way not in (None, (method, arguments)):
            self._forget(deadline_s)
        self.start()
        return self._exchange((method, arguments), deadline_s, then)

    def start(self) -> None:
        """Have the process running and its service made. Raises as a call does."""
        if self._process is None:
            self._start()
            try:
                self._exchange(("", (self._service,)), START_DEADLINE_S)
            except BaseException:
                self.close()
                raise

    def kill(self) -> None:
        """Kill the process and its group; a call in another thread sees it die."""
        process = self._process
        if process is not None:  # also when it is dead already: its group may hold a compiler
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process and its group, and wait for its end."""
        if self._process is None:
            return
        self.kill()
        self._process.wait()
        self._process = self._under_way = None
        for open_file in (self._connection, self._errors):
            if open_file is not None:
                open_file.close()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = os.environ | self._environment
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, str(theirs.fileno()), str(os.getpid())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            start_new_session=True,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self.starts += 1

    def _exchange(self, call: Call, deadline_s: float, then: Call | None = None) -> Any:
        assert self._connection is not None
        try:
            if call != self._under_way:
                self._connection.send_bytes(pickle.dumps(call))
            self._under_way = then
            if then is not None:
                self._connection.send_bytes(pickle.dumps(then))
            if not self._connection.poll(deadline_s):
                self.close()
                raise Failure("timeout", f"no answer within {deadline_s:g} s; its process killed")
            answered, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError, BrokenPipeError):
            raise self._death() from None
        except KeyboardInterrupt:
            self.close()  # an answer may still be under way: never read it as the next one's
            raise
        if answered:
            return value
        if isinstance(value, Failure) and value.fatal:
            self.close()
        raise value

    def _forget(self, deadline_s: float) -> None:
        """Let the call under way end; what came of it shows again when it is made."""
        assert self._under_way is not None
        with contextlib.suppress(Failure, AutoflashError, ChildError):
            self._exchange(self._under_way, deadline_s)

    def _death(self) -> Failure:
        """How the process ended, with the last line it wrote."""
        assert self._process is not None and self._errors is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self.close()
        how = "its process was closed"
        if code is not None and -code in OUTSIDE:
            how = f"{KILLED}: its process got {signal.Signals(-code).name}, as where a host's "
            return Failure("runtime", how + "memory is full", fatal=True, chance=True)
        if code is not None:
            how = f"exited with {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"
            how = f"its process {how}"
        return Failure("runtime", how + (f": {lines[-1][:300]}" if lines else ""), fatal=True)


def serve(descriptor: int, parent: int) -> None:
    """The child's side: make the service, then answer calls until the parent is gone."""
    _die_with(parent)
    connection = Connection(descriptor)
    _, (make_service,) = pickle.loads(connection.recv_bytes())
    service = None

    def made() -> None:
        nonlocal service
        service = make_service()

    _reply(connection, made)
    gc.freeze()  # torch and triton are 200,000 objects, a tenth of a second for every collection
    while True:
        try:
            method, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            _end()
        _reply(connection, lambda: getattr(service, method)(*arguments))  # noqa: B023 - called now
        del arguments


def _reply(connection: Connection, work: Callable[[], Any]) -> None:
    """Send what `work` gives or raises; whatever a failed call held on to is freed."""
    failure: Exception
    try:
        answer = pickle.dumps((True, work()))
    except (Failure, AutoflashError) as error:
        failure = error
    except MemoryError as error:
        failure = Failure("runtime", "out of host memory", fatal=True, chance=True)
        _clear(error)
    except Exception as error:
        failure = ChildError("".join(traceback.format_exception(error)))
        _clear(error)
    else:
        connection.send_bytes(answer)
        return
    _clear(failure)
    connection.send_bytes(pickle.dumps((False, failure)))


def _clear(error: BaseException) -> None:
    """Drop the frames of an exception and of its causes: they keep a candidate's tensors alive."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None
        inner = seen.__cause__ or seen.__context__
        seen.__cause__ = seen.__context__ = None
        seen = inner
    gc.collect()


def _die_with(parent: int) -> None:
    """Kill this process and all it started once the parent is gone, also while it computes."""

    def watch() -> None:
        # The parent's death is seen by polling: a pipe's end could be held by a grandchild.
        while os.getppid() == parent:
            threading.Event().wait(0.2)
        _end()

    threading.Thread(target=watch, daemon=True).start()


def _end() -> NoReturn:
    os.killpg(0, signal.SIGKILL)
    os._exit(1)
