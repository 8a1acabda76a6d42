r"""The supervisor of one restricted sandbox; run as a script, standard library only, never imported
by the package.

    python -I -S restricted_supervisor.py '{"uid": 60000, "work": ..., "tmp": ..., "limits": {...},
    "environment": {...}}'

Speaks the protocol of `shell`: 0 commands, 1 output, 2 control socket. It adopts every orphan of
its shell (PR_SET_CHILD_SUBREAPER), so "no child left" means that nothing of the sandbox is alive.
The shell gets resource limits, a uid of its own when this process is root, no_new_privs, Landlock
where the kernel has it, and a seccomp filter. Failing to set up the shell ends this process with
the reason on the control socket. When that socket closes, everything is killed.
"""

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER, PR_SET_SECCOMP = 38, 36, 22
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446

# include/uapi/linux/landlock.h
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3
READ = EXECUTE | READ_FILE | READ_DIR
RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1}
RIGHTS_ABI_3 = (1 << 15) - 1
FILE_RIGHTS = EXECUTE | 1 << 1 | READ_FILE | 1 << 14
SCOPED = 0b11  # abstract sockets and signals stay inside (ABI 6)
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib64", "/proc", "/dev/urandom", "/dev/random"),
    *("/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/alternatives"),
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty")
WORLD_WRITABLE = ("/tmp", "/var/tmp", "/dev/shm")

# (AUDIT_ARCH, socket, denied). Denied are shmget semget msgget mq_open add_key request_key keyctl,
# whose objects outlive processes; ptrace, process_vm_writev; io_uring_setup, which opens sockets.
SYSCALLS = {
    "x86_64": (0xC000003E, 41, (29, 64, 68, 240, 248, 249, 250, 101, 311, 425)),
    "aarch64": (0xC00000B7, 198, (194, 190, 186, 180, 217, 218, 219, 117, 271, 425)),
}
ALLOW, DENY = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW; SECCOMP_RET_ERRNO | EPERM
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06


def check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def restrict_files(readable: tuple[str, ...], writable: tuple[str, ...]) -> None:
    """Landlock: `readable` may be read and executed, `writable` everything, all else nothing. No
    kernel support: no limit.
    """
    abi = LIBC.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return
    rights = RIGHTS_BY_ABI.get(abi, RIGHTS_ABI_3)
    attributes = struct.pack("QQQ", rights, 0, SCOPED if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = check(
        LIBC.syscall(LANDLOCK_CREATE_RULESET, attributes, size, 0), "landlock_create_ruleset"
    )
    for paths, allowed in ((readable, READ), (writable, rights)):
        for path in filter(os.path.exists, paths):
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            access = allowed if os.path.isdir(path) else allowed & FILE_RIGHTS
            rule = struct.pack("=Qi", access & rights, beneath)
            check(LIBC.syscall(LANDLOCK_ADD_RULE, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
            os.close(beneath)
    check(LIBC.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def restrict_syscalls() -> None:
    """seccomp: sockets of the AF_UNIX family only, and none of the calls that outlive a process or
    reach into another.
    """
    architecture, socket_call, denied = SYSCALLS[os.uname().machine]
    program = [(LOAD, 0, 0, 4), (JUMP_EQUAL, 1, 0, architecture), (RETURN, 0, 0, DENY)]
    program += [
        (LOAD, 0, 0, 0),
        (JUMP_AT_LEAST, 0, 1, 0x40000000),
        (RETURN, 0, 0, DENY),
    ]  # x32 numbers
    for number in denied:
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, DENY)]
    program += [(JUMP_EQUAL, 1, 0, socket_call), (RETURN, 0, 0, ALLOW)]
    program += [
        (LOAD, 0, 0, 16),
        (JUMP_EQUAL, 0, 1, 1),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, DENY),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter_program = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, filter_program, 0, 0), "seccomp")


def become_shell(settings: dict) -> None:
    """In the child: every limit, then the shell."""
    os.setsid()
    limits = settings["limits"]
    pairs = [
        ("FSIZE", limits["max_file_bytes"]),
        ("CPU", limits["cpu_s"]),
        ("CORE", 0),
        ("NOFILE", 512),
    ]
    if settings["uid"] is not None:
        pairs += [("NPROC", limits["max_processes"])]
    for name, value in pairs:
        hard = value + 5 if name == "CPU" else value  # SIGXCPU first, SIGKILL later
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, hard))
    if settings["uid"] is not None:
        os.setgroups([])
        os.setgid(settings["uid"])
        os.setuid(settings["uid"])
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    os.chdir(settings["work"])
    restrict_files(SYSTEM, (settings["work"], settings["tmp"], *DEVICES))
    restrict_syscalls()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these two
        signal.signal(number, signal.SIG_DFL)
    os.dup2(1, settings["marker_fd"])
    os.dup2(1, 2)
    os.execve(settings["shell"][0], settings["shell"], settings["environment"])


class Supervisor:
    """The loop: requests of the control socket, and ends of children."""

    def __init__(self, settings: dict) -> None:
        self.settings = settings
        self.shell: int | None = None
        self.token = ""

    def serve(self) -> None:
        wakeup, signalled = os.pipe()
        for fd in (wakeup, signalled):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, stack: None)
        poll = select.poll()
        poll.register(2, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        try:
            while True:
                ready = dict(poll.poll())
                if wakeup in ready:
                    os.read(wakeup, 4096)
                    self.reap()
                if 2 in ready:
                    request = os.read(2, 4096).split()
                    if not request:
                        break
                    self.answer(*map(bytes.decode, request))
        finally:  # also when the other end of a pipe went first
            self.kill_all()

    def answer(self, request: str, token: str) -> None:
        if request == "reset":
            self.kill_all()
            self.wipe()
        self.token = token
        outcome, failed = os.pipe()  # closed by a successful exec
        self.shell = os.fork()
        if self.shell == 0:
            try:
                become_shell(self.settings)
            except BaseException as error:  # the outermost frame of the child
                os.write(failed, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os.close(failed)
        reason = os.read(outcome, 4096)
        os.close(outcome)
        if reason:
            os.write(2, reason)
            sys.exit(1)
        os.write(2, b"ready\n")

    def reap(self) -> bool:
        """Reaps what has ended; True while a child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.shell:
                self.shell = None
                code = os.waitstatus_to_exitcode(status)
                os.write(
                    1, f"\x1e{self.token} exit {code if code >= 0 else 128 - code}\x1e".encode()
                )

    def kill_all(self) -> None:
        """Kills until no child is left: as root everything of the uid at once, otherwise every
        descendant.
        """
        self.shell = None
        while True:
            self.kill_once()
            for _ in range(20):
                if not self.reap():
                    return
                select.select([], [], [], 0.0005)

    def kill_once(self) -> None:
        if self.settings["uid"] is None:
            for pid in descendants(os.getpid()):
                os.kill(pid, signal.SIGKILL)
            return
        killer = os.fork()  # also finds what an earlier supervisor of this uid left
        if killer == 0:
            os.setuid(self.settings["uid"])
            try:
                os.kill(-1, signal.SIGKILL)  # the caller itself is spared; ESRCH when it is alone
            finally:
                os._exit(0)
        os.waitpid(killer, 0)

    def wipe(self) -> None:
        """Removes every file that the sandbox could have written."""
        places = [self.settings["work"], self.settings["tmp"]]
        entries = [entry.path for place in places for entry in os.scandir(place)]
        uid = self.settings["uid"]
        if uid is not None:
            for place in filter(os.path.isdir, WORLD_WRITABLE):
                entries += [
                    e.path for e in os.scandir(place) if e.stat(follow_symlinks=False).st_uid == uid
                ]
        if not entries:
            return
        for command in (["chmod", "-R", "u+rwX", "--"], ["rm", "-rf", "--"]):
            if command[0] == "rm" or uid is None:
                child = os.posix_spawnp(command[0], command + entries, os.environ)
                os.waitpid(child, 0)


def descendants(root: int) -> list[int]:
    """Every process below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    frontier = [root]
    while frontier:
        frontier = [child for pid in frontier for child in children.get(pid, ())]
        found += frontier
    return found


if __name__ == "__main__":
    check(LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper")
    Supervisor(json.loads(sys.argv[1])).serve()
