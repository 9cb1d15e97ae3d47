// A window that stands on no communicator: memory of every rank of a machine, mapped by all in one range of addresses.
// The memory of a rank that is replaced is exchanged under its address, so captured graphs find the new one there.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <vector>

#include "transport/descriptor_mail.h"
#include "transport/device/lsa_peers.h"
#include "transport/transport.h"

namespace ep {

class CumemWindow {
 public:
  // Collective among those who meet, of a world of so many ranks, on the current device. Where the others would be
  // there is memory that nobody reads.
  CumemWindow(Bootstrap& bootstrap, int device, int num_ranks, uint64_t bytes, double seconds);
  // Local: a peer's mapping of this memory outlives it. The device must be done with the window.
  ~CumemWindow();
  CumemWindow(const CumemWindow&) = delete;
  CumemWindow& operator=(const CumemWindow&) = delete;

  // `rank` makes its window. Collective among those who meet. The device must be idle.
  void replace(Bootstrap& bootstrap, int rank, double seconds);

  const LsaPeers& peers() const { return peers_; }

 private:
  using Handle = CUmemGenericAllocationHandle;

  void allocate(int num_ranks, uint64_t bytes);
  Handle create(uint64_t bytes) const;
  CUdeviceptr address_of(int rank) const;
  // Once, or as often as it takes for a window. The window that was there before goes.
  void map(int rank, Handle memory, uint64_t bytes);
  // Memory that nobody reads.
  void map_nobody(int rank);
  void unmap(int rank);
  // The windows of the ranks that the others in `ranks` have made, within `seconds`; this one sends its own.
  void exchange(DescriptorMail& mail, const std::vector<int>& ranks, const std::vector<DescriptorMail::Address>& others,
                double seconds);
  void release();

  int device_;
  uint64_t granularity_ = 0;
  Handle own_ = 0;                     // of this rank's memory
  Handle nobody_ = 0;                  // one piece of memory, many times
  std::vector<uint64_t> piece_bytes_;  // of every rank's mappings; 0: there is none
  LsaPeers peers_;
};

}  // namespace ep
