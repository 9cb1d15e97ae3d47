// A rank's end of the network. Its thread takes the requests of all sources from the mailbox, moves their data here,
// adds their signals and tells the sources. So a put is carried out where it lands.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "mailbox.h"
#include "mesh.h"
#include "mover.h"
#include "options.h"
#include "rma_abi.h"
#include "schedule.h"

namespace gin_loopback {

// Memory that all ranks have registered in one step.
struct Region {
  uint32_t number = 0;
  char* data = nullptr;
  int type = kHostMemory;
  uint64_t flags = 0;
  bool is_shared = false;       // peers read it: no memory of NCCL's own
  std::vector<uint64_t> bytes;  // of every rank
  std::vector<std::unique_ptr<Imported>> imported;
  bool is_alive = true;
};

struct Statistics {
  uint64_t requests = 0, bytes = 0, submits = 0, passed = 0, completed_early = 0;
};

// Throws std::runtime_error; a request that breaks the contract is refused with std::invalid_argument.
class Endpoint {
 public:
  Endpoint(const std::vector<Handle>& handles, int rank, const Listener& listener, const Options& options);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  uint32_t new_context() { return num_contexts_++; }
  Region* add(void* data, uint64_t bytes, int type, uint64_t flags);  // collective
  void remove(Region* region);

  struct Put {
    uint32_t context = 0;
    int target = 0;
    Region *source = nullptr, *destination = nullptr, *signal = nullptr;
    uint64_t source_offset = 0, destination_offset = 0, bytes = 0, signal_offset = 0, add = 0;
    bool is_strong = false;
  };
  uint64_t post(const Put& put);  // its number for is_done()
  bool is_done(int target, uint64_t number) const { return senders_[target].is_done(number); }
  // Of this rank or of `peer`: nothing will come any more.
  bool has_failed(int peer) const;
  bool has_failed() const;

 private:
  struct Work : Request {
    int source = 0;
    uint64_t number = 0;     // 0: the source has been told
    char* staged = nullptr;  // where the data waits
  };
  struct Finishing {
    uint64_t batch;
    int source;
    uint64_t number;
    bool gives_staging_back;
  };

  Mailbox* map_mailbox(int fd) const;
  void serve();
  bool take_requests(uint64_t now);
  void complete_early(Work& work);
  void land(const Work& work);
  void end(const Work& work);
  Region* region(uint32_t number) const;
  Source source_of(const Work& work) const;
  bool finish();
  void watch_peers();
  void fail(const std::string& text);
  void write_statistics() const;

  const Options options_;
  const int rank_, num_ranks_;
  std::unique_ptr<Mesh> mesh_;
  std::unique_ptr<Mover> mover_;
  std::vector<Mailbox*> mailboxes_;
  mutable std::mutex post_mutex_;
  std::vector<Sender> senders_;
  long num_posts_ = 0;
  std::atomic<uint32_t> num_contexts_{0};
  std::atomic<uint64_t> lost_peers_{0};  // as bits

  std::mutex register_mutex_;        // of add() and remove()
  std::mutex serve_mutex_;           // of what follows
  std::atomic<int> num_waiting_{0};  // for serve_mutex_
  std::vector<std::unique_ptr<Region>> regions_;
  std::vector<Receiver> receivers_;
  std::vector<Schedule<Work>> schedules_;  // by source
  std::map<void*, uint64_t> signals_;      // their values: nobody else writes them
  std::deque<Finishing> finishing_;
  uint64_t next_batch_ = 1;
  bool has_work_to_submit_ = false;
  Statistics statistics_;

  std::atomic<bool> is_ending_{false};
  std::thread thread_;
};

}  // namespace gin_loopback
