// What glibc 2.28 has not, or has under another name: for libraries that are linked against tools/glibc_stubs.py.
#include <sys/stat.h>

#define HIDDEN __attribute__((visibility("hidden")))

extern "C" {
int __fxstat(int version, int fd, struct stat* status) noexcept;

extern HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;  // libstdc++ counts atomically then
HIDDEN int fstat(int fd, struct stat* status) noexcept { return __fxstat(1, fd, status); }
}
