// A GPU as plans see it. Of sm_90 unless a device says otherwise; the plans' numbers were measured there.
#pragma once

namespace ep {

struct Arch {
  int compute = 90;               // capability: 90 is 9.0
  int num_sms = 132;              // that an operation may have
  int shared_bytes = 227 * 1024;  // of a block, at most

  // The same GPU, for an operation that may have so many.
  Arch with_sms(int count) const {
    Arch arch = *this;
    arch.num_sms = count;
    return arch;
  }
  // Of a block, for all that is sized at its launch.
  constexpr int dynamic_bytes() const { return shared_bytes - 7 * 1024; }
  // Of a block of high throughput, for stages and rings of rows. The rest holds tables.
  constexpr int stage_bytes() const { return dynamic_bytes() - 20 * 1024; }
};

}  // namespace ep
