// One round's tensors on one rank, from dispatch to combine, and what must be in them: the part that does not depend on
// the mode.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "base/check.h"
#include "round.h"

namespace ep {

template <class... Parts>
void require(bool condition, const Round& round, Parts&&... parts) {
  if (condition) return;
  throw std::runtime_error(concat("round ", round.index, " of seed ", round.seed, " (", name_of(round.output.layout),
                                  ", ", name_of(round.dtype), ", top-", round.shape.topk, ", ", round.shape.num_experts,
                                  " experts): ", std::forward<Parts>(parts)...));
}

class Trip {
 public:
  Trip(const Round& round, int rank, bool keeps_all_bits);
  const Round& round() const { return round_; }

 protected:
  static constexpr int kScalar = 1 << 20;  // an element index that no row has

  int owner_of(int token, int k) const;
  void fill_inputs();
  void spoil_inputs();  // they are free as soon as the send is done
  void check_dispatch(const uint32_t* rows, const uint32_t* scales) const;
  // Writes the rows of combine, [output.rows(), hidden] fp32, and the home rank's weights.
  void fill_rows(float* rows);
  void check_combine() const;
  std::vector<float> scalars_to_send() const;
  void check_scalars(const std::vector<float>& scalars) const;

  const Round round_;
  const int rank_, num_tokens_;
  const bool keeps_all_bits_;       // of floats too
  std::vector<Expected> expected_;  // [R]
  std::vector<uint32_t> x_, scales_;
  std::vector<int64_t> ids_, out_ids_;
  std::vector<float> weights_, out_weights_, sums_;
  std::vector<int32_t> info_, row_expert_;

 private:
  void check_info() const;
  void check_row_info(const Expected::Entry& entry) const;
  void check_no_row(size_t row) const;
  float factor(int token, int k) const;
  float expected_sum(int token, int i) const;
};

}  // namespace ep
