#!/bin/bash
# What prolog.sh, epilog.sh and health.sh do: "vramledger slurm" judges, this script drains and resumes. The settings are
# in vramledger.conf, in the directory above this one. Called with its context: prolog, epilog or health.
#
# The node is drained once, and only if it is neither drained nor down: a reason that is there stays. What we have set is
# recorded on the node, and only that is resumed, with the same reason and the same user.

# shellcheck disable=SC2034 # the settings, with their defaults
settings() {
    VRAMLEDGER=vramledger
    SLURM_BIN=
    WAIT=30
    SETTLE=20
    GRACE=5
    NOT_CLEAN=drain
    UNKNOWN=drain
    END=yes
    FLAGS=()
    RUN=/run/vramledger-slurm
    STATE=/var/lib/vramledger-slurm
    local file=${BASH_SOURCE[0]%/*}/../vramledger.conf
    # shellcheck disable=SC1090
    [ ! -r "$file" ] || . "$file"
}

log() {
    printf 'vramledger %s: %s\n' "$context" "$*" >&2
    logger -t vramledger-slurm -- "$context ${SLURM_JOB_ID:+job $SLURM_JOB_ID }on $node: $*" 2>/dev/null
}

# slurmd starts us without a PATH. Slurm's commands are beside the daemon that is our parent.
find_programs() {
    local daemon
    daemon=$(readlink "/proc/$PPID/exe" 2>/dev/null)
    PATH=${SLURM_BIN:+$SLURM_BIN:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    case $daemon in */sbin/slurm*) PATH=$PATH:${daemon%/sbin/*}/bin:${daemon%/sbin/*}/sbin ;; esac
    PATH=$PATH:/opt/slurm/bin:/opt/slurm/sbin:/usr/local/slurm/bin:/usr/local/slurm/sbin
    export PATH
}

# A health check has no SLURMD_NODENAME; a slurmd with another name than the host's has it in its arguments.
find_node() {
    node=${SLURMD_NODENAME:-}
    if [ -z "$node" ]; then
        local words=() index
        mapfile -d '' -t words 2>/dev/null <"/proc/$PPID/cmdline"
        for index in "${!words[@]}"; do
            case ${words[index]} in
            -N) node=${words[index + 1]:-} ;;
            -N?*) node=${words[index]#-N} ;;
            esac
        done
    fi
    node=${node:-$(hostname -s)}
    export SLURMD_NODENAME=$node
}

# What slurmd itself has made of gres.conf. Once for each slurmd and configuration: with AutoDetect it asks the driver.
read_gres() {
    local conf=${SLURM_CONF:-/etc/slurm/slurm.conf} stamp
    stamp=$(cut -d ' ' -f 22 "/proc/$PPID/stat" 2>/dev/null)-$(stat -c %Y "$conf" "${conf%/*}/gres.conf" 2>/dev/null | tr '\n' -)
    [ "$(head -n 1 "$gres" 2>/dev/null)" != "# $stamp" ] || return
    { echo "# $stamp" && timeout -k 1 10 slurmd -G -N "$node" 2>&1; } >"$gres.$$" && mv "$gres.$$" "$gres" || rm -f "$gres.$$"
}

# Set status and line. It does not wait for vramledger longer than it may: a process that is stuck in the kernel cannot be
# killed. During an upgrade the program is missing or broken for a moment: then it is tried again.
judge() {
    local output=$RUN/answer.$$ flags=(--log.level=error "--gres=$gres" "--settle=${SETTLE}s") pid end=$((SECONDS + WAIT + 3))
    [ "$END" = yes ] || flags+=(--no-end)
    [ "$context" != epilog ] || flags+=("--grace=${GRACE}s")
    while :; do
        "$VRAMLEDGER" slurm "$context" "--wait=$((end - 3 > SECONDS ? end - 3 - SECONDS : 1))s" "${flags[@]}" "${FLAGS[@]}" \
            >"$output" 2>"$output.log" &
        pid=$!
        # "wait" has no deadline.
        while kill -0 "$pid" 2>/dev/null && ((SECONDS <= end)); do sleep 0.05; done
        if kill -KILL "$pid" 2>/dev/null; then
            status=3 line="vram? no answer: vramledger did not end within $WAIT s"
            break
        fi
        wait "$pid"
        status=$?
        line=$(head -n 1 "$output")
        # A Python that cannot import us ends with 1 as well, and without a reason.
        case $status:$line in 0: | 1:vram\ * | 3:vram\?*) break ;; esac
        line="vram? vramledger failed ($status): $(tail -n 1 "$output.log")" status=3
        ((SECONDS + 2 < end)) || break
        sleep 1
    done
    rm -f "$output" "$output.log"
}

# Set state, reason and setter of the node, as slurmctld has them; fails if it does not answer.
ask_node() {
    local text
    text=$(timeout -k 1 10 scontrol -o show node "$node" 2>/dev/null) || return
    [[ $text =~ \ State=([^ ]+) ]] || return
    state=${BASH_REMATCH[1]}
    reason='' setter=''
    if [[ $text =~ \ Reason=(.*)\ \[([^@\ ]+)@[^]]*\] ]]; then
        reason=${BASH_REMATCH[1]} setter=${BASH_REMATCH[2]}
    fi
}

is_out() { [[ $state =~ DRAIN|DOWN|FAIL|MAINT|FUTURE|POWER|REBOOT|NOT_RESPONDING ]]; }

# Drain the node with "$line", unless somebody has taken it out already. Fails if the node is then not out.
drain() {
    local try
    for try in 1 2; do
        ask_node || continue
        if is_out; then
            log "the node is $state already (${reason:-no reason}); not changed. Found: $line"
            return 0
        fi
        timeout -k 1 10 scontrol update NodeName="$node" State=DRAIN Reason="$line" >/dev/null 2>&1 || continue
        ask_node && is_out || continue
        if [ "$reason" = "$line" ]; then
            printf '%s\n%s\n%s\n' "$1" "$setter" "$reason" >"$record.$$" && mv "$record.$$" "$record"
        fi
        log "drained: $line"
        return 0
    done
    log "scontrol did not drain the node ($try tries): $line"
    return 1
}

# Whether the node is drained, and nothing else, by us, for a state that was not known.
is_our_doubt() {
    local recorded=()
    [ -r "$record" ] && mapfile -t recorded <"$record" && [ "${recorded[0]:-}" = unknown ] && ask_node &&
        [[ $state == *DRAIN* && ! $state =~ DOWN|FAIL|MAINT|FUTURE|POWER|REBOOT|NOT_RESPONDING ]] &&
        [ "$reason" = "${recorded[2]:-}" ] && [ "$setter" = "${recorded[1]:-}" ]
}

resume() {
    is_our_doubt || return 0
    timeout -k 1 10 scontrol update NodeName="$node" State=RESUME >/dev/null 2>&1 || return 0
    rm -f "$record"
    log "resumed: $reason"
}

# The status for slurmd of a context in which the node must go out, as the policy says.
act() { # POLICY KIND
    case $1 in
    drain) drain "$2" ;;
    *) log "$1: $line" ;;
    esac
}

main() {
    context=$1
    settings
    find_programs
    find_node
    local record=$STATE/$node.drained gres=$RUN/gres.$node
    umask 022
    mkdir -p "$RUN" "$STATE"
    read_gres
    judge
    local policy=$NOT_CLEAN kind=not-clean
    if [ "$status" = 3 ]; then policy=$UNKNOWN kind=unknown; fi
    case $context:$status in
    health:0) resume ;;
    health:1) log "not clean: $line" ;; # the next prolog or an epilog drains, when a job needs the GPU
    *:0) ;;
    prolog:*) act "$policy" "$kind"; [ "$policy" != drain ] || return 1 ;; # slurmd requeues the job, and drains if we could not
    *) act "$policy" "$kind" ;; # an epilog that fails lets slurmd drain the node, with a reason that says less
    esac
}

main "$@"
exit
