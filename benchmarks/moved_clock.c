/* Preloaded into a process (LD_PRELOAD): its wall clock is off by the seconds in the file $MOVED_CLOCK, which is
 * read again every half second. The monotonic clock stays as it is, as when a person sets a machine's clock. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long moved_by(void) {
  static long seconds;
  static long long looked = -1;
  struct timespec now;
  syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
  long long half_seconds = now.tv_sec * 2LL + now.tv_nsec / 500000000;
  if (half_seconds != looked) {
    looked = half_seconds;
    const char *path = getenv("MOVED_CLOCK");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file) {
      if (fscanf(file, "%ld", &seconds) != 1) seconds = 0;
      fclose(file);
    }
  }
  return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  int result = syscall(SYS_clock_gettime, clock, time);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) time->tv_sec += moved_by();
  return result;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
  int result = syscall(SYS_gettimeofday, time, zone);
  if (result == 0 && time) time->tv_sec += moved_by();
  return result;
}

time_t time(time_t *where) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (where) *where = now.tv_sec;
  return now.tv_sec;
}
