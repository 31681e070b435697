#!/bin/sh
# Trains on this host, or on several: ./run.sh [flags of main.py]
#
#   ./run.sh --epochs 30                                  every GPU here, or two CPU processes
#   CUDA_VISIBLE_DEVICES=0,2 ./run.sh                     these two GPUs
#   NPROC=1 ./run.sh --batch-size 256                     one process
#   NNODES=2 MASTER_ADDR=10.0.0.1 ./run.sh                on each of two hosts, with the same flags
#
# Several hosts: NNODES is their number, or 2:4 for an elastic job on 2 to 4 hosts. MASTER_ADDR and
# MASTER_PORT (default 29500) are the address of one host, whose launcher serves the rendezvous store;
# NODE_RANK=0 marks this host as that one, if its address does not show it. NODE_WAIT (default 600):
# seconds that hosts wait for others.
#
# NPROC: processes on this host (default: its GPUs, or 2 without a GPU). MAX_RESTARTS (default 0):
# restarts after a failure, each from the newest checkpoint. OMP_NUM_THREADS: CPU threads of each
# process (default: cores / processes). PYTHON: the interpreter (default: python or python3, whichever
# has torch). STOP_WAIT (default 30): seconds that processes have to save after a signal.
# CHECK_WAIT (default 20): seconds that --check may take.
# The script works from any folder; paths in the flags are relative to the folder it is started from.
#
#   ./run.sh --check [flags]    checks this host and these flags, does not train

set -eu

# A stream that is closed would share its number with the next file or socket that is opened.
(: 3>&2) || exec 2>/dev/null
(: 3>&1) 2>/dev/null || exec >/dev/null
(: 3<&0) 2>/dev/null || exec </dev/null

fail() {
    printf 'run.sh: %s\n' "$1" >&2 || : # a full disk
    exit 2
}

number() { # name, value, lowest, highest
    case $2 in
        '' | *[!0-9]* | 0?* | ???????*) ;;
        *) if [ "$2" -ge "$3" ] && [ "$2" -le "$4" ]; then return; fi ;;
    esac
    fail "$1 is \"$2\", but must be a whole number from $3 to $4."
}

count_gpus() {
    if [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then
        limit=60 # loading a driver that is not kept loaded takes seconds
        [ "$module" = engine.launch ] || limit=7 # that of the check of the driver
        timeout="timeout --foreground -k 1 $limit" # in the foreground, Ctrl-C ends both
        $timeout true 2>/dev/null || timeout=      # there is none, or another
        gpus=$({ $timeout nvidia-smi -L || exit $?; } 2>/dev/null) || case $? in
            124 | 137) fail "nvidia-smi does not answer within $limit s: search dmesg for errors, \
and reboot, or set NPROC to the number of processes." ;;
        esac
        printf '%s\n' "$gpus" | grep -c '^GPU [0-9]' || true
        return
    fi
    # As CUDA reads it: the list ends at the first entry that is no device.
    count=0
    rest=$CUDA_VISIBLE_DEVICES,
    while [ -n "$rest" ]; do
        case ${rest%%,*} in '' | -* | NoDevFiles) break ;; esac
        count=$((count + 1))
        rest=${rest#*,}
    done
    echo "$count"
}

# The "x" keeps line breaks at the end of a name, which $(...) would drop.
script=$0
if [ -h "$script" ]; then
    script=$(readlink -f -- "$script" && printf x)
    script=${script%?x}
fi
case $script in */*) here=${script%/*}/ ;; *) here=./ ;; esac
here=$(CDPATH='' cd -- "$here" && pwd -P && printf x)
here=${here%?x}
case $here in
    *:*) fail "rename the folder $here: Python's search path can't hold a name with a colon." ;;
esac

module=engine.launch
for argument; do
    case $argument in --check | --json) module=engine.diagnostics.preflight ;; esac
done

# Prints the interpreter's option that keeps the caller's folder out of the module search, so that an
# engine/ or a torch.py there isn't taken for ours; before Python 3.11, that of a program which does
# the same. Fails if this is no Python from 3.10 on, or the check exits.
find_option() { # interpreter, check
    "$1" -c "
import sys
sys.path[:] = filter(None, sys.path)
$2
if sys.version_info < (3, 10):
    sys.exit(1)
print('-P' if sys.version_info >= (3, 11) else '-c')
" 2>/dev/null | grep '^-[Pc]$'
}

# Sets python, and option, to the first interpreter with torch; --check reports if there is none.
choose_python() {
    has_torch='import importlib.util; importlib.util.find_spec("torch") or sys.exit(1)'
    for python; do option=$(find_option "$python" "$has_torch") && return; done
    [ "$module" = engine.diagnostics.preflight ] || return 1
    for python; do option=$(find_option "$python" "") && return; done
    return 1
}

if [ -n "${PYTHON:-}" ]; then
    choose_python "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.10 or later with torch: name \
another, or install this project in it."
else
    choose_python python python3 || fail "neither python nor python3 is Python 3.10 or later with \
torch: activate its environment, or see README.md."
fi

# The folders that Python tries for temporary files.
for folder in "${TMPDIR:-}" "${TEMP:-}" "${TMP:-}" /tmp /var/tmp /usr/tmp .; do
    [ -d "$folder" ] && [ -w "$folder" ] && break
done || fail "no folder for temporary files can be written to: set TMPDIR to one."

hosts=${NNODES:-1}
least=${hosts%%:*}
most=${hosts#*:}
number NNODES "$least" 1 100000
number NNODES "$most" "$least" 100000
# % if ddp == "dataparallel"
processes=${NPROC:-1} # of which a thread drives each GPU
# % else
processes=${NPROC:-$(count_gpus)}
# % endif
if [ -z "${NPROC:-}" ] && [ "$processes" = 0 ]; then processes=2; fi
number NPROC "$processes" 1 1024
number MAX_RESTARTS "${MAX_RESTARTS:-0}" 0 100000
number STOP_WAIT "${STOP_WAIT:-30}" 1 100000
number CHECK_WAIT "${CHECK_WAIT:-20}" 20 100000

# From here on "$@" grows at the front, until it is the whole command.
set -- "--nproc-per-node=$processes" "--max-restarts=${MAX_RESTARTS:-0}" "$here/main.py" "$@"
if [ "$hosts" = 1 ]; then
    if [ "${NODE_RANK:-0}" != 0 ]; then
        fail "NODE_RANK is \"$NODE_RANK\", but there is one host: set NNODES, too."
    fi
else
    if [ -z "${MASTER_ADDR:-}" ]; then
        fail "set MASTER_ADDR to the address of one of the hosts, the same on all: NNODES=$hosts"
    fi
    [ -z "${NODE_RANK:-}" ] || number NODE_RANK "$NODE_RANK" 0 $((most - 1))
    number MASTER_PORT "${MASTER_PORT:-29500}" 1 65535
    number NODE_WAIT "${NODE_WAIT:-600}" 1 100000
    # engine.launch serves the store. An elastic job waits 15 s for hosts beyond the least number.
    wait=$((${NODE_WAIT:-600} + (most > least ? 15 : 0)))
    waits="join_timeout=$wait,last_call_timeout=15,read_timeout=20"
    set -- "--nnodes=$hosts" --rdzv-backend=c10d "--rdzv-conf=is_host=false,$waits" \
        "--rdzv-endpoint=$MASTER_ADDR:${MASTER_PORT:-29500}" "$@"
    if [ "$module" = engine.diagnostics.preflight ]; then # checks the least number of hosts
        if [ -z "${NODE_RANK:-}" ] || [ "$NODE_RANK" -ge "$least" ]; then
            fail "NODE_RANK is \"${NODE_RANK:-}\", but --check of NNODES=$hosts, which checks the \
least number of hosts, needs this one's number, from 0 to $((least - 1))."
        fi
        NNODES=$least
    fi
fi

if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
    OMP_NUM_THREADS=$((cores < processes ? 1 : cores / processes))
fi
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
# Warnings of torch's C++ code, such as of a machine that is gone, are followed by its stack.
TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
# Sets of names, such as of a split of the data, have the same order in all processes and restarts.
PYTHONHASHSEED=${PYTHONHASHSEED:-0}
export OMP_NUM_THREADS PYTHONHASHSEED PYTHONPATH TORCH_CPP_LOG_LEVEL

if [ "$option" = -P ]; then
    exec "$python" -P -m "$module" "$@"
fi
exec "$python" -c '
import sys
sys.path[:] = filter(None, sys.path)
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
' "$module" "$@"
