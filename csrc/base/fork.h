// What a fork must not take over: a mutex that a thread of its parent holds, which is not here to give it back.
#pragma once

#include <pthread.h>

#include <atomic>
#include <new>

namespace ep {

// The mutex of `Owner`, for the whole process: it outlives every static object. A fork is made when nobody holds it,
// and gets one of its own: threads that wait for the parent's are counted in that.
template <class Owner, class Mutex>
Mutex& process_mutex() {
  static Mutex& mutex = *[] {
    auto* made = new Mutex;
    pthread_atfork([] { process_mutex<Owner, Mutex>().lock(); }, [] { process_mutex<Owner, Mutex>().unlock(); },
                   [] { new (&process_mutex<Owner, Mutex>()) Mutex; });
    return made;
  }();
  return mutex;
}

// Of how many forks, one of another, this process is the last. Counted from the first call on, because to ask for the
// process id at every call is a call of the kernel.
inline std::atomic<int>& fork_counter() {
  static std::atomic<int>& counter = *[] {
    auto* made = new std::atomic<int>(0);
    pthread_atfork(nullptr, nullptr, [] { fork_counter()++; });
    return made;
  }();
  return counter;
}
inline int num_forks() { return fork_counter().load(std::memory_order_relaxed); }

}  // namespace ep
