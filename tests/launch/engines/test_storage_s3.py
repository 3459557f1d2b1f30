"""Shared storage in an object store: a real S3 server that checks signatures, started here."""

import os
import signal
import sys
from dataclasses import replace

import pytest

from forgetless.cli import main
from forgetless.launch.engines import Cluster, Processes
from forgetless.launch.engines.storage import ObjectStore, download_state
from forgetless.launch.runs import status_of
from forgetless.support.validation import ConfigError, ForgetlessWarning

from . import s3
from .problems import Events, Pretended, assert_alike, order, trained

sys.path.append(str(s3.FOLDER))
pytest.importorskip("s3fs", reason="needs an S3 client and server: `make test` installs them")
pytest.importorskip("moto", reason="needs an S3 client and server: `make test` installs them")

ONE = f"s3://{s3.BUCKET}"
# Of the client: it asks for an older package than there is.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def server():
    with s3.serving() as one:
        yield one


@pytest.fixture
def storage(server, monkeypatch, tmp_path):
    """The address of a folder of its own in the bucket."""
    s3.use(monkeypatch, server)
    return f"{ONE}/{tmp_path.name}"


@pytest.fixture
def relay(server, monkeypatch):
    """What the storage is reached through."""
    one = s3.Relay(server.port)
    s3.use(monkeypatch, server, AWS_ENDPOINT_URL=one.endpoint)
    yield one
    one.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    assert trained([order(folder / "ogd")]) == {"ogd": None}
    return folder / "ogd"


def stored(here, url, **settings):
    return replace(order(here, **settings), shared=f"{url}/ogd")


def stopping(after):
    def watch(event):
        if event.progress is not None and event.progress.done > after:
            raise KeyboardInterrupt

    return watch


def test_files_come_and_go(storage, server, tmp_path):
    there = ObjectStore(storage)
    assert there.names() == []
    (tmp_path / "one").write_bytes(b"1" * 1000)
    (tmp_path / "two").write_bytes(b"2")
    there.put(tmp_path / "one", "a/b/one")
    there.replace(tmp_path / "one", "a/c")
    there.replace(tmp_path / "two", "a/c")
    there.write("d", b"small")
    assert there.names() == server.names(tmp_path.name) == ["a/b/one", "a/c", "d"]
    assert (there.read("d", 5), there.size("a/b/one")) == (b"small", 1000)
    there.within("a").get("c", tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == b"2"
    there.remove("a/b", folder=True)
    there.remove("d")
    there.remove("d")
    assert there.names() == ["a/c"]


def test_a_large_checkpoint_goes_in_parts(storage, server, tmp_path):
    content = os.urandom(1 << 20) * 101  # the client's parts have 50, and a file of two is one
    (tmp_path / "large").write_bytes(content)
    there = ObjectStore(storage)
    there.put(tmp_path / "large", "large")
    tag = server.client.head_object(Bucket=s3.BUCKET, Key=f"{tmp_path.name}/large")["ETag"]
    assert tag.strip('"').endswith("-3")  # how S3 marks what came in three parts
    there.get("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content


def test_a_run_resumes_on_another_machine(storage, server, expected, tmp_path):
    engine = Pretended()  # in parts, as several workers do
    with pytest.raises(KeyboardInterrupt):
        trained([stored(tmp_path / "one", storage)], engine, stopping(0.6))
    assert "ogd/trace.json" not in server.names(tmp_path.name)
    other = stored(tmp_path / "two" / "ogd", storage)
    download_state(other.shared, other.folder)
    assert status_of(other.folder, other.config).kind == "unfinished"
    events = Events()
    assert trained([other], engine, events) == {"ogd": None}
    begun = [e.progress.done for e in events if e.progress and e.job.seeds[0] == 0]
    assert not begun or begun[0] > 0.4
    assert_alike(other.folder, expected)
    names = server.names(f"{tmp_path.name}/ogd")
    assert {n.split("/")[0] for n in names} == {"seed-0", "seed-1", "trace.json"}


def test_a_killed_worker_resumes_from_the_bucket(storage, expected, tmp_path):
    import multiprocessing

    events, killed = Events(), []

    def watch(event):
        events(event)
        if event.progress is not None and event.progress.task == 2 and not killed:
            killed.extend(p.pid for p in multiprocessing.active_children())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    wanted = replace(stored(tmp_path / "here" / "ogd", storage, epochs=6), checkpoint_every=0.5)
    assert trained([order(tmp_path / "whole", epochs=6)]) == {"whole": None}
    assert trained([wanted], Processes(1), watch) == {"ogd": None}
    assert killed
    assert events.kinds().count("retried") == 1
    assert_alike(tmp_path / "here" / "ogd", tmp_path / "whole")


def test_a_killed_node_of_a_cluster_loses_nothing(storage, server, tmp_path):
    pytest.importorskip("ray", reason="needs Ray: pip install 'forgetless[ray]'")
    from .kills import LONG, node_of, ray_nodes

    events, killed = Events(), []
    with ray_nodes(2, server.environment()) as nodes:

        def watch(event):
            events(event)
            if event.progress is not None and event.progress.task >= 3 and not killed:
                killed.append(event.job)
                nodes.remove_node(node_of(nodes, event.worker), allow_graceful=False)

        wanted = stored(tmp_path / "here" / "ogd", storage, **LONG)
        wanted = replace(wanted, checkpoint_every=0.5)
        assert trained([wanted], Cluster(), watch) == {"ogd": None}
    assert len(killed) == 1
    assert "retried" in events.kinds()
    assert trained([order(tmp_path / "whole", **LONG)]) == {"whole": None}
    assert_alike(tmp_path / "here" / "ogd", tmp_path / "whole")
    names = server.names(f"{tmp_path.name}/ogd")
    assert {n.split("/")[0] for n in names} == {"seed-0", "seed-1", "trace.json"}


@pytest.mark.parametrize(
    ("changes", "bucket", "words"),
    [
        ({}, "nowhere", "cannot be used as storage: there is no bucket nowhere"),
        (
            {"AWS_ACCESS_KEY_ID": "AKIAWRONG"},
            s3.BUCKET,
            "cannot be used as storage: The AWS Access Key Id you provided does not exist",
        ),
        (
            {"AWS_SECRET_ACCESS_KEY": "wrong"},
            s3.BUCKET,
            "cannot be used as storage: The request signature we calculated does not match",
        ),
        (
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"},
            s3.BUCKET,
            "cannot be reached: Could not connect to the endpoint URL",
        ),
    ],
    ids=["bucket", "key", "secret", "server"],
)
def test_what_is_wrong_is_one_sentence(
    changes, bucket, words, server, capsys, monkeypatch, tmp_path
):
    s3.use(monkeypatch, server, **changes)
    monkeypatch.chdir(tmp_path)
    url = f"s3://{bucket}/here"
    with pytest.raises(ConfigError, match=words):
        ObjectStore(url)
    if "server" in words:  # the client tries for twelve seconds
        return
    with pytest.raises(SystemExit) as stopped:
        main(["compare", "rotated-digits", "--out", url])
    error = capsys.readouterr().err
    assert (stopped.value.code, error.count("\n")) == (2, 1)
    assert error.startswith(f"forgetless: {url} {words}")
    assert not any(tmp_path.iterdir())
    buckets = [one["Name"] for one in server.client.list_buckets()["Buckets"]]
    assert buckets == [s3.BUCKET]  # none is made of a wrong name


def test_a_bucket_that_goes_in_the_middle_of_a_run(server, monkeypatch, expected, tmp_path):
    s3.use(monkeypatch, server)
    gone = []

    def watch(event):
        if event.progress is not None and event.progress.task == 2 and not gone:
            gone.append(event)
            server.remove("short-lived")

    server.client.create_bucket(Bucket="short-lived")
    wanted = stored(tmp_path / "here" / "ogd", "s3://short-lived/x", seeds="1")
    with pytest.warns(ForgetlessWarning, match="was not copied.*bucket does not exist"):
        (error,) = trained([wanted], watch=watch).values()
    assert "cannot be written: The specified bucket does not exist" in str(error)
    server.client.create_bucket(Bucket="short-lived")
    assert trained([wanted]) == {"ogd": None}
    assert trained([order(tmp_path / "whole", seeds="1")]) == {"whole": None}
    assert_alike(tmp_path / "here" / "ogd", tmp_path / "whole")
    server.remove("short-lived")


def test_a_slow_connection_delays_and_changes_nothing(relay, expected, tmp_path):
    relay.delay = 0.05
    wanted = stored(tmp_path / "here" / "ogd", f"{ONE}/{tmp_path.name}", epochs=1, tasks=2)
    wanted = replace(wanted, checkpoint_every=0.2)
    assert trained([wanted]) == {"ogd": None}
    assert trained([order(tmp_path / "whole", epochs=1, tasks=2)]) == {"whole": None}
    assert_alike(tmp_path / "here" / "ogd", tmp_path / "whole")


def test_connections_that_are_cut_cost_checkpoints_and_no_run(relay, expected, tmp_path):
    """The client tries several times, and then the checkpoint is left out."""
    begun = []

    def watch(event):
        if event.progress is not None and event.progress.done > 0.3 and not begun:
            begun.append(event)
            relay.to_cut = 14

    wanted = stored(tmp_path / "here" / "ogd", f"{ONE}/{tmp_path.name}", seeds="1")
    assert trained([order(tmp_path / "whole", seeds="1")]) == {"whole": None}
    with pytest.warns(ForgetlessWarning, match="was not copied, the next one will be"):
        assert trained([wanted], watch=watch) == {"ogd": None}
    assert begun
    assert relay.to_cut == 0
    assert_alike(tmp_path / "here" / "ogd", tmp_path / "whole")
