// What a recording writes of operations on GPUs, on GPUs that are done when the test says so.
#include "runtime/recorder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <clocale>
#include <deque>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"

namespace ep {
namespace {

const std::string kBuffer = "b";

// A GPU that has done an operation when the test says so. What it counts is the operation's number.
struct FakeGpu {
  uint64_t done = 0;  // up to which number
  bool has_failed = false;
  std::atomic<int> asked{0};  // calls
  std::atomic<int> in_use{0}, waits{0}, failed{0};
};

class FakeRecording final : public GpuRecording {
 public:
  explicit FakeRecording(FakeGpu& gpu) : gpu_(gpu) {}

  struct Operation : Entry {
    uint64_t number = 0;
    bool has_ended = false;
    std::vector<uint64_t> words;
  };

  Entry* begin(const Observation& operation) override {
    gpu_.asked++;
    if (gpu_.has_failed) raise(ErrorKind::kSystem, "the GPU has failed");
    gpu_.in_use++;
    entries_.emplace_back().number = operation.number;
    return &entries_.back();
  }
  RecordedWords words_of(const Entry& entry) override {
    return {nullptr, static_cast<uint32_t>(static_cast<const Operation&>(entry).number)};
  }
  void fail(Entry&, const Observation&) override { gpu_.failed++; }
  void end(Entry& entry, const Observation& operation, bool has_rows, bool has_choices) override {
    gpu_.asked++;
    auto& own = static_cast<Operation&>(entry);
    own.has_ended = true;
    const int words = operation.shape.num_ranks + (has_choices ? operation.shape.num_experts : 0);
    if (has_rows) own.words.assign(static_cast<size_t>(words), 7ull << 32 | operation.number);
  }
  void give_back(Entry&) override { gpu_.in_use--; }
  bool is_done(const Entry& entry) override {
    gpu_.asked++;
    return static_cast<const Operation&>(entry).number <= gpu_.done;
  }
  void wait(const Entry& entry) override {
    gpu_.waits++;
    if (gpu_.has_failed && !is_done(entry)) raise(ErrorKind::kSystem, "the GPU has failed");
  }
  Times times(const Entry& entry) override {
    EXPECT_TRUE(static_cast<const Operation&>(entry).has_ended);
    return {static_cast<int64_t>(1000 * static_cast<const Operation&>(entry).number), 2050};
  }
  const uint64_t* counts(const Entry& entry) override {
    const auto& words = static_cast<const Operation&>(entry).words;
    return words.empty() ? nullptr : words.data();
  }

 private:
  FakeGpu& gpu_;
  std::deque<Operation> entries_;
};

// Two GPUs, and what a file would get.
struct RecordedWorld {
  std::map<int, FakeGpu> gpus;
  bool is_capturing = false;
  std::vector<size_t> batches;
  std::vector<uint64_t> numbers;
  std::vector<std::string> texts;

  class Kept : public Recorder {
   public:
    explicit Kept(RecordedWorld& world)
        : Recorder({[&world](int device) { return std::make_unique<FakeRecording>(world.gpus[device]); },
                    [&world](void*) { return world.is_capturing; }}),
          world_(world) {}
    void give(const Lines& lines) noexcept override {
      world_.batches.push_back(lines.size());
      world_.add(lines);
    }

   private:
    RecordedWorld& world_;
  };

  Kept recorder{*this};
  uint64_t last = 0;

  void add(const Recorder::Lines& lines) {
    for (const auto& line : lines) {
      numbers.push_back(line->number);
      texts.push_back(line->text());
    }
  }
  static Observation seen(uint64_t number, int device) {
    return {.buffer = kBuffer,
            .operation = "ht dispatch",
            .number = number,
            .rank = 0,
            .shape = Shape::make(2, 4, 2, 8),
            .num_tokens = 3,
            .hidden = 64,
            .row_bytes = 128,
            .device_index = device};
  }
  void operate(int device = 0, bool has_failed = false) {
    const Observation operation = seen(++last, device);
    void* begun = recorder.begin(operation);
    recorder.end(operation, begun, has_failed);
  }
  void operate_times(int count) {
    for (int i = 0; i < count; i++) operate();
  }
  void close() { add(recorder.close()); }
  bool is_in_order(size_t count) const {
    for (size_t i = 0; i < numbers.size(); i++) {
      if (numbers[i] != i + 1) return false;
    }
    return numbers.size() == count;
  }
};

TEST(Recorder, GivesWhatAGpuHasDoneInBatchesAndInOrder) {
  RecordedWorld world;
  world.gpus[0].done = 1000;
  world.operate_times(2 * Recorder::kBatch + 3);
  EXPECT_EQ(world.batches, std::vector<size_t>(2, Recorder::kBatch));
  EXPECT_EQ(world.gpus[0].waits, 0);
  world.close();
  EXPECT_TRUE(world.is_in_order(2 * Recorder::kBatch + 3));
  EXPECT_EQ(world.gpus[0].in_use, 0);
}

TEST(Recorder, WaitsForNoGpuThatIsBehind) {
  RecordedWorld world;
  world.operate_times(Recorder::kBatch - 1);
  world.gpus[0].done = 10;
  world.operate_times(3 * Recorder::kBatch);
  EXPECT_EQ(world.batches, std::vector<size_t>{10});
  EXPECT_EQ(world.gpus[0].waits, 0);
  world.gpus[0].done = 12;
  world.close();
  EXPECT_TRUE(world.is_in_order(4 * Recorder::kBatch - 1));
}

TEST(Recorder, OneGpuDoesNotHoldAnother) {
  RecordedWorld world;
  world.gpus[1].done = 1000;
  for (int i = 0; i < Recorder::kBatch / 2; i++) {
    world.operate(0);
    world.operate(1);
  }
  EXPECT_EQ(world.batches, std::vector<size_t>{Recorder::kBatch / 2});
  EXPECT_EQ(world.numbers.front(), 2u);
}

TEST(Recorder, AsksNothingOfAGpuThatCaptures) {
  RecordedWorld world;
  world.operate();
  const int asked = world.gpus[0].asked;
  world.is_capturing = true;
  world.operate_times(Recorder::kBatch);
  EXPECT_EQ(world.gpus[0].asked, asked);
  EXPECT_TRUE(world.batches.empty());
  world.is_capturing = false;
  world.gpus[0].done = 1000;
  world.operate();
  world.close();
  EXPECT_TRUE(world.is_in_order(Recorder::kBatch + 2));
  EXPECT_NE(world.texts[1].find("\"is_captured\": true"), std::string::npos);
  EXPECT_EQ(world.texts[1].find("\"rows\""), std::string::npos);
  EXPECT_EQ(world.texts[1].find("device_us"), std::string::npos);
}

TEST(Recorder, AFailedOperationIsALineAtItsPlace) {
  RecordedWorld world;
  world.gpus[0].done = 1000;
  world.operate();
  world.operate(0, true);
  world.operate();
  world.close();
  EXPECT_TRUE(world.is_in_order(3));
  EXPECT_EQ(world.gpus[0].failed, 1);
  EXPECT_NE(world.texts[1].find("\"has_failed\": true"), std::string::npos);
  EXPECT_EQ(world.texts[1].find("device_us"), std::string::npos);
  EXPECT_EQ(world.gpus[0].in_use, 0);
}

TEST(Recorder, GivesKernelsTheWordsOfTheirOperation) {
  RecordedWorld world;
  world.gpus[0].done = 1000;
  const Observation operation = RecordedWorld::seen(7, 0);
  void* begun = world.recorder.begin(operation);
  EXPECT_EQ(world.recorder.words_of(begun).tag, 7u);
  world.recorder.end(operation, begun, false);
  world.is_capturing = true;
  begun = world.recorder.begin(operation);
  EXPECT_EQ(world.recorder.words_of(begun).words, nullptr);
  world.recorder.end(operation, begun, false);
  EXPECT_EQ(world.recorder.words_of(nullptr).words, nullptr);
}

TEST(Recorder, TellsWhatAFailedGpuHasLost) {
  RecordedWorld world;
  world.operate_times(5);
  world.gpus[0].done = 2;
  world.gpus[0].has_failed = true;
  world.operate_times(2);
  world.operate(1);
  world.gpus[1].done = 1000;
  world.close();
  EXPECT_EQ(world.numbers, (std::vector<uint64_t>{1, 2, 8}));
  EXPECT_EQ(world.recorder.lost().operations, 5);
  EXPECT_EQ(world.recorder.lost().error, "the GPU has failed");
}

TEST(Recorder, WhatEndsBehindTheEndIsNotRecorded) {
  RecordedWorld world;
  const Observation operation = RecordedWorld::seen(1, 0);
  void* begun = world.recorder.begin(operation);
  world.close();
  const int waits = world.gpus[0].waits;
  world.recorder.end(operation, begun, false);
  EXPECT_EQ(world.gpus[0].waits, waits + 1);
  EXPECT_TRUE(world.numbers.empty() && world.batches.empty());
  EXPECT_EQ(world.recorder.lost().operations, 0);
}

TEST(Recorder, ThreadsRecordBesideOneAnother) {
  constexpr int kThreads = 4, kEach = 10 * Recorder::kBatch;
  RecordedWorld world;
  for (int device = 0; device < kThreads; device++) world.gpus[device].done = kEach;
  std::vector<std::thread> threads;
  for (int device = 0; device < kThreads; device++) {
    threads.emplace_back([&world, device] {
      for (uint64_t number = 1; number <= kEach; number++) {
        const Observation operation = RecordedWorld::seen(number, device);
        world.recorder.end(operation, world.recorder.begin(operation), false);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(world.batches.size(), 1u);
  world.close();
  ASSERT_EQ(world.numbers.size(), size_t{kThreads} * kEach);
  std::sort(world.numbers.begin(), world.numbers.end());
  for (size_t i = 0; i < world.numbers.size(); i++) EXPECT_EQ(world.numbers[i], i / kThreads + 1);
}

TEST(Recorder, ALineIsJson) {
  RecordedWorld world;
  world.gpus[0].done = 1000;
  world.operate();
  world.close();
  ASSERT_EQ(world.texts.size(), 1u);
  const std::string& text = world.texts[0];
  EXPECT_EQ(text.rfind("\"operation\": \"ht dispatch\", \"number\": 1, \"begin_ns\": ", 0), 0u) << text;
  const std::string end =
      ", \"tokens\": 3, \"hidden\": 64, \"topk\": 2, \"experts\": 4, \"row_bytes\": 128, \"is_home_bound\": false, "
      "\"device_begin_ns\": 1000, \"device_us\": 2.050, \"rows\": [1, 1], \"choices\": [1, 1, 1, 1]";
  EXPECT_NE(text.find(end), std::string::npos) << text;
}

// Which has a comma in numbers of C.
TEST(Recorder, ALineIsJsonInAnyLocale) {
  const std::string before = std::setlocale(LC_NUMERIC, nullptr);
  if (std::setlocale(LC_NUMERIC, "de_DE.UTF-8") == nullptr) GTEST_SKIP() << "there is no locale de_DE.UTF-8";
  RecordedWorld world;
  world.gpus[0].done = 1000;
  world.operate();
  world.close();
  std::setlocale(LC_NUMERIC, before.c_str());
  EXPECT_NE(world.texts[0].find("\"device_us\": 2.050, "), std::string::npos) << world.texts[0];
}

TEST(Recorder, CountsOnTheCpuAtOnce) {
  RecordedWorld world;
  const int64_t ids[] = {0, 1, 3, -1, 9, 2};
  Observation operation = RecordedWorld::seen(1, -1);
  operation.ids = ids;
  operation.is_idx64 = true;
  world.recorder.end(operation, world.recorder.begin(operation), false);
  ASSERT_EQ(world.batches, std::vector<size_t>{1});
  EXPECT_NE(world.texts[0].find("\"rows\": [1, 2], \"choices\": [1, 1, 1, 1]"), std::string::npos) << world.texts[0];
  EXPECT_EQ(world.texts[0].find("device_us"), std::string::npos);
}

}  // namespace
}  // namespace ep
