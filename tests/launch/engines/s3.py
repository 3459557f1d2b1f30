"""An S3 server that checks signatures, and a relay in front of it that is slow or cuts off."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import requests

FOLDER = Path(sys.prefix) / "s3"  # where `make test` installs the server and the client
BUCKET = "runs"
_POLICY = (
    '{"Version": "2012-10-17", "Statement": '
    '[{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}'
)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


class Server:
    """A server on this machine, with one user and one bucket."""

    def __init__(self, port: int) -> None:
        import boto3

        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"
        anyone = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
        options = {"endpoint_url": self.endpoint, "region_name": "us-east-1", **anyone}
        users = boto3.client("iam", **options)
        users.create_user(UserName="me")
        users.put_user_policy(UserName="me", PolicyName="all", PolicyDocument=_POLICY)
        key = users.create_access_key(UserName="me")["AccessKey"]
        self.key, self.secret = key["AccessKeyId"], key["SecretAccessKey"]
        # From now on it checks who asks.
        requests.post(f"{self.endpoint}/moto-api/reset-auth", data=b"0", timeout=10)
        mine = {"aws_access_key_id": self.key, "aws_secret_access_key": self.secret}
        self.client: Any = boto3.client("s3", **options | mine)
        self.client.create_bucket(Bucket=BUCKET)

    def environment(self, **changes: str) -> dict[str, str]:
        """What tells clients about it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # the client above it tries again, too
            "AWS_EC2_METADATA_DISABLED": "true",
            "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]),
        } | changes

    def names(self, prefix: str) -> list[str]:
        """The objects below a prefix, without it."""
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")
        return [one["Key"].removeprefix(f"{prefix}/") for one in found.get("Contents", [])]

    def remove(self, bucket: str) -> None:
        """A bucket with all that is in it."""
        for one in self.client.list_objects_v2(Bucket=bucket).get("Contents", []):
            self.client.delete_object(Bucket=bucket, Key=one["Key"])
        self.client.delete_bucket(Bucket=bucket)


@contextmanager
def serving() -> Iterator[Server]:
    """A server, while it is needed."""
    port = _free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "-p", str(port)],
        env={**os.environ, "PYTHONPATH": str(FOLDER)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 30
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        yield Server(port)
    finally:
        process.terminate()
        process.wait()


class Relay:
    """A port of its own, from which all is passed on to a server.

    Attributes:
        delay: seconds that every answer waits.
        to_cut: how many of the next connections are cut within a request of more than 4 kB.
    """

    def __init__(self, to: int) -> None:
        self.delay, self.to_cut = 0.0, 0
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                for ends in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, asks: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                passed += len(data)
                if asks and self.to_cut and passed > 4096:
                    self.to_cut -= 1
                    break
                if not asks:
                    time.sleep(self.delay)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def use(patch: pytest.MonkeyPatch, server: Server, **changes: str) -> None:
    """Let this process's clients, and those of its workers, ask a server."""
    import s3fs

    for name, value in server.environment(**changes).items():
        patch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # they know the one before
