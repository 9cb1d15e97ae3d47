// What glibc 2.28 has not, or has under another name: for libraries that are linked against tools/glibc_stubs.py.
#include <pthread.h>
#include <sys/stat.h>
#include <time.h>

#define HIDDEN __attribute__((visibility("hidden")))

extern "C" {
int __fxstat(int version, int fd, struct stat* status) noexcept;

extern HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;  // libstdc++ counts atomically then
HIDDEN int fstat(int fd, struct stat* status) noexcept { return __fxstat(1, fd, status); }

// Of glibc 2.30. Where the time of day is set meanwhile, it may return early or late, as timed waits of older
// libstdc++.
HIDDEN int pthread_cond_clockwait(pthread_cond_t* told, pthread_mutex_t* mutex, clockid_t clock,
                                  const timespec* until) {
  constexpr long kSecond = 1'000'000'000;
  timespec now, today;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &today);
  timespec then{today.tv_sec + until->tv_sec - now.tv_sec, today.tv_nsec + until->tv_nsec - now.tv_nsec};
  const long carry = then.tv_nsec < 0 ? -1 : then.tv_nsec / kSecond;
  then.tv_sec += carry;
  then.tv_nsec -= carry * kSecond;
  return pthread_cond_timedwait(told, mutex, &then);
}
}
