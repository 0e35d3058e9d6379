"""What a role loads is no work for the cycle collector, which goes on with what comes after."""

import gc

import pytest

from headrace.cli.loading import loading


def test_the_collector_rests_while_a_role_is_loaded_and_leaves_alone_what_came() -> None:
    before = gc.get_freeze_count()
    with loading():
        assert not gc.isenabled()
        came = [[number] for number in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(came)


def test_the_collector_goes_on_when_loading_fails() -> None:
    with pytest.raises(ImportError), loading():
        raise ImportError
    assert gc.isenabled()
