// Operations that a compiled program runs beside its kernels, on a stream of the buffer's: a compiler can name none.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>
#include <utility>

#include "torch/ops/device.h"

namespace ep {

class Beside {
  struct Own {
    c10::Stream stream;
    c10::Event end;  // of what was last put there
  };

 public:
  // From take() on an operation is launched on the buffer's own stream, or, as without, on the caller's.
  class Turn {
   public:
    explicit Turn(Own* own = nullptr) : own_(own) {
      if (own_ == nullptr) return;
      caller_ = current_stream_of(own_->stream.device());
      launches_.emplace(&*caller_, &own_->stream);
    }
    // The operation is enqueued.
    void note_end() const {
      if (own_ != nullptr) own_->end.record(own_->stream);
    }

   private:
    Own* own_;
    std::optional<c10::Stream> caller_;
    std::optional<LaunchStreamScope> launches_;
  };

  // The next operation runs there. Nothing on the CPU.
  void arm(const at::Device& device);
  // Of an op that runs an operation, before it can throw.
  Turn take() { return Turn(std::exchange(is_armed_, false) ? &*own_ : nullptr); }
  // The current stream waits for the end of what was put there.
  void await() const;

 private:
  std::optional<Own> own_;  // on a GPU, once armed
  bool is_armed_ = false;
};

}  // namespace ep
