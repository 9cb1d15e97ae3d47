// Moves bytes into this process's memory, in the order of the calls: by copy engines of its GPU, or on the host, where
// there is no GPU (for tests of the plugin itself).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mesh.h"

namespace gin_loopback {

// Memory of a rank as this process reads it.
struct Source {
  uint64_t address = 0;  // in `pid`, or mapped here
  int64_t pid = 0;       // host memory of that process; 0: GPU memory, or pinned memory of this process
  bool is_same_gpu = false;
};

// A peer's region, mapped here for as long as this lives.
class Imported {
 public:
  virtual ~Imported() = default;
  Source source;
};

// Throws std::runtime_error.
class Mover {
 public:
  virtual ~Mover() = default;
  virtual void use_in_this_thread() {}  // before any other call of a thread that is the plugin's own
  // What peers need to read the memory: fills `message`, and returns the descriptors to send.
  virtual std::vector<int> share(const void* data, uint64_t bytes, Message& message) = 0;
  virtual std::unique_ptr<Imported> import(const Mesh::Received& received) = 0;
  virtual std::string gpu() const { return ""; }  // its UUID

  // Memory of this process that is always there, for data on its way. The same bytes again when all was given back.
  char* take_staging(uint64_t bytes);  // null: there is no room
  void give_staging_back();

  // In stream order. What is not yet submitted may not have begun. Copies between two submits have no order.
  virtual void copy(void* to, const Source& from, uint64_t bytes) = 0;
  virtual void copy_value(void* to, uint64_t value, uint32_t bytes) = 0;
  virtual void store(void* word, uint64_t value) = 0;  // after all copies before
  virtual uint64_t submit() = 0;                       // the number of what was submitted, from 1
  virtual uint64_t num_finished() = 0;

 protected:
  static constexpr uint64_t kStagingBytes = 64ull << 20;
  char* staging_ = nullptr;
  bool is_staging(const void* address) const {
    const char* byte = static_cast<const char*>(address);
    return staging_ != nullptr && byte >= staging_ && byte < staging_ + kStagingBytes;
  }

 private:
  uint64_t used_ = 0;
  int taken_ = 0;
};

std::unique_ptr<Mover> make_host_mover();
// Null: this thread has no CUDA context, or the process no CUDA.
std::unique_ptr<Mover> make_cuda_mover();

}  // namespace gin_loopback
