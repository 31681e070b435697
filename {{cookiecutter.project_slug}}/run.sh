#!/bin/sh
# Trains on this machine, or on several: ./run.sh [flags of main.py]
#
#   ./run.sh --epochs 30                                  every GPU here, or two CPU processes
#   CUDA_VISIBLE_DEVICES=0,2 ./run.sh                     these two GPUs
#   NPROC=1 ./run.sh --batch-size 256                     one process
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 ./run.sh    on the first of two machines, and
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 ./run.sh    with the same flags on the second
#
# NPROC is the number of processes on this machine (default: its GPUs, or 2 without any), NNODES the
# number of machines, NODE_RANK this machine's number from 0; MASTER_ADDR and MASTER_PORT (default
# 29500) say where the others reach the first one. MAX_RESTARTS (default 0) is how often a run that
# failed, or lost a machine, is started again, NODE_WAIT (default 600) how many seconds machines wait
# for one that has not come, or is lost. OMP_NUM_THREADS is the CPU threads of each process (default:
# its share of the cores), PYTHON the interpreter (default: python or python3, whichever has torch).
# The script works from any folder; paths in the flags are relative to the folder it is started from.
#
#   ./run.sh --check [flags]    looks at this machine and these flags for seconds, trains nothing

set -eu

fail() {
    printf 'run.sh: %s\n' "$1" >&2
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
        nvidia-smi -L 2>/dev/null | grep -c '^GPU [0-9]' || true
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

# Prints the interpreter's option that keeps the caller's folder out of the module search (Python
# 3.11 and later have one), so that an engine/ or a torch.py there isn't taken for ours.
find_torch() {
    "$1" -c '
import importlib.util, sys
sys.path[:] = filter(None, sys.path)
if importlib.util.find_spec("torch") is None:
    sys.exit(1)
print("-P" if sys.version_info >= (3, 11) else "")
' 2>/dev/null
}

# The "x" keeps line breaks at the end of the folder's name, which $(...) would drop.
case $0 in */*) here=${0%/*}/ ;; *) here=./ ;; esac
here=$(CDPATH='' cd -- "$here" && pwd -P && printf x)
here=${here%?x}
case $here in
    *:*) fail "rename the folder $here: Python's search path can't hold a name with a colon." ;;
esac

module=engine.launch
for argument; do
    case $argument in --check | --json) module=engine.doctor ;; esac
done

# Whether --check can say of the interpreter that it has no torch, and all the rest.
can_look() { [ "$module" = engine.doctor ] && "$1" -c '' 2>/dev/null; }

if [ -n "${PYTHON:-}" ]; then
    python=$PYTHON
    option=$(find_torch "$python") || can_look "$python" ||
        fail "PYTHON=$python is no Python with torch: name one, or install this project in it."
else
    for python in python python3; do
        option=$(find_torch "$python") && break
    done || for python in python python3; do
        can_look "$python" && break
    done || fail "neither python nor python3 has torch: activate its environment, or see README.md."
fi

machines=${NNODES:-1}
number NNODES "$machines" 1 100000
# % if ddp == "dataparallel"
processes=${NPROC:-1} # of which a thread drives each GPU
# % else
processes=${NPROC:-$(count_gpus)}
# % endif
if [ -z "${NPROC:-}" ] && [ "$processes" = 0 ]; then processes=2; fi
number NPROC "$processes" 1 1024
number MAX_RESTARTS "${MAX_RESTARTS:-0}" 0 100000

# From here on "$@" grows at the front, until it is the whole command.
set -- "--nproc-per-node=$processes" "--max-restarts=${MAX_RESTARTS:-0}" "$here/main.py" "$@"
if [ "$machines" = 1 ]; then
    if [ "${NODE_RANK:-0}" != 0 ]; then
        fail "NODE_RANK is \"$NODE_RANK\", but there is one machine: set NNODES, too."
    fi
    set -- --standalone "$@"
else
    if [ -z "${NODE_RANK:-}" ]; then
        fail "set NODE_RANK to this machine's number, from 0 to $((machines - 1)): NNODES=$machines"
    elif [ -z "${MASTER_ADDR:-}" ]; then
        fail "set MASTER_ADDR to the address of the machine with NODE_RANK=0: NNODES=$machines"
    fi
    number NODE_RANK "$NODE_RANK" 0 $((machines - 1))
    number MASTER_PORT "${MASTER_PORT:-29500}" 1 65535
    number NODE_WAIT "${NODE_WAIT:-600}" 1 100000
    set -- "--nnodes=$machines" --rdzv-backend=machines \
        "--rdzv-endpoint=$MASTER_ADDR:${MASTER_PORT:-29500}" \
        "--rdzv-conf=rank=$NODE_RANK,max_restarts=${MAX_RESTARTS:-0},wait=${NODE_WAIT:-600}" "$@"
fi

if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
    OMP_NUM_THREADS=$((cores < processes ? 1 : cores / processes))
fi
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
# Warnings of torch's C++ code, such as of a machine that is gone, are followed by its stack.
TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
export OMP_NUM_THREADS PYTHONPATH TORCH_CPP_LOG_LEVEL

exec "$python" ${option:+"$option"} -m "$module" "$@"
