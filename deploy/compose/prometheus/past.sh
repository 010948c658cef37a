#!/bin/sh
# Give the demo's Prometheus a past, before its first start: the 48 minutes of the demo, again and again for eight days,
# as far as the dashboards compare with it (past.tsv, by `python -m tests.lab.past`). Without it *Changed* would say for
# a day that nobody watched, and have nothing of a week ago. In one block this takes 0.2 s of the processor, in blocks
# of two hours 3.6 s.
set -eu
data=${1:-/prometheus}
here=$(dirname "$0")
if [ -e "$data/wal" ] || [ -n "$(find "$data" -name meta.json | head -n 1)" ]; then
    exit 0 # it has a past of its own
fi
made=$(mktemp)
trap 'rm -f "$made"' EXIT
# It ends 20 minutes after the recording's beginning, so that what was held is not what is held now: a day and a week
# have whole numbers of 48 minutes.
awk -F '\t' -v now="$(date +%s)" '
    {
        count = NF - 1
        end = int(now / 240) * 240
        for (step = 8 * 360; step >= 1; step--) {
            value = $((2880 - step + 5) % count + 2)
            if (value != "-") printf "%s %s %d\n", $1, value, end - step * 240
        }
    }
    END { print "# EOF" }
' "$here/past.tsv" >"$made"
promtool tsdb create-blocks-from openmetrics --quiet --max-block-duration=216h "$made" "$data"
