// A window over NCCL: memory of every rank, mapped by all ranks of an NVLink domain.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/device/lsa_peers.h"
#include "transport/transport.h"

namespace ep {

// A communicator, shared by the windows of the same ranks in the same order. It only maps windows: no kernel of NCCL
// runs on it. Calls of NCCL on it are non-blocking, so that a missing rank costs a deadline and not the process.
class NcclComm {
 public:
  // Collective, on the current device. Takes the communicator that all ranks still have from an earlier window, if no
  // window on it has failed; else makes one. No name is needed: ranks that have the same communicator, each at its
  // rank, are the same group.
  static std::shared_ptr<NcclComm> agree(Bootstrap& bootstrap, int device, double seconds);
  // The caller's own (ncclEpCreateGroup): never destroyed or aborted here, and no other operation may run on it while
  // windows are made.
  static std::shared_ptr<NcclComm> borrow(Bootstrap& bootstrap, ncclComm_t comm, int device);
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  ncclComm_t get() const { return comm_; }
  // Waits for the end of a call that returned `result`. Throws kTimeout, or kSystem with NCCL's text.
  void finish(ncclResult_t result, const char* call, double seconds);
  // What a registration that has missed its deadline may still use. It is freed when the communicator has been aborted;
  // a caller's communicator keeps it to the process's end.
  void leave_unfinished(void* memory, std::unique_ptr<ncclWindow_t> window);
  // No new window is made on it, and it ends by abort. Windows of other buffers stay mapped until they go.
  void fail();
  // A call of NCCL does not return: the communicator and all that it uses stay to the process's end, because to end
  // them NCCL would wait for that call.
  void abandon();
  bool is_abandoned() const { return is_abandoned_.load(std::memory_order_relaxed); }

 private:
  NcclComm(ncclComm_t comm, uint64_t id, int rank, int num_ranks, int device, bool is_own);
  bool fits(int rank, int num_ranks, int device) const;

  struct Unfinished {
    void* memory;
    std::unique_ptr<ncclWindow_t> window;
  };
  struct Registry;
  static Registry& registry();

  ncclComm_t comm_;
  uint64_t id_;  // the same on all ranks, different for every communicator
  int rank_, num_ranks_, device_;
  bool is_own_;
  bool has_failed_ = false;
  std::atomic<bool> is_abandoned_{false};
  std::vector<Unfinished> unfinished_;
};

class NcclWindow {
 public:
  // Collective. Throws on all ranks if NCCL's NVLink domains are not those of the topology.
  NcclWindow(Bootstrap& bootstrap, std::shared_ptr<NcclComm> comm, const Topology& topology, uint64_t bytes,
             double seconds);
  // Local: a peer's mapping of this memory outlives it. The device must be done with the window.
  ~NcclWindow();
  NcclWindow(const NcclWindow&) = delete;
  NcclWindow& operator=(const NcclWindow&) = delete;

  // Addresses of all ranks of the own domain, this one's included: the window is used through these alone, because a
  // second address of the same memory (the one from ncclMemAlloc) is not coherent with it inside a kernel. Ranks are
  // numbered as in the world; those of other domains have no address.
  const LsaPeers& peers() const { return peers_; }
  ncclWindow_t get() const { return window_; }
  NcclComm& comm() { return *comm_; }
  const std::shared_ptr<NcclComm>& shared_comm() { return comm_; }

 private:
  void allocate(uint64_t bytes);
  void map(uint64_t bytes, const Topology& topology, int rank, double seconds);
  void release();

  std::shared_ptr<NcclComm> comm_;
  void* memory_ = nullptr;
  ncclWindow_t window_ = nullptr;
  LsaPeers peers_;
};

// Reads the peers' addresses with a kernel, for libraries without ncclGetLsaDevicePointer.
LsaPeers query_lsa_peers(ncclWindow_t window);

}  // namespace ep
