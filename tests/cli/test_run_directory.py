"""The folder that sockets lie in: found alike by every process of a user, and nobody else's."""

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.cli.run_directory import default_control, private_directory, running_control, user_directory
from headrace.errors import InputError


@pytest.fixture(autouse=True)
def runtime(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    return short_path


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_it_lies_in_the_users_runtime_folder_and_is_private(runtime: Path) -> None:
    folder = user_directory()
    assert folder == runtime / "headrace" == user_directory()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("value", [None, "", "relative", "/no/such/folder"])
def test_without_a_usable_one_it_is_the_users_own_temporary_folder(
    value: str | None, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    assert user_directory() == temporary / f"headrace-{os.geteuid()}"


def test_a_folder_that_others_may_enter_is_refused(runtime: Path) -> None:
    (runtime / "headrace").mkdir(mode=0o700)
    (runtime / "headrace").chmod(0o710)
    with pytest.raises(InputError, match="belongs to you and nobody else may enter"):
        user_directory()


def test_a_link_that_somebody_laid_there_is_refused(runtime: Path) -> None:
    (runtime / "elsewhere").mkdir(mode=0o700)
    (runtime / "headrace").symlink_to(runtime / "elsewhere")
    with pytest.raises(InputError, match="belongs to you"):
        user_directory()


def test_a_file_in_its_place_is_refused(runtime: Path) -> None:
    (runtime / "headrace").touch(mode=0o600)
    with pytest.raises(InputError, match="must be a folder for sockets"):
        user_directory()


def test_gateway_and_instances_of_a_user_meet_without_being_told(runtime: Path) -> None:
    assert default_control() == f"ipc://{runtime}/headrace/control.sock"


def test_a_folder_too_deep_for_sockets_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = runtime / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(InputError, match="^XDG_RUNTIME_DIR: a socket's path has at most 107 bytes"):
        default_control()
    with pytest.raises(InputError, match="^XDG_RUNTIME_DIR"), private_directory():
        pass
    assert list((deep / "headrace").iterdir()) == []


def test_a_private_folder_is_removed_with_what_lies_in_it() -> None:
    with private_directory() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "control.sock").touch()
        with private_directory() as other:
            assert other != folder
    assert not folder.exists()


# ---- who listens there -----------------------------------------------------------------------------------------


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def test_the_one_gateway_that_runs_is_found_alone_or_under_serve() -> None:
    with listening(user_directory() / "control.sock"):
        assert running_control() == default_control()
    with private_directory() as serving, listening(serving / "control-1.sock"):
        assert running_control() == f"ipc://{serving}/control-1.sock"
        with listening(serving / "control.sock"):
            assert running_control() in {f"ipc://{serving}/control{number}.sock" for number in ("", "-1")}


def test_a_socket_that_a_killed_process_left_is_none() -> None:
    listening(user_directory() / "control.sock").close()
    with pytest.raises(InputError, match="must be said: no gateway of this user listens in"):
        running_control()


def test_of_several_gateways_one_must_be_named() -> None:
    with ExitStack() as exits:
        folders = [exits.enter_context(private_directory()) for _ in range(2)]
        for folder in folders:
            exits.enter_context(listening(folder / "control.sock"))
        with pytest.raises(InputError) as error:
            running_control()
        assert all(f"ipc://{folder}/control.sock" in str(error.value) for folder in folders)
