// Which ranks share memory: the world is divided into LSA domains of equal size, of consecutive ranks.
#pragma once

#include "base/check.h"
#include "base/platform.h"
#include "layout/common/rank_mask.h"

namespace ep {

struct Topology {
  int num_ranks = 1;
  int domain_size = 1;  // ranks that reach one another's window by loads and stores

  EP_HD int num_domains() const { return num_ranks / domain_size; }
  EP_HD int domain_of(int rank) const { return rank / domain_size; }
  EP_HD int lsa_rank(int rank) const { return rank % domain_size; }
  EP_HD bool is_lsa(int a, int b) const { return domain_of(a) == domain_of(b); }

  static Topology make(int num_ranks, int domain_size) {
    EP_CHECK(num_ranks >= 1, "a world needs at least one rank, got ", num_ranks);
    EP_CHECK(num_ranks <= kMaxRanks, num_ranks, " ranks, a world has at most ", kMaxRanks);
    EP_CHECK(domain_size >= 1 && num_ranks % domain_size == 0, num_ranks, " ranks do not divide into domains of ",
             domain_size);
    return Topology{num_ranks, domain_size};
  }
};

}  // namespace ep
