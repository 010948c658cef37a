"""A wrong argument of any command is one line that says what is wrong; tests/e2e tries some in a process."""

from __future__ import annotations

import shlex

import pytest

from vramledger.cli import main

PODS = "serve --pods.node=n"
WRONG = {
    "unknown flag": ("serve --colour", "unrecognized arguments: --colour; see 'vramledger serve --help'"),
    "shortened flag": ("serve --sample.inter=1s", "unrecognized arguments: --sample.inter=1s"),
    "unknown command": ("fly", "invalid choice: 'fly'"),
    "no command": ("", "required: COMMAND"),
    "duration without unit": ("serve --sample.interval=1", "'1' is not a duration; write for example"),
    "duration of nothing": ("serve --sample.timeout=0s", "'0s' is not a duration"),
    "duration of words": ("show --idle-after=soon", "'soon' is not a duration"),
    "duration that overflows": ("serve --sample.interval=99999999999999h", "is too long for a duration"),
    "duration of infinity": (f"end --pid=7 --grace={'9' * 400}d", "is too long for a duration"),
    "release for ever": ("release --for=31d", "--for is at most 30d"),
    "release beyond time": ("release --for=99999999999999h", "is too long for a duration"),
    "address without port": ("serve --web.listen-address=host", "'host' is not a listen address"),
    "port too high": ("serve --web.listen-address=:65536", "':65536' is not a listen address"),
    "bare IPv6": ("serve --web.listen-address=::1:9", "'::1:9' is not a listen address; write"),
    "unknown source": ("serve --source=amd", "'amd' is not a source; use nvml, auto or replay:FILE"),
    "replay of nothing": ("show --source=replay:", "'replay:' is not a source"),
    "speed of nothing": ("serve --replay.speed=0", "'0' is not a speed"),
    "negative count": ("serve --processes.max=-1", "'-1' is not a whole number"),
    "path without slash": ("serve --web.telemetry-path=metrics", "'metrics' is not a path for metrics"),
    "path with braces": ("serve --web.telemetry-path=/{gpu", "'/{gpu' is not a path for metrics"),
    "path with an end": ("serve --web.telemetry-path=/gpu/", "'/gpu/' is not a path for metrics"),
    "path of a probe": ("serve --web.telemetry-path=/-/ready", "'/-/ready' is not a path for metrics"),
    "path of the ledger": ("serve --web.telemetry-path=/api/v1/ledger", "is not a path for metrics"),
    "level": ("serve --log.level=loud", "invalid choice: 'loud'"),
    "no procfs": ("serve --path.procfs=/nowhere", "--path.procfs=/nowhere is not a proc file system"),
    "not procfs": ("doctor --path.procfs=/etc", "--path.procfs=/etc is not a proc file system"),
    "no rootfs": ("check --path.rootfs=/nowhere", "--path.rootfs=/nowhere cannot be read (No such file"),
    "a file as rootfs": ("serve --path.rootfs=/etc/passwd", "cannot be read (Not a directory)"),
    "capture to nowhere": ("capture", "required: FILE"),
    "labels without a node": ("serve --pods.labels=team", "needs the name of this node"),
    "labels of a path": ("serve --pods.labels=team --pods.node=../x", "needs the name of this node"),
    "labels with a space": (f"{PODS} '--pods.labels=te am'", "is not the name of a label"),
    "labels of nothing": (f"{PODS} --pods.labels=", "is not the name of a label"),
    "all labels": (f"{PODS} --pods.labels=*", "is not the name of a label"),
    "a long label": (f"{PODS} --pods.labels={'a' * 64}", "is not the name of a label"),
    "many labels": (f"{PODS} --pods.labels={','.join('abcdefghijklmnopqrstu')}", "21 labels are too many"),
    "a kubelet of a path": (f"{PODS} --pods.labels=a --pods.kubelet=a/b", "is not the address of a kubelet"),
    "a kubelet of port 0": (f"{PODS} --pods.labels=a --pods.kubelet=a:0", "is not the address of a kubelet"),
    "snapshot of nobody": ("snapshot", "--help"),
    "snapshot show of nothing": ("snapshot show", "--help"),
    "snapshot diff of one file": ("snapshot diff a", "--help"),
    "snapshot of a word": ("snapshot zero", "--help"),
    "reclaim of pid 0": ("reclaim 0", "--help"),
    "end of nobody": ("end", "select holders with --pid, --state, --owner or --gpu"),
    "end of a state": ("end --state=lazy", "invalid choice: 'lazy'"),
    "end of a negative pid": ("end --pid=-1", "'-1' is not a process id"),
    "end of a word": ("end --pid=x", "'x' is not a process id"),
    "leftover of words": ("check --max-leftover=much", "'much' is not a size"),
    "wait of words": ("check --wait=never", "'never' is not a duration"),
    "check of an unknown flag": ("check --gpus=1", "unrecognized arguments: --gpus=1"),
    "fit of nobody": ("fit", "required: PID|FILE"),
    "fit of pid 0": ("fit 0", "0 is not a process id"),
    "fit of two pids": ("fit 7 --pid=8", "--pid chooses a program of a FILE"),
    "fit with three heads": ("fit 7 --headroom=300%", "'300%' is not a share"),
    "fit of a file at a time": ("fit x.json --at=-1h", "--at is for a PID"),
}


@pytest.mark.parametrize(("words", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_one_line(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A usage error is one line that says what is wrong and where to read more; the exit status is 2."""
    try:
        status: object = main(shlex.split(words))
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert status == 2
    assert printed.out == ""
    assert line.startswith("vramledger")
    assert message in line
