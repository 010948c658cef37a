"""Write the files of a release into a directory: packages, chart, rules, image, and what proves their origin.

The packages are the same, byte for byte, whoever builds them from the same commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "deploy/docker/requirements.txt"
BUILD_REQUIREMENTS = ROOT / "deploy/docker/build-requirements.txt"
SIGNATURE_NAMESPACE = "vramledger-release"
TOOLS = Path(sys.executable).parent


class ReleaseError(Exception):
    """The release cannot be made; the message says what to do."""


def run(*command: str | Path, place: Path = ROOT, **variables: str) -> str:
    """Run a program, and return what it prints.

    Raises:
        ReleaseError: it is missing or has failed.
    """
    try:
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            cwd=place,
            env={**os.environ, **variables},
        )
    except OSError as error:
        message = f"{command[0]}: {error.strerror}; install it, then try again"
        raise ReleaseError(message) from error
    if done.returncode != 0:
        message = f"{Path(command[0]).name} failed: {(done.stderr or done.stdout).strip()[-1000:]}"
        raise ReleaseError(message)
    return done.stdout


def commit() -> tuple[str, int]:
    """Return the commit that is built, and its Unix time.

    Raises:
        ReleaseError: files differ from it, so that nobody else could build the same.
    """
    changed = run("git", "status", "--porcelain").strip()
    if changed:
        message = f"these files are not committed; commit or remove them, then try again:\n{changed}"
        raise ReleaseError(message)
    revision, time = run("git", "log", "-1", "--format=%H %ct").split()
    return revision, int(time)


def check_project() -> str:
    """Return the address of the project, for the image and the provenance.

    Raises:
        ReleaseError: nobody has said where the project is, who maintains it, or where to report a
            vulnerability. Without an address, users may trust somebody else who has registered the name.
    """
    metadata = json.loads(run(TOOLS / "hatchling", "metadata"))
    chart = (ROOT / "deploy/kubernetes/chart/Chart.yaml").read_text(encoding="utf-8")
    security = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    urls = {name: str(metadata.get("urls", {}).get(name, "")) for name in ("Source", "Issues", "Changelog")}
    missing = []
    if not all(each.startswith("https://") for each in urls.values()):
        missing.append("pyproject.toml: [project.urls] with Source, Issues and Changelog, each https://")
    if not any("email" in each for each in metadata.get("maintainers", ())):
        missing.append("pyproject.toml: maintainers, each with name and email")
    missing += [
        f"deploy/kubernetes/chart/Chart.yaml: {name}"
        for name in ("home", "sources", "maintainers")
        if not re.search(rf"^{name}:", chart, re.MULTILINE)
    ]
    if not re.search(r"mailto:\S+@\S+|https://\S+", security.partition("\n## ")[0]):
        missing.append(
            "SECURITY.md: before its first section, a mailto: or https:// link for private reports"
        )
    if missing:
        listed = "\n".join(f"  {each}" for each in missing)
        message = f"fill in first, or try everything else with --rehearsal:\n{listed}"
        raise ReleaseError(message)
    return urls["Source"]


def make_packages(directory: Path, time: int) -> None:
    """Build wheel and source package of exporter and agent; their files have the time of the commit."""
    for place in (ROOT, ROOT / "exporter" / "agent"):
        build = [TOOLS / "hatchling", "build", "--directory", directory]
        run(*build, place=place, SOURCE_DATE_EPOCH=str(time))


def make_chart(directory: Path) -> None:
    """Package the chart, and write the rules as PrometheusRule objects."""
    run("helm", "package", ROOT / "deploy/kubernetes/chart", "--destination", directory)
    run(sys.executable, ROOT / "deploy/kubernetes/render.py", "--rules", directory / "prometheusrule.yaml")


def make_bill_of_materials(directory: Path, version: str) -> None:
    """Write which packages run with ours, with their versions and hashes, as CycloneDX."""
    run(
        TOOLS / "cyclonedx-py", "requirements", REQUIREMENTS, "--pyproject", ROOT / "pyproject.toml",
        "--output-reproducible", "--output-format", "JSON",
        "--output-file", directory / f"vramledger-{version}.cdx.json",
    )  # fmt: skip
    shutil.copy(REQUIREMENTS, directory / f"vramledger-{version}-requirements.txt")


def make_image(
    directory: Path, version: str, revision: str, source: str, options: argparse.Namespace
) -> None:
    """Build the image on a base that is named by its digest, and write it into an archive.

    Raises:
        ReleaseError: the base has no digest, or the program cannot build.
    """
    base, engine = options.image, options.image_program
    if "@sha256:" not in base:
        message = f"--image={base} has no digest; name the base as NAME@sha256:DIGEST"
        raise ReleaseError(message)
    name = f"vramledger:{version}"
    run(
        engine, "build", *options.image_option,
        "--file", "deploy/docker/Dockerfile", f"--build-arg=BASE={base}",
        f"--build-arg=VERSION={version}", f"--build-arg=REVISION={revision}",
        f"--build-arg=SOURCE={source}", "--tag", name, ".",
    )  # fmt: skip
    run(engine, "save", "--output", directory / f"vramledger-{version}-image.tar", name)


def digest(path: Path) -> str:
    """Return a file's SHA-256."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_provenance(  # noqa: PLR0913 what a provenance says
    directory: Path, version: str, revision: str, *, source: str, begun: datetime, builder: str
) -> None:
    """Write from what, how and by whom each file was built: an in-toto statement with a SLSA predicate."""
    subjects = [
        {"name": each.name, "digest": {"sha256": digest(each)}} for each in sorted(directory.iterdir())
    ]
    sources = [{"uri": f"git+{source or 'vramledger'}", "digest": {"gitCommit": revision}}]
    sources += [
        {"uri": each.relative_to(ROOT).as_posix(), "digest": {"sha256": digest(each)}}
        for each in (REQUIREMENTS, BUILD_REQUIREMENTS)
    ]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:vramledger:make-release:1",
                "externalParameters": {"version": version, "command": "make release"},
                "resolvedDependencies": sources,
            },
            "runDetails": {
                "builder": {"id": builder},
                "metadata": {"startedOn": begun.isoformat(timespec="seconds")},
            },
        },
    }
    path = directory / f"vramledger-{version}.provenance.json"
    path.write_text(json.dumps(statement, indent=2) + "\n", encoding="utf-8")


def sign(directory: Path, key: str) -> None:
    """Write the digests of all files, and sign them with an SSH key if there is one."""
    lines = [f"{digest(each)}  {each.name}\n" for each in sorted(directory.iterdir())]
    sums = directory / "SHA256SUMS"
    sums.write_text("".join(lines), encoding="utf-8")
    if key:
        run("ssh-keygen", "-q", "-Y", "sign", "-f", key, "-n", SIGNATURE_NAMESPACE, sums)


def main() -> None:
    """Make the release."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where to write the files; what is there is removed")
    parser.add_argument(
        "--image", metavar="BASE", default="", help="also build the image on NAME@sha256:DIGEST"
    )
    parser.add_argument("--image-program", default="docker", help="builds the image: docker or podman")
    parser.add_argument(
        "--image-option", action="append", default=[], help="passed to the build of the image"
    )
    parser.add_argument("--sign", metavar="KEY", default="", help="sign with this SSH key")
    parser.add_argument(
        "--rehearsal",
        action="store_true",
        help="make files that are not for publication, also while nobody has said where the project is",
    )
    parser.add_argument("--builder", default="urn:vramledger:builder:unnamed", help="a URI: who builds")
    options = parser.parse_args()
    directory: Path = options.directory.resolve()
    begun = datetime.now(timezone.utc)
    try:
        revision, time = commit()
        source = "" if options.rehearsal else check_project()
        version = run(TOOLS / "hatchling", "version").strip()
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        make_packages(directory, time)
        make_chart(directory)
        make_bill_of_materials(directory, version)
        if options.image:
            make_image(directory, version, revision, source, options)
        make_provenance(directory, version, revision, source=source, begun=begun, builder=options.builder)
        sign(directory, options.sign)
    except ReleaseError as error:
        sys.exit(f"vramledger: {error}")
    for each in sorted(directory.iterdir()):
        sys.stdout.write(f"{each.stat().st_size:10}  {each.name}\n")
    if options.rehearsal:
        sys.stdout.write("NOT FOR PUBLICATION: a rehearsal\n")
    if not options.sign:
        sys.stdout.write("NOT SIGNED: name a key with --sign=KEY, for example ~/.ssh/id_ed25519\n")


if __name__ == "__main__":
    main()
