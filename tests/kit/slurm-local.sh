#!/usr/bin/env bash
# A private Slurm of two nodes on this machine, as root, without systemd and cgroups:
#   slurm-local.sh up FOLDER      state and logs lie in FOLDER; then export SLURM_CONF=FOLDER/slurm.conf
#   slurm-local.sh down FOLDER    ends its jobs and its daemons, and no others
# Needs Debian's packages slurmctld, slurmd, slurm-client and munge. Each node has two stand-in GPUs.
set -euo pipefail
folder=$2
export SLURM_CONF=$folder/slurm.conf

up() {
    local host port
    host=$(hostname -s)
    port=$((20000 + RANDOM % 10000))
    mkdir -p "$folder"/{state,spool,log,run} /run/munge
    chown munge: /run/munge
    chmod 755 /run/munge
    [ -s /etc/munge/munge.key ] || runuser -u munge -- mungekey
    if ! munge -n >/dev/null 2>&1; then
        runuser -u munge -- /usr/sbin/munged
        touch "$folder/run/own-munge"
    fi
    # ids of its own: MPICH names shared memory by job and step, and killed ranks leave theirs behind
    cat > "$SLURM_CONF" <<CONF
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
SlurmctldPort=$port
SlurmdPort=$((port + 1))
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmdPidFile=$folder/run/slurmd-%n.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdLogFile=$folder/log/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=10000
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
InactiveLimit=0
MinJobAge=3600
FirstJobId=$((1000 + RANDOM * 10))
MailProg=/bin/true
PropagateResourceLimitsExcept=MEMLOCK
GresTypes=gpu
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=4 State=UNKNOWN Gres=gpu:2
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 3)) CPUs=4 State=UNKNOWN Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
CONF
    echo "CgroupAutomount=no" > "$folder/cgroup.conf"
    for gpu in 0 1; do [ -e "$folder/gpu$gpu" ] || mknod "$folder/gpu$gpu" c 1 3; done
    echo "NodeName=n[1-2] Name=gpu File=$folder/gpu[0-1]" > "$folder/gres.conf"
    slurmctld -c -f "$SLURM_CONF" 2>/dev/null
    for node in n1 n2; do slurmd -f "$SLURM_CONF" -N "$node"; done
    for _ in $(seq 200); do
        [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | wc -l)" = 2 ] && return
        sleep 0.1
    done
    sinfo
    tail -n 5 "$folder"/log/*.log
    return 1
}

down() {
    [ -f "$SLURM_CONF" ] || return 0
    scancel --quiet -u "$(id -un)" 2>/dev/null || true
    for _ in $(seq 100); do # slurmstepd must end before its slurmd
        [ -z "$(timeout 5 squeue -h -t R,CG,S 2>/dev/null)" ] && break
        sleep 0.1
    done
    local pids
    pids=$(cat "$folder"/run/*.pid 2>/dev/null || true)
    [ -e "$folder/run/own-munge" ] && pids="$pids $(cat /run/munge/munged.pid)"
    # shellcheck disable=SC2086
    kill $pids 2>/dev/null || true
    for _ in $(seq 50); do
        # shellcheck disable=SC2086
        [ -z "$(ps -o stat= $(printf -- '-p %s ' $pids) | grep -v Z)" ] && return 0
        sleep 0.1
    done
    # shellcheck disable=SC2086
    kill -9 $pids 2>/dev/null || true
}

"$1"
