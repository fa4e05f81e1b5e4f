"""A file is written whole or not at all, and what fails says so in one line."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tasp_lab.core.errors import OutputError
from tasp_lab.core.files import check_writable, write_whole

REPOSITORY = Path(__file__).resolve().parent.parent

# A disk of 32 KiB in a mount namespace of its own, so nothing is left behind: 1 MiB does not fit beside the old file.
FULL_DISK = """
import sys
from pathlib import Path
from tasp_lab.core.errors import OutputError
from tasp_lab.core.files import check_writable, write_whole
path = Path(sys.argv[1]) / "trace.json"
write_whole(path, b"old")
check_writable(path)
try:
    write_whole(path, bytes(2**20))
except OutputError as error:
    print(error)
print(sorted(entry.name for entry in path.parent.iterdir()), path.read_bytes())
"""


def fail(code: int) -> Callable[..., None]:
    def failing(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return failing


def test_content_arrives_and_replaces_the_old(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for content in (b"first, longer", b"second", b""):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_new_files_have_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_whole(tmp_path / "whole", b"x")
    assert stat.S_IMODE((tmp_path / "whole").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_links_are_followed(tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "folder" / "target"
    target.parent.mkdir()
    link.symlink_to(target)
    write_whole(link, b"through the link")
    assert link.is_symlink()
    assert target.read_bytes() == b"through the link"


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_what_fails_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    path = tmp_path / "trace.json"
    write_whole(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail(code))
        with pytest.raises(OutputError) as caught:
            write_whole(path, b"new")
    assert str(caught.value) == f"cannot write {path}: {os.strerror(code)}"
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "trace.json", b"new")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(tmp_path: Path) -> None:
    prepare = 'mount -t tmpfs -o size=32k tmpfs "$1" || exit 77; exec "$2" -c "$3" "$1"'
    own_namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    command = [*own_namespace, "sh", "-c", prepare, "sh", str(tmp_path), sys.executable, FULL_DISK]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("no program unshare")
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    refusal, left = done.stdout.splitlines()
    assert refusal == f"cannot write {tmp_path}/trace.json: No space left on device"
    assert left == "['trace.json'] b'old'"


def write_something(path: Path) -> None:
    write_whole(path, b"x")


@pytest.mark.parametrize("attempt", [check_writable, write_something])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/trace.json", "its folder does not exist"),
        ("file/trace.json", "Not a directory"),
        ("folder", "it is a folder"),
        ("pipe", "it is not a regular file"),
        ("loop", "Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
    ],
)
def test_impossible_paths(tmp_path: Path, attempt: Callable[[Path], None], name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OutputError) as caught:
        attempt(tmp_path / name)
    assert str(caught.value) == f"cannot write {tmp_path / name}: {reason}"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("attempt", [check_writable, write_something])
def test_devices_are_not_replaced(attempt: Callable[[Path], None]) -> None:
    with pytest.raises(OutputError, match=r"^cannot write /dev/null: it is not a regular file$"):
        attempt(Path("/dev/null"))
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        check_writable(tmp_path / "trace.json")


def test_a_folder_that_refuses_new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", fail(errno.EROFS))
    with pytest.raises(OutputError, match=r"trace\.json: Read-only file system$"):
        check_writable(tmp_path / "trace.json")


def test_checking_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    check_writable(path)
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"old")
    check_writable(path)
    assert path.read_bytes() == b"old"


def test_messages_have_one_line(tmp_path: Path) -> None:
    with pytest.raises(OutputError) as caught:
        check_writable(tmp_path / "two\nlines" / "trace.json")
    assert len(str(caught.value).splitlines()) == 1
