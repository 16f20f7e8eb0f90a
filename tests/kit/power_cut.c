/* LD_PRELOAD: writes down what processes do to the files of one folder, in the order in which it
 * happens, so that power_cut.py can tell what a disk may hold at any moment in between.
 *
 * $POWER_CUT_FOLDER: its absolute path; $POWER_CUT_LOG: a file outside it. A record is a line
 * "OP INODE OFFSET P T D", and after it P bytes of a path and T of another (relative to the folder,
 * "" for none; they may hold anything) and D of data. fsync brings the whole file: what stdio wrote
 * is seen there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096], log_path[4096];
static size_t folder_length; /* 0: nothing is recorded */
static __thread int inside, log_fd;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    const char *where = getenv("POWER_CUT_FOLDER"), *log = getenv("POWER_CUT_LOG");
    if (!where || !log) return;
    snprintf(folder, sizeof folder, "%s", where);
    snprintf(log_path, sizeof log_path, "%s", log);
    folder_length = strlen(folder);
    close(REAL(open)(log_path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
}

/* The part of the path below the folder ("." for the folder itself); 0 where it is elsewhere. */
static int below(int at, const char *path, char *out) {
    char whole[8192];
    if (!folder_length || inside) return 0;
    if (path[0] == '/') snprintf(whole, sizeof whole, "%s", path);
    else {
        char link[64], base[4096];
        if (at == AT_FDCWD) { if (!getcwd(base, sizeof base)) return 0; }
        else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            ssize_t n = readlink(link, base, sizeof base - 1);
            if (n < 0) return 0;
            base[n] = 0;
        }
        snprintf(whole, sizeof whole, "%s/%s", base, path);
    }
    if (strncmp(whole, folder, folder_length)) return 0;
    if (!whole[folder_length]) { strcpy(out, "."); return 1; }
    if (whole[folder_length] != '/') return 0;
    snprintf(out, 4096, "%s", whole + folder_length + 1);
    return 1;
}

static int below_fd(int fd, char *out) {
    char link[64], path[4096];
    if (!folder_length || inside || fd < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return path[0] == '/' && below(AT_FDCWD, path, out);
}

static void record(const char *op, long long inode, long long offset, const void *data,
                   size_t length, const char *path, const char *target) {
    char head[256];
    if (!target) target = "";
    int n = snprintf(head, sizeof head, "%s %lld %lld %zu %zu %zu\n", op, inode, offset,
                     strlen(path), strlen(target), length);
    struct iovec parts[] = {{head, n}, {(void *)path, strlen(path)},
                            {(void *)target, strlen(target)}, {(void *)data, length}};
    if (writev(log_fd, parts, 4) != (ssize_t)(n + strlen(path) + strlen(target) + length))
        abort(); /* half a record would be read as another */
}

/* Operation and record are one to all threads and processes. The lock is of an open file, which
 * threads and forks would share: each time it is opened anew. */
static void enter(void) {
    int kept = errno;
    log_fd = REAL(open)(log_path, O_WRONLY | O_APPEND | O_CLOEXEC);
    while (flock(log_fd, LOCK_EX)) if (errno != EINTR) abort(); /* not: a signal's handler ran */
    errno = kept;
}
static void leave(void) {
    int kept = errno;
    flock(log_fd, LOCK_UN); /* said, for a fork in between holds it open, too */
    close(log_fd);
    errno = kept;
}

static long long inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) ? -1 : (long long)found.st_ino;
}

static int opened(int fd, int flags, const char *path) {
    if (fd >= 0 && (flags & (O_CREAT | O_TRUNC)))
        record(flags & O_TRUNC ? "truncated" : "open", inode_of(fd), 0, NULL, 0, path, NULL);
    return fd;
}

#define OPEN(name, AT, PARAMETERS, CALL)                                       \
    int name PARAMETERS {                                                      \
        mode_t mode = 0;                                                       \
        char place[4096];                                                      \
        if (flags & (O_CREAT | O_TMPFILE)) {                                   \
            va_list more; va_start(more, flags);                               \
            mode = va_arg(more, mode_t); va_end(more);                         \
        }                                                                      \
        if (!(flags & (O_CREAT | O_TRUNC)) || !below(AT, path, place))         \
            return REAL(name) CALL;                                            \
        enter();                                                               \
        int fd = opened(REAL(name) CALL, flags, place);                        \
        leave();                                                               \
        return fd;                                                             \
    }
OPEN(open, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPEN(openat, at, (int at, const char *path, int flags, ...), (at, path, flags, mode))
OPEN(openat64, at, (int at, const char *path, int flags, ...), (at, path, flags, mode))

ssize_t write(int fd, const void *data, size_t length) {
    char place[4096];
    if (!below_fd(fd, place)) return REAL(write)(fd, data, length);
    enter();
    ssize_t n = REAL(write)(fd, data, length);
    if (n > 0) record("write", inode_of(fd), lseek(fd, 0, SEEK_CUR) - n, data, n, place, NULL);
    leave();
    return n;
}

#define SYNC(name)                                                             \
    int name(int fd) {                                                         \
        char place[4096];                                                      \
        if (!below_fd(fd, place)) return REAL(name)(fd);                       \
        enter();                                                               \
        struct stat found;                                                     \
        fstat(fd, &found);                                                     \
        int done = REAL(name)(fd);                                             \
        if (S_ISDIR(found.st_mode)) record("syncdir", found.st_ino, 0, NULL, 0, place, NULL); \
        else {                                                                 \
            char link[64];                                                     \
            snprintf(link, sizeof link, "/proc/self/fd/%d", fd);               \
            char *data = malloc(found.st_size + 1);                            \
            inside = 1;                                                        \
            int again = REAL(open)(link, O_RDONLY | O_CLOEXEC);                \
            ssize_t n = again < 0 ? 0 : pread(again, data, found.st_size, 0);  \
            if (again >= 0) close(again);                                      \
            inside = 0;                                                        \
            record("sync", found.st_ino, 0, data, n < 0 ? 0 : n, place, NULL); \
            free(data);                                                        \
        }                                                                      \
        leave();                                                               \
        return done;                                                           \
    }
SYNC(fsync)
SYNC(fdatasync)

#define RESIZE(name, PARAMETERS, CALL, FOUND, INODE)                           \
    int name PARAMETERS {                                                      \
        char place[4096];                                                      \
        if (!FOUND) return REAL(name) CALL;                                    \
        enter();                                                               \
        int done = REAL(name) CALL;                                            \
        if (!done) record("resize", INODE, length, NULL, 0, place, NULL);      \
        leave();                                                               \
        return done;                                                           \
    }
static long long inode_at(const char *path) {
    struct stat found;
    return lstat(path, &found) ? -1 : (long long)found.st_ino;
}
RESIZE(ftruncate, (int fd, off_t length), (fd, length), below_fd(fd, place), inode_of(fd))
RESIZE(ftruncate64, (int fd, off64_t length), (fd, length), below_fd(fd, place), inode_of(fd))
RESIZE(truncate, (const char *path, off_t length), (path, length),
       below(AT_FDCWD, path, place), inode_at(path))
RESIZE(truncate64, (const char *path, off64_t length), (path, length),
       below(AT_FDCWD, path, place), inode_at(path))

#define TWO(name, OP, PARAMETERS, CALL, FROM, TO)                              \
    int name PARAMETERS {                                                      \
        char place[4096], target[4096];                                        \
        int is_from = below(FROM, from, place), is_to = below(TO, to, target); \
        if (!is_from && !is_to) return REAL(name) CALL;                        \
        enter();                                                               \
        int done = REAL(name) CALL;                                            \
        if (!done) record(OP, 0, 0, NULL, 0, is_from ? place : "", is_to ? target : ""); \
        leave();                                                               \
        return done;                                                           \
    }
TWO(rename, "rename", (const char *from, const char *to), (from, to), AT_FDCWD, AT_FDCWD)
TWO(renameat, "rename", (int a, const char *from, int b, const char *to), (a, from, b, to), a, b)
TWO(link, "link", (const char *from, const char *to), (from, to), AT_FDCWD, AT_FDCWD)
TWO(linkat, "link", (int a, const char *from, int b, const char *to, int flags),
    (a, from, b, to, flags), a, b)

#define ONE(name, OP, PARAMETERS, CALL, AT)                                    \
    int name PARAMETERS {                                                      \
        char place[4096];                                                      \
        if (!below(AT, path, place)) return REAL(name) CALL;                   \
        enter();                                                               \
        int done = REAL(name) CALL;                                            \
        if (!done) record(OP, inode_at(path), 0, NULL, 0, place, NULL);        \
        leave();                                                               \
        return done;                                                           \
    }
ONE(unlink, "unlink", (const char *path), (path), AT_FDCWD)
ONE(unlinkat, "unlink", (int at, const char *path, int flags), (at, path, flags), at)
ONE(rmdir, "unlink", (const char *path), (path), AT_FDCWD)
ONE(mkdir, "mkdir", (const char *path, mode_t mode), (path, mode), AT_FDCWD)
ONE(mkdirat, "mkdir", (int at, const char *path, mode_t mode), (at, path, mode), at)
