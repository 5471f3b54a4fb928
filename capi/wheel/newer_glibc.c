// The wheel's own copies of functions that its library uses and glibc before 2.29 lacks, so that
// the wheel runs on older systems. They are hidden, so that dlsym() finds the system's and not
// these. For 64-bit Linux only.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// 2.32: libstdc++ counts references without atomics while it is set. Who cannot know leaves it unset.
char __libc_single_threaded = 0;

// 2.33: until then the headers turned these into calls of __xstat and its kin. The kernel fills the same struct,
// which is that of stat64() too.
int fstatat(int folder, const char* path, struct stat* out, int flags) {
  return (int)syscall(SYS_newfstatat, folder, path, out, flags);
}
int stat(const char* path, struct stat* out) { return fstatat(AT_FDCWD, path, out, 0); }
int lstat(const char* path, struct stat* out) {
  return fstatat(AT_FDCWD, path, out, AT_SYMLINK_NOFOLLOW);
}
int fstat(int fd, struct stat* out) { return (int)syscall(SYS_fstat, fd, out); }
int fstatat64(int folder, const char* path, struct stat64* out, int flags) {
  return fstatat(folder, path, (struct stat*)out, flags);
}
int stat64(const char* path, struct stat64* out) { return stat(path, (struct stat*)out); }
int lstat64(const char* path, struct stat64* out) { return lstat(path, (struct stat*)out); }
int fstat64(int fd, struct stat64* out) { return fstat(fd, (struct stat*)out); }

// 2.36: what std::random_device reads.
uint32_t arc4random(void) {
  uint32_t random;
  if (getentropy(&random, sizeof random) != 0) abort();  // arc4random() cannot fail either
  return random;
}

// 2.30: what std::condition_variable waits with until a time of the steady clock. The system's own where it has one.
// Without it the wait is by the clock that can be set, as libstdc++ did there: for at most a second, so that it does
// not last when that clock is set back. Who waits looks again whenever it ends.
typedef int (*clockwait_t)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);

static int64_t nanoseconds(const struct timespec* time) {
  return time->tv_sec * INT64_C(1000000000) + time->tv_nsec;
}

static int64_t now(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return nanoseconds(&time);
}

static int wait_by_settable_clock(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                  const struct timespec* until) {
  if (until->tv_nsec < 0 || until->tv_nsec >= 1000000000) return EINVAL;
  // Times of year 2262 and later do not fit into nanoseconds; such a wait is one without an end.
  const int64_t end = until->tv_sec > INT64_C(9000000000) ? INT64_MAX : nanoseconds(until);
  int64_t left = end - now(clock);
  if (left < 0) left = 0;
  if (left > 1000000000) left = 1000000000;
  const int64_t settable = now(CLOCK_REALTIME) + left;
  const struct timespec time = {settable / 1000000000, settable % 1000000000};
  const int result = pthread_cond_timedwait(condition, mutex, &time);
  return result == ETIMEDOUT && now(clock) < end ? 0 : result;
}

static clockwait_t wait_of_this_system = wait_by_settable_clock;

// When the library is loaded: a forked child that asked would wait for whoever asked when it was forked.
__attribute__((constructor)) static void find_wait(void) {
  clockwait_t found = (clockwait_t)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
  if (found != NULL) wait_of_this_system = found;
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  return wait_of_this_system(condition, mutex, clock, until);
}

// 2.38: C23's, which know 0b101 as well. Headers of that age call them whenever strtol() is meant.
#define C23(type, name)                                                           \
  type old_##name(const char*, char**, int) __asm__(#name);                       \
  type __isoc23_##name(const char* text, char** end, int base) {                  \
    return old_##name(text, end, base);                                           \
  }
C23(long, strtol)
C23(unsigned long, strtoul)
C23(long long, strtoll)
C23(unsigned long long, strtoull)
