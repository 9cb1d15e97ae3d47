// Waits of the host: by the clock, not by how often they look, and ended by other threads.
#include "cpu/common/wait.h"

#include <gtest/gtest.h>

namespace ep {
namespace {

using End = Deadline::End;

// A word that does not come, on a machine so busy that each look at it takes `pause`.
struct Busy {
  std::chrono::milliseconds pause;
  int looks = 0;
  bool operator()() {
    looks++;
    std::this_thread::sleep_for(pause);
    return false;
  }
};

TEST(Wait, SeesAnInterruptionInTimeOnABusyMachine) {
  WaitControl control;
  Deadline deadline(control);
  is_interrupted = [] { return true; };
  Busy word{std::chrono::milliseconds(5)};
  EXPECT_EQ(deadline.wait_until(std::ref(word)), End::kInterrupted);
  is_interrupted = nullptr;
  EXPECT_LE(word.looks, 10);  // 50 ms
}

TEST(Wait, LooksForInterruptionsOverAllWaitsOfACall) {
  WaitControl control;
  Deadline deadline(control);
  static int asked;
  asked = 0;
  is_interrupted = [] { return ++asked > 1000; };
  for (int word = 0; word < 20; word++) {  // none takes as long as the time from look to look
    int looks = 0;
    const auto ready = [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      return ++looks == 3;
    };
    EXPECT_EQ(deadline.wait_until(ready), End::kReady);
  }
  is_interrupted = nullptr;
  EXPECT_GE(asked, 2);
}

TEST(Wait, SeesItsDeadlineInTimeOnABusyMachine) {
  WaitControl control;
  control.timeout_seconds = 0.05;
  Deadline deadline(control);
  Busy word{std::chrono::milliseconds(10)};
  EXPECT_EQ(deadline.wait_until(std::ref(word)), End::kLate);
  EXPECT_LE(word.looks, 10);
  EXPECT_EQ(deadline.waited_seconds(), 0);
}

TEST(Wait, TakesAWordThatCameWhileItHadNoCore) {
  WaitControl control;
  control.timeout_seconds = 1000;
  Deadline deadline(control);
  int looks = 0;
  const auto ready = [&] {
    if (++looks == 2) {  // the deadline passes amid this look, however busy the machine is
      std::this_thread::sleep_for(std::chrono::milliseconds(40));
      control.timeout_seconds = 0.02;
    }
    return looks > 2;
  };
  EXPECT_EQ(deadline.wait_until(ready), End::kReady);
}

TEST(Wait, ObeysATimeoutThatIsChangedMeanwhile) {
  WaitControl control;
  control.timeout_seconds = 1000;
  Deadline deadline(control);
  Busy word{std::chrono::milliseconds(1)};
  const auto ready = [&] {
    if (word.looks == 150) control.timeout_seconds = 0.05;
    return word();
  };
  EXPECT_EQ(deadline.wait_until(ready), End::kLate);
  EXPECT_LE(word.looks, 152);
  EXPECT_GE(deadline.waited_seconds(), 0.1);
}

TEST(Wait, EndsWhenTheBufferIsDestroyed) {
  WaitControl control;
  Deadline deadline(control);
  Busy word{std::chrono::milliseconds(0)};
  std::thread destroyer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    control.is_destroyed = true;
  });
  EXPECT_EQ(deadline.wait_until(std::ref(word)), End::kDestroyed);
  destroyer.join();
}

}  // namespace
}  // namespace ep
