"""`forgetless list` and `forgetless data`."""

from tests.conftest import forgetless


def test_list_names_everything(capsys):
    status, out, _ = forgetless(["list"], capsys)
    assert status == 0
    for name in ("rotated-digits", "permuted-mnist", "split-cifar100", "gem-nt", "joint", "lenet"):
        assert name in out


def test_data_shows_what_is_on_disk(capsys):
    status, out, _ = forgetless(["data"], capsys)
    assert status == 0
    for name in ("digits", "mnist", "fashion-mnist", "cifar100"):
        assert name in out


def test_data_finds_what_is_there(capsys, real_data):
    status, out, _ = forgetless(["data", "fetch", "mnist", "--data", real_data], capsys)
    assert status == 0
    assert str(real_data) in out
