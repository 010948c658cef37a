#!/bin/sh
# Start vramledger, or vramledger-agent: this file has both names, and the Python program is beside it, NAME-python.
#
# A program that "run" starts inherits what its caller had. From its start on, Python ignores SIGPIPE and SIGXFSZ, and
# a shell drops variables whose names it does not know. So this shell reads both from the kernel before Python begins;
# and Python is started so that it does not obey the program's PYTHONHOME, PYTHONPATH and the like.
vl_program=$0-python
if ! [ -x "$vl_program" ]; then # a link to this file
    vl_program=$(readlink -f -- "$0")-python
fi
if [ "${1-}" = run ] && read -r vl_python <"$vl_program"; then
    vl_python=${vl_python#"#!"}
    [ "$vl_python" != /bin/sh ] || vl_python=${vl_program%/*}/python3 # its path is too long for the kernel
    while read -r vl_key vl_value && [ "$vl_key" != SigIgn: ]; do :; done 2>/dev/null <"/proc/$$/status"
    VRAMLEDGER_CALLER_IGNORES=$vl_value
    VRAMLEDGER_CALLER_ENVIRON=$(PATH=/usr/bin:/bin exec base64 "/proc/$$/environ" 2>/dev/null)
    [ "${#VRAMLEDGER_CALLER_ENVIRON}" -lt 131000 ] || unset VRAMLEDGER_CALLER_ENVIRON # the kernel takes no longer one
    export VRAMLEDGER_CALLER_IGNORES VRAMLEDGER_CALLER_ENVIRON
    [ ! -x "$vl_python" ] || exec "$vl_python" -I -S -c '
import os, site, sys
program = sys.argv.pop(1)
site.execsitecustomize = site.execusercustomize = lambda: None  # they are for the program alone
site.main()
try:
    try:
        import vramledger_agent
    except ImportError:
        site.addsitedir(site.getusersitepackages())
    from vramledger_agent.cli import main
except ImportError:
    os.execv(program, [program, *sys.argv[1:]])
sys.exit(main(prog=os.path.basename(program)[:-len("-python")]))
' "$vl_program" "$@"
fi
exec "$vl_program" "$@"
