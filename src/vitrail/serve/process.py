"""Helper processes of the service, which answer one request after another over pipes.

Python runs one thread of a process at a time. What would keep the others waiting for long is computed there.
"""

from __future__ import annotations

import os
import subprocess
import sys

from vitrail.serve.errors import ServiceError


class Refused:
    """A `ServiceError` on its way between two processes."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message

    def error(self) -> ServiceError:
        return ServiceError(self.status, self.message, retry_after=1 if self.status == 503 else None)


def start(module: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start a process that runs `main` of a module, with the paths of this one. It ends with its input.

    Ctrl-C does not reach it. A service manager may send SIGTERM to every process of the service: what was accepted is still
    answered, so it is ignored, from the start and not only after imports that take half a second.
    """
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    command = [sys.executable, "-P", "-c", f"{ignore}; from {module} import main; main()"]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **paths, **environment},
        start_new_session=True,
    )
