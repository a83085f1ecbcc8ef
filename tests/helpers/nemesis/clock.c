/* A wall clock of a process's own: the seconds in the file NEMESIS_CLOCK are added to the machine's.
   Only what reads the date, or waits until one, is replaced; the clocks that nobody can set are the
   machine's. A wait is as long as at its start: the system would make it longer or shorter when
   the clock is set meanwhile. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *ahead_s;

__attribute__((constructor)) static void open_clock(void) {
    const char *path = getenv("NEMESIS_CLOCK");
    int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED) ahead_s = mapped;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*machines)(clockid_t, struct timespec *);
    if (machines == NULL) machines = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = machines(id, now);
    if (!failed && ahead_s != NULL && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead_s;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *kept) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (kept != NULL) *kept = now.tv_sec;
    return now.tv_sec;
}

/* Of a condition that waits by the date, as torch's do; other clocks count from the last boot. */
int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*machines)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (machines == NULL) machines = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (machines == NULL) machines = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec there = *until;
    if (ahead_s != NULL && there.tv_sec > 1000000000) there.tv_sec -= *ahead_s;
    return machines(condition, mutex, &there);
}
