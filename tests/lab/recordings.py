"""Judge every recording again, and write the page that it must give: ``python -m tests.lab.recordings``."""

import sys

from tests.support import judging


def main() -> int:
    """Write the golden scrape of each recording that keeps its promises; return 1 if one does not."""
    failed = 0
    for entry in judging.load():
        snapshots = judging.replay(judging.HOME, entry)
        problems = judging.problems(entry, snapshots)
        print(f"{'FAIL' if problems else 'PASS'} {entry.name} {'; '.join(problems)}")
        failed += bool(problems)
        if not problems:
            judging.golden_path(judging.HOME, entry).write_bytes(judging.golden(snapshots[-1]))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
