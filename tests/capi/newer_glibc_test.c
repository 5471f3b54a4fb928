// What the wheel brings in place of a newer glibc does what glibc does.
#include "capi/wheel/newer_glibc.c"

#include <stdio.h>
#include <string.h>

#define CHECK(what)                                                  \
  do {                                                               \
    if (!(what)) {                                                   \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what); \
      exit(1);                                                       \
    }                                                                \
  } while (0)

// The kernel's own word on a file, by a call that needs no struct stat.
static struct statx asked(const char* path, int flags) {
  struct statx out;
  CHECK(statx(AT_FDCWD, path, flags, STATX_BASIC_STATS, &out) == 0);
  return out;
}

static void files(void) {
  char folder[] = "/tmp/newer_glibc_test.XXXXXX";
  CHECK(mkdtemp(folder) != NULL);
  CHECK(chdir(folder) == 0);
  const int fd = open("file", O_CREAT | O_RDWR, 0640);
  CHECK(fd >= 0 && write(fd, "12345", 5) == 5 && symlink("file", "link") == 0);
  struct stat seen[5];
  CHECK(stat("link", &seen[0]) == 0);
  CHECK(stat64("file", (void*)&seen[1]) == 0);
  CHECK(fstat(fd, &seen[2]) == 0);
  CHECK(fstatat(AT_FDCWD, "link", &seen[3], 0) == 0);
  CHECK(fstat64(fd, (void*)&seen[4]) == 0);
  const struct statx file = asked("file", 0);
  for (int i = 0; i < 5; ++i) {
    CHECK(seen[i].st_ino == file.stx_ino && seen[i].st_size == 5 && seen[i].st_mode == file.stx_mode);
    CHECK(seen[i].st_mtim.tv_sec == file.stx_mtime.tv_sec);
  }
  CHECK(lstat("link", &seen[0]) == 0 && S_ISLNK(seen[0].st_mode));
  CHECK(seen[0].st_ino == asked("link", AT_SYMLINK_NOFOLLOW).stx_ino);
  CHECK(stat("nothing", &seen[0]) == -1 && errno == ENOENT);
  CHECK(fstat(-1, &seen[0]) == -1 && errno == EBADF);
  CHECK(close(fd) == 0 && unlink("file") == 0 && unlink("link") == 0 && rmdir(folder) == 0);
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static int told;

static void* tell(void* unused) {
  CHECK(pthread_mutex_lock(&mutex) == 0);
  told = 1;
  CHECK(pthread_cond_signal(&condition) == 0 && pthread_mutex_unlock(&mutex) == 0);
  return unused;
}

static void waits(clockwait_t wait) {
  CHECK(pthread_mutex_lock(&mutex) == 0);
  // Nobody tells: until the time, neither shorter nor for good.
  const int64_t end = now(CLOCK_MONOTONIC) + 20000000;
  const struct timespec soon = {end / 1000000000, end % 1000000000};
  int result = 0;
  while (result == 0) result = wait(&condition, &mutex, CLOCK_MONOTONIC, &soon);
  CHECK(result == ETIMEDOUT && now(CLOCK_MONOTONIC) >= end);
  const struct timespec past = {0, 0};
  CHECK(wait(&condition, &mutex, CLOCK_MONOTONIC, &past) == ETIMEDOUT);
  const struct timespec wrong = {0, 1000000000};
  CHECK(wait(&condition, &mutex, CLOCK_MONOTONIC, &wrong) == EINVAL);
  // Somebody does, long before a time that is further away than nanoseconds count.
  const struct timespec never = {INT64_MAX / 2, 0};
  pthread_t thread;
  told = 0;
  CHECK(pthread_create(&thread, NULL, tell, NULL) == 0);
  while (!told) CHECK(wait(&condition, &mutex, CLOCK_MONOTONIC, &never) == 0);
  CHECK(pthread_mutex_unlock(&mutex) == 0 && pthread_join(thread, NULL) == 0);
}

int main(void) {
  files();
  waits(wait_by_settable_clock);
  waits(pthread_cond_clockwait);
  CHECK(arc4random() != arc4random() || arc4random() != arc4random());
  char* end;
  CHECK(__isoc23_strtol("-12x", &end, 10) == -12 && strcmp(end, "x") == 0);
  CHECK(__isoc23_strtoull("0xffffffffffffffff", NULL, 0) == UINT64_MAX);
  return 0;
}
