"""What the part that listens may change in the file system: nothing but its sockets."""

import ctypes
import subprocess
import sys
from pathlib import Path

from tests.support.exporter import SOURCES
from tests.support.requirements import do_without

PROGRAM = """
import os, socket, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from vramledger.logs import configure
from vramledger.sampling.privileges import drop_privileges, forbid_changes
configure("debug", "logfmt")
home, other = map(Path, sys.argv[2:])
opened = (other / "opened").open("w")
drop_privileges()
forbid_changes([home, home / "missing"])

def attempt(name, act):
    try:
        act()
        print(name, "done")
    except PermissionError:
        print(name, "refused")

def bind(path):
    socket.socket(socket.AF_UNIX).bind(str(path))

def all_of_it():
    attempt("write", lambda: (other / "file").write_text("x"))
    attempt("make", lambda: (other / "new").write_text("x"))
    attempt("make beside sockets", lambda: (home / "new").write_text("x"))
    attempt("directory", lambda: (other / "directory").mkdir())
    attempt("link", lambda: (other / "link").symlink_to("file"))
    attempt("remove", lambda: (other / "file").unlink())
    attempt("rename", lambda: (other / "file").rename(other / "renamed"))
    attempt("socket elsewhere", lambda: bind(other / "socket"))
    attempt("socket", lambda: bind(home / "socket"))
    attempt("replace socket", lambda: (home / "socket").rename(home / "final"))
    attempt("remove socket", lambda: (home / "final").unlink())
    attempt("read", lambda: (other / "file").read_text())
    attempt("null", lambda: Path(os.devnull).write_text("x"))
    attempt("opened", lambda: opened.write("x") and opened.flush())
    attempt("memory", lambda: os.write(os.memfd_create("x"), b"x"))

all_of_it()
thread = threading.Thread(target=all_of_it)
thread.start()
thread.join()
"""

REFUSED = "write, make, make beside sockets, directory, link, remove, rename, socket elsewhere"
DONE = "socket, replace socket, remove socket, read, null, opened, memory"


def test_only_sockets_change(tmp_path: Path) -> None:
    """Every change of a file is refused, in every later thread too; sockets, reading and open files go on."""
    if ctypes.CDLL(None, use_errno=True).syscall(444, None, 0, 1) < 1:
        do_without("needs a kernel with Landlock")
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    other.mkdir()
    (other / "file").write_text("precious", encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM, str(SOURCES), str(home), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    words = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    refused, passed = dict.fromkeys(REFUSED.split(", "), "refused"), dict.fromkeys(DONE.split(", "), "done")
    assert words == {**refused, **passed}
    assert len(done.stdout.splitlines()) == 2 * len(words)
    assert (other / "file").read_text(encoding="utf-8") == "precious"
    assert "May change no file but the sockets" in done.stderr
