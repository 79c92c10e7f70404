/* Makes the system calls of a process fail, as its disk, its kernel or another process would make them.
 *
 * Preloaded, it stands between the C library and who calls it, and touches only files below one folder. It is driven
 * from within the process: faults_arm() says which calls, what is to happen, and at which of them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN = 1, READ = 2, MAP = 4, STAT = 8, WRITE = 16, SYNC = 32, MOVE = 64, REMOVE = 128, MAKE = 256, CLOSE = 512 };
enum { COUNT, FAIL, SHORTEN, SLOW, TRUNCATE, REPLACE, OVERWRITE, INTERRUPT, KILL };

#define MOST 65536

static char root[PATH_MAX];
static size_t root_length;
static char *paths[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned mask;
static int action, argument;
static long first, times, seen, injected;
static char other[PATH_MAX];

#define REAL(result, name, ...) \
    static result (*real)(__VA_ARGS__); \
    if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

void faults_root(const char *path) {
    snprintf(root, sizeof root, "%s", path);
    root_length = strlen(root);
}

/* The calls of these kinds are counted; from the first-th on, as many as said, this happens. */
void faults_arm(unsigned calls, int what, int with, long from, long count, const char *path) {
    pthread_mutex_lock(&lock);
    action = what, argument = with, first = from, times = count, seen = injected = 0;
    snprintf(other, sizeof other, "%s", path ? path : "");
    mask = calls;
    pthread_mutex_unlock(&lock);
}

long faults_disarm(long *counted) {
    pthread_mutex_lock(&lock);
    mask = 0;
    long result = injected;
    *counted = seen;
    pthread_mutex_unlock(&lock);
    return result;
}

static int is_ours(const char *path) {
    return root_length && path && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static const char *path_of(int fd) { return fd >= 0 && fd < MOST ? paths[fd] : NULL; }

static void remember(int fd, const char *path) {
    if (fd < 0 || fd >= MOST) return;
    char *before = paths[fd];
    paths[fd] = is_ours(path) ? strdup(path) : NULL;
    free(before);
}

static void damage(const char *path) {
    static int (*looks)(const char *, struct stat *);
    if (!looks) looks = (int (*)(const char *, struct stat *))dlsym(RTLD_NEXT, "stat");
    struct stat now;
    /* What is not there can't be damaged, and a folder is another matter. */
    if (looks(path, &now) || !S_ISREG(now.st_mode)) return;
    if (action == REPLACE) {
        REAL(int, "rename", const char *, const char *);
        real(other, path);
        return;
    }
    REAL(int, "open64", const char *, int, ...);
    int to = real(path, O_WRONLY);
    if (to < 0) return;
    struct stat status;
    static int (*stats)(int, struct stat *);
    if (!stats) stats = (int (*)(int, struct stat *))dlsym(RTLD_NEXT, "fstat");
    if (!stats(to, &status)) {
        if (action == TRUNCATE) {
            if (ftruncate(to, status.st_size * argument / 1000)) { }
        } else {
            /* The other file's bytes, from some place on, in the same file: as a writer that does not replace. */
            int from = real(other, O_RDONLY);
            static ssize_t (*reads)(int, void *, size_t, off_t);
            static ssize_t (*writes)(int, const void *, size_t, off_t);
            if (!reads) reads = (ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread64");
            if (!writes) writes = (ssize_t (*)(int, const void *, size_t, off_t))dlsym(RTLD_NEXT, "pwrite64");
            char bytes[1 << 16];
            off_t at = status.st_size * argument / 1000;
            ssize_t count;
            while (from >= 0 && (count = reads(from, bytes, sizeof bytes, at)) > 0) {
                if (writes(to, bytes, count, at) < 0) break;
                at += count;
            }
            if (from >= 0) close(from);
        }
    }
    close(to);
}

/* Whether this call is to fail: errno is set then. */
static int faulty(unsigned call, const char *path) {
    if (!(mask & call) || !path) return 0;
    pthread_mutex_lock(&lock);
    int now = 0;
    if (mask & call) {
        long number = seen++;
        now = number >= first && (times < 0 || number < first + times);
        injected += now && action != COUNT;
        if (now && (action == TRUNCATE || action == REPLACE || action == OVERWRITE)) {
            unsigned armed = mask;
            mask = 0; /* What it does itself is no call of the process. */
            damage(path);
            mask = armed;
        }
    }
    pthread_mutex_unlock(&lock);
    if (!now) return 0;
    if (action == KILL) kill(getpid(), SIGKILL);
    if (action == INTERRUPT) kill(getpid(), SIGINT);
    if (action == SLOW) usleep(argument * 1000);
    if (action != FAIL) return 0;
    errno = argument;
    return 1;
}

static int is_short(unsigned call, int fd) {
    const char *path = path_of(fd);
    if (!(mask & call) || action != SHORTEN || !path) return 0;
    __atomic_add_fetch(&injected, 1, __ATOMIC_RELAXED);
    return 1;
}

/* ---------------------------------------------------------------- opening */

static int open_with(int (*real)(const char *, int, ...), const char *path, int flags, mode_t mode) {
    if (is_ours(path) && faulty(flags & O_CREAT ? OPEN | MAKE : OPEN, path)) return -1;
    int fd = real(path, flags, mode);
    remember(fd, path);
    return fd;
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE REAL(int, "open", const char *, int, ...); return open_with(real, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE REAL(int, "open64", const char *, int, ...); return open_with(real, path, flags, mode); }

static int openat_with(int (*real)(int, const char *, int, ...), int folder, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    if (path[0] == '/') snprintf(full, sizeof full, "%s", path);
    else snprintf(full, sizeof full, "%s/%s", path_of(folder) ? path_of(folder) : "", path);
    if (is_ours(full) && faulty(OPEN, full)) return -1;
    int fd = real(folder, path, flags, mode);
    remember(fd, full);
    return fd;
}

int openat(int folder, const char *path, int flags, ...) { MODE REAL(int, "openat", int, const char *, int, ...); return openat_with(real, folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE REAL(int, "openat64", int, const char *, int, ...); return openat_with(real, folder, path, flags, mode); }

int close(int fd) {
    REAL(int, "close", int);
    const char *path = path_of(fd);
    int fails = path && faulty(CLOSE, path), why = errno;
    remember(fd, NULL);
    int result = real(fd);
    if (fails) { errno = why; return -1; }
    return result;
}

/* ---------------------------------------------------------------- reading */

ssize_t read(int fd, void *to, size_t count) {
    REAL(ssize_t, "read", int, void *, size_t);
    if (faulty(READ, path_of(fd))) return -1;
    return real(fd, to, is_short(READ, fd) && count > 1 ? count / 2 : count);
}

ssize_t pread64(int fd, void *to, size_t count, off64_t at) {
    REAL(ssize_t, "pread64", int, void *, size_t, off64_t);
    if (faulty(READ, path_of(fd))) return -1;
    return real(fd, to, is_short(READ, fd) && count > 1 ? count / 2 : count, at);
}

ssize_t preadv64v2(int fd, const struct iovec *to, int count, off64_t at, int flags) {
    REAL(ssize_t, "preadv64v2", int, const struct iovec *, int, off64_t, int);
    if (faulty(READ, path_of(fd))) return -1;
    if (is_short(READ, fd) && !(fcntl(fd, F_GETFL) & O_DIRECT)) {
        for (int i = 0; i < count; i++) {
            if (to[i].iov_len) {
                struct iovec some = {to[i].iov_base, (to[i].iov_len + 1) / 2};
                return real(fd, &some, 1, at, flags);
            }
        }
    }
    return real(fd, to, count, at, flags);
}

ssize_t preadv64(int fd, const struct iovec *to, int count, off64_t at) { return preadv64v2(fd, to, count, at, 0); }

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t at) {
    REAL(void *, "mmap", void *, size_t, int, int, int, off_t);
    if (fd >= 0 && faulty(MAP, path_of(fd))) return MAP_FAILED;
    return real(address, length, protection, flags, fd, at);
}

void *mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t at) { return mmap(address, length, protection, flags, fd, at); }

int stat64(const char *path, struct stat64 *into) {
    REAL(int, "stat64", const char *, struct stat64 *);
    if (is_ours(path) && faulty(STAT, path)) return -1;
    return real(path, into);
}

int lstat64(const char *path, struct stat64 *into) {
    REAL(int, "lstat64", const char *, struct stat64 *);
    if (is_ours(path) && faulty(STAT, path)) return -1;
    return real(path, into);
}

int fstat64(int fd, struct stat64 *into) {
    REAL(int, "fstat64", int, struct stat64 *);
    if (faulty(STAT, path_of(fd))) return -1;
    return real(fd, into);
}

/* ---------------------------------------------------------------- writing */

ssize_t write(int fd, const void *from, size_t count) {
    REAL(ssize_t, "write", int, const void *, size_t);
    if (faulty(WRITE, path_of(fd))) return -1;
    return real(fd, from, is_short(WRITE, fd) && count > 1 ? count / 2 : count);
}

int fsync(int fd) {
    REAL(int, "fsync", int);
    if (faulty(SYNC, path_of(fd))) return -1;
    return real(fd);
}

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    if (is_ours(to) && faulty(MOVE, to)) return -1;
    return real(from, to);
}

int unlink(const char *path) {
    REAL(int, "unlink", const char *);
    if (is_ours(path) && faulty(REMOVE, path)) return -1;
    return real(path);
}

int unlinkat(int folder, const char *path, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    if (faulty(REMOVE, path_of(folder))) return -1;
    return real(folder, path, flags);
}

int rmdir(const char *path) {
    REAL(int, "rmdir", const char *);
    if (is_ours(path) && faulty(REMOVE, path)) return -1;
    return real(path);
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    if (is_ours(path) && faulty(MAKE, path)) return -1;
    return real(path, mode);
}
